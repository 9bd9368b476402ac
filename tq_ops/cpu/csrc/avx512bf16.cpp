#include "intrinsics.h"

#include <cmath>
#include <cstring>

#include "kernels.h"
#include "numbers.h"

namespace haarkv {
namespace {
#include "common.h"
#include "exponential.h"
#include "simd_avx2.h"
#include "simd_avx512.h"
#include "projection.h"
#include "pair_rotation.h"

// `vdpbf16ps`: in each lane two products of BF16 numbers, the odd one first, each added with one rounding. It takes numbers
// below 2^-126 for zero and makes none. x stays in BF16.
struct Bf16Pairs : Avx512 {
    typedef uint16_t Weight;
    typedef uint16_t X;
    typedef __m512bh W;
    static constexpr int step = 32, parts = 1, lanes = 32;

    template <int> static W load(const Weight* weight) { return load_x(weight); }
    static W load_x(const X* x) { return (W)_mm512_loadu_si512(x); }
    static F add(W w, W x, F sum) { return _mm512_dpbf16_ps(sum, w, x); }
};

// FP32 in the weight or in x stays what it is.
bool all_bf16(const Projection& p) { return p.weight_bf16() && p.x_bf16; }

int64_t prepared_bf16(const Projection& p) {
    return all_bf16(p) ? (p.tokens * prepared_numbers<Bf16Pairs>(p.in) + 1) / 2 : avx512_kernels().prepared_floats(p);
}

void prepare_bf16(const Projection& p, int64_t begin, int64_t end) {
    if (all_bf16(p)) return prepare_tokens<Bf16Pairs>(p, begin, end);
    avx512_kernels().prepare(p, begin, end);
}

void project_bf16(const Projection& p, int64_t begin, int64_t end, float* sums) {
    if (all_bf16(p)) return project_by<Bf16Pairs>(p, begin, end);
    avx512_kernels().project(p, begin, end, sums);
}

void rotate_either(const float* x, int rows, bool exact, const Matrix& matrix, int head, float* y) {
    if (exact) return rotate_exact(x, rows, matrix, head, y);
    for (int r = 0; r < rows; r += kMaxRows)
        avx512_kernels().rotate(x + r * matrix.inputs, smaller(rows - r, kMaxRows), matrix, head, y + r * matrix.outputs);
}
}  // namespace

const Kernels& avx512bf16_kernels() {
    static const Kernels kernels = [] {
        Kernels k = avx512vnni_kernels();
        k.rotate_pairs = rotate_either;
        k.prepared_floats = prepared_bf16, k.prepare = prepare_bf16, k.project = project_bf16;
        return k;
    }();
    return kernels;
}

}  // namespace haarkv
