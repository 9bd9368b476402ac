// Q.K and P.V of packed codes by dot products of 16-bit integers, two products per lane and instruction, for BF16 activations.
//
// Centroids are 16-bit integers times a unit. A row's query, and its weights of up to kStretch keys, become integers with a
// step of their own: as fine as 16 bits allow, yet coarse enough that no 32-bit sum can overflow, whatever the codes. All
// integer sums are therefore exact; the only errors are those of rounding centroids to their unit and queries and weights to
// half a step.

constexpr int kGroupWords = 4;            // words of a key (32 levels) that one 32-bit sum can hold
constexpr int kStretch = 128;             // keys that one 32-bit sum can hold
constexpr int kQueryStride = kMaxLevels;  // integers per row

// The largest sum of the magnitudes of n rounded integers whose products with the centroids still fit in 32 bits. A margin of
// a thousandth covers the rounding of FP32 sums.
inline float most_total(const int16_t* integers, int n) {
    int largest = 0;
    for (int i = 0; i < 16; ++i) {
        const int size = integers[i] < 0 ? -integers[i] : integers[i];
        largest = size > largest ? size : largest;
    }
    return 0.999f * 2147483647.0f / static_cast<float>(largest) - 0.5f * static_cast<float>(n);
}

// The step for numbers of magnitude up to `most`, whose magnitudes add up to `total` times the allowed sum. NaN if they are
// not finite; 0, and `inverse` too, if they are too small to matter.
inline float step_of(float most, float total, float* inverse) {
    float step = most / 32767.0f;
    if (!(total <= step)) step = total;  // also if the total is a NaN
    *inverse = step > 1e-35f ? 1.0f / step : 0.0f;
    return step < INFINITY ? step > 1e-35f ? step : 0.0f : NAN;
}

inline __m256i to_whole(__m512 x, __m512 inverse) {
    return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)));
}

// Converts a rotated row of N levels in word order to N / 2 pairs, levels k and k + 4 of a word. Returns the row's step.
inline float whole_query(const float* q, int levels, float most_total, int16_t* pairs) {
    __m512 most = _mm512_setzero_ps();
    const __m512 share = _mm512_set1_ps(1.0f / most_total);
    float total = 0.0f;
    for (int i = 0; i < levels; i += 8 * kGroupWords) {
        const __m512 a = _mm512_abs_ps(_mm512_loadu_ps(q + i));
        const __m512 b = i + 16 < levels ? _mm512_abs_ps(_mm512_loadu_ps(q + i + 16)) : _mm512_setzero_ps();
        most = _mm512_max_ps(_mm512_max_ps(a, b), most);
        const float sum = _mm512_reduce_add_ps(_mm512_fmadd_ps(a, share, _mm512_mul_ps(b, share)));
        if (!(sum <= total) && total == total) total = sum;  // a NaN enters and stays
    }
    float inverse;
    const float step = step_of(_mm512_reduce_max_ps(most), total, &inverse);
    for (int i = 0; i < levels; i += 16) {
        const __m256i whole = to_whole(_mm512_loadu_ps(q + i), _mm512_set1_ps(inverse));
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
    __m512 part[TILES][R];
    for (int group = begin; group < end; group += kGroupWords) {
        __m512i acc[TILES][R];
        for (int t = 0; t < TILES; ++t)
            for (int r = 0; r < R; ++r) acc[t][r] = V::zero();
#pragma GCC unroll 1
        for (int j = group, last = smaller(end, group + kGroupWords); j < last; ++j) {
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
        for (int t = 0; t < TILES; ++t)
            for (int r = 0; r < R; ++r) {
                const __m512 sum = V::to_floats(acc[t][r]);
                part[t][r] = group == begin ? sum : _mm512_add_ps(part[t][r], sum);
            }
    }
    for (int t = 0; t < TILES; ++t) {
        const __m512 own = Avx512::load(scale + t * kWidth);
        for (int r = 0; r < R; ++r) {
            float* to = logits + r * stride + t * kWidth;
            const __m512 value = Avx512::mul(part[t][r], Avx512::mul(own, Avx512::set1(factor[r])));
            Avx512::store(to, add ? Avx512::add(Avx512::load(to), value) : value);
        }
    }
}

// WORDS words of a vector, and of as many vectors as one register holds beside each other: 16 / WORDS.
//
// Two registers make a step: a lane holds the same level of a key of each. So a step takes 2, 4 or 8 keys, and no lane is idle
// however short a vector is. Where a register holds several keys, each lane block gets its own key's weight, and blocks are
// added at the end.
template <int WORDS> struct Piece {
    static constexpr int kKeys = 16 / WORDS, kStep = 2 * kKeys;

    const uint8_t* codes;
    int64_t bytes;      // from a vector to the next
    int n;              // vectors
    int first;          // lanes before this one were summed by another piece
    const int16_t* weights;  // of row r and two keys at weights[r * stride + key]; spread out where a register holds several
    int stride;

    // The weights of a step of row r, beginning at `key`.
    __m512i weight(int r, int key) const {
        if constexpr (kKeys == 1) return Vnni512::pair(weights + r * stride + key);
        return _mm512_loadu_si512(weights + r * stride + key / kStep * 32);
    }

    // The lower (or upper) halves of the words of a step, the second register's above the first's.
    template <bool UPPER, bool CLAMP> __m512i halves(int key) const {
        if constexpr (kKeys == 1) {
            const uint8_t* a = codes + key * bytes;
            // The cache may end right after the last vector. An odd one out is paired with itself, at weight zero.
            const uint8_t* b = CLAMP && key + 1 >= n ? a : a + bytes;
            if constexpr (!UPPER) return Vnni512::lower_halves(Vnni512::load(a), b);
            return Vnni512::upper_halves(CLAMP ? Vnni512::upper(Vnni512::load(a)) : Vnni512::load(a + 2), b);
        } else {
            const __m512i a = keys<CLAMP>(key), b = keys<CLAMP>(key + kKeys);
            if constexpr (!UPPER) return _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
            return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(a, 16), b);
        }
    }

    // sum = sum * shrink + step * x, of the WORDS lanes that are left when keys side by side are added. Registers are as wide as
    // these: a load that overlaps an earlier store, masked or not, waits for it.
    void add_to(float* sum, __m512i x, float shrink, float step) const {
        if constexpr (WORDS == 16) {
            const __m512 before = _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(shrink));
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(step), before));
        } else {
            const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
            if constexpr (WORDS == 8) {
                const __m256 before = _mm256_mul_ps(_mm256_loadu_ps(sum), _mm256_set1_ps(shrink));
                _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(half), _mm256_set1_ps(step), before));
            } else {
                const __m128i own = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
                const __m128 old = _mm_loadu_ps(sum), before = _mm_mul_ps(old, _mm_set1_ps(shrink));
                const __m128 now = _mm_fmadd_ps(_mm_cvtepi32_ps(own), _mm_set1_ps(step), before);
                _mm_storeu_ps(sum, _mm_mask_blend_ps(static_cast<__mmask8>(16 - (1 << first)), old, now));
            }
        }
    }

  private:
    // The words of kKeys vectors from `key` on; CLAMP repeats the last vector, whose weights are zero then.
    template <bool CLAMP> __m512i keys(int key) const {
        auto at = [&](int i) { return codes + (CLAMP ? smaller(key + i, n - 1) : key + i) * bytes; };
        if constexpr (WORDS == 8) {
            const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(0))));
            return _mm512_inserti64x4(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(1))), 1);
        } else {
            auto four = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(i))); };
            __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(four(0)), four(1), 1);
            x = _mm512_inserti32x4(x, four(2), 2);
            return _mm512_inserti32x4(x, four(3), 3);
        }
    }
};

// sums[r] = sums[r] * shrink[r] + step[r] * (weights[r] @ integer centroids of the vectors), for PLANES of the eight levels of
// a word.
template <int R, int WORDS, int FIRST, int PLANES>
inline void mix_whole(const Piece<WORDS>& of, __m512i table, const float* shrink, const float* step, float* sums, int words,
                      Ahead& to_fetch) {
    using V = Vnni512;
    Ahead ahead = to_fetch;  // in registers
    __m512i acc[PLANES][R];
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[k][r] = V::zero();
    auto add = [&](int key, __m512i halves) __attribute__((always_inline)) {
        __m512i value[PLANES];
        auto expand = [&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value;
            if constexpr (kPlane < PLANES) value[kPlane] = V::lookup(table, V::shift<(FIRST + kPlane) % 4 * 4>(halves));
        };
        expand(Int<0>{}), expand(Int<1>{}), expand(Int<2>{}), expand(Int<3>{});
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i weight = of.weight(r, key);
#pragma GCC unroll 4
            for (int k = 0; k < PLANES; ++k) acc[k][r] = V::dot(value[k], weight, acc[k][r]);
        }
    };
    constexpr bool kUpper = FIRST >= 4;
    int key = 0;
    for (; key + Piece<WORDS>::kStep < of.n; key += Piece<WORDS>::kStep) {
        ahead.turn();
        add(key, of.template halves<kUpper, false>(key));
    }
    add(key, of.template halves<kUpper, true>(key));
    to_fetch = ahead;
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) of.add_to(sums + (r * 8 + FIRST + k) * words, acc[k][r], shrink[r], step[r]);
}

// The products of R rows, as `attend_rows` calls them.
template <int R> struct IntegerProducts {
    using Simd = Avx512;
    static constexpr int kPlanes = R * 4 <= kAccumulators<Simd> ? 4 : 2;
    static constexpr int kSpread = kStretch / 4 * 32;  // integers of a row's weights, a register for every four keys

    const Cache& cache;
    const int stride;       // keys of a row in scratch
    int16_t* const q;       // [R, kQueryStride]
    int16_t* const spread;  // [R, kSpread]
    int16_t* const whole;   // [R, stride], a stretch's weights
    float step[R];

    static int64_t floats(const Cache& cache) { return R * (kQueryStride + kSpread + padded(cache.block_size)) / 2; }

    IntegerProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache(cache),
          stride(stride),
          q(reinterpret_cast<int16_t*>(scratch)),
          spread(q + R * kQueryStride),
          whole(spread + R * kSpread) {
        const float most = most_total(cache.k.integers, 8 * kGroupWords);
        for (int r = 0; r < R; ++r)
            step[r] = whole_query(tile.q[r], cache.k.levels, most, q + r * kQueryStride) * cache.k.unit;
    }

    void score(Place at, int n, float softmax_scale, uint32_t* words, float* scale, float* logits, const uint8_t* ahead,
               const uint8_t* later) const {
        constexpr int kTiles = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
        const int count = cache.k.levels / 8, segments = cache.k.scales_per_vector;
        const int64_t bytes = bytes_of(cache.v), early = early_bytes(cache);
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
        const int64_t bytes = bytes_of(cache.v);
        const float most = most_total(cache.v.integers, kStretch);
        for (int s = 0; s < segments; ++s)
            for (int key = 0; key < n; key += kStretch) {
                const int keys = smaller(n - key, kStretch);
                float own[R], steps[R];
                whole_weights(weights + s * R * stride + key, keys, most, steps);
                for (int r = 0; r < R; ++r) own[r] = key ? 1.0f : shrink[r], steps[r] *= cache.v.unit;
                const int64_t early = early_bytes(cache), late = bytes_of(cache.k) - early, share = keys * late / segments;
                mix_stretch(at.codes + key * bytes + s * words * 4, words, keys, own, steps, sums + s * words,
                            ahead + n * early + key * late + s * share, share);
            }
    }

  private:
    // Converts the weights of up to kStretch keys to integers, zero after the last, and returns their steps.
    void whole_weights(const float* weights, int n, float most_total, float* steps) const {
        const __m512 share = Simd::set1(1.0f / most_total);
        __m512 most[R], total[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) most[r] = total[r] = Simd::zero();
        for (int i = 0; i < n; i += Simd::width)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512 size = _mm512_abs_ps(Simd::load(weights + r * stride + i));
                most[r] = Simd::max(size, most[r]), total[r] = Simd::fma(size, share, total[r]);
            }
        __m512 inverse[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float by;
            steps[r] = step_of(Simd::reduce_max(most[r]), Simd::reduce_add(total[r]), &by);
            inverse[r] = Simd::set1(by);
        }
        for (int i = 0; i < n; i += Simd::width)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole + r * stride + i),
                                    to_whole(Simd::load(weights + r * stride + i), inverse[r]));
    }

    // Writes each row's weights as `Piece` reads them: a register a step, in whose lane blocks lie the weights of their keys.
    template <int WORDS> void spread_weights(int n) const {
        using P = Piece<WORDS>;
        alignas(64) int16_t from[32];
        for (int i = 0; i < 32; ++i) from[i] = static_cast<int16_t>(i / 2 / WORDS + i % 2 * P::kKeys);
        const __m512i order = _mm512_load_si512(from);
        for (int r = 0; r < R; ++r)
            for (int key = 0; key < n; key += P::kStep) {
                // Four or eight weights and no more: they were stored just now, and a wider load would wait for that.
                const __m128i* at = reinterpret_cast<const __m128i*>(whole + r * stride + key);
                const __m512i step = P::kStep == 4 ? _mm512_broadcastq_epi64(_mm_loadl_epi64(at))
                                                   : _mm512_broadcast_i32x4(_mm_loadu_si128(at));
                _mm512_storeu_si512(spread + r * kSpread + key / P::kStep * 32, _mm512_permutexvar_epi16(order, step));
            }
    }

    // One segment, `words` words, of each vector; prefetches `share` bytes at `ahead`.
    void mix_stretch(const uint8_t* codes, int words, int n, const float* shrink, const float* steps, float* sums,
                     const uint8_t* at, int64_t share) const {
        const int64_t turns = 8 / kPlanes * (words / 16 * (n / 2) + words % 16 / 8 * (n / 4) + (words % 8 > 0) * (n / 8));
        const int64_t bytes = bytes_of(cache.v);
        Ahead ahead(at, share, turns > 0 ? turns : 1);
        int word = 0;
        for (; word + 16 <= words; word += 16)
            mix_piece<16>({codes + word * 4, bytes, n, 0, whole, stride}, shrink, steps, sums + word, ahead);
        if (word + 8 <= words) {
            spread_weights<8>(n);
            mix_piece<8>({codes + word * 4, bytes, n, 0, spread, kSpread}, shrink, steps, sums + word, ahead);
            word += 8;
        }
        if (word == words) return;
        spread_weights<4>(n);
        for (; word < words; word += 4) {
            // The last piece overlaps the one before, whose words it leaves alone.
            const int from = smaller(word, words - 4);
            mix_piece<4>({codes + from * 4, bytes, n, word - from, spread, kSpread}, shrink, steps, sums + from, ahead);
        }
    }

    template <int WORDS>
    void mix_piece(const Piece<WORDS>& of, const float* shrink, const float* steps, float* sums, Ahead& ahead) const {
        const __m512i table = Vnni512::table(cache.v.integers);
        auto pass = [&](auto first) __attribute__((always_inline)) {
            constexpr int kFirst = decltype(first)::value;
            if constexpr (kFirst % kPlanes == 0)
                mix_whole<R, WORDS, kFirst, kPlanes>(of, table, shrink, steps, sums, cache.v.levels / 8, ahead);
        };
        pass(Int<0>{}), pass(Int<2>{}), pass(Int<4>{}), pass(Int<6>{});
    }
};
