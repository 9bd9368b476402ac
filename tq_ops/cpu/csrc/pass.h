// Attention of the tiles of a pass in vector registers: codes are looked up, or become numbers, once for all of their rows.
// Each tile adds what it would add alone, in the same order.

template <class Simd, template <int> class Products> class Pass : PassTiles<Simd, Products<kMaxRows>> {
    typedef Products<kMaxRows> P;
    typedef PassTiles<Simd, P> All;
    typedef typename All::Rows Rows;
    using All::R, All::cache, All::count, All::seen, All::rows;

  public:
    static int64_t floats(const Cache& cache) { return slab_floats(cache) + kMaxTiles * tile_floats<P>(cache); }

    Pass(const Cache& cache, const Tile* tiles, int count, float* scratch)
        : All(cache, tiles, count, scratch + slab_floats(cache)), slab_(scratch) {
        for (int t = 0; t < count; ++t) longest_[t] = longest_of(tiles[t]);
    }

    void see(int base, int n) {
        All::see(base, n);
        for (int t = 0; t < count; ++t) n_[t] = smaller(n, longest_[t] - base);
    }

    // Logits of a block's first n keys.
    void score(Place k, int base, int n, const uint8_t* values, const uint8_t*) {
        each([&](int t) { packed_[t] = rows(t).packed_keys(base, n_[t], seen[t]); });
        fetch_bytes(values, n * cache.v.bytes);
        if (P::scores(cache.k))
            score_nibbles(k);
        else
            each_number(cache.k, k, [](Rows& of, int key, int keys, const float* x) { of.score_at(key, keys, x); });
        each([&](int t) { rows(t).score_exact(base, n_[t], seen[t]); });
    }

    // Adds the block's values by the probabilities that its logits make.
    void mix(Place v, int base, int n, const uint8_t* next_keys) {
        each([&](int t) {
            packed_[t] = rows(t).weigh(v, base, n_[t], seen[t]);
            if (!packed_[t]) shrink_sums<R>(rows(t).shrink, cache.v.levels, rows(t).tile.sums);
        });
        fetch_bytes(next_keys, n * cache.k.bytes);
        if (P::mixes(cache.v))
            mix_nibbles(v);
        else
            each_number(cache.v, v, [](Rows& of, int key, int keys, const float* x) { of.mix_at(key, keys, x); });
    }

    void finish() {
        for (int t = 0; t < count; ++t) rows(t).products.order(rows(t).tile.sums);
    }

  private:
    float* const slab_;  // what the tiles share
    int longest_[kMaxTiles], n_[kMaxTiles];
    int packed_[kMaxTiles];  // keys of the block that a row of the tile sees packed, and those before them

    static int64_t slab_floats(const Cache& cache) { return (P::slab_floats(cache) + 15) / 16 * 16; }

    // Tiles that see a key of the block.
    template <class Body> void each(Body body) {
        for (int t = 0; t < count; ++t)
            if (n_[t] > 0) body(t);
    }
    int most_packed() {
        int most = 0;
        each([&](int t) { most = larger(packed_[t], most); });
        return most;
    }

    // A block's vectors as numbers: body(rows, key, keys, numbers) for tiles that see any of some keys packed.
    template <class Body> void each_number(const Side& side, Place at, Body body) {
        Rows& first = rows(0);
        each_numbers<Simd>(side, at, most_packed(), first.codes, first.numbers, [&](int key, int) {
            each([&](int t) {
                const int keys = smaller(packed_[t] - key, kTileKeys);
                if (keys > 0) body(rows(t), key, keys, first.numbers);
            });
        });
    }

    void score_nibbles(Place k) {
        const Rows& first = rows(0);
        const int most = most_packed();
        if (!most) return;
        const uint8_t* codes = first.nibbles(cache.k, k, most);
        widen_halves<Simd>(k.scales, most, first.stride, first.k_scale);
        for (int key = 0; key < most; key += kSlabKeys) {
            first.products.look_up_keys(codes + key * key_words(cache.k) * 4, smaller(most - key, kSlabKeys), first.words,
                                        slab_);
            each([&](int t) {
                const Rows& of = rows(t);
                const int keys = smaller(packed_[t] - key, kSlabKeys);
                if (keys > 0) of.products.score_slab(slab_, keys, first.k_scale + key, of.logits + key);
            });
        }
    }

    void mix_nibbles(Place v) {
        const int most = most_packed(), words = cache.v.levels / 8;
        if (!most) return;
        const uint8_t* codes = rows(0).nibbles(cache.v, v, most);
        const int64_t bytes = cache.v.cell == kNibble ? nibble_bytes(cache.v) : cache.v.bytes;
        for (int key = 0; key < most; key += P::kValuesTogether) {
            auto each_left = [&](auto body) {
                each([&](int t) {
                    const int keys = smaller(packed_[t] - key, P::kValuesTogether);
                    if (keys > 0) body(rows(t), keys);
                });
            };
            each_left([&](Rows& of, int keys) { of.products.weigh(of.weights + key, keys); });
            P::units(words, [&](auto unit, int word) {
                P::look_up_values(unit, cache, codes + key * bytes, word, smaller(most - key, P::kValuesTogether), slab_);
                each_left([&](Rows& of, int keys) {
                    of.products.mix_shared(unit, slab_, keys, key ? kOnes : of.shrink, of.tile.sums + word);
                });
            });
        }
    }
};

// Whether the tiles are better off alone. A pass fills its last tile up to kMaxRows, which costs more than looking nibbles up
// again for a few rows.
inline bool are_alone(const Cache& cache, const Tile* tiles, int count) {
    const bool nibbles = (cache.k.cell == kNibble || cache.k.columns) && cache.v.cell == kNibble;
    return count == 1 || (nibbles && count == 2 && tiles[1].rows <= kMaxRows / 2);
}

// Of one tile, or of several.
template <class Simd, template <int> class Products>
void attend_pass(const Cache& cache, const Tile* tiles, int count, float* scratch) {
    if (are_alone(cache, tiles, count)) {
        for (int t = 0; t < count; ++t) attend<Simd, Products>(cache, tiles[t], scratch);
        return;
    }
    Tile filled[kMaxTiles] = {};
    const int longest = fill_tiles(tiles, count, filled);
    Pass<Simd, Products> pass(cache, filled, count, scratch);
    walk_blocks(cache, *filled, longest, pass);
    pass.finish();
}
