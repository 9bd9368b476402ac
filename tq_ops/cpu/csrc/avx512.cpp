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
#include "simd_avx512.h"
#include "words_avx2.h"
#include "lanes_avx512.h"
#include "every_kernel.h"
}  // namespace

const Kernels& avx512_kernels() {
    static constexpr Kernels kernels = every_kernel<Avx512, Avx2, Words256, Lanes512>();
    return kernels;
}

}  // namespace haarkv
