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
template <int R> using Products = FloatProducts<Avx2, Avx2, R>;
}  // namespace

const Kernels& avx2_kernels() {
    static constexpr Kernels kernels = {
        scratch_of_passes<Avx2, Products>,
        attend_pass<Avx2, Products>,
        numbers_of<Avx2>,
        rotate<Avx2>,
        nullptr,
        quantize<Avx2>,
        prepared_floats<Avx2>,
        prepare<Avx2>,
        project<Avx2>,
        rms_norm<Avx2>,
        rope,
        gated_mul<Avx2>,
        widen,
        narrow,
        add_up,
        kMaxTiles,
    };
    return kernels;
}

}  // namespace haarkv
