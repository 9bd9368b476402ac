// Q.K and P.V of packed codes in FP32.

// Logits of TILES tiles of keys. Each lane holds another key, so nothing is summed across a register. The words are
// transposed, [word][tile][lane]; each lookup serves R query rows. Prefetches the codes at `ahead` meanwhile.
template <class Simd, int R, int TILES>
inline void score(const uint32_t* words, int stride, int begin, int end, const float* q, typename Simd::Table table,
                  const float* scale, float softmax_scale, float* logits, bool add, const uint8_t* ahead) {
    typename Simd::F acc[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = Simd::zero();
    for (int j = begin; j < end; ++j) {
        const uint32_t* word = words + j * stride;
        for (int byte = 0; byte < TILES * Simd::width * 4; byte += kLine) fetch(ahead + j * TILES * Simd::width * 4 + byte);
        const float* column = q + j * 8 * R;
        auto level = [&](auto k) __attribute__((always_inline)) {
            typename Simd::F value[TILES];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t)
                value[t] = centroids_of<Simd, decltype(k)::value, true>(table, word + t * Simd::width);
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
        for (int r = 0; r < R; ++r) {
            float* to = logits + r * stride + t * Simd::width;
            typename Simd::F value = Simd::mul(acc[t][r], factor);
            Simd::store(to, add ? Simd::add(Simd::load(to), value) : value);
        }
    }
}

// Logits [R, stride] of the block's first n keys; the rest of each row is undefined. Prefetches as many codes at `ahead`.
template <class Simd, int R>
void score_block(const Cache& cache, Place at, int n, const float* q, float softmax_scale, int stride, uint32_t* words,
                 float* scale, float* logits, const uint8_t* ahead) {
    constexpr int kTiles = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
    const int count = cache.head_dim / 8, segments = cache.k.scales_per_vector;
    const typename Simd::Table table = Simd::table(cache.k.centroids);
    for (int key = 0; key < n; key += Simd::width)
        Simd::transpose(at.codes + static_cast<int64_t>(key) * count * 4, count, smaller(n - key, Simd::width), words + key,
                        stride);
    widen_scales<Simd>(at.scales, segments, n, stride, scale);
    for (int s = 0; s < segments; ++s) {
        const int begin = s * count / segments, end = (s + 1) * count / segments;
        int key = 0;
        for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width)
            score<Simd, R, kTiles>(words + key, stride, begin, end, q, table, scale + s * stride + key, softmax_scale,
                                   logits + key, s, ahead + static_cast<int64_t>(key) * count * 4);
        for (; key < n; key += Simd::width)
            score<Simd, R, 1>(words + key, stride, begin, end, q, table, scale + s * stride + key, softmax_scale, logits + key,
                              s, ahead + static_cast<int64_t>(key) * count * 4);
    }
}

// sums[r] = sums[r] * shrink[r] + weights[r] @ values of n vectors, for PLANES of the eight levels of a word and the first
// `width` words of a vector.
template <class Simd, int R, int FIRST, int PLANES>
inline void mix(const uint8_t* codes, int64_t bytes, int n, const float* weights, int stride, typename Simd::Table table,
                const float* shrink, float* sums, int words, int head_dim, const uint8_t* ahead) {
    typename Simd::F acc[PLANES][R];
    for (int k = 0; k < PLANES; ++k)
        for (int r = 0; r < R; ++r)
            acc[k][r] = Simd::mul(Simd::load(sums + r * head_dim + (FIRST + k) * words), Simd::set1(shrink[r]));
    auto add = [&](int key, auto past) __attribute__((always_inline)) {
        constexpr bool kPast = decltype(past)::value;
        if constexpr (FIRST == 0) fetch(ahead + key * bytes);
        typename Simd::F value[PLANES];
        auto expand = [&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value;
            if constexpr (kPlane < PLANES)
                value[kPlane] = centroids_of<Simd, FIRST + kPlane, kPast>(table, codes + key * bytes);
        };
        expand(Int<0>{}), expand(Int<1>{}), expand(Int<2>{}), expand(Int<3>{});
        expand(Int<4>{}), expand(Int<5>{}), expand(Int<6>{}), expand(Int<7>{});
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename Simd::F weight = Simd::set1(weights[r * stride + key]);
#pragma GCC unroll 8
            for (int k = 0; k < PLANES; ++k) acc[k][r] = Simd::fma(value[k], weight, acc[k][r]);
        }
    };
    for (int key = 0; key + 1 < n; ++key) add(key, Int<true>{});
    add(n - 1, Int<false>{});  // the cache may end right after the last vector
    for (int k = 0; k < PLANES; ++k)
        for (int r = 0; r < R; ++r) Simd::store(sums + r * head_dim + (FIRST + k) * words, acc[k][r]);
}

template <class Simd, int R>
void mix_block(const Cache& cache, Place at, int n, const float* weights, int stride, const float* shrink, float* sums,
               const uint8_t* ahead) {
    constexpr int kPlanes = R * 8 <= kAccumulators<Simd>   ? 8
                            : R * 4 <= kAccumulators<Simd> ? 4
                            : R * 2 <= kAccumulators<Simd> ? 2
                                                           : 1;
    const int words = cache.head_dim / 8, segments = cache.v.scales_per_vector;
    const typename Simd::Table table = Simd::table(cache.v.centroids);
    for (int word = 0; word < words; word += Simd::width) {
        const float* own = weights + word * segments / words * R * stride;
        auto pass = [&](auto first) __attribute__((always_inline)) {
            if constexpr (decltype(first)::value % kPlanes == 0)
                mix<Simd, R, decltype(first)::value, kPlanes>(at.codes + word * 4, words * 4, n, own, stride, table, shrink,
                                                              sums + word, words, cache.head_dim, ahead + word * 4);
        };
        pass(Int<0>{}), pass(Int<1>{}), pass(Int<2>{}), pass(Int<3>{});
        pass(Int<4>{}), pass(Int<5>{}), pass(Int<6>{}), pass(Int<7>{});
    }
}

// The products of R rows, as `attend_rows` calls them. `Narrow` is a register of half the width, for vectors shorter than one.
template <class Simd, class Narrow, int R> struct FloatProducts {
    const Cache& cache;
    const int stride;  // keys of a row in scratch
    float* const q;    // [D, R]

    static int64_t floats(const Cache& cache) { return R * cache.head_dim; }

    FloatProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache(cache), stride(stride), q(scratch) {
        for (int r = 0; r < R; ++r)
            for (int d = 0; d < cache.head_dim; ++d) q[d * R + r] = tile.q[r][d];
    }

    void score(Place at, int n, float softmax_scale, uint32_t* words, float* scale, float* logits,
               const uint8_t* ahead) const {
        score_block<Simd, R>(cache, at, n, q, softmax_scale, stride, words, scale, logits, ahead);
    }

    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) const {
        if (cache.head_dim / 8 % Simd::width == 0)
            mix_block<Simd, R>(cache, at, n, weights, stride, shrink, sums, ahead);
        else
            mix_block<Narrow, R>(cache, at, n, weights, stride, shrink, sums, ahead);
    }
};
