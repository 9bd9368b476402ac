// What follows from the shape a kernel is compiled for, and the instructions that CUDA C++ has no words for.
#pragma once

typedef unsigned int word;
typedef unsigned short half_bits;

constexpr int WARPS = 8, THREADS = 32 * WARPS, SPAN = 32, TILE = SPAN * WARPS;
constexpr int BYTES = HEAD_DIM / 2;            // of a vector of two levels a byte
constexpr int COLUMN_TILES = (GROUP + 7) / 8;  // of 8 query heads
constexpr int COLUMNS = 8 * COLUMN_TILES;
constexpr int K_WORDS = BYTES / 16;  // of two levels a byte, that a lane holds of K's token: a quarter
constexpr int V_WORDS = BYTES / 32;  // and of V's: an eighth
__device__ constexpr int stored(int words, int bits) { return bits == 2 ? words / 2 : words; }  // of those, as they are stored
constexpr int K_VECTOR = HEAD_DIM * K_BITS / 8, V_VECTOR = HEAD_DIM * V_BITS / 8;               // bytes
constexpr int K_STORED = K_LEARNED ? K_VECTOR / 16 : stored(K_WORDS, K_BITS);
constexpr int STEPS = HEAD_DIM / 16;            // products of Q.K, and of P.V, for 16 tokens
constexpr int SUMS = 4 * STEPS * COLUMN_TILES;  // a lane's numbers of the output
static_assert(!K_LEARNED || HEAD_DIM >= 128, "a lane's share of a column is whole words");
constexpr int PAIRS = 256, PAIR_STRIDE = 256;  // bytes from a pair to the next: 32 lanes of K's, then of V's
constexpr int TABLE_BYTES = PAIRS * PAIR_STRIDE;
constexpr bool KEPT = TAIL + SINK > 0;     // some tokens are seen in BF16
constexpr bool LOWER = SINK + WINDOW > 0;  // some of the first are not seen packed
constexpr unsigned ALL = 0xffffffffu;
#define MINUS_INFINITY __int_as_float(0xff800000)
constexpr float LEAST_PEAK = -1e30f;                  // below every logit
constexpr float LEAST_UNIT = 9.313225746154785e-10f;  // 2**-30, below every FP16 number

__device__ __forceinline__ float to_float(word half) {
    float out;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(out) : "r"(half));
    return out;
}

__device__ __forceinline__ word to_halves(float low, float high) {
    word out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ half_bits to_bf16(float x) {
    half_bits out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ void multiply(float* sums, word a0, word a1, word a2, word a3, word b0, word b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An 8 x 8 tile of FP16: from row lane / 4, columns 2 * (lane % 4) and the next, to the same of the transposed tile.
__device__ __forceinline__ word transposed(word pair) {
    word out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// Largest over the eight lanes that hold the same columns, and sum.
__device__ __forceinline__ float largest_of_tokens(float x) {
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

__device__ __forceinline__ float sum_of_tokens(float x) {
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

// Codes and scales are read once: they need no place in L1.
template <int N> __device__ __forceinline__ void load_codes(word (&out)[N], const unsigned char* at) {
    if constexpr (N % 2)
        for (int i = 0; i < N; i++) asm("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(out[i]) : "l"(at + 4 * i));
    if constexpr (N % 4 == 2)
        for (int i = 0; i < N; i += 2)
            asm("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(out[i]), "=r"(out[i + 1]) : "l"(at + 4 * i));
    if constexpr (N % 4 == 0)
        for (int i = 0; i < N; i += 4)
            asm("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                : "=r"(out[i]), "=r"(out[i + 1]), "=r"(out[i + 2]), "=r"(out[i + 3])
                : "l"(at + 4 * i));
}

__device__ __forceinline__ word load_scale(const half_bits* at) {
    half_bits out;
    asm("ld.global.nc.L1::no_allocate.b16 %0, [%1];" : "=h"(out) : "l"(at));
    return out;
}

// Two FP16 numbers times two, and plus two.
__device__ __forceinline__ word times(word a, word b) {
    word out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ word times_plus(word a, word b, word c) {
    word out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

struct Side {
    const unsigned char* codes;
    const half_bits* scales;
    int codes_stride, scales_stride;  // from a block to the next, in bytes and in scales
};

struct Arguments {
    const half_bits* q;                      // [sequences, HEADS * GROUP, D] FP16, rotated, in layout.kernel_order; with
                                             // K_LEARNED of every stretch
    half_bits* out;                          // [sequences, HEADS * GROUP, D] BF16
    const void* rotation;                    // [D, D] BF16 or FP32
    float* parts;                            // [gridDim.x, HEADS, 2, SUMS, 32]
    float* part_maxima;                      // [gridDim.x, HEADS, 2, COLUMNS], in units of log2
    float* part_sums;                        // likewise
    int* arrived;                            // [sequences, HEADS], zeros before and after
    const long long* positions;              // [sequences] of the new tokens
    const int* seq_lens;                     // [sequences]
    const int* block_table;                  // [sequences, table_width]
    const float *k_centroids, *v_centroids;  // [16]
    const float* in_bf16;                    // [sequences, HEADS * GROUP, D], what was seen in BF16, as in_bf16.py leaves it
    const float *in_bf16_maxima, *in_bf16_sums;  // [sequences, HEADS * GROUP], in units of log2, and of probabilities
    const float* gains;                          // [stretches, sequences, HEADS * GROUP], of the queries; only with K_LEARNED
    const float* lacks;                          // likewise; what logits lack, without `scale`
    Side k, v;
    int sequences, table_width;
    float scale;  // softmax scale times log2(e)
};
