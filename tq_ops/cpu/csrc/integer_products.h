// Q.K and P.V of packed codes by dot products of 16-bit integers, two products per lane and instruction, for BF16 activations.

constexpr int kQueryStride = kMaxLevels;  // integers per row

inline __m256i to_halves(__m512 x, __m512 inverse) { return _mm512_cvtsepi32_epi16(to_integers(x, inverse)); }

// Converts a rotated row of N levels in word order to N / 2 pairs, levels k and k + 4 of a word. Returns the row's step.
inline float whole_query(const float* q, int levels, float most_total, int16_t* pairs) {
    float inverse;
    const float step = query_step(q, levels, most_total, &inverse);
    for (int i = 0; i < levels; i += 16) {
        const __m256i whole = to_halves(_mm512_loadu_ps(q + i), _mm512_set1_ps(inverse));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + i), _mm256_unpacklo_epi16(whole, _mm256_srli_si256(whole, 8)));
    }
    return step;
}

// Logits of TILES tiles of keys, one key per lane, the words transposed as for FP32; factor[r] scales row r's integers.
template <int R, int TILES>
inline void score_whole(const uint32_t* words, int begin, int end, const int16_t* q, __m512i table, const float* scale,
                        const float* factor, float* logits, int stride, bool add, Ahead ahead) {
    using V = Vnni512;
    constexpr int kWidth = Avx512::width;
    __m512i acc[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = V::zero();
#pragma GCC unroll 1
    for (int j = begin; j < end; ++j) {
        const uint32_t* word = words + j * TILES * kWidth;
        ahead.turn();
        const int16_t* column = q + j * 8;
        auto level = [&](auto k) __attribute__((always_inline)) {
            constexpr int kLevel = decltype(k)::value;
            __m512i value[TILES];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t) {
                const char* from = reinterpret_cast<const char*>(word + t * kWidth) + kLevel / 2;
                value[t] = V::lookup(table, V::shift<kLevel % 2 * 4>(V::load(from)));
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512i query = V::pair(column + r * kQueryStride + kLevel * 2);
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) acc[t][r] = V::dot(value[t], query, acc[t][r]);
            }
        };
        level(Int<0>{}), level(Int<1>{}), level(Int<2>{}), level(Int<3>{});
    }
    for (int t = 0; t < TILES; ++t) {
        const __m512 own = Avx512::load(scale + t * kWidth);
        for (int r = 0; r < R; ++r) {
            float* to = logits + r * stride + t * kWidth;
            const __m512 by = Avx512::mul(own, Avx512::set1(factor[r]));
            // A product and a sum apart would be contracted for some R and not for others.
            Avx512::store(to, Avx512::fma(V::to_floats(acc[t][r]), by, add ? Avx512::load(to) : Avx512::zero()));
        }
    }
}

// Some words of n vectors, `bytes` apart, and the weights of row r at weights[r * stride].
struct Words {
    const uint8_t* codes;
    int64_t bytes;
    int n;
    const int16_t* weights;
    int stride;
};

// Adds integer products of two keys at a time: a lane holds the same level of both. `halves(key, last)` are the 16-bit halves
// of their words, in the lanes of `acc`; plane k is their levels k places up.
template <int R, int FIRST, int PLANES, class H>
inline void add_keys(const Words& of, __m512i table, __m512i (&acc)[PLANES][R], Ahead& to_fetch, H halves) {
    using V = Vnni512;
    Ahead ahead = to_fetch;  // in registers
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[k][r] = V::zero();
    auto add = [&](int key, __m512i both) __attribute__((always_inline)) {
        __m512i value[PLANES];
        auto expand = [&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value;
            if constexpr (kPlane < PLANES) value[kPlane] = V::lookup(table, V::shift<(FIRST + kPlane) % 4 * 4>(both));
        };
        expand(Int<0>{}), expand(Int<1>{}), expand(Int<2>{}), expand(Int<3>{});
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i weight = V::pair(of.weights + r * of.stride + key);
#pragma GCC unroll 4
            for (int k = 0; k < PLANES; ++k) acc[k][r] = V::dot(value[k], weight, acc[k][r]);
        }
    };
    int key = 0;
    for (; key + 2 < of.n; key += 2) {
        ahead.turn();
        add(key, halves(key, Int<0>{}));
    }
    add(key, halves(key, Int<1>{}));
    to_fetch = ahead;
}

// sums[r] = sums[r] * shrink[r] + step[r] * (weights[r] @ integer centroids of the vectors), for PLANES of the eight levels of
// 16 words.
template <int R, int FIRST, int PLANES>
inline void mix_wide(const Words& of, __m512i table, const float* shrink, const float* step, float* sums, int words,
                     Ahead& ahead) {
    using V = Vnni512;
    __m512i acc[PLANES][R];
    add_keys<R, FIRST, PLANES>(of, table, acc, ahead, [&](int key, auto last) __attribute__((always_inline)) {
        constexpr bool kLast = decltype(last)::value;
        const uint8_t* a = of.codes + key * of.bytes;
        // The cache may end right after the last vector. An odd one out is paired with itself, at weight zero.
        const uint8_t* b = kLast && key + 1 >= of.n ? a : a + of.bytes;
        if constexpr (FIRST < 4) return V::lower_halves(V::load(a), b);
        return V::upper_halves(kLast ? V::upper(V::load(a)) : V::load(a + 2), b);
    });
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float* sum = sums + (r * 8 + FIRST + k) * words;
            const __m512 before = _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(shrink[r]));
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(V::to_floats(acc[k][r]), _mm512_set1_ps(step[r]), before));
        }
}

// The lanes of a register for WORDS words, 8, 4 or 2, so that none is idle: the lower halves of all words, then the upper
// ones, then both again moved down by the levels that the planes before have, and so on.
template <int WORDS> struct Lanes {
    static constexpr int kPlanes = WORDS / 2;
    int16_t from[32] = {};  // where the half of a lane and key lies in the words of two keys
    int16_t down[32] = {};  // bits that it is moved down

    constexpr Lanes() {
        for (int i = 0; i < 32; ++i) {
            const int key = i % 2, word = i / 2 % WORDS, block = i / 2 / WORDS;
            from[i] = static_cast<int16_t>(key * 2 * WORDS + word * 2 + block % 2);
            down[i] = static_cast<int16_t>(block / 2 * kPlanes * 4);
        }
    }
    // The level of plane k in a block of WORDS lanes.
    static constexpr int level(int block, int k) { return block % 2 * 4 + block / 2 * kPlanes + k; }
};

// Two keys' words beside each other.
template <int WORDS> inline __m512i side_by_side(const uint8_t* a, const uint8_t* b) {
    if constexpr (WORDS == 8) {
        const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
        return _mm512_inserti64x4(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
    } else if constexpr (WORDS == 4) {
        const __m256i x = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
        return _mm512_castsi256_si512(_mm256_inserti128_si256(x, _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1));
    } else {
        const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(a));
        return _mm512_castsi128_si512(_mm_unpacklo_epi64(x, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b))));
    }
}

// As `mix_wide`, for all levels of WORDS words in PLANES planes from FIRST on.
template <int R, int WORDS, int FIRST, int PLANES>
inline void mix_narrow(const Words& of, __m512i table, const float* shrink, const float* step, float* sums, int words,
                       Ahead& ahead) {
    static constexpr Lanes<WORDS> kLanes;
    const __m512i from = _mm512_loadu_si512(kLanes.from), down = _mm512_loadu_si512(kLanes.down);
    __m512i acc[PLANES][R];
    add_keys<R, FIRST, PLANES>(of, table, acc, ahead, [&](int key, auto last) __attribute__((always_inline)) {
        const uint8_t* a = of.codes + key * of.bytes;
        const uint8_t* b = decltype(last)::value && key + 1 >= of.n ? a : a + of.bytes;
        const __m512i halves = _mm512_permutexvar_epi16(from, side_by_side<WORDS>(a, b));
        return WORDS == 8 ? halves : _mm512_srlv_epi16(halves, down);
    });
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            alignas(64) float blocks[16];
            auto each = [&](auto act) __attribute__((always_inline)) {
                for (int block = 0; block < 16 / WORDS; ++block) {
                    float* sum = sums + (r * 8 + Lanes<WORDS>::level(block, FIRST + k)) * words;
                    for (int w = 0; w < WORDS; ++w) act(sum[w], blocks[block * WORDS + w]);
                }
            };
            each([](float& sum, float& lane) { lane = sum; });
            const __m512 before = _mm512_mul_ps(_mm512_load_ps(blocks), _mm512_set1_ps(shrink[r]));
            _mm512_store_ps(blocks, _mm512_fmadd_ps(Vnni512::to_floats(acc[k][r]), _mm512_set1_ps(step[r]), before));
            each([](float& sum, float& lane) { sum = lane; });
        }
}

// The products of R rows, as `attend_rows` calls them.
template <int R> struct IntegerProducts {
    using Simd = Avx512;
    static constexpr int kPlanes = R * 4 <= kAccumulators<Simd> ? 4 : 2;

    const Cache& cache;
    const int stride;      // keys of a row in scratch
    int16_t* const q;      // [R, kQueryStride]
    int16_t* const whole;  // [R, stride], a stretch's weights
    float step[R];

    static int64_t floats(const Cache& cache) { return R * (kQueryStride + padded(cache.block_size)) / 2; }

    IntegerProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache(cache), stride(stride), q(reinterpret_cast<int16_t*>(scratch)), whole(q + R * kQueryStride) {
        if (cache.k.cell != kNibble) return;
        const float most = most_total(cache.k.integers, cache.k.levels);
        for (int r = 0; r < R; ++r)
            step[r] = whole_query(tile.q[r], cache.k.levels, most, q + r * kQueryStride) * cache.k.unit;
    }

    void score(Place at, int n, float softmax_scale, uint32_t* words, float* scale, float* logits, const uint8_t* ahead,
               const uint8_t* later) const {
        constexpr int kTiles = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
        const int count = cache.k.levels / 8, segments = cache.k.scales_per_vector;
        const int64_t bytes = cache.v.bytes, early = early_bytes(cache);
        const __m512i table = Vnni512::table(cache.k.integers);
        float factor[R];
        for (int r = 0; r < R; ++r) factor[r] = step[r] * softmax_scale;
        widen_scales<Simd>(at.scales, segments, n, stride, scale);
        auto tiles = [&](auto number, int key) __attribute__((always_inline)) {
            constexpr int kNumber = decltype(number)::value, kLanes = kNumber * Simd::width;
            const uint8_t* codes = at.codes + static_cast<int64_t>(key) * count * 4;
            for (int i = 0; i < kLanes && key + i < n; i += Simd::width)
                Simd::transpose(codes + i * count * 4, count, smaller(n - key - i, Simd::width), words + i, kLanes);
            for (int s = 0; s < segments; ++s) {
                const int begin = s * count / segments, end = (s + 1) * count / segments;
                const int64_t share = kLanes * bytes / segments, later_share = kLanes * early / segments;
                score_whole<R, kNumber>(words, begin, end, q, table, scale + s * stride + key, factor, logits + key, stride, s,
                                        Ahead(ahead + key * bytes + s * share, share, end - begin,
                                              later + key * early + s * later_share, later_share));
            }
        };
        int key = 0;
        for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width) tiles(Int<kTiles>{}, key);
        for (; key < n; key += Simd::width) tiles(Int<1>{}, key);
    }

    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) const {
        const int segments = cache.v.scales_per_vector, words = cache.v.levels / 8 / segments;
        const int64_t bytes = nibble_bytes(cache.v);
        const float most = most_total(cache.v.integers, kStretch);
        for (int s = 0; s < segments; ++s)
            for (int key = 0; key < n; key += kStretch) {
                const int keys = smaller(n - key, kStretch);
                float own[R], steps[R];
                whole_weights(weights + s * R * stride + key, keys, most, steps);
                for (int r = 0; r < R; ++r) own[r] = key ? 1.0f : shrink[r], steps[r] *= cache.v.unit;
                const int64_t early = early_bytes(cache), late = cache.k.bytes - early, share = keys * late / segments;
                mix_stretch(at.codes + key * bytes + s * words * 4, words, keys, own, steps, sums + s * words,
                            ahead + n * early + key * late + s * share, share);
            }
    }

  private:
    // Converts the weights of up to kStretch keys to integers, zero after the last, and returns their steps.
    void whole_weights(const float* weights, int n, float most_total, float* steps) const {
        __m512 inverse[R];
        weight_steps<R>(weights, stride, n, most_total, steps, inverse);
        for (int i = 0; i < n; i += Simd::width)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole + r * stride + i),
                                    to_halves(Simd::load(weights + r * stride + i), inverse[r]));
    }

    // One segment, `words` words, of each vector; prefetches `share` bytes at `at`.
    void mix_stretch(const uint8_t* codes, int words, int n, const float* shrink, const float* steps, float* sums,
                     const uint8_t* at, int64_t share) const {
        const __m512i table = Vnni512::table(cache.v.integers);
        const int all = cache.v.levels / 8, passes = words / 16 * 8 / kPlanes + (words % 16 / 8 * 4 + kPlanes - 1) / kPlanes +
                                                     words % 8 / 4 + words % 4 / 2;
        Ahead ahead(at, share, n > 1 ? passes * (n / 2) : 1);
        auto from = [&](int word) { return Words{codes + word * 4, nibble_bytes(cache.v), n, whole, stride}; };
        int word = 0;
        for (; word + 16 <= words; word += 16) {
            auto pass = [&](auto first) __attribute__((always_inline)) {
                constexpr int kFirst = decltype(first)::value;
                if constexpr (kFirst % kPlanes == 0)
                    mix_wide<R, kFirst, kPlanes>(from(word), table, shrink, steps, sums + word, all, ahead);
            };
            pass(Int<0>{}), pass(Int<2>{}), pass(Int<4>{}), pass(Int<6>{});
        }
        if (words - word >= 8) {
            mix_narrow<R, 8, 0, kPlanes>(from(word), table, shrink, steps, sums + word, all, ahead);
            if constexpr (kPlanes == 2) mix_narrow<R, 8, 2, 2>(from(word), table, shrink, steps, sums + word, all, ahead);
            word += 8;
        }
        if (words - word >= 4) mix_narrow<R, 4, 0, 2>(from(word), table, shrink, steps, sums + word, all, ahead), word += 4;
        if (words - word >= 2) mix_narrow<R, 2, 0, 1>(from(word), table, shrink, steps, sums + word, all, ahead);
    }
};
