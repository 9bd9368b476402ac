// The structures of the C interface beside those of kernels.h. Python holds the same ones (library.py), and `haarkv_sizes`
// tells when they are not.
#pragma once

#include "kernels.h"

using namespace haarkv;

extern "C" {

// One call of `haarkv_attention`.
struct HaarkvAttention {
    Cache cache;
    const void* q;               // [T, Hq, D] BF16 or FP32
    void* out;                   // [T, Hq, D] of the same
    Matrix rotation;             // q @ rotation is the rotated query in word order; no numbers where K is not rotated
    Matrix rotation_back;        // from the rotated domain in plane order to the model's own; no numbers where V is not
    const int32_t* block_table;  // [B, max_blocks]
    const int32_t* query_start;  // [B + 1]
    const int64_t* positions;    // [T]
    const int64_t* rows;         // [B], of each sequence in `Kept`; looked at where tokens stay in BF16
    int32_t sequences, max_blocks, num_heads, bf16;
    float softmax_scale;
    int32_t isa, threads;
};

// K or V of new tokens and where they go.
struct HaarkvStoreSide {
    const void* x;   // [T, Hkv, D] BF16 or FP32
    uint8_t* codes;  // as in Side, and so are the strides
    uint16_t* scales;
    float* zeros;
    int64_t codes_stride, scales_stride;
    Quantizer quantizer;
    Kept kept;
    int32_t bf16;
    uint8_t* signs;  // [num_blocks, Hkv, block_size, D / 8] of what levels leave, or null
    int64_t signs_stride;
};

struct HaarkvStore {
    HaarkvStoreSide k, v;
    const int64_t* slots;      // [T]
    const int64_t* positions;  // [T], and so on as for attention; they are looked at where tokens stay in BF16
    const int32_t* query_start;
    const int64_t* rows;
    int64_t tokens, num_slots;
    int32_t sequences, num_kv_heads, block_size, isa, threads;
};

struct HaarkvLinear {
    const void* weight;  // [out, in] BF16 or FP32
    const void* x;       // [T, in] BF16 or FP32
    float* y;            // [T, out]
    int64_t tokens, in, out;
    int32_t weight_bf16, bf16, isa, threads;
};

// One dense layer: its weights, all BF16 or all FP32, and the calls that its cache decides. Norms of heads and biases may be
// null.
struct HaarkvDenseLayer {
    const void *input_norm, *q_proj, *k_proj, *v_proj, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o_proj;
    const void *post_norm, *gate_proj, *up_proj, *down_proj;
    const HaarkvStore* store;
    const HaarkvAttention* attention;
};

// What the time of a layer goes to.
enum Part : int32_t { kNorms, kProjections, kRope, kStore, kAttention, kSwiglu, kResiduals, kParts };

// One call of `haarkv_layers`.
struct HaarkvLayers {
    const HaarkvDenseLayer* layers;
    void* hidden;            // [T, hidden_size] BF16 or FP32, before and after
    const float *cos, *sin;  // [T, D / 2]
    const int64_t* slots;    // [T], and so on as in HaarkvStore and HaarkvAttention
    const int64_t* positions;
    const int64_t* rows;
    const int32_t *block_table, *query_start;
    int64_t* spent;  // [kParts] nanoseconds, to which the caller's are added: of CPU time if threads is 1; or null
    int64_t count, tokens, hidden_size, intermediate_size;
    int32_t sequences, max_blocks, num_heads, bf16, isa, threads;
    float eps, softmax_scale;
};

}  // extern "C"
