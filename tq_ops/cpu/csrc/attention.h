// Attention of tiles of query rows over one stretch of blocks, with an online softmax. One walk over the blocks serves a tile
// alone (`Single`), the tiles of a pass (pass.h) and those of AMX (tile_attention.h). `Products` says how K and V are read.

// The products of R rows with keys and with values.
template <class K, class V> struct Products : K, V {
    static int64_t floats(const Cache& cache) { return K::floats(cache) + V::floats(cache); }
    static int64_t slab_floats(const Cache& cache) { return larger(K::slab_floats(cache), V::slab_floats(cache)); }

    Products(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : K(cache, tile, stride, scratch), V(cache, stride, scratch + K::floats(cache)) {}
};

// shrink[r] = exp(before[r] - now[r]), factor[r] = exp(block[r] - now[r]), all in one register or two; 0 where a maximum is
// that of no key.
template <class Simd>
void exponentials(int rows, const float* before, const float* block, const float* now, float* shrink, float* factor) {
    float power[2 * kMaxRows] = {};
    for (int r = 0; r < rows; ++r) power[r] = before[r] - now[r], power[kMaxRows + r] = block[r] - now[r];
    for (int i = 0; i < 2 * kMaxRows; i += Simd::width) Simd::store(power + i, Simd::expf(Simd::load(power + i)));
    for (int r = 0; r < rows; ++r) {
        shrink[r] = before[r] == -INFINITY ? 0.0f : power[r];
        factor[r] = block[r] == -INFINITY ? 0.0f : power[kMaxRows + r];
    }
}

// The pieces of a tile's scratch, each whole cache lines. The products' own come last.
struct Pieces {
    float *logits, *k_scale, *v_scale, *weights, *numbers, *queries, *found;
    uint32_t* words;
    uint8_t* codes;
    int64_t end = 0;  // floats

    Pieces(const Cache& cache, int rows, float* scratch) {
        auto take = [&](int64_t floats) {
            float* const piece = scratch ? scratch + end : nullptr;
            end += (floats + kLine / 4 - 1) / (kLine / 4) * (kLine / 4);
            return piece;
        };
        const int64_t stride = padded(cache.block_size);
        const bool numbers_too = cache.k.cell != kNibble || cache.v.cell != kNibble;
        const bool residual = cache.k.residual.vectors || cache.v.residual.vectors;
        const int64_t tile = kTileKeys * cache.head_dim;
        const int64_t nibbles = cache.block_size * larger(unpacked_bytes(cache.k), unpacked_bytes(cache.v));
        logits = take(rows * stride);
        k_scale = take(stride);
        v_scale = take(stride);
        weights = take(rows * stride);
        const bool words_too = cache.k.cell == kNibble || cache.k.columns || has_planes(cache.k);
        words = reinterpret_cast<uint32_t*>(take(words_too ? stride * key_words(cache.k) : 0));
        codes = reinterpret_cast<uint8_t*>(take(larger(nibbles, numbers_too ? tile : 0) / 4 + 1));  // and a word past the last
        numbers = take(numbers_too ? tile : 0);
        queries = take(residual ? rows * cache.head_dim : 0);
        found = take(residual ? rows * stride : 0);
    }

  private:
    static int64_t unpacked_bytes(const Side& side) { return unpacks_nibbles(side) ? nibble_bytes(side) : 0; }
};

// Floats of scratch that a tile needs with the products `P`.
template <class P> int64_t tile_floats(const Cache& cache) {
    return (Pieces(cache, kMaxRows, nullptr).end + P::floats(cache) + 15) / 16 * 16;
}

// The rows of a tile: what is taken of one block after the other, and what is kept between them.
template <class Simd, class P, int R> struct Attend : Pieces {
    const Cache& cache;
    const Tile& tile;
    const int stride, dim;
    P products;
    const ResidualRows<R> k_residual, v_residual;
    const float* own[R];        // [dim] queries for keys in BF16
    float shrink[R];            // of all sums, by the block at hand
    bool met_residual = false;  // whether a row has seen a value in BF16

    Attend(const Cache& cache, const Tile& tile, float* scratch)
        : Pieces(cache, R, scratch),
          cache(cache),
          tile(tile),
          stride(padded(cache.block_size)),
          dim(cache.head_dim),
          products(cache, tile, stride, scratch + end),
          k_residual(cache.k, cache, tile),
          v_residual(cache.v, cache, tile) {
        for (int r = 0; r < R; ++r) {
            for (int i = 0; i < cache.v.levels; ++i) tile.sums[r * cache.v.levels + i] = 0.0f;
            tile.maxima[r] = -INFINITY, tile.totals[r] = 0.0f;
        }
        for (int i = 0; !P::mixes(cache.v) && i < stride; ++i) v_scale[i] = 1.0f;
        for (int r = 0; v_residual.vectors && r < R; ++r) tile.residual_totals[r] = 0.0f;
        for (int r = 0; k_residual.vectors && r < R; ++r) {
            read(tile.own[r], tile.bf16, 0, dim, queries + r * dim);
            own[r] = queries + r * dim;
        }
    }

    // Logits of a block's first n keys. Prefetches `values`, the same of V, and `next_keys`.
    void score(Place k, int base, int n, const Seen* seen, const uint8_t* values, const uint8_t* next_keys) {
        const int packed = packed_keys(base, n, seen);
        if (packed && P::scores(cache.k)) {
            k.codes = nibbles(cache.k, k, packed);
            products.score(k, packed, words, k_scale, logits, values, next_keys);
        } else {
            each_numbers<Simd>(cache.k, k, packed, codes, numbers, [&](int key, int keys) { score_at(key, keys, numbers); });
        }
        score_exact(base, n, seen);
    }

    // Adds the block's values by the probabilities that its logits make. Prefetches `next_keys`.
    void mix(Place v, int base, int n, const Seen* seen, const uint8_t* next_keys) {
        const int packed = weigh(v, base, n, seen);
        if (!packed) return shrink_sums<R>(shrink, cache.v.levels, tile.sums);
        if (!P::mixes(cache.v))
            return each_numbers<Simd>(cache.v, v, packed, codes, numbers,
                                      [&](int key, int keys) { mix_at(key, keys, numbers); });
        v.codes = nibbles(cache.v, v, packed);
        products.mix(v, packed, weights, shrink, tile.sums, next_keys);
    }

    // The codes of a block's first n vectors, unpacked where levels up to 4 bits are no nibbles.
    const uint8_t* nibbles(const Side& side, Place at, int n) const {
        if (!unpacks_nibbles(side)) return at.codes;
        unpack_nibbles<Simd>(side, at.codes, n, codes);
        return codes;
    }

    // Logits of a block's keys key ... key + keys - 1, x [keys, levels], which are numbers; and the same of its values.
    void score_at(int key, int keys, const float* x) const {
        score_numbers<Simd, R>(x, keys, cache.k.levels, tile.q, tile.softmax_scale, stride, logits + key);
    }
    void mix_at(int key, int keys, const float* x) const {
        mix_numbers<Simd, R>(x, keys, cache.v.levels, weights + key, stride, key ? kOnes : shrink, tile.sums);
    }

    // Of how many of a block's first keys a row sees packed ones, 0 of none.
    int packed_keys(int base, int n, const Seen* seen) const {
        return k_residual.none_in(base, n) ? most_seen(seen) : ResidualKeys<R>(k_residual, base, n, seen).packed;
    }

    // Replaces the logits of keys in BF16.
    void score_exact(int base, int n, const Seen* seen) {
        if (k_residual.none_in(base, n)) return;
        const ResidualKeys<R> keys(k_residual, base, n, seen);
        if (keys.any) score_residual<Simd, R>(k_residual, keys, n, own, tile.less, tile.softmax_scale, stride, found, logits);
    }

    // Turns the block's logits into the weights of its packed values, and adds those in BF16. Returns what `packed_keys` says,
    // of V.
    int weigh(Place v, int base, int n, const Seen* seen) {
        if (P::mixes(cache.v)) widen_halves<Simd>(v.scales, n, stride, v_scale);
        if (v_residual.none_in(base, n)) return soften_block(false, n, seen), most_seen(seen);
        const ResidualKeys<R> keys(v_residual, base, n, seen);
        soften_block(keys.any, n, seen);
        if (!keys.any) return keys.packed;
        for (int i = 0; !met_residual && i < R * dim; ++i) tile.residual_sums[i] = 0.0f;
        met_residual = true;
        split_weights<Simd, R>(keys, n, stride, weights, logits, shrink, tile.residual_totals);
        mix_residual<Simd, R>(v_residual, keys, n, logits, stride, shrink, tile.residual_sums);
        return keys.packed;
    }

  private:
    static int most_seen(const Seen* seen) {
        int most = 0;
        for (int r = 0; r < R; ++r) most = seen[r].any() ? larger(seen[r].end, most) : most;
        return most;
    }

    // One step of the online softmax. Turns logits [R, stride] of a block of n keys, of which row r sees seen[r], into the
    // weights of V's vectors: weights [R, stride] = p * scale. Each row's probabilities are taken against its
    // maximum in this block, then rescaled to the running maximum; shrink[r] is the factor for earlier sums. With `keep` the
    // logits become p. `SEEN` says that every row sees all n keys, and that activations are in BF16.
    template <bool SEEN> __attribute__((always_inline)) void soften(bool keep, int n, const Seen* seen) {
        using F = typename Simd::F;
        float *const x = logits, *const to = weights;
        const float* const scale = v_scale;
        const int apart = stride;
        const bool round = SEEN || tile.bf16;
        auto seen_of = [&](int r, int i, F value, F other)
                           __attribute__((always_inline)) { return SEEN ? value : shown<Simd>(seen[r], i, value, other); };
        const F lowest = Simd::set1(-INFINITY);
        F most[R], sum[R];
        for (int r = 0; r < R; ++r) most[r] = lowest, sum[r] = Simd::zero();
        for (int i = 0; i < n; i += Simd::width)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) most[r] = Simd::max(seen_of(r, i, Simd::load(x + r * apart + i), lowest), most[r]);
        float block_max[R], new_max[R], factor[R];
        for (int r = 0; r < R; ++r) {
            block_max[r] = Simd::reduce_max(most[r]);
            new_max[r] = block_max[r] > tile.maxima[r] ? block_max[r] : tile.maxima[r];
        }
        exponentials<Simd>(R, tile.maxima, block_max, new_max, shrink, factor);
        for (int i = 0; i < n; i += Simd::width)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F logit = Simd::load(x + r * apart + i);
                F value =
                    round ? Simd::exp_bf16(logit, block_max[r]) : Simd::expf(Simd::add(logit, Simd::set1(-block_max[r])));
                value = seen_of(r, i, value, Simd::zero());
                sum[r] = Simd::add(sum[r], value);
                value = Simd::mul(value, Simd::set1(factor[r]));
                if (!SEEN && keep) Simd::store(x + r * apart + i, value);
                Simd::store(to + r * apart + i, Simd::mul(value, Simd::load(scale + i)));
            }
        for (int r = 0; r < R; ++r) {
            // One of the products is rounded; a compiler might choose another one for another R.
            tile.totals[r] = __builtin_fmaf(tile.totals[r], shrink[r], Simd::reduce_add(sum[r]) * factor[r]);
            tile.maxima[r] = new_max[r];
        }
    }

    // With `keep`, where there are values in BF16, the sums of those are left to `weigh`.
    void soften_block(bool keep, int n, const Seen* seen) {
        bool all = n % Simd::width == 0 && tile.bf16 && !keep;
        for (int r = 0; r < R; ++r) all = all && seen[r].all(n);
        if (all)
            soften<true>(false, n, seen);
        else
            soften<false>(keep, n, seen);
        if (met_residual && !keep)
            shrink_sums<R>(shrink, dim, tile.residual_sums), shrink_sums<R>(shrink, 1, tile.residual_totals);
    }
};

inline int longest_of(const Tile& tile) {
    int longest = 0;
    for (int r = 0; r < tile.rows; ++r) longest = larger(tile.limits[r], longest);
    return longest;
}

// Fills every tile up to kMaxRows rows: the last one may have fewer. Added rows copy the tile's first row and see no key.
// Returns the most keys that any row sees.
inline int fill_tiles(const Tile* tiles, int count, Tile* filled) {
    int longest = 0;
    for (int t = 0; t < count; ++t) {
        filled[t] = tiles[t], filled[t].rows = kMaxRows;
        for (int r = tiles[t].rows; r < kMaxRows; ++r)
            filled[t].starts[r] = filled[t].limits[r] = 0, filled[t].q[r] = tiles[t].q[0], filled[t].own[r] = tiles[t].own[0];
        longest = larger(longest_of(tiles[t]), longest);
    }
    return longest;
}

// Block after block: rows.see(base, n), then rows.score(K, base, n, V's codes, the next K's), then rows.mix(V, base, n, the
// next K's codes). Prefetches a block's values while its keys are scored, and the next keys while the values are mixed: blocks
// lie apart in memory, so the hardware prefetcher cannot predict the next one.
template <class Rows>
__attribute__((always_inline)) inline void walk_blocks(const Cache& cache, const Tile& first, int longest, Rows& rows) {
    for (int block = first.first_block; block < first.end_block; ++block) {
        const int base = block * cache.block_size, n = smaller(cache.block_size, longest - base);
        if (n <= 0) break;
        const int next = block + 1 < first.end_block ? block + 1 : block;
        const Place k = place(cache.k, cache, first.block_table[block], first.kv_head);
        const Place v = place(cache.v, cache, first.block_table[block], first.kv_head);
        const Place next_k = place(cache.k, cache, first.block_table[next], first.kv_head);
        rows.see(base, n);
        fetch_scales(v, n);
        rows.score(k, base, n, v.codes, next_k.codes);
        fetch_scales(next_k, n);
        rows.mix(v, base, n, next_k.codes);
    }
}

// The tiles of a pass, and what their rows see of the block at hand.
template <class Simd, class P> struct PassTiles {
    static constexpr int R = kMaxRows;
    typedef Attend<Simd, P, R> Rows;
    const Cache& cache;
    const int count;
    alignas(Rows) unsigned char places[kMaxTiles][sizeof(Rows)];
    Seen seen[kMaxTiles][R];

    PassTiles(const Cache& cache, const Tile* tiles, int count, float* scratch) : cache(cache), count(count) {
        for (int t = 0; t < count; ++t) new (places[t]) Rows(cache, tiles[t], scratch + t * tile_floats<P>(cache));
    }

    Rows& rows(int t) { return *reinterpret_cast<Rows*>(places[t]); }

    void see(int base, int n) {
        for (int t = 0; t < count; ++t)
            for (int r = 0; r < R; ++r) seen[t][r] = seen_by(rows(t).tile, r, base, n);
    }
};

// A tile alone: codes become operands of its products as they are looked up.
template <class Simd, class P, int R> class Single {
  public:
    Single(const Cache& cache, const Tile& tile, int longest, float* scratch)
        : rows_(cache, tile, scratch),
          keys_ahead_(rows_.k_residual, cache, tile, longest),
          values_ahead_(rows_.v_residual, cache, tile, longest) {}

    void see(int base, int n) {
        for (int r = 0; r < R; ++r) seen_[r] = seen_by(rows_.tile, r, base, n);
    }
    void score(Place k, int base, int n, const uint8_t* values, const uint8_t* next_keys) {
        keys_ahead_.turn();
        rows_.score(k, base, n, seen_, values, next_keys);
    }
    void mix(Place v, int base, int n, const uint8_t* next_keys) {
        values_ahead_.turn();
        rows_.mix(v, base, n, seen_, next_keys);
    }
    void finish() { rows_.products.order(rows_.tile.sums); }

  private:
    Attend<Simd, P, R> rows_;
    ResidualAhead<R> keys_ahead_, values_ahead_;
    Seen seen_[R];
};

template <class Simd, template <int> class P> void attend(const Cache& cache, const Tile& tile, float* scratch) {
    with_number<kMaxRows>(tile.rows, [&](auto rows) {
        constexpr int kRows = decltype(rows)::value;
        const int longest = longest_of(tile);
        Single<Simd, P<kRows>, kRows> single(cache, tile, longest, scratch);
        walk_blocks(cache, tile, longest, single);
        single.finish();
    });
}
