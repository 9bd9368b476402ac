// Attention: rotates queries, attends by items of 1,024 keys, merges those and rotates back.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "driver.h"
#include "pool.h"

using namespace haarkv;

extern "C" {

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

}  // extern "C"

namespace haarkv {
namespace {

// Keys of one item. Fixed, so that sums do not depend on the number of threads or on the rest of the batch.
constexpr int kSplitKeys = 1024;

// The splits of a tile are consecutive in the list of all; `first` is the index of its first.
struct RowTile {
    Tile tile;
    int64_t first, splits, row[kMaxRows];
};

struct Split {
    int64_t tile;
    int32_t first_block, end_block;
};

// What a split leaves: maxima, totals, sums; where V has tokens in BF16 also the totals and sums over those.
struct Partials {
    const int64_t levels, kept;  // numbers of a row's sums
    Floats numbers;

    Partials(const Cache& cache, size_t splits)
        : levels(cache.v.levels),
          kept(cache.v.kept.vectors ? cache.head_dim : 0),
          numbers(floats(static_cast<int64_t>(splits) * size())) {}

    int64_t size() const { return kMaxRows * (2 + levels + (kept ? 1 + kept : 0)); }
    float* maxima(int64_t split) const { return numbers.get() + split * size(); }
    float* totals(int64_t split) const { return maxima(split) + kMaxRows; }
    float* sums(int64_t split) const { return totals(split) + kMaxRows; }
    float* kept_totals(int64_t split) const { return kept ? sums(split) + kMaxRows * levels : nullptr; }
    float* kept_sums(int64_t split) const { return kept ? kept_totals(split) + kMaxRows : nullptr; }
};

// Cuts the rows of every sequence and KV head into tiles, and their contexts into splits. q's rotated rows lie at `rotated`.
void cut(const HaarkvAttention& a, const float* rotated, std::vector<RowTile>& tiles, std::vector<Split>& splits) {
    const int dim = a.cache.head_dim, group = a.num_heads / a.cache.num_kv_heads;
    const int blocks_per_split = std::max(1, kSplitKeys / a.cache.block_size);
    for (int b = 0; b < a.sequences; ++b) {
        const int64_t begin = a.query_start[b], rows = (a.query_start[b + 1] - begin) * group;
        for (int64_t row = 0; row < rows; row += kMaxRows)
            for (int head = 0; head < a.cache.num_kv_heads; ++head) {
                RowTile t;
                t.tile.rows = static_cast<int32_t>(std::min<int64_t>(kMaxRows, rows - row));
                t.tile.kv_head = head;
                t.tile.block_table = a.block_table + static_cast<int64_t>(b) * a.max_blocks;
                t.tile.kept_row = a.cache.k.kept.vectors || a.cache.v.kept.vectors ? a.rows[b] : 0;
                t.tile.softmax_scale = a.softmax_scale;
                t.tile.bf16 = a.bf16;
                int longest = 0;
                for (int r = 0; r < t.tile.rows; ++r) {
                    const int64_t token = begin + (row + r) / group;
                    t.row[r] = token * a.num_heads + head * group + (row + r) % group;
                    t.tile.q[r] = rotated + t.row[r] * a.cache.k.levels;
                    t.tile.own[r] = at(a.q, a.bf16, t.row[r] * dim);
                    t.tile.limits[r] = static_cast<int32_t>(a.positions[token] + 1);
                    longest = std::max(longest, t.tile.limits[r]);
                }
                const int blocks = static_cast<int>(divide_up(longest, a.cache.block_size));
                t.first = static_cast<int64_t>(splits.size());
                t.splits = divide_up(blocks, blocks_per_split);
                for (int block = 0; block < blocks; block += blocks_per_split)
                    splits.push_back({static_cast<int64_t>(tiles.size()), block, std::min(blocks, block + blocks_per_split)});
                tiles.push_back(t);
            }
    }
}

// Adds up n numbers of a row of every split, each by its factor, over the row's total.
void add_up(const float* first, int64_t distance, const std::vector<float>& factors, float total, int64_t n, float* sum) {
    std::fill(sum, sum + n, 0.0f);
    for (size_t s = 0; s < factors.size(); ++s)
        for (int64_t i = 0; i < n; ++i) sum[i] += first[static_cast<int64_t>(s) * distance + i] * factors[s];
    for (int64_t i = 0; i < n; ++i) sum[i] /= total;
}

// The output of a tile's rows, from what its splits left. Scratch: [kMaxRows, v.levels + 2 * head_dim].
void merge(const HaarkvAttention& a, const Kernels& kernels, const Partials& of, const RowTile& t, float* scratch) {
    const int64_t dim = a.cache.head_dim, size = of.size();
    float *merged = scratch, *out = merged + kMaxRows * of.levels, *exact = out + kMaxRows * dim;
    float share[kMaxRows];  // of the probabilities, that of packed values
    std::vector<float> factors(t.splits);
    for (int r = 0; r < t.tile.rows; ++r) {
        const float *maxima = of.maxima(t.first) + r, *totals = of.totals(t.first) + r;
        float most = -std::numeric_limits<float>::infinity(), total = 0.0f, kept = 0.0f;
        for (int64_t s = 0; s < t.splits; ++s) most = std::max(most, maxima[s * size]);
        for (int64_t s = 0; s < t.splits; ++s) {
            factors[s] = std::exp(maxima[s * size] - most);
            total += totals[s * size] * factors[s];
            if (of.kept) kept += of.kept_totals(t.first + s)[r] * factors[s];
        }
        share[r] = 1.0f - kept / total;
        add_up(of.sums(t.first) + r * of.levels, size, factors, total, of.levels, merged + r * of.levels);
        if (of.kept) add_up(of.kept_sums(t.first) + r * dim, size, factors, total, dim, exact + r * dim);
    }
    if (a.rotation_back.numbers)
        kernels.rotate(merged, t.tile.rows, a.rotation_back, t.tile.kv_head, out);
    else
        std::memcpy(out, merged, t.tile.rows * dim * sizeof(float));
    const float* mean = a.cache.v.mean ? a.cache.v.mean + t.tile.kv_head * dim : nullptr;
    for (int r = 0; r < t.tile.rows; ++r) {
        float* row = out + r * dim;
        // Probabilities of packed values sum to their share, so the mean is added once.
        for (int d = 0; mean && d < dim; ++d) row[d] += mean[d] * share[r];
        for (int d = 0; of.kept && d < dim; ++d) row[d] += exact[r * dim + d];
        if (!a.bf16) {
            std::memcpy(static_cast<float*>(a.out) + t.row[r] * dim, row, dim * sizeof(float));
            continue;
        }
        for (int d = 0; d < dim; ++d) static_cast<uint16_t*>(a.out)[t.row[r] * dim + d] = float_to_bf16(row[d]);
    }
}

}  // namespace
}  // namespace haarkv

extern "C" {

__attribute__((visibility("default"))) void haarkv_attention(const HaarkvAttention* a) {
    const Kernels& kernels = kernels_of(a->isa);
    const int64_t dim = a->cache.head_dim, kv_heads = a->cache.num_kv_heads, group = a->num_heads / kv_heads;
    const int64_t tokens = a->query_start[a->sequences], k_levels = a->cache.k.levels;
    const Floats rotated = floats(tokens * a->num_heads * k_levels);
    std::vector<RowTile> tiles;
    std::vector<Split> splits;
    cut(*a, rotated.get(), tiles, splits);

    const Partials partials(a->cache, splits.size());
    const int64_t scratch_size = std::max<int64_t>(kernels.scratch_floats(a->cache), kMaxRows * (a->cache.v.levels + 2 * dim));
    const Floats scratch = floats(a->threads * scratch_size);

    // Rows that are multiplied by one matrix lie together: all, or the query heads of a KV head of a token.
    const int64_t rows_together = a->rotation.head_stride ? group : std::max<int64_t>(1, tokens * a->num_heads);
    const int64_t tiles_together = divide_up(rows_together, kMaxRows);
    auto rotate = [&](int64_t item, int thread) {
        float* x = scratch.get() + thread * scratch_size;
        const int64_t together = item / tiles_together, first = item % tiles_together * kMaxRows;
        const int64_t row = together * rows_together + first, rows = std::min<int64_t>(kMaxRows, rows_together - first);
        if (!a->rotation.numbers) return widen(at(a->q, a->bf16, row * dim), a->bf16, rows * dim, rotated.get() + row * dim);
        widen(at(a->q, a->bf16, row * dim), a->bf16, rows * dim, x);
        kernels.rotate(x, static_cast<int>(rows), a->rotation, static_cast<int>(together % kv_heads),
                       rotated.get() + row * k_levels);
    };
    parallel_for(a->threads, tokens * a->num_heads / rows_together * tiles_together, rotate);

    auto attend = [&](int64_t item, int thread) {
        Tile tile = tiles[splits[item].tile].tile;
        tile.first_block = splits[item].first_block, tile.end_block = splits[item].end_block;
        tile.maxima = partials.maxima(item), tile.totals = partials.totals(item), tile.sums = partials.sums(item);
        tile.kept_totals = partials.kept_totals(item), tile.kept_sums = partials.kept_sums(item);
        kernels.attend(a->cache, tile, scratch.get() + thread * scratch_size);
    };
    parallel_for(a->threads, static_cast<int64_t>(splits.size()), attend);

    auto merge_tile = [&](int64_t item, int thread) {
        merge(*a, kernels, partials, tiles[item], scratch.get() + thread * scratch_size);
    };
    parallel_for(a->threads, static_cast<int64_t>(tiles.size()), merge_tile);
}

}  // extern "C"
