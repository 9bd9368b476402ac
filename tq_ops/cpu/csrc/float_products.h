// Q.K and P.V of packed codes in FP32.

// Logits of TILES tiles of keys. Each lane holds another key, so nothing is summed across a register. The words are
// transposed, [word][tile][lane]; each lookup serves R query rows. Prefetches meanwhile.
template <class Simd, int R, int TILES>
inline void score(const uint32_t* words, int stride, int begin, int end, const float* q, typename Simd::Table table,
                  const float* scale, float softmax_scale, float* logits, bool add, Ahead ahead) {
    typename Simd::F acc[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = Simd::zero();
    for (int j = begin; j < end; ++j) {
        const uint32_t* word = words + j * stride;
        ahead.turn();
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
            // A product and a sum apart would be contracted for some R and not for others.
            Simd::store(to, Simd::fma(acc[t][r], factor, add ? Simd::load(to) : Simd::zero()));
        }
    }
}

// Logits [R, stride] of the block's first n keys; the rest of each row is undefined. Prefetches V's codes of them at `ahead`.
template <class Simd, int R>
void score_block(const Cache& cache, Place at, int n, const float* q, float softmax_scale, int stride, uint32_t* words,
                 float* scale, float* logits, const uint8_t* ahead, const uint8_t* later) {
    constexpr int kTiles = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
    const int count = cache.k.levels / 8, segments = cache.k.scales_per_vector;
    const int64_t bytes = cache.v.bytes, early = early_bytes(cache);
    const typename Simd::Table table = Simd::table(cache.k.centroids);
    auto fetching = [&](int key, int keys) {
        return Ahead(ahead + key * bytes, keys * bytes, count, later + key * early, keys * early);
    };
    for (int key = 0; key < n; key += Simd::width)
        Simd::transpose(at.codes + static_cast<int64_t>(key) * count * 4, count, smaller(n - key, Simd::width), words + key,
                        stride);
    widen_scales<Simd>(at.scales, segments, n, stride, scale);
    for (int s = 0; s < segments; ++s) {
        const int begin = s * count / segments, end = (s + 1) * count / segments;
        int key = 0;
        for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width)
            score<Simd, R, kTiles>(words + key, stride, begin, end, q, table, scale + s * stride + key, softmax_scale,
                                   logits + key, s, fetching(key, kTiles * Simd::width));
        for (; key < n; key += Simd::width)
            score<Simd, R, 1>(words + key, stride, begin, end, q, table, scale + s * stride + key, softmax_scale, logits + key,
                              s, fetching(key, Simd::width));
    }
}

// Lanes first ... last - 1 of the numbers at p; the others are zero. Nothing beside them is read.
template <class Simd> __attribute__((always_inline)) inline typename Simd::F load_lanes(const float* p, int first, int last) {
    if (first == 0 && last == Simd::width) return Simd::load(p);
    float lanes[Simd::width] = {};
    for (int i = first; i < last; ++i) lanes[i] = p[i];
    return Simd::load(lanes);
}

// The inverse: nothing beside them is written.
template <class Simd>
__attribute__((always_inline)) inline void store_lanes(float* p, int first, int last, typename Simd::F x) {
    if (first == 0 && last == Simd::width) return Simd::store(p, x);
    float lanes[Simd::width];
    Simd::store(lanes, x);
    for (int i = first; i < last; ++i) p[i] = lanes[i];
}

// A register's width of the words of n vectors, `bytes` apart: of these words, lanes first ... last - 1 are summed.
struct Words {
    const uint8_t* codes;
    int64_t bytes;
    int n, first, last;
};

// sums[r] = sums[r] * shrink[r] + weights[r] @ values of n vectors, for PLANES of the eight levels of a word.
template <class Simd, int R, int FIRST, int PLANES>
inline void mix(Words of, const float* weights, int stride, typename Simd::Table table, const float* shrink, float* sums,
                int words, Ahead ahead) {
    typename Simd::F acc[PLANES][R];
    for (int k = 0; k < PLANES; ++k)
        for (int r = 0; r < R; ++r)
            acc[k][r] =
                Simd::mul(load_lanes<Simd>(sums + (r * 8 + FIRST + k) * words, of.first, of.last), Simd::set1(shrink[r]));
    auto add = [&](int key, auto past) __attribute__((always_inline)) {
        constexpr bool kPast = decltype(past)::value;
        if constexpr (FIRST == 0) ahead.turn();
        typename Simd::F value[PLANES];
        auto expand = [&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value;
            if constexpr (kPlane < PLANES)
                value[kPlane] = centroids_of<Simd, FIRST + kPlane, kPast>(table, of.codes + key * of.bytes);
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
    for (int key = 0; key + 1 < of.n; ++key) add(key, Int<true>{});
    add(of.n - 1, Int<false>{});  // the cache may end right after the last vector
    for (int k = 0; k < PLANES; ++k)
        for (int r = 0; r < R; ++r) store_lanes<Simd>(sums + (r * 8 + FIRST + k) * words, of.first, of.last, acc[k][r]);
}

// All levels of a register's width of words.
template <class Simd, int R>
void mix_words(Words of, const float* weights, int stride, typename Simd::Table table, const float* shrink, float* sums,
               int words, Ahead ahead) {
    constexpr int kPlanes = R * 8 <= kAccumulators<Simd>   ? 8
                            : R * 4 <= kAccumulators<Simd> ? 4
                            : R * 2 <= kAccumulators<Simd> ? 2
                                                           : 1;
    auto pass = [&](auto first) __attribute__((always_inline)) {
        if constexpr (decltype(first)::value % kPlanes == 0)
            mix<Simd, R, decltype(first)::value, kPlanes>(of, weights, stride, table, shrink, sums, words, ahead);
    };
    pass(Int<0>{}), pass(Int<1>{}), pass(Int<2>{}), pass(Int<3>{});
    pass(Int<4>{}), pass(Int<5>{}), pass(Int<6>{}), pass(Int<7>{});
}

// The products of R rows, as `attend_rows` calls them. `Narrow` is a register of half the width, for vectors shorter than one.
template <class Simd, class Narrow, int R> struct FloatProducts {
    static constexpr bool shares = false;  // lookups, in a pass
    static int64_t found_floats(const Cache&) { return 0; }

    const Cache& cache;
    const int stride;       // keys of a row in scratch
    float* const q;         // [k.levels, R]
    uint8_t* const spaced;  // [stride, 4 * Narrow::width], vectors shorter than a narrow register, and a word past them

    static int64_t floats(const Cache& cache) {
        return R * cache.k.levels + (is_short(cache) ? padded(cache.block_size) * Narrow::width + kLine / 4 : 0);
    }

    FloatProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache(cache), stride(stride), q(scratch), spaced(reinterpret_cast<uint8_t*>(scratch + R * cache.k.levels)) {
        if (cache.k.cell != kNibble) return;
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < cache.k.levels; ++i) q[i * R + r] = tile.q[r][i];
    }

    void score(Place at, int n, float softmax_scale, uint32_t* words, float* scale, float* logits, const uint8_t* ahead,
               const uint8_t* later) const {
        score_block<Simd, R>(cache, at, n, q, softmax_scale, stride, words, scale, logits, ahead, later);
    }

    // Adds n vectors to the sums, and prefetches K's codes of as many at `ahead`.
    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) const {
        const int words = cache.v.levels / 8;
        const int64_t bytes = nibble_bytes(cache.v);
        ahead += n * early_bytes(cache);
        if (is_short(cache)) {
            constexpr int64_t kBytes = 4 * Narrow::width;
            for (int key = 0; key < n; ++key) std::memcpy(spaced + key * kBytes, at.codes + key * bytes, bytes);
            return mix_at<Narrow>({spaced, kBytes, n, 0, words}, 0, weights, shrink, sums, ahead);
        }
        int word = 0;
        for (; word + Simd::width <= words; word += Simd::width)
            mix_at<Simd>({at.codes + word * 4, bytes, n, 0, Simd::width}, word, weights, shrink, sums, ahead);
        for (; word < words; word += Narrow::width) {
            // The last register overlaps the one before, whose words it leaves alone.
            const int from = smaller(word, words - Narrow::width);
            mix_at<Narrow>({at.codes + from * 4, bytes, n, word - from, Narrow::width}, from, weights, shrink, sums, ahead);
        }
    }

  private:
    static bool is_short(const Cache& cache) { return cache.v.levels / 8 < Narrow::width; }

    // Words of the vectors from `word` on. Each register prefetches its share of what is ahead.
    template <class Register>
    void mix_at(Words of, int word, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) const {
        const int words = cache.v.levels / 8, segment = words / cache.v.scales_per_vector;
        const int64_t total = of.n * (cache.k.bytes - early_bytes(cache)), begin = total * (word + of.first) / words;
        const int64_t end = total * (word + of.last) / words;
        mix_words<Register, R>(of, weights + word / segment * R * stride, stride, Register::table(cache.v.centroids), shrink,
                               sums + word, words, Ahead(ahead + begin, end - begin, of.n));
    }
};
