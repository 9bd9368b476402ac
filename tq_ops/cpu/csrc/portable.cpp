// GCC warns that without AVX the calling convention for vectors differs. No function that takes one leaves this unit.
#pragma GCC diagnostic ignored "-Wpsabi"

#include <cmath>
#include <cstring>

#include "kernels.h"
#include "numbers.h"

namespace haarkv {
namespace {
#include "common.h"
#include "exponential.h"
#include "simd_portable.h"
#include "float_products.h"
#include "unpacked.h"
#include "kept.h"
#include "attention.h"
#include "projection.h"
#include "elementwise.h"
#include "vectors.h"
template <int R> using Products = FloatProducts<Portable, Portable, R>;
}  // namespace

const Kernels& portable_kernels() {
    static constexpr Kernels kernels = {
        scratch_floats<Products>, attend<Portable, Products>, rotate<Portable>,
        quantize<Portable>,       prepared_floats<Portable>,  prepare<Portable>,
        project<Portable>,        rms_norm<Portable>,         rope,
        silu_mul<Portable>,
    };
    return kernels;
}

}  // namespace haarkv
