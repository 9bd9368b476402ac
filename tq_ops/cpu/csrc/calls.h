// The structures of the C interface beside those of kernels.h. Python reads both headers (library.py): fields of a structure
// are numbers, pointers, arrays of a literal size and structures, four spaces in.
#pragma once

#include "kernels.h"

using namespace haarkv;

extern "C" {

// How RoPE turns keys that are stored by stretches of kStretchKeys positions: by how much where each begins.
struct Stretches {
    const float *cos, *sin;  // [stretches, half]; null where keys are stored as they are
    int32_t half, count;     // numbers i and i + half of a key are turned together
};

// One call of `haarkv_attention`.
struct HaarkvAttention {
    Cache cache;
    Stretches stretches;            // of keys; there are as many as any sequence has
    const void* q;                  // [T, Hq, D] BF16 or FP32
    void* out;                      // [T, Hq, D] of the same
    Matrix rotation;                // q @ rotation is the rotated query in word order; no numbers where K is not rotated
    Matrix rotation_back;           // from the rotated domain in plane order to the model's own; no numbers where V is not
    const int32_t* block_table;     // [B, max_blocks]
    const int32_t* query_start;     // [B + 1]
    const int64_t* positions;       // [T]
    const int64_t* rows;            // [B], of each sequence in `ResidualWindow`; looked at where tokens stay in BF16
    const int32_t* residual_table;  // [B, residual_blocks], where those lie in blocks of their own
    int32_t sequences, max_blocks, residual_blocks, num_heads, bf16;
    int32_t window;  // tokens that a query sees, itself among them; 0 for all
    float softmax_scale;
    int32_t isa, threads;
};

// K or V of new tokens, where they go and how.
struct HaarkvStoreSide {
    const void* x;  // [T, Hkv, D] BF16 or FP32
    Side side;
    Quantizer quantizer;
    Stretches stretches;
    int32_t bf16;
};

struct HaarkvStore {
    HaarkvStoreSide k, v;
    const int64_t* slots;      // [T]
    const int64_t* positions;  // [T], and so on as for attention; they are looked at where tokens stay in BF16
    const int32_t* query_start;
    const int64_t* rows;
    const int64_t* residual_slots;  // [T], where those lie in blocks of their own
    int64_t tokens, num_slots;
    int32_t sequences, num_kv_heads, block_size, isa, threads;
};

struct HaarkvLinear {
    Weight weight;  // [outputs, inputs]
    const void* x;  // [T, inputs] BF16 or FP32
    float* y;       // [T, outputs]
    int64_t tokens, inputs, outputs;
    int32_t bf16, isa, threads;
};

// One dense layer: its weights, the calls that its cache decides, and what else it declares. Norms of heads, biases and norms
// behind the mixer and the MLP may be null. Norms are BF16 or FP32, biases of the model's dtype, and projections too, or
// blocks.
struct HaarkvDenseLayer {
    const void *input_norm, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *mixer_out_norm, *post_norm, *mlp_out_norm;
    Weight q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj;
    const HaarkvStore* store;
    const HaarkvAttention* attention;
    int64_t intermediate_size;
    int32_t num_heads, norms_bf16, gelu;
    int32_t rope, place;  // which of the call's `ropes` and `places` are its own
    float eps, softmax_scale;
};

// cos and sin [T, D / 2] of the tokens by one rotary embedding.
struct HaarkvTurns {
    const float *cos, *sin;
};

// Slots [T] and block table [B, max_blocks] of the tokens, as layers of one shape have them.
struct HaarkvPlaces {
    const int64_t* slots;
    const int32_t* block_table;
};

// One call of `haarkv_layers`.
struct HaarkvLayers {
    const HaarkvDenseLayer* layers;
    void* hidden;  // [T, hidden_size] BF16 or FP32, before and after
    const HaarkvTurns* ropes;
    const HaarkvPlaces* places;
    const int64_t* positions;  // [T], and so on as in HaarkvStore and HaarkvAttention
    const int64_t* rows;
    const int32_t* query_start;
    int64_t count, tokens, hidden_size;
    int32_t sequences, max_blocks, bf16, isa, threads;
};

}  // extern "C"
