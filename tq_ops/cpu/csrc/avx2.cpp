#include "intrinsics.h"

#include <cmath>
#include <cstring>
#include <new>

#include "kernels.h"
#include "numbers.h"

namespace haarkv {
namespace {
#include "common.h"
#include "exponential.h"
#include "simd_avx2.h"
#include "words_avx2.h"
#include "every_kernel.h"
}  // namespace

const Kernels& avx2_kernels() {
    static constexpr Kernels kernels = every_kernel<Avx2, Avx2, Words256, Lanes256>();
    return kernels;
}

}  // namespace haarkv
