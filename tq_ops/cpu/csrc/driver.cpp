// The C interface: cuts each op into items, runs them on the pool, and owns scratch. Arrays are contiguous. The caller checks
// shapes and dtypes. Here are stores and what a layer does number by number; other ops have files of their own.
#include "driver.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "calls.h"

namespace haarkv {

namespace {

// Whether n numbers, given as bits, are no larger in size than another; neither is a NaN. `size` masks all bits but the sign.
template <class T> bool within(const T* x, int64_t n, T size, T most) {
    T largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, static_cast<T>(x[i] & size));
    return largest <= most;
}

constexpr int64_t kNumbersPerItem = 16 * 1024;  // 10 microseconds of one thread

// Rows of `width` numbers; few of them are not worth waking a thread for.
template <class Op>
void by_rows(const Op& op, void (*kernel)(const Op&, int64_t, int64_t), int64_t rows, int64_t width, int threads) {
    const int64_t together = std::max<int64_t>(1, kNumbersPerItem / std::max<int64_t>(1, width));
    auto some = [&](int64_t item, int) { kernel(op, item * together, std::min(rows, (item + 1) * together)); };
    parallel_for(threads, divide_up(rows, together), some);
}

// Whether a side takes n vectors: plain numbers are whatever they are, all else is finite.
bool all_stored(const HaarkvStoreSide& of, int64_t n) {
    if (!of.quantizer.matrix.numbers) return true;
    n *= of.side.levels;
    if (!of.bf16) return within(static_cast<const uint32_t*>(of.x), n, uint32_t{0x7fffffff}, uint32_t{0x7f7fffff});
    return within(static_cast<const uint16_t*>(of.x), n, uint16_t{0x7fff}, uint16_t{0x7f7f});
}

// Keeps a vector x [dim] of a token in BF16, in the block of its slot, or in the row of its sequence. A negative slot is none.
void keep(const Kernels& kernels, const HaarkvStore& s, const ResidualWindow& residual, int64_t token, int64_t row,
          int64_t head, const float* x, int64_t dim) {
    if (residual.block_size) {
        const int64_t slot = s.residual_slots[token], block = slot / residual.block_size, offset = slot % residual.block_size;
        uint16_t* of_block = residual.vectors + block * residual.block_stride;
        if (slot >= 0) kernels.narrow(x, dim, of_block + (head * residual.block_size + offset) * dim);
        return;
    }
    const int64_t position = s.positions[token];
    uint16_t* of_head = residual.vectors + (row * s.num_kv_heads + head) * (residual.sink + residual.ring) * dim;
    if (residual.ring) kernels.narrow(x, dim, of_head + (residual.sink + position % residual.ring) * dim);
    if (position < residual.sink) kernels.narrow(x, dim, of_head + position * dim);
}

}  // namespace
}  // namespace haarkv

using namespace haarkv;

extern "C" {

// Returns 0, or 1 without storing anything if a slot lies outside the cache, a side refuses a vector, or no stretch is known.
__attribute__((visibility("default"))) int haarkv_store(const HaarkvStore* s) {
    const int64_t heads = s->num_kv_heads;
    for (int64_t t = 0; t < s->tokens; ++t)
        if (s->slots[t] < 0 || s->slots[t] >= s->num_slots) return 1;
    for (int64_t t = 0; s->k.stretches.cos && t < s->tokens; ++t)
        if (s->positions[t] >= static_cast<int64_t>(s->k.stretches.count) * kStretchKeys) return 1;
    for (const HaarkvStoreSide* side : {&s->k, &s->v})
        if (!all_stored(*side, s->tokens * heads)) return 1;
    const Kernels& kernels = kernels_of(s->isa);
    std::vector<int64_t> residual_rows(s->k.side.residual.vectors || s->v.side.residual.vectors ? s->tokens : 0);
    for (int64_t b = 0; !residual_rows.empty() && b < s->sequences; ++b)
        std::fill(residual_rows.begin() + s->query_start[b], residual_rows.begin() + s->query_start[b + 1], s->rows[b]);
    // Up to kMaxRows vectors that one matrix rotates: of all tokens and heads, or where heads differ of one head.
    auto heads_of_matrix = [&](const HaarkvStoreSide& of) { return of.quantizer.matrix.head_stride ? 1 : heads; };
    auto tiles_of_matrix = [&](const HaarkvStoreSide& of) { return divide_up(s->tokens * heads_of_matrix(of), kMaxRows); };
    auto tiles_of = [&](const HaarkvStoreSide& of) { return heads / heads_of_matrix(of) * tiles_of_matrix(of); };
    auto quantize_tile = [&](const HaarkvStoreSide& of, int64_t tile) {
        const Side& side = of.side;
        const int64_t dim = side.levels, alike = heads_of_matrix(of), tiles = tiles_of_matrix(of);
        const int64_t first_head = tile / tiles, first = tile % tiles * kMaxRows;
        const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, s->tokens * alike - first));
        const bool plain = !of.quantizer.matrix.numbers;
        alignas(64) float x[3 * kMaxRows * kMaxDim];  // on the stack: the heap would take longer than storing a token
        uint8_t* codes[kMaxRows];
        uint16_t* scales[kMaxRows];
        for (int r = 0; r < rows; ++r) {
            const int64_t token = (first + r) / alike, head = first_head + (first + r) % alike;
            float* const row = x + r * dim;
            widen(kernels, at(of.x, of.bf16, (token * heads + head) * dim), of.bf16, dim, row);
            if (side.residual.vectors) keep(kernels, *s, side.residual, token, residual_rows[token], head, row, dim);
            if (of.stretches.cos) turn_back(of.stretches, s->positions[token] / kStretchKeys, row);
            const int64_t block = s->slots[token] / s->block_size;
            const int64_t vector = head * s->block_size + s->slots[token] % s->block_size;
            codes[r] = side.codes + block * side.codes_stride + vector * side.bytes;
            scales[r] = plain ? nullptr : side.scales + block * side.scales_stride + vector;
            if (plain && side.cell == kFp32) std::memcpy(codes[r], row, dim * sizeof(float));
            if (plain && side.cell == kBf16) kernels.narrow(row, dim, reinterpret_cast<uint16_t*>(codes[r]));
        }
        if (plain) return;
        kernels.quantize(side, of.quantizer, static_cast<int>(first_head), x, rows, x + rows * dim, codes, scales);
    };
    // K and V take turns, so that two threads fetch their pages side by side.
    const int64_t k_tiles = tiles_of(s->k), v_tiles = tiles_of(s->v), both = 2 * std::min(k_tiles, v_tiles);
    auto quantize = [&](int64_t item, int) {
        if (item < both) return quantize_tile(item % 2 ? s->v : s->k, item / 2);
        quantize_tile(k_tiles > v_tiles ? s->k : s->v, item - both / 2);
    };
    parallel_for(s->threads, k_tiles + v_tiles, quantize);
    return 0;
}

__attribute__((visibility("default"))) void haarkv_rms_norm(const RmsNorm* o) {
    by_rows(*o, kernels_of(o->isa).rms_norm, o->rows, o->width, o->threads);
}

__attribute__((visibility("default"))) void haarkv_rope(const Rope* o) {
    by_rows(*o, kernels_of(o->isa).rope, o->rows, 2 * o->half, o->threads);
}

__attribute__((visibility("default"))) void haarkv_gated_mul(const GatedMul* o) {
    by_rows(*o, kernels_of(o->isa).gated_mul, o->count, 1, o->threads);
}

}  // extern "C"
