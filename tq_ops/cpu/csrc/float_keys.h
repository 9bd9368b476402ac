// Q.K of nibbles in FP32.

// Centroids of a level of a register's width of keys, one key per lane: looked up in transposed words, [word][stride keys] ...
template <class Simd> struct WordsOfKeys {
    const uint32_t* words;
    int stride;
    typename Simd::Table table;

    template <int LEVEL> __attribute__((always_inline)) typename Simd::F at(int word, int tile) const {
        return centroids_of<Simd, LEVEL, true>(table, words + word * stride + tile * Simd::width);
    }
};

// ... or found before, [word][8 levels][kSlabKeys].
constexpr int kSlabKeys = 32;  // keys that are looked up at a time for all rows of a pass
template <class Simd> struct FoundKeys {
    const float* values;

    template <int LEVEL> __attribute__((always_inline)) typename Simd::F at(int word, int tile) const {
        return Simd::load(values + (word * 8 + LEVEL) * kSlabKeys + tile * Simd::width);
    }
};

template <class Simd> inline void look_up_words(const WordsOfKeys<Simd>& of, int count, float* values) {
    for (int word = 0; word < count; ++word) {
        auto level = [&](auto k) __attribute__((always_inline)) {
            for (int tile = 0; tile < kSlabKeys / Simd::width; ++tile, values += Simd::width)
                Simd::store(values, of.template at<decltype(k)::value>(word, tile));
        };
        level(Int<0>{}), level(Int<1>{}), level(Int<2>{}), level(Int<3>{});
        level(Int<4>{}), level(Int<5>{}), level(Int<6>{}), level(Int<7>{});
    }
}

// Logits of TILES tiles of keys, summed over `count` words. Each lane holds another key, so nothing is summed across a
// register; each centroid serves R query rows. Prefetches meanwhile.
template <class Simd, int R, int TILES, class Keys>
inline void score(const Keys& keys, int stride, int count, const float* q, const float* scale, float softmax_scale,
                  float* logits, Ahead ahead) {
    typename Simd::F acc[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = Simd::zero();
    for (int j = 0; j < count; ++j) {
        ahead.turn();
        const float* column = q + j * 8 * R;
        auto level = [&](auto k) __attribute__((always_inline)) {
            typename Simd::F value[TILES];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t) value[t] = keys.template at<decltype(k)::value>(j, t);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                typename Simd::F query = Simd::set1(column[decltype(k)::value * R + r]);
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) acc[t][r] = Simd::fma(value[t], query, acc[t][r]);
            }
        };
        level(Int<0>{}), level(Int<1>{}), level(Int<2>{}), level(Int<3>{});
        level(Int<4>{}), level(Int<5>{}), level(Int<6>{}), level(Int<7>{});
    }
    for (int t = 0; t < TILES; ++t) {
        typename Simd::F factor = Simd::mul(Simd::load(scale + t * Simd::width), Simd::set1(softmax_scale));
        for (int r = 0; r < R; ++r) Simd::store(logits + r * stride + t * Simd::width, Simd::mul(acc[t][r], factor));
    }
}

// Logits [R, stride] of the block's first n keys; the rest of each row is undefined. Prefetches V's codes of them at `ahead`.
template <class Simd, int R>
void score_block(const Cache& cache, Place at, int n, const float* q, float softmax_scale, int stride, uint32_t* words,
                 float* scale, float* logits, const uint8_t* ahead, const uint8_t* later) {
    constexpr int kTiles = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
    const int count = cache.k.levels / 8;
    const int64_t bytes = cache.v.bytes, early = early_bytes(cache);
    const typename Simd::Table table = Simd::table(cache.k.centroids);
    auto from = [&](int key) { return WordsOfKeys<Simd>{words + key, stride, table}; };
    auto fetching = [&](int key, int keys) {
        return Ahead(ahead + key * bytes, keys * bytes, count, later + key * early, keys * early);
    };
    for (int key = 0; key < n; key += Simd::width)
        Simd::transpose(at.codes + static_cast<int64_t>(key) * count * 4, count, smaller(n - key, Simd::width), words + key,
                        stride);
    Simd::widen_halves(at.scales, n, stride, scale);
    int key = 0;
    for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width)
        score<Simd, R, kTiles>(from(key), stride, count, q, scale + key, softmax_scale, logits + key,
                               fetching(key, kTiles * Simd::width));
    for (; key < n; key += Simd::width)
        score<Simd, R, 1>(from(key), stride, count, q, scale + key, softmax_scale, logits + key, fetching(key, Simd::width));
}
