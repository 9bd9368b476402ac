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

// Keeps a vector x [dim] of a token in BF16, in the block of its slot. A negative slot is none.
void keep_in_block(const Kernels& kernels, const ResidualWindow& residual, int64_t slot, int64_t head, const float* x,
                   int64_t dim) {
    if (slot < 0) return;
    const int64_t block = slot / residual.block_size, offset = slot % residual.block_size;
    kernels.narrow(x, dim, residual.vectors + block * residual.block_stride + (head * residual.block_size + offset) * dim);
}

// Keeps a vector x [dim] of the token at `position` of a sequence in BF16, in the sequence's row.
void keep_in_row(const Kernels& kernels, const ResidualWindow& residual, int64_t row, int64_t heads, int64_t head,
                 int64_t position, const float* x, int64_t dim) {
    uint16_t* of_head = residual.vectors + (row * heads + head) * (residual.sink + residual.ring) * dim;
    if (residual.ring) kernels.narrow(x, dim, of_head + (residual.sink + position % residual.ring) * dim);
    if (position < residual.sink) kernels.narrow(x, dim, of_head + position * dim);
}

constexpr int64_t kNumbersPerItem = 16 * 1024;  // 10 microseconds of one thread

// Rows of `width` numbers; few of them are not worth waking a thread for.
template <class Op>
void by_rows(const Op& op, void (*kernel)(const Op&, int64_t, int64_t), int64_t rows, int64_t width, int threads) {
    const int64_t together = std::max<int64_t>(1, kNumbersPerItem / std::max<int64_t>(1, width));
    auto some = [&](int64_t item, int) { kernel(op, item * together, std::min(rows, (item + 1) * together)); };
    parallel_for(threads, divide_up(rows, together), some);
}

}  // namespace
}  // namespace haarkv

using namespace haarkv;

extern "C" {

// Where a vector's codes and its scale go.
struct Stored {
    uint8_t* codes;
    uint16_t* scale;
};

// The place of a vector of a block, of all that it holds one head after the other.
static Stored place_of(const HaarkvStoreSide& side, int64_t block, int64_t vector) {
    return {side.codes + block * side.codes_stride + vector * side.quantizer.bytes,
            side.scales ? side.scales + block * side.scales_stride + vector : nullptr};
}

// Whether a side takes n vectors: plain numbers are whatever they are, all else is finite.
static bool all_stored(const HaarkvStoreSide& side, int64_t n) {
    if (!side.quantizer.matrix.numbers) return true;
    n *= side.quantizer.matrix.inputs;
    if (!side.bf16) return within(static_cast<const uint32_t*>(side.x), n, uint32_t{0x7fffffff}, uint32_t{0x7f7fffff});
    return within(static_cast<const uint16_t*>(side.x), n, uint16_t{0x7fff}, uint16_t{0x7f7f});
}

// A vector x [dim] as the numbers that it is.
static void put_numbers(Cell cell, const float* x, int64_t dim, uint8_t* codes) {
    if (cell == kFp32) {
        std::memcpy(codes, x, dim * sizeof(float));
        return;
    }
    uint16_t* to = reinterpret_cast<uint16_t*>(codes);
    for (int64_t i = 0; i < dim; ++i) to[i] = float_to_bf16(x[i]);
}

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
    std::vector<int64_t> residual_rows(s->k.residual.vectors || s->v.residual.vectors ? s->tokens : 0);
    for (int64_t b = 0; !residual_rows.empty() && b < s->sequences; ++b)
        std::fill(residual_rows.begin() + s->query_start[b], residual_rows.begin() + s->query_start[b + 1], s->rows[b]);
    // Up to kMaxRows vectors that one matrix rotates: heads of a token, or where heads differ tokens of a head.
    auto tiles_of = [&](const HaarkvStoreSide& side) {
        return side.quantizer.matrix.head_stride ? heads * divide_up(s->tokens, kMaxRows)
                                                 : s->tokens * divide_up(heads, kMaxRows);
    };
    auto quantize_tile = [&](const HaarkvStoreSide& side, int64_t tile) {
        const int64_t dim = side.quantizer.matrix.inputs;
        const bool by_head = side.quantizer.matrix.head_stride != 0;
        const int64_t together = by_head ? s->tokens : heads, tiles = divide_up(together, kMaxRows);
        const int64_t fixed = tile / tiles, first = tile % tiles * kMaxRows;
        const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, together - first));
        alignas(64) float x[3 * kMaxRows * kMaxDim];  // on the stack: the heap would take longer than storing a token
        uint8_t* codes[kMaxRows];
        uint16_t* scales[kMaxRows];
        for (int r = 0; r < rows; ++r) {
            const int64_t token = by_head ? first + r : fixed, head = by_head ? fixed : first + r;
            widen(kernels, at(side.x, side.bf16, (token * heads + head) * dim), side.bf16, dim, x + r * dim);
            if (side.residual.vectors && side.residual.block_size)
                keep_in_block(kernels, side.residual, s->residual_slots[token], head, x + r * dim, dim);
            else if (side.residual.vectors)
                keep_in_row(kernels, side.residual, residual_rows[token], heads, head, s->positions[token], x + r * dim, dim);
            if (side.stretches.cos) turn_back(side.stretches, s->positions[token] / kStretchKeys, x + r * dim);
            const int64_t vector = head * s->block_size + s->slots[token] % s->block_size;
            const Stored to = place_of(side, s->slots[token] / s->block_size, vector);
            codes[r] = to.codes, scales[r] = to.scale;
            if (!side.quantizer.matrix.numbers)
                put_numbers(static_cast<Cell>(side.quantizer.cell), x + r * dim, dim, to.codes);
        }
        if (!side.quantizer.matrix.numbers) return;
        kernels.quantize(side.quantizer, static_cast<int>(by_head ? fixed : 0), x, rows, x + rows * dim, codes, scales);
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
