// Attention of the tiles of a pass in vector registers: codes are looked up, or become numbers, once for all of their rows.
// Each tile adds what it would add alone, in the same order.

template <class Simd, template <int> class Products> class Pass {
    static constexpr int R = kMaxRows;
    typedef Products<R> P;
    typedef Attend<Simd, P, R> Rows;

  public:
    static int64_t floats(const Cache& cache) { return slab_floats(cache) + kMaxTiles * tile_floats(cache); }

    Pass(const Cache& cache, const Tile* tiles, int count, float* scratch) : cache_(cache), count_(count), slab_(scratch) {
        scratch += slab_floats(cache);
        for (int t = 0; t < count; ++t) {
            new (places_[t]) Rows(cache, tiles[t], scratch + t * tile_floats(cache));
            longest_[t] = longest_of(tiles[t]);
        }
    }

    void see(int base, int n) {
        for (int t = 0; t < count_; ++t) {
            n_[t] = smaller(n, longest_[t] - base);
            for (int r = 0; r < R; ++r) seen_[t][r] = seen_by(rows(t).tile, r, base, n_[t]);
        }
    }

    // Logits of a block's first n keys.
    void score(Place k, int base, int n, const uint8_t* values, const uint8_t*) {
        each([&](int t) { packed_[t] = rows(t).packed_keys(base, n_[t], seen_[t]); });
        fetch_bytes(values, n * cache_.v.bytes);
        if (P::scores(cache_.k))
            score_nibbles(k);
        else
            each_number(cache_.k, k, [](Rows& of, int key, int keys, const float* x) { of.score_at(key, keys, x); });
        each([&](int t) { rows(t).score_exact(base, n_[t], seen_[t]); });
    }

    // Adds the block's values by the probabilities that its logits make.
    void mix(Place v, int base, int n, const uint8_t* next_keys) {
        each([&](int t) {
            packed_[t] = rows(t).weigh(v, base, n_[t], seen_[t]);
            if (!packed_[t]) shrink_sums<R>(rows(t).shrink, cache_.v.levels, rows(t).tile.sums);
        });
        fetch_bytes(next_keys, n * cache_.k.bytes);
        if (P::mixes(cache_.v))
            mix_nibbles(v);
        else
            each_number(cache_.v, v, [](Rows& of, int key, int keys, const float* x) { of.mix_at(key, keys, x); });
    }

    void finish() {
        for (int t = 0; t < count_; ++t) rows(t).products.order(rows(t).tile.sums);
    }

  private:
    const Cache& cache_;
    const int count_;
    float* const slab_;  // what the tiles share
    alignas(Rows) unsigned char places_[kMaxTiles][sizeof(Rows)];
    int longest_[kMaxTiles], n_[kMaxTiles];
    Seen seen_[kMaxTiles][R];
    int packed_[kMaxTiles];  // keys of the block that a row of the tile sees packed, and those before them

    static int64_t slab_floats(const Cache& cache) { return (P::slab_floats(cache) + 15) / 16 * 16; }
    static int64_t tile_floats(const Cache& cache) { return (Pieces(cache, kMaxRows).end + P::floats(cache) + 15) / 16 * 16; }

    Rows& rows(int t) { return *reinterpret_cast<Rows*>(places_[t]); }

    // Tiles that see a key of the block.
    template <class Body> void each(Body body) {
        for (int t = 0; t < count_; ++t)
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

    // Nibbles of a block's first n vectors.
    const uint8_t* nibbles(const Side& side, Place at, int n) {
        if (!unpacks_nibbles(side)) return at.codes;
        unpack_nibbles<Simd>(side, at.codes, n, rows(0).codes);
        return rows(0).codes;
    }

    void score_nibbles(Place k) {
        const Rows& first = rows(0);
        const int most = most_packed();
        if (!most) return;
        const uint8_t* codes = nibbles(cache_.k, k, most);
        Simd::widen_halves(k.scales, most, first.stride, first.k_scale);
        for (int key = 0; key < most; key += kSlabKeys) {
            first.products.look_up_keys(codes + key * key_words(cache_.k) * 4, smaller(most - key, kSlabKeys),
                                        reinterpret_cast<uint32_t*>(first.words), slab_);
            each([&](int t) {
                const Rows& of = rows(t);
                const int keys = smaller(packed_[t] - key, kSlabKeys);
                if (keys > 0) of.products.score_slab(slab_, keys, first.k_scale + key, of.logits + key);
            });
        }
    }

    void mix_nibbles(Place v) {
        const int most = most_packed(), words = cache_.v.levels / 8;
        if (!most) return;
        const uint8_t* codes = nibbles(cache_.v, v, most);
        const int64_t bytes = cache_.v.cell == kNibble ? nibble_bytes(cache_.v) : cache_.v.bytes;
        for (int key = 0; key < most; key += P::kValuesTogether) {
            auto each_left = [&](auto body) {
                each([&](int t) {
                    const int keys = smaller(packed_[t] - key, P::kValuesTogether);
                    if (keys > 0) body(rows(t), keys);
                });
            };
            each_left([&](Rows& of, int keys) { of.products.weigh(of.weights + key, keys); });
            P::units(words, [&](auto unit, int word) {
                P::look_up_values(unit, cache_, codes + key * bytes, word, smaller(most - key, P::kValuesTogether), slab_);
                each_left([&](Rows& of, int keys) {
                    of.products.mix_shared(unit, slab_, keys, key ? kOnes : of.shrink, of.tile.sums + word);
                });
            });
        }
    }
};

template <class Simd, template <int> class Products> int64_t scratch_of_passes(const Cache& cache) {
    return larger(scratch_floats<Products>(cache), Pass<Simd, Products>::floats(cache));
}

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
