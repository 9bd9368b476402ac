// Attention of the tiles of a pass: codes are looked up once for all of their rows.

inline int64_t scratch_of_tiles(const Cache& cache) {
    return LookedUp::floats(cache) + number_floats(cache) + kMaxTiles / 2 * RowBytes::floats(cache) +
           kMaxTiles * tile_floats<TileProducts<kMaxRows>>(cache);
}

struct Together : PassTiles<Avx512, TileProducts<kMaxRows>> {
    const LookedUp found;
    uint16_t* const numbers;
    float* const row_bytes;  // of each two tiles

    Together(const Cache& cache, const Tile* tiles, int count, float* scratch)
        : PassTiles(cache, tiles, count, scratch),
          found(cache, scratch += kMaxTiles * tile_floats<TileProducts<R>>(cache)),
          numbers(reinterpret_cast<uint16_t*>(scratch += LookedUp::floats(cache))),
          row_bytes(scratch + number_floats(cache)) {
        for (int t = 0; t < count; ++t) rows(t).products.take(tiles[t], bytes_of(t), t % 2);
    }

    RowBytes bytes_of(int t) const { return {cache, row_bytes + t / 2 * RowBytes::floats(cache)}; }

    // Logits of a block's first n keys.
    void score(Place k, int base, int n, const uint8_t* values, const uint8_t*) {
        bool packed = false;
        for (int t = 0; t < count; ++t) packed = packed || rows(t).packed_keys(base, n, seen[t]);
        if (packed && cache.k.cell != kNibble) {
            score_numbers(k, n, values);
        } else if (packed) {
            k.codes = rows(0).nibbles(cache.k, k, n);
            widen_halves<Avx512>(k.scales, n, padded(cache.block_size), found.k_scale);
            const int chunks = chunks_of(cache.k.levels);
            for (int key = 0; key < n; key += kSlabKeys) {
                const int keys = smaller(n - key, kSlabKeys), tiles = (keys + 15) / 16;
                fetch_bytes(values + key * cache.v.bytes, keys * cache.v.bytes);
                look_up_keys(cache, k.codes + key * nibble_bytes(cache.k), keys, found.bytes);
                auto each = [&](At at) {
                    return Product{bytes_of(at.rows * 2).q, found.bytes + at.tile * chunks * kPairBytes};
                };
                multiply_all((count + 1) / 2, tiles, chunks, each, [&](At at, const int32_t* sums) {
                    for (int t = at.rows * 2, half = 0; half < 2 && t < count; ++t, ++half)
                        rows(t).products.score(sums + half * R * 16, key + at.tile * 16, found.k_scale, rows(t).logits);
                });
            }
        }
        for (int t = 0; t < count; ++t) rows(t).score_exact(base, n, seen[t]);
    }

    // Adds the block's values.
    void mix(Place v, int base, int n, const uint8_t* next_keys) {
        int some = 0, mixing[kMaxTiles];  // tiles that see a packed value
        bool mixes[kMaxTiles + 1] = {};
        const bool at_once = weighs_at_once();
        if (at_once) widen_halves<Avx512>(v.scales, n, kStretch, rows(0).v_scale);
        for (int t = 0; t < count; ++t) {
            mixes[t] = at_once ? weigh(rows(t), n, seen[t]) : rows(t).weigh(v, base, n, seen[t]);
            if (mixes[t])
                mixing[some++] = t;
            else if (!at_once)
                shrink(rows(t));
        }
        if (!some) return;
        if (cache.v.cell != kNibble) return mix_numbers(v, n, mixing, some, next_keys);
        v.codes = rows(0).nibbles(cache.v, v, n);
        const ByteTables tables(cache.v.integers);
        for (int key = 0; key < n; key += kStretch) {
            const int keys = smaller(n - key, kStretch);
            interleave_values(cache, v.codes + key * nibble_bytes(cache.v), keys, next_keys + key * cache.k.bytes,
                              found.values);
            for (int i = 0; !at_once && i < some; ++i) rows(mixing[i]).products.weigh(rows(mixing[i]).weights + key, keys);
            int pairs = 0, first_of[kMaxTiles / 2];  // two tiles of which one mixes at least
            for (int t = 0; t < count; t += 2)
                if (mixes[t] || mixes[t + 1]) first_of[pairs++] = t;
            for (int column = 0; column < cache.v.levels / 16; column += kTilesAtOnce) {
                constexpr int kApart = kStretch / kChunk * kPairBytes;
                for (int i = 0; i < kTilesAtOnce; i += 2)
                    look_up_values(tables, found.values + (column + i) / 2 * kStretch * 16, keys, found.bytes + i * kApart);
                auto each = [&](At at) { return Product{bytes_of(first_of[at.rows]).p, found.bytes + at.tile * kApart}; };
                multiply_all(pairs, kTilesAtOnce, chunks_of(keys), each, [&](At at, const int32_t* sums) {
                    for (int t = first_of[at.rows], half = 0; half < 2; ++t, ++half)
                        if (mixes[t])
                            rows(t).products.mix(sums + half * R * 16, column + at.tile, key ? kOnes : rows(t).shrink);
                });
            }
        }
    }

  private:
    // Whether weights become bytes as soon as they are known.
    bool weighs_at_once() {
        return cache.v.cell == kNibble && !rows(0).v_residual.vectors && padded(cache.block_size) == kStretch;
    }

    // As the tile's own `weigh`, and its products'.
    bool weigh(Rows& of, int n, const Seen* seen) {
        bool all = n == kStretch, any = false;
        for (int r = 0; r < R; ++r) all = all && seen[r].all(n), any = any || seen[r].any();
        for (int r = 0; r < R; ++r) of.shrink[r] = 1.0f;
        if (!any) return false;
        auto soften = all ? soften_to_bytes<R, true> : soften_to_bytes<R, false>;
        auto& products = of.products;
        soften(of.logits, seen, rows(0).v_scale, most_total(cache.v.integers, kStretch), of.tile.maxima, of.tile.totals,
               of.shrink, products.steps, products.weights_at);
        for (int r = 0; r < R; ++r) products.steps[r] *= cache.v.unit;
        return true;
    }

    void shrink(Rows& of) const {
        if (cache.v.cell == kNibble) return of.products.shrink(of.shrink);
        shrink_sums<R>(of.shrink, cache.v.levels, of.tile.sums);
    }

    void score_numbers(Place k, int n, const uint8_t* values) {
        const int levels = cache.k.levels;
        for (int key = 0; key < n; key += kPairs) {
            fetch_bytes(values + key * cache.v.bytes, smaller(n - key, kPairs) * cache.v.bytes);
            const uint16_t* keys[2];
            for (int half = 0; half < 2; ++half)
                keys[half] = key_rows(cache.k, k, key + half * 16, n - key - half * 16, numbers + half * 16 * levels);
            for (int t = 0; t < count; ++t)
                score_tile(keys, rows(t).products.q, levels, rows(t).tile.softmax_scale, rows(t).stride, rows(t).logits + key);
        }
    }

    void mix_numbers(Place v, int n, const int* mixing, int some, const uint8_t* next_keys) {
        for (int key = 0; key < n; key += kStretch) {
            const int keys = smaller(n - key, kStretch);
            put_values(cache.v, v, key, keys, numbers, next_keys + key * cache.k.bytes, cache.k.bytes);
            for (int i = 0; i < some; ++i) {
                Rows& of = rows(mixing[i]);
                put_weights(of.weights + key, of.stride, keys, of.products.p);
                for (int column = 0; column < cache.v.levels; column += kPairs)
                    mix_tile(numbers, column, keys, of.products.p, cache.v.levels, key ? kOnes : of.shrink, of.tile.sums);
            }
        }
    }
};

inline void attend_tiles(const Cache& cache, const Tile* tiles, int count, float* scratch) {
    const Tiles shapes(whole_shapes());
    Tile filled[kMaxTiles] = {};
    const int longest = fill_tiles(tiles, count, filled);
    Together together(cache, filled, count, scratch);
    walk_blocks(cache, *filled, longest, together);
    for (int t = 0; cache.v.cell == kNibble && t < count; ++t) together.rows(t).products.finish(tiles[t].sums);
}
