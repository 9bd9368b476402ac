#include <cmath>
#include <cstring>

#include "kernels.h"
#include "numbers.h"

namespace haarkv {
namespace {
#include "level.h"
#include "projection.h"
#include "vectors.h"
#include "exponential.h"
#include "simd_portable.h"
template <int R> using Products = FloatProducts<Portable, Portable, R>;
} // namespace

const Kernels& portable_kernels() {
    static constexpr Kernels kernels = {
        scratch_floats<Products>, attend<Portable, Products>, rotate<Portable, float>, quantize<Portable>, project<Portable>,
    };
    return kernels;
}

} // namespace haarkv
