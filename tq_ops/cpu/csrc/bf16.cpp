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

// Rotations, where the matrix holds BF16 numbers too: products are exact, and sums are FP32. What goes back has FP32 numbers,
// two BF16 ones each, and would gain nothing.
//
// A sum runs over the inputs in pairs, in one lane; its bits depend on the row and the matrix alone.

constexpr int kChunkInputs = 32;  // of `Matrix::pairs`

// COLUMNS registers of y of R rows, from `pairs` on; x [R, size].
template <int R, int COLUMNS>
inline void rotate_by_pairs(const uint16_t* x, const uint16_t* pairs, int size, int64_t distance, float* y) {
    __m512 acc[COLUMNS][R];
    for (int c = 0; c < COLUMNS; ++c)
        for (int r = 0; r < R; ++r) acc[c][r] = _mm512_setzero_ps();
    for (int chunk = 0; chunk < size / kChunkInputs; ++chunk, pairs += distance)
        for (int pair = 0; pair < kChunkInputs / 2; ++pair) {
            __m512bh value[COLUMNS];
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) value[c] = (__m512bh)_mm512_loadu_si512(pairs + c * 512 + pair * 32);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512i both = _mm512_set1_epi32(read_as<int32_t>(x + r * size + chunk * kChunkInputs + 2 * pair));
#pragma GCC unroll 8
                for (int c = 0; c < COLUMNS; ++c) acc[c][r] = _mm512_dpbf16_ps(acc[c][r], value[c], (__m512bh)both);
            }
        }
    for (int c = 0; c < COLUMNS; ++c)
        for (int r = 0; r < R; ++r) _mm512_storeu_ps(y + r * size + c * 16, acc[c][r]);
}

// As `Kernels::rotate_pairs`, of rows that are exact.
inline void rotate_exact(const float* x, int rows, bool, const Matrix& matrix, int head, float* y) {
    alignas(64) uint16_t upper[kMaxRows * kMaxDim];
    const int size = matrix.size, columns = size / 16;
    const int64_t distance = columns * 512;
    const uint16_t* pairs = matrix.pairs + (matrix.head_stride ? head * (size / kChunkInputs) * distance : 0);
    for (int first = 0; first < rows; first += kMaxRows)
        with_number<kMaxRows>(smaller(rows - first, kMaxRows), [&](auto number) {
            constexpr int R = decltype(number)::value, kColumns = R < 4 ? 8 : R < 7 ? 4 : 2;
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < size; i += 16) {
                    const __m512i bits = _mm512_loadu_si512(x + (first + r) * size + i);
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(upper + r * size + i),
                                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
                }
            float* to = y + first * size;
            int c = 0;
            for (; c + kColumns <= columns; c += kColumns)
                rotate_by_pairs<R, kColumns>(upper, pairs + c * 512, size, distance, to + c * 16);
            for (; c < columns; ++c) rotate_by_pairs<R, 1>(upper, pairs + c * 512, size, distance, to + c * 16);
        });
}

int64_t prepared_pairs(const Projection& p) { return (p.tokens * prepared_numbers<Bf16Pairs>(p.in) + 1) / 2; }

void project_pairs(const Projection& p, int64_t begin, int64_t end, float*) { project_by<Bf16Pairs>(p, begin, end); }
}  // namespace

void add_bf16(Kernels& kernels) {
    kernels.rotate_pairs = rotate_exact;
    kernels.bf16 = {prepared_pairs, prepare_tokens<Bf16Pairs>, project_pairs};
}

}  // namespace haarkv
