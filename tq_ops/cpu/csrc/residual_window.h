// Tokens that stay in BF16, which a row sees in place of the same tokens packed: its sinks and its tail.

// What the rows of a tile see in BF16 of K, or of V.
template <int R> struct ResidualRows {
    const uint16_t* vectors = nullptr;  // [sink + ring, dim] of the sequence and KV head, or what the table leads to
    const int32_t* table = nullptr;
    int64_t block_stride = 0;
    int dim, sink = 0, ring = 1, block_size = 0;
    int from[R],
        first = INT32_MAX;  // query r reads in BF16 keys before `sink`, and from position from[r] on; `first`: the least

    ResidualRows(const Side& side, const Cache& cache, const Tile& tile) : dim(cache.head_dim) {
        const ResidualWindow& residual = side.residual;
        for (int r = 0; r < R; ++r) from[r] = tile.limits[r];
        if (residual.vectors == nullptr) return;
        sink = residual.sink, ring = residual.ring > 0 ? residual.ring : 1;
        block_size = residual.block_size, block_stride = residual.block_stride, table = tile.residual_table;
        vectors = residual.vectors +
                  (block_size ? static_cast<int64_t>(tile.kv_head) * block_size * dim
                              : (tile.residual_row * cache.num_kv_heads + tile.kv_head) * (sink + residual.ring) * dim);
        for (int r = 0; r < R; ++r) {
            const int behind = tile.limits[r] - 1 - residual.tail;  // the newest token that is no longer in the tail
            from[r] = behind < 0 ? 0 : behind + 1;
            if (tile.limits[r] > 0) first = smaller(first, from[r]);  // a padding row has no limit and sees nothing
        }
    }

    // The vector of a token; `here` tokens lie side by side from it on.
    const uint16_t* vector(int token, int* here) const {
        if (block_size) {
            const int offset = token % block_size;
            *here = block_size - offset;
            return vectors + table[token / block_size] * block_stride + static_cast<int64_t>(offset) * dim;
        }
        const int place = token < sink ? token : token % ring;
        *here = (token < sink ? sink : ring) - place;
        return vectors + static_cast<int64_t>(token < sink ? place : sink + place) * dim;
    }

    // Whether no row sees any of n keys from `base` on in BF16.
    bool none_in(int base, int n) const { return vectors == nullptr || (base >= sink && base + n <= first); }
};

// Asks for a tail's vectors while the blocks before it are at work: nothing else has read them since the last step. They go to
// the second cache, for the first has no room for them.
template <int R> class ResidualAhead {
  public:
    ResidualAhead(const ResidualRows<R>& rows, const Cache& cache, const Tile& tile, int longest)
        : rows_(rows), end_(smaller(longest, tile.end_block * cache.block_size)) {
        const int begin = tile.first_block * cache.block_size;
        next_ = smaller(larger(rows.first, begin), end_);
        const int blocks = (next_ - begin) / cache.block_size, tokens = end_ - next_;
        share_ = blocks > 0 ? smaller((tokens + blocks - 1) / blocks, cache.block_size) : cache.block_size;
    }

    // Once a block.
    void turn() {
        for (const int stop = smaller(next_ + share_, end_); next_ < stop; ++next_) {
            int here;
            const uint16_t* x = rows_.vector(next_, &here);
            for (int d = 0; d < rows_.dim; d += kLine / 2) __builtin_prefetch(x + d, 0, 2);
        }
    }

  private:
    const ResidualRows<R>& rows_;
    int next_, share_;
    const int end_;
};

// Which keys of one block each query reads packed: begin[r] ... end[r] - 1; the others that it sees, in BF16. Over all
// queries, keys 0 ... `sinks` - 1 and `first` ... n - 1 are read in BF16, and keys before `packed` are read packed.
template <int R> struct ResidualKeys {
    int begin[R], end[R], sinks = 0, first, packed = 0, base;
    bool any = false;  // whether some row sees a key in BF16

    ResidualKeys(const ResidualRows<R>& rows, int base, int n, const Seen* seen) : first(n), base(base) {
        for (int r = 0; r < R; ++r) {
            const int least = seen[r].any() ? seen[r].begin : 0, most = seen[r].any() ? seen[r].end : 0;
            begin[r] = larger(least, smaller(rows.sink - base, most));
            end[r] = larger(begin[r], smaller(rows.from[r] - base, most));
            sinks = least < begin[r] ? larger(begin[r], sinks) : sinks;
            first = end[r] < most ? smaller(first, end[r]) : first;
            any = any || least < begin[r] || end[r] < most;
            packed = begin[r] < end[r] ? larger(packed, end[r]) : packed;
        }
        first = larger(first, sinks);
    }

    // Calls body(key, keys, x) for keys in BF16 whose vectors x [keys, dim] lie side by side, first to last.
    template <class Body> void each(const ResidualRows<R>& rows, int n, Body body) const {
        for (int key = 0; key < n;) {
            if (key >= sinks && key < first) key = first;
            int here;
            const uint16_t* x = rows.vector(base + key, &here);
            const int keys = smaller((key < sinks ? sinks : n) - key, here);
            if (keys <= 0) return;
            body(key, keys, x);
            key += keys;
        }
    }

    // Whether no row sees any of n keys from `key` on in BF16.
    bool none_in(int key, int n) const { return key >= sinks && key + n <= first; }

    // Of keys `key` and so on, `residual` where row r sees them in BF16 and `other` where it sees them packed.
    template <class Simd>
    __attribute__((always_inline)) typename Simd::F choose(int r, int key, typename Simd::F residual,
                                                           typename Simd::F other) const {
        return Simd::first(end[r] - key, Simd::first(begin[r] - key, residual, other), residual);
    }
};

// Replaces the logits of keys that a row sees in BF16, which it makes in `found` [R, stride]. `less[r]` is what all packed
// keys of row r lack.
template <class Simd, int R>
void score_residual(const ResidualRows<R>& rows, const ResidualKeys<R>& keys, int n, const float* const* q, const float* less,
                    float softmax_scale, int stride, float* found, float* logits) {
    keys.each(rows, n, [&](int key, int count, const uint16_t* x) {
        score_numbers<Simd, R>(x, count, rows.dim, q, 1.0f, stride, found + key);
    });
    for (int i = 0; i < n; i += Simd::width) {
        if (keys.none_in(i, Simd::width)) continue;
        for (int r = 0; r < R; ++r) {
            float* to = logits + r * stride + i;
            const auto exact = Simd::fma(Simd::load(found + r * stride + i), Simd::set1(softmax_scale), Simd::set1(-less[r]));
            Simd::store(to, keys.template choose<Simd>(r, i, exact, Simd::load(to)));
        }
    }
}

// Cuts the weights of a block's keys in two: those of packed vectors [R, stride] lose what a row sees in BF16, and
// of p [R, stride] only that is left, where there is any. Adds up the latter to totals, which shrink first.
template <class Simd, int R>
void split_weights(const ResidualKeys<R>& keys, int n, int stride, float* weights, float* p, const float* shrink,
                   float* totals) {
    for (int r = 0; r < R; ++r) {
        typename Simd::F sum = Simd::zero();
        for (int i = 0; i < n; i += Simd::width) {
            if (keys.none_in(i, Simd::width)) continue;
            const auto residual = keys.template choose<Simd>(r, i, Simd::load(p + r * stride + i), Simd::zero());
            Simd::store(p + r * stride + i, residual);
            sum = Simd::add(sum, residual);
            float* packed = weights + r * stride + i;
            Simd::store(packed, keys.template choose<Simd>(r, i, Simd::zero(), Simd::load(packed)));
        }
        // One of the products is rounded; a compiler might choose another one for another R.
        totals[r] = __builtin_fmaf(totals[r], shrink[r], Simd::reduce_add(sum));
    }
}

// Adds the block's vectors in BF16 to sums [R, dim], which shrink first.
template <class Simd, int R>
void mix_residual(const ResidualRows<R>& rows, const ResidualKeys<R>& keys, int n, const float* p, int stride,
                  const float* shrink, float* sums) {
    keys.each(rows, n, [&](int key, int count, const uint16_t* x) {
        mix_numbers<Simd, R>(x, count, rows.dim, p + key, stride, shrink, sums);
        shrink = kOnes;
    });
}
