// The C interface: cuts each op into items, runs them on the pool, and owns scratch. Arrays are contiguous. The caller checks
// whatever it can see for itself, such as shapes and dtypes.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"
#include "numbers.h"
#include "pool.h"

namespace haarkv {
namespace {

// Keys of one item. Fixed, so that sums do not depend on the number of threads or on the rest of the batch.
constexpr int kSplitKeys = 1024;
constexpr int64_t kWeightBytesPerItem = 128 * 1024;

enum Isa { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Vnni = 3 };

Isa best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx2) return kPortable;
    if (!avx512) return kAvx2;
    return __builtin_cpu_supports("avx512vnni") ? kAvx512Vnni : kAvx512;
#else
    return kPortable;
#endif
}

const Kernels& kernels_of(int isa) {
#if defined(__x86_64__)
    if (isa == kAvx512Vnni) return avx512vnni_kernels();
    if (isa == kAvx512) return avx512_kernels();
    if (isa == kAvx2) return avx2_kernels();
#endif
    (void)isa;
    return portable_kernels();
}

// Converts x [n], BF16 or FP32, to FP32.
void widen(const void* x, bool bf16, int64_t n, float* out) {
    if (!bf16) {
        std::memcpy(out, x, n * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(static_cast<const uint16_t*>(x)[i]);
}

// Whether n numbers, given as bits, are finite: `exponent` masks the bits that are all ones in an infinity or a NaN.
template <class T> bool finite(const T* x, int64_t n, T exponent) {
    T bad = 0;
    for (int64_t i = 0; i < n; ++i) bad |= static_cast<T>((x[i] & exponent) == exponent);
    return !bad;
}

const void* at(const void* x, bool bf16, int64_t index) { return static_cast<const char*>(x) + index * (bf16 ? 2 : 4); }

struct Free {
    void operator()(float* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float[], Free>;

// Aligned to a cache line: a load that straddles two lines costs two.
Floats floats(int64_t n) {
    void* p = std::aligned_alloc(64, static_cast<size_t>((n * 4 + 63) / 64 * 64));
    if (p == nullptr) throw std::bad_alloc();
    return Floats(static_cast<float*>(p));
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
}  // namespace haarkv

using namespace haarkv;

extern "C" {

struct HaarkvAttention {
    Cache cache;
    const void* q;               // [T, Hq, D] BF16 or FP32
    void* out;                   // [T, Hq, D] of the same
    Matrix rotation;             // q @ rotation is the rotated query in word order
    Matrix rotation_back;        // from the rotated domain in plane order to the model's own
    const float* mean;           // [Hkv, D], what V's vectors come back with, or null
    const int32_t* block_table;  // [B, max_blocks]
    const int32_t* query_start;  // [B + 1]
    const int64_t* positions;    // [T]
    int32_t sequences, max_blocks, num_heads, bf16;
    float softmax_scale;
    int32_t isa, threads;
};

// K or V of new tokens and where they go.
struct HaarkvStoreSide {
    const void* x;   // [T, Hkv, D] BF16 or FP32
    uint8_t* codes;  // as in Side, and so are the strides
    uint16_t* scales;
    int64_t codes_stride, scales_stride;
    Quantizer quantizer;
    int32_t bf16;
};

struct HaarkvStore {
    HaarkvStoreSide k, v;
    const int64_t* slots;  // [T]
    int64_t tokens, num_slots;
    int32_t num_kv_heads, block_size, isa, threads;
};

struct HaarkvLinear {
    const uint16_t* weight;  // [out, in] BF16
    const void* x;           // [T, in] BF16 or FP32
    float* y;                // [T, out]
    int64_t tokens, in, out;
    int32_t bf16, isa, threads;
};

__attribute__((visibility("default"))) int haarkv_best_isa() { return best_isa(); }

__attribute__((visibility("default"))) void haarkv_attention(const HaarkvAttention* a) {
    const Kernels& kernels = kernels_of(a->isa);
    const int dim = a->cache.head_dim, kv_heads = a->cache.num_kv_heads, group = a->num_heads / kv_heads;
    const int blocks_per_split = std::max(1, kSplitKeys / a->cache.block_size);
    const int64_t tokens = a->query_start[a->sequences];

    // The splits of a tile are consecutive in the list of all; `first` is the index of its first.
    struct RowTile {
        Tile tile;
        int64_t first, splits, row[kMaxRows];
    };
    struct Split {
        int64_t tile;
        int32_t first_block, end_block;
    };
    std::vector<RowTile> tiles;
    std::vector<Split> splits;
    const int64_t k_levels = a->cache.k.levels, v_levels = a->cache.v.levels;
    const Floats rotated = floats(tokens * a->num_heads * k_levels);
    for (int b = 0; b < a->sequences; ++b) {
        const int64_t begin = a->query_start[b], rows = (a->query_start[b + 1] - begin) * group;
        for (int64_t row = 0; row < rows; row += kMaxRows)
            for (int head = 0; head < kv_heads; ++head) {
                RowTile t;
                t.tile.rows = static_cast<int32_t>(std::min<int64_t>(kMaxRows, rows - row));
                t.tile.kv_head = head;
                t.tile.block_table = a->block_table + static_cast<int64_t>(b) * a->max_blocks;
                t.tile.softmax_scale = a->softmax_scale;
                t.tile.bf16 = a->bf16;
                int longest = 0;
                for (int r = 0; r < t.tile.rows; ++r) {
                    const int64_t token = begin + (row + r) / group;
                    t.row[r] = token * a->num_heads + head * group + (row + r) % group;
                    t.tile.q[r] = rotated.get() + t.row[r] * k_levels;
                    t.tile.limits[r] = static_cast<int32_t>(a->positions[token] + 1);
                    longest = std::max(longest, t.tile.limits[r]);
                }
                const int blocks = static_cast<int>(divide_up(longest, a->cache.block_size));
                t.first = static_cast<int64_t>(splits.size());
                t.splits = divide_up(blocks, blocks_per_split);
                for (int block = 0; block < blocks; block += blocks_per_split)
                    splits.push_back({static_cast<int64_t>(tiles.size()), block, std::min(blocks, block + blocks_per_split)});
                tiles.push_back(t);
            }
    }

    const int64_t per_split = kMaxRows * (v_levels + 2);
    const Floats partials = floats(splits.size() * per_split);
    const int64_t scratch_size = std::max<int64_t>(kernels.scratch_floats(a->cache), kMaxRows * (v_levels + dim));
    const Floats scratch = floats(a->threads * scratch_size);

    // Rows that are multiplied by one matrix lie together: all, or the query heads of a KV head of a token.
    const int64_t rows_together = a->rotation.head_stride ? group : std::max<int64_t>(1, tokens * a->num_heads);
    const int64_t tiles_together = divide_up(rows_together, kMaxRows);
    auto rotate = [&](int64_t item, int thread) {
        float* x = scratch.get() + thread * scratch_size;
        const int64_t together = item / tiles_together, first = item % tiles_together * kMaxRows;
        const int64_t row = together * rows_together + first, rows = std::min<int64_t>(kMaxRows, rows_together - first);
        widen(at(a->q, a->bf16, row * dim), a->bf16, rows * dim, x);
        kernels.rotate(x, static_cast<int>(rows), a->rotation, static_cast<int>(together % kv_heads),
                       rotated.get() + row * k_levels);
    };
    parallel_for(a->threads, tokens * a->num_heads / rows_together * tiles_together, rotate);

    auto attend = [&](int64_t item, int thread) {
        Tile tile = tiles[splits[item].tile].tile;
        tile.first_block = splits[item].first_block, tile.end_block = splits[item].end_block;
        tile.maxima = partials.get() + item * per_split;
        tile.totals = tile.maxima + kMaxRows, tile.sums = tile.totals + kMaxRows;
        kernels.attend(a->cache, tile, scratch.get() + thread * scratch_size);
    };
    parallel_for(a->threads, static_cast<int64_t>(splits.size()), attend);

    auto merge = [&](int64_t item, int thread) {
        const RowTile& t = tiles[item];
        float* merged = scratch.get() + thread * scratch_size;
        float* out = merged + kMaxRows * v_levels;
        for (int r = 0; r < t.tile.rows; ++r) {
            const float* parts = partials.get() + t.first * per_split;
            float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
            for (int64_t s = 0; s < t.splits; ++s) most = std::max(most, parts[s * per_split + r]);
            float* sum = merged + r * v_levels;
            std::fill(sum, sum + v_levels, 0.0f);
            for (int64_t s = 0; s < t.splits; ++s) {
                const float* part = parts + s * per_split;
                const float factor = std::exp(part[r] - most);
                total += part[kMaxRows + r] * factor;
                for (int i = 0; i < v_levels; ++i) sum[i] += part[2 * kMaxRows + r * v_levels + i] * factor;
            }
            for (int i = 0; i < v_levels; ++i) sum[i] /= total;
        }
        kernels.rotate(merged, t.tile.rows, a->rotation_back, t.tile.kv_head, out);
        for (int r = 0; r < t.tile.rows; ++r) {
            // Probabilities sum to 1, so the mean is added once.
            for (int d = 0; a->mean && d < dim; ++d) out[r * dim + d] += a->mean[t.tile.kv_head * dim + d];
            if (!a->bf16) {
                std::memcpy(static_cast<float*>(a->out) + t.row[r] * dim, out + r * dim, dim * sizeof(float));
                continue;
            }
            for (int d = 0; d < dim; ++d) static_cast<uint16_t*>(a->out)[t.row[r] * dim + d] = float_to_bf16(out[r * dim + d]);
        }
    };
    parallel_for(a->threads, static_cast<int64_t>(tiles.size()), merge);
}

// Returns 0, or 1 without storing anything if a slot lies outside the cache or a number is not finite.
__attribute__((visibility("default"))) int haarkv_store(const HaarkvStore* s) {
    const int64_t heads = s->num_kv_heads;
    const HaarkvStoreSide* const sides[] = {&s->k, &s->v};
    for (int64_t t = 0; t < s->tokens; ++t)
        if (s->slots[t] < 0 || s->slots[t] >= s->num_slots) return 1;
    for (const HaarkvStoreSide* side : sides) {
        const int64_t n = s->tokens * heads * side->quantizer.matrix.inputs;
        if (side->bf16) {
            if (!finite(static_cast<const uint16_t*>(side->x), n, uint16_t{0x7f80})) return 1;
        } else if (!finite(static_cast<const uint32_t*>(side->x), n, uint32_t{0x7f800000})) {
            return 1;
        }
    }
    const Kernels& kernels = kernels_of(s->isa);
    // Up to kMaxRows vectors that one matrix rotates: heads of a token, or where heads differ tokens of a head.
    auto tiles_of = [&](const HaarkvStoreSide& side) {
        return side.quantizer.matrix.head_stride ? heads * divide_up(s->tokens, kMaxRows)
                                                 : s->tokens * divide_up(heads, kMaxRows);
    };
    auto quantize_tile = [&](const HaarkvStoreSide& side, int64_t tile) {
        const int64_t dim = side.quantizer.matrix.inputs, bytes = side.quantizer.levels / 2;
        const bool by_head = side.quantizer.matrix.head_stride != 0;
        const int64_t together = by_head ? s->tokens : heads, tiles = divide_up(together, kMaxRows);
        const int64_t fixed = tile / tiles, first = tile % tiles * kMaxRows;
        const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, together - first));
        alignas(64) float x[3 * kMaxRows * kMaxDim];  // on the stack: the heap would take longer than storing a token
        uint8_t* codes[kMaxRows];
        uint16_t* scales[kMaxRows];
        for (int r = 0; r < rows; ++r) {
            const int64_t token = by_head ? first + r : fixed, head = by_head ? fixed : first + r;
            widen(at(side.x, side.bf16, (token * heads + head) * dim), side.bf16, dim, x + r * dim);
            const int64_t block = s->slots[token] / s->block_size, offset = s->slots[token] % s->block_size;
            const int64_t vector = head * s->block_size + offset;
            codes[r] = side.codes + block * side.codes_stride + vector * bytes;
            scales[r] = side.scales + block * side.scales_stride + vector;
        }
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

__attribute__((visibility("default"))) void haarkv_linear(const HaarkvLinear* p) {
    const Kernels& kernels = kernels_of(p->isa);
    const int64_t half = p->in / 2;
    const Floats numbers = floats(p->tokens * (p->in + 2 * half));
    float *x = numbers.get(), *even = x + p->tokens * p->in, *odd = even + p->tokens * half;
    widen(p->x, p->bf16, p->tokens * p->in, x);
    for (int64_t t = 0; t < p->tokens; ++t)
        for (int64_t i = 0; i < half; ++i) {
            even[t * half + i] = x[t * p->in + 2 * i];
            odd[t * half + i] = x[t * p->in + 2 * i + 1];
        }
    const Projection projection{p->weight, even, odd, x, p->y, p->in, p->out, static_cast<int32_t>(p->tokens)};
    const int64_t rows = std::max<int64_t>(8, kWeightBytesPerItem / (2 * p->in) / 8 * 8);
    auto project = [&](int64_t item, int) { kernels.project(projection, item * rows, std::min(p->out, (item + 1) * rows)); };
    parallel_for(p->threads, divide_up(p->out, rows), project);
}

}  // extern "C"
