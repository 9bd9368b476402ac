// What each instruction set provides, and the plain data that the driver hands to it.
//
// A packed vector is read as D / 8 words of 32 bits, each with eight 4-bit levels. This gives two orders of coordinates:
//   word order   coordinate (word j, level k) at j * 8 + k          rotated queries
//   plane order  coordinate (word j, level k) at k * (D / 8) + j    accumulators
// The caller folds the format's own order of coordinates into its rotation matrices, so nothing here knows a format.
#pragma once

#include <cstdint>

namespace haarkv {

constexpr int kMaxRows = 8;       // query rows that one pass over the codes serves
constexpr int kMaxDim = 256;      // the largest head_dim
constexpr int kMaxKeysTile = 16;  // keys are padded to this in scratch

// K or V of one layer, for every block and KV head. A block is contiguous; blocks may lie apart.
struct Side {
    const uint8_t* codes;                 // [num_blocks, Hkv, block_size, D / 2]
    const uint16_t* scales;               // [num_blocks, Hkv, block_size, scales_per_vector] FP16
    const float* centroids;               // [16]
    int64_t codes_stride, scales_stride;  // from a block to the next, in codes and in scales
    int32_t scales_per_vector;
    float unit;               // centroids[i] is about integers[i] * unit
    const int16_t* integers;  // [16]
};

struct Cache {
    Side k, v;
    int32_t num_kv_heads, head_dim, block_size;
};

// Some query rows of one KV head of one sequence, and the stretch of the sequence's blocks that they attend to.
struct Tile {
    int32_t rows, kv_head, first_block, end_block;
    const int32_t* block_table;
    int32_t limits[kMaxRows];  // row r sees keys 0 ... limits[r] - 1 of its sequence
    const float* q[kMaxRows];  // [D] rotated, word order
    float softmax_scale;
    int32_t bf16;   // BF16 activations: round probabilities to BF16, each block's against its own maximum
    float* sums;    // [rows, D] out, plane order: sum of p * v
    float* maxima;  // [rows] out, largest logit
    float* totals;  // [rows] out, sum of p
};

// How vectors are quantized: y = bf16(x / ||x||) @ rotation; level = #{b : y >= b}; scale = fp16(||x|| / ||c[level]||).
struct Quantizer {
    const uint16_t* rotation;  // [D, D] BF16
    const float* boundaries;   // [15] ascending
    const float* centroids;    // [16]
    int32_t head_dim;
};

// Projections of tokens by rows of a BF16 weight.
struct Projection {
    const uint16_t* weight;  // [out, in] BF16
    const float* even;       // [tokens, in / 2]: x[0], x[2], ...
    const float* odd;        // [tokens, in / 2]: x[1], x[3], ...
    const float* x;          // [tokens, in]
    float* y;                // [tokens, out]
    int64_t in, out;
    int32_t tokens;
};

struct Kernels {
    // Floats of scratch that `attend` needs, for any activations.
    int64_t (*scratch_floats)(const Cache&);
    void (*attend)(const Cache&, const Tile&, float* scratch);
    // y = x @ matrix; x, y [rows, D], matrix [D, D], row-major, rows <= kMaxRows.
    void (*rotate)(const float* x, int rows, const float* matrix, int head_dim, float* y);
    // x [rows, D] finite; codes[r] [D / 2], byte j = level[j] | level[j + D / 2] << 4; scratch [2 * rows * D]; rows <=
    // kMaxRows.
    void (*quantize)(const Quantizer&, const float* x, int rows, float* scratch, uint8_t* const* codes,
                     uint16_t* const* scales);
    void (*project)(const Projection&, int64_t begin, int64_t end);
};

const Kernels& portable_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512vnni_kernels();

}  // namespace haarkv
