// Attention: rotates queries, attends by items of 1,024 keys, merges those and rotates back. Long prompts are served a part at
// a time, so that what is kept between these steps stays small.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "calls.h"
#include "driver.h"

using namespace haarkv;

namespace haarkv {
namespace {

constexpr int64_t kPassRows = kMaxTiles * kMaxRows;
constexpr int kLanes = 16;  // a head_dim is a multiple of it
// Of rotated queries and partial sums that are kept at a time: for each thread, at least, and at most.
constexpr int64_t kBytesPerThread = 1 << 20, kLeastBytes = 4 << 20, kMostBytes = 16 << 20;

// Tiles that one pass serves: rows of one sequence and KV head. The splits of their context are consecutive in the list of
// all, and so are the partial sums of a split's tiles.
struct Pass {
    int64_t first_tile, first_partial;
    int32_t tiles, splits, kv_head;
};

struct Split {
    int64_t pass;
    int32_t number, first_block, end_block;
};

// What is attended to at a time.
struct Wave {
    std::vector<Tile> tiles;
    std::vector<int64_t> rows;  // kMaxRows of each tile: the queries' own, over all heads
    std::vector<Pass> passes;
    std::vector<Split> splits;
    int64_t partials = 0;

    void clear() { tiles.clear(), rows.clear(), passes.clear(), splits.clear(), partials = 0; }
};

// Where a tile of a split leaves its numbers: maxima, totals, sums; where V has tokens in BF16 also the totals and sums over
// those.
struct Partials {
    const int64_t levels, residual, size;  // numbers of a row's sums; of a tile
    float* const numbers;

    static int64_t size_of(const Cache& cache) {
        return kMaxRows * (2 + cache.v.levels + (cache.v.residual.vectors ? 1 + cache.head_dim : 0));
    }

    Partials(const Cache& cache, float* numbers)
        : levels(cache.v.levels),
          residual(cache.v.residual.vectors ? cache.head_dim : 0),
          size(size_of(cache)),
          numbers(numbers) {}

    float* maxima(int64_t index) const { return numbers + index * size; }
    float* totals(int64_t index) const { return maxima(index) + kMaxRows; }
    float* sums(int64_t index) const { return totals(index) + kMaxRows; }
    float* residual_totals(int64_t index) const { return residual ? sums(index) + kMaxRows * levels : nullptr; }
    float* residual_sums(int64_t index) const { return residual ? residual_totals(index) + kMaxRows : nullptr; }
};

// Keys of a sequence that some rows see.
struct Keys {
    int begin, end;
};

// Cuts the rows of every sequence and KV head into passes, and their contexts into splits, a wave at a time.
class Cutter {
  public:
    explicit Cutter(const HaarkvAttention& a)
        : a_(a),
          query_floats_(kMaxRows * a.cache.k.levels),
          partial_floats_(Partials::size_of(a.cache)),
          most_floats_(std::clamp(kBytesPerThread * a.threads, kLeastBytes, kMostBytes) / 4) {}

    // The next wave; false if there is none.
    bool next(Wave& wave) {
        wave.clear();
        for (; sequence_ < a_.sequences; ++sequence_, row_ = 0)
            for (; row_ < rows(); row_ += kPassRows, head_ = 0)
                for (; head_ < a_.cache.num_kv_heads; ++head_) {
                    const int64_t floats = wave.partials * partial_floats_ + wave.tiles.size() * query_floats_;
                    if (floats >= most_floats_) return true;
                    add_pass(wave);
                }
        return !wave.passes.empty();
    }

  private:
    const HaarkvAttention& a_;
    const int64_t query_floats_, partial_floats_, most_floats_;
    int64_t row_ = 0;
    int sequence_ = 0, head_ = 0;

    int group() const { return a_.num_heads / a_.cache.num_kv_heads; }
    int64_t rows() const { return static_cast<int64_t>(a_.query_start[sequence_ + 1] - a_.query_start[sequence_]) * group(); }

    void add_pass(Wave& wave) const {
        const int blocks_per_split = std::max(1, kStretchKeys / a_.cache.block_size);
        Pass pass{};
        pass.first_tile = static_cast<int64_t>(wave.tiles.size());
        pass.first_partial = wave.partials;
        pass.kv_head = head_;
        Keys keys{std::numeric_limits<int>::max(), 0};
        for (int64_t end = std::min(rows(), row_ + kPassRows), row = row_; row < end; row += kMaxRows, ++pass.tiles)
            add_tile(wave, row, static_cast<int>(std::min<int64_t>(kMaxRows, end - row)), keys);
        // Splits begin at fixed places of a sequence. The first split skips blocks before the sliding windows of all queries.
        const int first = keys.begin / a_.cache.block_size;
        const int end = static_cast<int>(divide_up(keys.end, a_.cache.block_size));
        for (int block = first / blocks_per_split * blocks_per_split; block < end; block += blocks_per_split, ++pass.splits)
            wave.splits.push_back({static_cast<int64_t>(wave.passes.size()), pass.splits, std::max(first, block),
                                   std::min(end, block + blocks_per_split)});
        wave.partials += static_cast<int64_t>(pass.splits) * pass.tiles;
        wave.passes.push_back(pass);
    }

    // Widens `keys` to those that its rows see.
    void add_tile(Wave& wave, int64_t row, int rows, Keys& keys) const {
        Tile tile;
        tile.rows = rows, tile.kv_head = head_;
        tile.block_table = a_.block_table + static_cast<int64_t>(sequence_) * a_.max_blocks;
        tile.residual_table = a_.residual_table + static_cast<int64_t>(sequence_) * a_.residual_blocks;
        tile.residual_row = a_.cache.k.residual.vectors || a_.cache.v.residual.vectors ? a_.rows[sequence_] : 0;
        tile.softmax_scale = a_.softmax_scale, tile.bf16 = a_.bf16;
        wave.rows.resize(wave.rows.size() + kMaxRows);
        for (int r = 0; r < rows; ++r) {
            const int64_t token = a_.query_start[sequence_] + (row + r) / group();
            const int64_t query = token * a_.num_heads + head_ * group() + (row + r) % group();
            wave.rows[wave.tiles.size() * kMaxRows + r] = query;
            tile.own[r] = at(a_.q, a_.bf16, query * a_.cache.head_dim);
            tile.limits[r] = static_cast<int32_t>(a_.positions[token] + 1);
            tile.starts[r] = a_.window ? std::max(0, tile.limits[r] - a_.window) : 0;
            keys.begin = std::min(keys.begin, tile.starts[r]), keys.end = std::max(keys.end, tile.limits[r]);
        }
        wave.tiles.push_back(tile);
    }
};

// y [rows, D] = x [rows, D] @ matrix, for any number of rows. `exact` says that x holds BF16 numbers.
void multiply(const HaarkvAttention& a, const Kernels& kernels, const float* x, int rows, bool exact, const Matrix& matrix,
              int head, float* y) {
    // `vdpbf16ps` gains only where x holds BF16 numbers, tiles always.
    const bool pays = kernels.rotate_pairs && (exact || kernels.by_tiles.attend);
    if (a.bf16 && matrix.pairs && pays) return kernels.rotate_pairs(x, rows, exact, matrix, head, y);
    for (int r = 0; r < rows; r += kMaxRows)
        kernels.rotate(x + r * matrix.size, std::min(kMaxRows, rows - r), matrix, head, y + r * matrix.size);
}

// The sums of a row over all splits, which left partials from `first` on, `apart` from each other.
void merge_row(const Kernels& kernels, const Partials& of, int r, int64_t first, int64_t apart, std::vector<float>& factors,
               float* merged, float* exact) {
    const int64_t size = of.size * apart, splits = static_cast<int64_t>(factors.size());
    const float *maxima = of.maxima(first) + r, *totals = of.totals(first) + r;
    float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
    for (int64_t s = 0; s < splits; ++s) most = std::max(most, maxima[s * size]);
    for (int64_t s = 0; s < splits; ++s) {
        factors[s] = std::exp(maxima[s * size] - most);
        total += totals[s * size] * factors[s];
    }
    auto add_up = [&](const float* sums, int64_t n, float* sum) {
        kernels.add_up(sums + r * n, size, factors.data(), splits, 1.0f / total, n, sum);
    };
    add_up(of.sums(first), of.levels, merged);
    for (int64_t s = 0; of.residual && s < splits; ++s) {
        // Then a split has met no token in BF16, and has written no sums.
        if (of.residual_totals(first + s * apart)[r] == 0.0f) factors[s] = 0.0f;
    }
    if (of.residual) add_up(of.residual_sums(first), of.residual, exact);
}

// Floats of scratch that `merge` needs.
int64_t merged_floats(const Cache& cache) { return kPassRows * (cache.v.levels + 2 * cache.head_dim); }

// The output of a pass, from what its splits left.
void merge(const HaarkvAttention& a, const Kernels& kernels, const Partials& of, const Wave& wave, const Pass& pass,
           float* scratch) {
    const int64_t dim = a.cache.head_dim, most = pass.tiles * kMaxRows;
    float *merged = scratch, *out = merged + most * of.levels, *exact = out + most * dim;
    std::vector<float> factors(pass.splits);
    int rows = 0;
    for (int t = 0; t < pass.tiles; ++t)
        for (int r = 0; r < wave.tiles[pass.first_tile + t].rows; ++r, ++rows)
            merge_row(kernels, of, r, pass.first_partial + t, pass.tiles, factors, merged + rows * of.levels,
                      exact + rows * dim);
    if (a.rotation_back.numbers)
        multiply(a, kernels, merged, rows, false, a.rotation_back, pass.kv_head, out);
    else
        std::memcpy(out, merged, rows * dim * sizeof(float));
    for (int r = 0; r < rows; ++r) {
        const int64_t to = wave.rows[pass.first_tile * kMaxRows + r] * dim;
        float* row = out + r * dim;
        for (int d = 0; of.residual && d < dim; ++d) row[d] += exact[r * dim + d];
        if (a.bf16)
            kernels.narrow(row, dim, static_cast<uint16_t*>(a.out) + to);
        else
            std::memcpy(static_cast<float*>(a.out) + to, row, dim * sizeof(float));
    }
}

// softmax_scale * q . K's mean of a tile's queries x [rows, head_dim], which the logits of packed keys lack.
void find_less(const HaarkvAttention& a, const float* x, Tile& tile) {
    const int64_t dim = a.cache.head_dim;
    const float* mean = a.cache.k.mean ? a.cache.k.mean + tile.kv_head * dim : nullptr;
    for (int r = 0; r < tile.rows; ++r, x += dim) {
        float sums[kLanes] = {};
        for (int64_t d = 0; mean && d < dim; d += kLanes)
            for (int i = 0; i < kLanes; ++i) sums[i] = std::fma(x[d + i], mean[d + i], sums[i]);
        float sum = 0.0f;
        for (int i = 0; i < kLanes; ++i) sum += sums[i];
        tile.less[r] = a.softmax_scale * sum;
    }
}

// Rotates the queries of tiles as keys of a stretch meet them, to [rows, k.levels]; 0 of keys that are stored as they are.
// Scratch of [kPassRows, head_dim].
void rotate(const HaarkvAttention& a, const Kernels& kernels, Tile* tiles, int count, int64_t stretch, float* scratch,
            float* rotated) {
    const int64_t dim = a.cache.head_dim;
    float* x = a.rotation.numbers ? scratch : rotated;
    int rows = 0;
    for (int t = 0; t < count; ++t) {
        Tile& tile = tiles[t];
        for (int r = 0; r < tile.rows; ++r, ++rows) {
            widen(kernels, tile.own[r], a.bf16, dim, x + rows * dim);
            if (a.stretches.cos) turn_back(a.stretches, stretch, x + rows * dim);
            tile.q[r] = rotated + rows * a.cache.k.levels;
        }
        find_less(a, x + (rows - tile.rows) * dim, tile);
    }
    if (a.rotation.numbers) multiply(a, kernels, x, rows, a.bf16 && !stretch, a.rotation, tiles->kv_head, rotated);
}

// Floats of scratch that a split's queries need.
int64_t turned_floats(const HaarkvAttention& a) {
    return a.stretches.cos ? kPassRows * (a.cache.head_dim + a.cache.k.levels) : 0;
}

// Attends to one wave.
void attend(const HaarkvAttention& a, const Kernels& kernels, Wave& wave, const Partials& partials, float* queries,
            float* scratch, int64_t scratch_size) {
    const int64_t k_levels = a.cache.k.levels, passes = static_cast<int64_t>(wave.passes.size());
    auto rotate_pass = [&](int64_t item, int thread) {
        const Pass& pass = wave.passes[item];
        rotate(a, kernels, &wave.tiles[pass.first_tile], pass.tiles, 0, scratch + thread * scratch_size,
               queries + pass.first_tile * kMaxRows * k_levels);
    };
    if (!a.stretches.cos) parallel_for(a.threads, passes, rotate_pass);

    auto attend_split = [&](int64_t item, int thread) {
        const Split& split = wave.splits[item];
        const Pass& pass = wave.passes[split.pass];
        Tile tiles[kMaxTiles];
        for (int t = 0; t < pass.tiles; ++t) {
            const int64_t index = pass.first_partial + static_cast<int64_t>(split.number) * pass.tiles + t;
            tiles[t] = wave.tiles[pass.first_tile + t];
            tiles[t].first_block = split.first_block, tiles[t].end_block = split.end_block;
            tiles[t].maxima = partials.maxima(index), tiles[t].totals = partials.totals(index);
            tiles[t].sums = partials.sums(index);
            tiles[t].residual_totals = partials.residual_totals(index), tiles[t].residual_sums = partials.residual_sums(index);
        }
        float* const own = scratch + thread * scratch_size;
        const auto attend = attender(kernels, a.cache, tiles, pass.tiles).attend;
        if (!a.stretches.cos) return attend(a.cache, tiles, pass.tiles, own);
        const int64_t stretch = static_cast<int64_t>(split.first_block) * a.cache.block_size / kStretchKeys;
        rotate(a, kernels, tiles, pass.tiles, stretch, own, own + kPassRows * a.cache.head_dim);
        attend(a.cache, tiles, pass.tiles, own + turned_floats(a));
        // What logits lack is another number in each stretch.
        for (int t = 0; t < pass.tiles; ++t)
            for (int r = 0; r < tiles[t].rows; ++r) tiles[t].maxima[r] += tiles[t].less[r];
    };
    parallel_for(a.threads, static_cast<int64_t>(wave.splits.size()), attend_split);

    auto merge_pass = [&](int64_t item, int thread) {
        merge(a, kernels, partials, wave, wave.passes[item], scratch + thread * scratch_size);
    };
    parallel_for(a.threads, passes, merge_pass);
}

}  // namespace
}  // namespace haarkv

extern "C" {

__attribute__((visibility("default"))) void haarkv_attention(const HaarkvAttention* a) {
    const Kernels& kernels = kernels_of(a->isa);
    const Cache& cache = a->cache;
    const int64_t own = std::max<int64_t>(attention_floats(kernels, cache) + turned_floats(*a), merged_floats(cache));
    const int64_t scratch_size = round_up(own, 16);
    // Kept from call to call: blocks of some megabytes that come and go leave gaps in the heap, which add up.
    static thread_local Scratch own_scratch, numbers, queries;
    float* const scratch = own_scratch.of(a->threads * scratch_size);
    Cutter cutter(*a);
    Wave wave;
    while (cutter.next(wave)) {
        const Partials partials(cache, numbers.of(wave.partials * Partials::size_of(cache)));
        float* rotated = queries.of(static_cast<int64_t>(wave.tiles.size()) * kMaxRows * cache.k.levels);
        attend(*a, kernels, wave, partials, rotated, scratch, scratch_size);
    }
}

}  // extern "C"
