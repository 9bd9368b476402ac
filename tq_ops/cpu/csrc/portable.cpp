// GCC warns that without AVX the calling convention for vectors differs. No function that takes one leaves this unit.
#pragma GCC diagnostic ignored "-Wpsabi"

#include <cmath>
#include <cstring>
#include <new>

#include "kernels.h"
#include "numbers.h"

namespace haarkv {
namespace {
#include "common.h"
#include "exponential.h"
#include "simd_portable.h"
#include "words_portable.h"
#include "every_kernel.h"
}  // namespace

const Kernels& portable_kernels() {
    static constexpr Kernels kernels = every_kernel<Portable, Portable, WordsPortable, LanesPortable>();
    return kernels;
}

}  // namespace haarkv
