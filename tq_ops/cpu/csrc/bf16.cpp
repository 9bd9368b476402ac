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

Kernels others;  // for FP32 in the weight or in x, which stays what it is

int64_t prepared_bf16(const Projection& p) {
    return p.all_bf16() ? (p.tokens * prepared_numbers<Bf16Pairs>(p.in) + 1) / 2 : others.prepared_floats(p);
}

void prepare_bf16(const Projection& p, int64_t begin, int64_t end) {
    if (p.all_bf16()) return prepare_tokens<Bf16Pairs>(p, begin, end);
    others.prepare(p, begin, end);
}

void project_bf16(const Projection& p, int64_t begin, int64_t end, float* sums) {
    if (p.all_bf16()) return project_by<Bf16Pairs>(p, begin, end);
    others.project(p, begin, end, sums);
}
}  // namespace

void add_bf16(Kernels& kernels) {
    others = kernels;
    kernels.prepared_floats = prepared_bf16, kernels.prepare = prepare_bf16, kernels.project = project_bf16;
}

}  // namespace haarkv
