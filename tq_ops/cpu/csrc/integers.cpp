// Attention by exact sums of 16-bit integers (`vpdpwssd`), for BF16 activations.
#include "set.h"

namespace haarkv {
namespace {
#include "registers.h"
#include "keys.h"
#include "unpacked.h"
#include "residual_window.h"
#include "attention.h"
#include "pass.h"
#include "integers.h"
#include "integer_sums.h"
#include "integer_values.h"

template <int R> using Integers = Products<KeyProducts<IntegerSums, R>, IntegerValues<R>>;

// Only levels of up to 4 bits, or of several widths, and BF16 activations become integers; FP32 stays FP32.
bool takes_integers(const Cache& cache, const Tile* tiles, int) {
    return tiles->bf16 && (cache.k.cell == kNibble || cache.k.columns || cache.v.cell == kNibble);
}
}  // namespace

void add_integers(Kernels& kernels) {
    kernels.by_integers = {takes_integers, Pass<Simd, Integers>::floats, attend_pass<Simd, Integers>};
}

}  // namespace haarkv
