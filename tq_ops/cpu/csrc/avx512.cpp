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
template <int R> using Products = FloatProducts<Avx512, Avx2, R>;
}  // namespace

const Kernels& avx512_kernels() {
    static constexpr Kernels kernels = {
        scratch_of_passes<Avx512, Products>,
        attend_pass<Avx512, Products>,
        numbers_of<Avx512>,
        rotate<Avx512>,
        nullptr,
        quantize<Avx512>,
        prepared_floats<Avx512>,
        prepare<Avx512>,
        project<Avx512>,
        rms_norm<Avx512>,
        rope,
        gated_mul<Avx512>,
        widen,
        narrow,
        add_up,
        kMaxTiles,
    };
    return kernels;
}

}  // namespace haarkv
