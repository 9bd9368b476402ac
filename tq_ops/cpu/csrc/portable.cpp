#include <cmath>
#include <cstring>

#include "kernels.h"
#include "numbers.h"

namespace haarkv {
namespace {
#include "level.h"
#include "exponential.h"
#include "simd_portable.h"
} // namespace

const Kernels& portable_kernels() {
    static constexpr Kernels kernels = {
        scratch_floats, attend<Portable, Portable>, rotate<Portable>, quantize<Portable>, project<Portable>,
    };
    return kernels;
}

} // namespace haarkv
