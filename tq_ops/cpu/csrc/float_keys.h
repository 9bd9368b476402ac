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

// Logits of TILES tiles of keys, of their sums.
template <class Simd, int R, int TILES>
inline void write_logits(const typename Simd::F (&sums)[TILES][R], const float* scale, float softmax_scale, int stride,
                         float* logits) {
    for (int t = 0; t < TILES; ++t) {
        const typename Simd::F factor = Simd::mul(Simd::load(scale + t * Simd::width), Simd::set1(softmax_scale));
        for (int r = 0; r < R; ++r) Simd::store(logits + r * stride + t * Simd::width, Simd::mul(sums[t][r], factor));
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
    write_logits<Simd, R, TILES>(acc, scale, softmax_scale, stride, logits);
}
