// Attention by exact sums of 16-bit integers (`vpdpwssd`), for BF16 activations.
#include "set.h"

namespace haarkv {
namespace {
#include "registers.h"
#include "keys.h"
#include "unpacked.h"
#include "kept.h"
#include "attention.h"
#include "pass.h"
#include "integers.h"
#include "integer_sums.h"
#include "integer_values.h"

template <int R> using Integers = Products<KeyProducts<IntegerSums, R>, IntegerValues<R>>;

Kernels others;

// Only levels of up to 4 bits, or of several widths, and BF16 activations become integers; FP32 stays FP32.
void attend_either(const Cache& cache, const Tile* tiles, int count, float* scratch) {
    if (tiles->bf16 && (cache.k.cell == kNibble || cache.k.columns || cache.v.cell == kNibble))
        return attend_pass<Simd, Integers>(cache, tiles, count, scratch);
    others.attend(cache, tiles, count, scratch);
}

int64_t scratch_of_either(const Cache& cache) {
    return larger(others.scratch_floats(cache), scratch_of_passes<Simd, Integers>(cache));
}
}  // namespace

void add_integers(Kernels& kernels) {
    others = kernels;
    kernels.attend = attend_either, kernels.scratch_floats = scratch_of_either;
}

}  // namespace haarkv
