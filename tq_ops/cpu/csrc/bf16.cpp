// BF16 numbers by `vdpbf16ps`, where a CPU of the set avx512vnni has it: twice as fast as FMA where tokens are many.
#include "set.h"

namespace haarkv {
namespace {
#include "registers.h"
#include "projection.h"

// In each lane two products, the odd one first, each added with one rounding. It takes numbers below 2^-126 for zero and makes
// none. x stays in BF16.
struct Bf16Pairs : Avx512 {
    typedef uint16_t Weight;
    typedef uint16_t X;
    typedef __m512bh W;
    static constexpr int step = 32, parts = 1, lanes = 32;

    template <int> static W load(const Weight* weight) { return load_x(weight); }
    static W load_x(const X* x) { return (W)_mm512_loadu_si512(x); }
    static F add(W w, W x, F sum) { return _mm512_dpbf16_ps(sum, w, x); }
};

int64_t prepared_pairs(const Projection& p) { return (p.tokens * prepared_numbers<Bf16Pairs>(p.in) + 1) / 2; }

void project_pairs(const Projection& p, int64_t begin, int64_t end, float*) { project_by<Bf16Pairs>(p, begin, end); }
}  // namespace

void add_bf16(Kernels& kernels) { kernels.bf16 = {prepared_pairs, prepare_tokens<Bf16Pairs>, project_pairs}; }

}  // namespace haarkv
