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
    const float* rotation;       // [D, D]: q @ rotation is the rotated query in word order
    const float* rotation_back;  // [D, D]: from the rotated domain in plane order to the model's own
    const int32_t* block_table;  // [B, max_blocks]
    const int32_t* query_start;  // [B + 1]
    const int64_t* positions;    // [T]
    int32_t sequences, max_blocks, num_heads, bf16;
    float softmax_scale;
    int32_t isa, threads;
};

struct HaarkvStore {
    const void *k, *v;  // [T, Hkv, D] BF16 or FP32
    int32_t k_bf16, v_bf16;
    uint8_t *k_codes, *v_codes;  // as in Side, and so are the strides
    uint16_t *k_scales, *v_scales;
    int64_t k_codes_stride, v_codes_stride, k_scales_stride, v_scales_stride;
    Quantizer quantizer;
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
    const Floats rotated = floats(tokens * a->num_heads * dim);
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
                    t.tile.q[r] = rotated.get() + t.row[r] * dim;
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

    const int64_t per_split = kMaxRows * (dim + 2);
    const Floats partials = floats(splits.size() * per_split);
    const int64_t scratch_size = std::max<int64_t>(kernels.scratch_floats(a->cache), 2 * kMaxRows * dim);
    const Floats scratch = floats(a->threads * scratch_size);

    auto rotate = [&](int64_t item, int thread) {
        float* x = scratch.get() + thread * scratch_size;
        const int64_t row = item * kMaxRows, rows = std::min<int64_t>(kMaxRows, tokens * a->num_heads - row);
        widen(at(a->q, a->bf16, row * dim), a->bf16, rows * dim, x);
        kernels.rotate(x, static_cast<int>(rows), a->rotation, dim, rotated.get() + row * dim);
    };
    parallel_for(a->threads, divide_up(tokens * a->num_heads, kMaxRows), rotate);

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
        float* out = merged + kMaxRows * dim;
        for (int r = 0; r < t.tile.rows; ++r) {
            const float* parts = partials.get() + t.first * per_split;
            float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
            for (int64_t s = 0; s < t.splits; ++s) most = std::max(most, parts[s * per_split + r]);
            float* sum = merged + r * dim;
            std::fill(sum, sum + dim, 0.0f);
            for (int64_t s = 0; s < t.splits; ++s) {
                const float* part = parts + s * per_split;
                const float factor = std::exp(part[r] - most);
                total += part[kMaxRows + r] * factor;
                for (int d = 0; d < dim; ++d) sum[d] += part[2 * kMaxRows + r * dim + d] * factor;
            }
            for (int d = 0; d < dim; ++d) sum[d] /= total;
        }
        kernels.rotate(merged, t.tile.rows, a->rotation_back, dim, out);
        for (int r = 0; r < t.tile.rows; ++r) {
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
    const int64_t dim = s->quantizer.head_dim, heads = s->num_kv_heads;
    for (int64_t t = 0; t < s->tokens; ++t)
        if (s->slots[t] < 0 || s->slots[t] >= s->num_slots) return 1;
    for (int side = 0; side < 2; ++side) {
        const void* x = side ? s->v : s->k;
        const int64_t n = s->tokens * heads * dim;
        if (side ? s->v_bf16 : s->k_bf16) {
            if (!finite(static_cast<const uint16_t*>(x), n, uint16_t{0x7f80})) return 1;
        } else if (!finite(static_cast<const uint32_t*>(x), n, uint32_t{0x7f800000})) {
            return 1;
        }
    }
    const Kernels& kernels = kernels_of(s->isa);
    const int64_t tiles = divide_up(heads, kMaxRows);
    auto quantize = [&](int64_t item, int) {
        const bool v = item & 1;
        const int64_t token = item / 2 / tiles, head = item / 2 % tiles * kMaxRows;
        const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, heads - head));
        alignas(64) float x[3 * kMaxRows * kMaxDim];  // on the stack: the heap would take longer than storing a token
        const bool bf16 = v ? s->v_bf16 : s->k_bf16;
        widen(at(v ? s->v : s->k, bf16, (token * heads + head) * dim), bf16, rows * dim, x);
        uint8_t* codes[kMaxRows];
        uint16_t* scales[kMaxRows];
        const int64_t block = s->slots[token] / s->block_size, offset = s->slots[token] % s->block_size;
        for (int r = 0; r < rows; ++r) {
            const int64_t vector = (head + r) * s->block_size + offset;
            codes[r] =
                (v ? s->v_codes + block * s->v_codes_stride : s->k_codes + block * s->k_codes_stride) + vector * (dim / 2);
            scales[r] = (v ? s->v_scales + block * s->v_scales_stride : s->k_scales + block * s->k_scales_stride) + vector;
        }
        kernels.quantize(s->quantizer, x, rows, x + kMaxRows * dim, codes, scales);
    };
    parallel_for(s->threads, 2 * s->tokens * tiles, quantize);
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
