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
#include "float_keys.h"
#include "float_values.h"
#include "float_products.h"
#include "vectors.h"
#include "unpacked.h"
#include "stored_numbers.h"
#include "kept.h"
#include "attention.h"
#include "pass.h"
#include "pass_attention.h"
#include "projection.h"
#include "elementwise.h"
template <int R> using Products = FloatProducts<Portable, Portable, R>;
}  // namespace

const Kernels& portable_kernels() {
    static constexpr Kernels kernels = {
        scratch_of_passes<Portable, Products>,
        attend_pass<Portable, Products>,
        numbers_of<Portable>,
        rotate<Portable>,
        nullptr,
        quantize<Portable>,
        prepared_floats<Portable>,
        prepare<Portable>,
        project<Portable>,
        rms_norm<Portable>,
        rope,
        gated_mul<Portable>,
        widen,
        narrow,
        add_up,
        kMaxTiles,
    };
    return kernels;
}

}  // namespace haarkv
