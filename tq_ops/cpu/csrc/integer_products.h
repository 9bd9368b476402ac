// Q.K and P.V of packed codes by dot products of 16-bit integers, two products per lane and instruction, for BF16 activations.
//
// Centroids are 16-bit integers times a unit. A row's query, and its weights of up to kStretch keys, become integers with a
// step of their own: as fine as 16 bits allow, yet coarse enough that no 32-bit sum can overflow, whatever the codes. All
// integer sums are therefore exact; the only errors are those of rounding centroids to their unit and queries and weights to
// half a step.

constexpr int kGroupWords = 4;         // words of a key (32 coordinates) that one 32-bit sum can hold
constexpr int kStretch = 128;          // keys that one 32-bit sum can hold
constexpr int kQueryStride = kMaxDim;  // integers per row

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

// Converts a rotated row in word order to D / 2 pairs, levels k and k + 4 of a word. Returns the row's step.
inline float whole_query(const float* q, int dim, float most_total, int16_t* pairs) {
    __m512 most = _mm512_setzero_ps();
    const __m512 share = _mm512_set1_ps(1.0f / most_total);
    float total = 0.0f;
    for (int d = 0; d < dim; d += 8 * kGroupWords) {
        const __m512 a = _mm512_abs_ps(_mm512_loadu_ps(q + d)), b = _mm512_abs_ps(_mm512_loadu_ps(q + d + 16));
        most = _mm512_max_ps(_mm512_max_ps(a, b), most);
        const float sum = _mm512_reduce_add_ps(_mm512_fmadd_ps(a, share, _mm512_mul_ps(b, share)));
        if (!(sum <= total) && total == total) total = sum;  // a NaN enters and stays
    }
    float inverse;
    const float step = step_of(_mm512_reduce_max_ps(most), total, &inverse);
    for (int d = 0; d < dim; d += 16) {
        const __m256i whole = to_whole(_mm512_loadu_ps(q + d), _mm512_set1_ps(inverse));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + d), _mm256_unpacklo_epi16(whole, _mm256_srli_si256(whole, 8)));
    }
    return step;
}

// Logits of TILES tiles of keys, one key per lane, the words transposed as for FP32; factor[r] scales row r's integers.
template <int R, int TILES>
inline void score_whole(const uint32_t* words, int begin, int end, const int16_t* q, __m512i table, const float* scale,
                        const float* factor, float* logits, int stride, bool add, const uint8_t* ahead) {
    using V = Vnni512;
    constexpr int kWidth = Avx512::width;
    __m512 part[TILES][R];
    for (int group = begin; group < end; group += kGroupWords) {
        __m512i acc[TILES][R];
        for (int t = 0; t < TILES; ++t)
            for (int r = 0; r < R; ++r) acc[t][r] = V::zero();
#pragma GCC unroll 1
        for (int j = group; j < group + kGroupWords; ++j) {
            const uint32_t* word = words + j * TILES * kWidth;
            for (int byte = 0; byte < TILES * kWidth * 4; byte += kLine) fetch(ahead + j * TILES * kWidth * 4 + byte);
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

// sums[r] = sums[r] * shrink[r] + step[r] * (weights[r] @ integer centroids of n vectors), for PLANES of the eight levels of a
// word. Two keys at a time: a lane holds the same level of both.
template <class V, int R, int FIRST, int PLANES>
inline void mix_whole(const uint8_t* codes, int64_t bytes, int n, const int16_t* weights, int stride, typename V::I table,
                      const float* shrink, const float* step, float* sums, int words, int head_dim, const uint8_t* ahead,
                      int64_t step_ahead) {
    using Simd = typename V::Floats;
    typename V::I acc[PLANES][R];
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[k][r] = V::zero();
    auto add = [&](int key, typename V::I halves) __attribute__((always_inline)) {
        typename V::I value[PLANES];
        auto expand = [&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value;
            if constexpr (kPlane < PLANES)
                value[kPlane] = V::lookup(table, V::template shift<(FIRST + kPlane) % 4 * 4>(halves));
        };
        expand(Int<0>{}), expand(Int<1>{}), expand(Int<2>{}), expand(Int<3>{});
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename V::I weight = V::pair(weights + r * stride + key);
#pragma GCC unroll 4
            for (int k = 0; k < PLANES; ++k) acc[k][r] = V::dot(value[k], weight, acc[k][r]);
        }
    };
    const uint8_t* a = codes;
    int key = 0;
    for (; key + 2 < n; key += 2, a += 2 * bytes) {
        fetch(ahead), ahead += step_ahead;
        add(key, FIRST < 4 ? V::lower_halves(V::load(a), a + bytes) : V::upper_halves(V::load(a + 2), a + bytes));
    }
    // The cache may end right after the last vector. An odd one out is paired with itself, at weight zero.
    const uint8_t* b = key + 1 < n ? a + bytes : a;
    add(key, FIRST < 4 ? V::lower_halves(V::load(a), b) : V::upper_halves(V::upper(V::load(a)), b));
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float* sum = sums + r * head_dim + (FIRST + k) * words;
            Simd::store(sum, Simd::fma(V::to_floats(acc[k][r]), Simd::set1(step[r]),
                                       Simd::mul(Simd::load(sum), Simd::set1(shrink[r]))));
        }
}

// The products of R rows, as `attend_rows` calls them.
template <int R> struct IntegerProducts {
    using Simd = Avx512;
    const Cache& cache;
    const int stride;      // keys of a row in scratch
    int16_t* const q;      // [R, kQueryStride]
    int16_t* const whole;  // [R, stride], a stretch's weights
    float step[R];

    static int64_t floats(const Cache& cache) { return R * (kQueryStride / 2 + padded(cache.block_size) / 2); }

    IntegerProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache(cache),
          stride(stride),
          q(reinterpret_cast<int16_t*>(scratch)),
          whole(reinterpret_cast<int16_t*>(scratch + R * kQueryStride / 2)) {
        const float most = most_total(cache.k.integers, 8 * kGroupWords);
        for (int r = 0; r < R; ++r)
            step[r] = whole_query(tile.q[r], cache.head_dim, most, q + r * kQueryStride) * cache.k.unit;
    }

    void score(Place at, int n, float softmax_scale, uint32_t* words, float* scale, float* logits,
               const uint8_t* ahead) const {
        constexpr int kTiles = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
        const int count = cache.head_dim / 8, segments = cache.k.scales_per_vector;
        const __m512i table = Vnni512::table(cache.k.integers);
        float factor[R];
        for (int r = 0; r < R; ++r) factor[r] = step[r] * softmax_scale;
        widen_scales<Simd>(at.scales, segments, n, stride, scale);
        auto tiles = [&](auto number, int key) __attribute__((always_inline)) {
            constexpr int kNumber = decltype(number)::value, kLanes = kNumber * Simd::width;
            const uint8_t* codes = at.codes + static_cast<int64_t>(key) * count * 4;
            for (int i = 0; i < kLanes && key + i < n; i += Simd::width)
                Simd::transpose(codes + i * count * 4, count, smaller(n - key - i, Simd::width), words + i, kLanes);
            for (int s = 0; s < segments; ++s)
                score_whole<R, kNumber>(words, s * count / segments, (s + 1) * count / segments, q, table,
                                        scale + s * stride + key, factor, logits + key, stride, s,
                                        ahead + static_cast<int64_t>(key) * count * 4);
        };
        int key = 0;
        for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width) tiles(Int<kTiles>{}, key);
        for (; key < n; key += Simd::width) tiles(Int<1>{}, key);
    }

    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) const {
        const int segments = cache.v.scales_per_vector, segment = cache.head_dim / segments;
        const int64_t bytes = cache.head_dim / 2;
        const float most = most_total(cache.v.integers, kStretch);
        for (int s = 0; s < segments; ++s)
            for (int key = 0; key < n; key += kStretch) {
                const int keys = smaller(n - key, kStretch);
                float own[R], steps[R];
                whole_weights(weights + s * R * stride + key, keys, most, steps);
                for (int r = 0; r < R; ++r) own[r] = key ? 1.0f : shrink[r], steps[r] *= cache.v.unit;
                const uint8_t* codes = at.codes + key * bytes + s * segment / 2;
                mix_stretch(codes, bytes, keys, own, steps, sums + s * segment / 8, segment / 8,
                            ahead + key * bytes + s * segment / 2 * keys);
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

    // One segment, `words` words, of each vector.
    void mix_stretch(const uint8_t* codes, int64_t bytes, int n, const float* shrink, const float* steps, float* sums,
                     int words, const uint8_t* ahead) const {
        int word = 0;
        for (; word + 16 <= words; word += 16)
            mix_words<Vnni512>(codes + word * 4, bytes, n, shrink, steps, sums + word, ahead + word * 4 * n);
        for (; word < words; word += 8)
            mix_words<Vnni256>(codes + word * 4, bytes, n, shrink, steps, sums + word, ahead + word * 4 * n);
    }

    // 16 or 8 words of each vector. The passes share the work of prefetching as many bytes at `ahead`.
    template <class V>
    void mix_words(const uint8_t* codes, int64_t bytes, int n, const float* shrink, const float* steps, float* sums,
                   const uint8_t* ahead) const {
        constexpr int kPlanes = R * 4 <= kAccumulators<Simd> ? 4 : 2;
        constexpr int64_t kStepAhead = 2 * sizeof(typename V::I) * kPlanes / 8;
        const typename V::I table = V::table(cache.v.integers);
        auto pass = [&](auto first) __attribute__((always_inline)) {
            constexpr int kFirst = decltype(first)::value;
            if constexpr (kFirst % kPlanes == 0)
                mix_whole<V, R, kFirst, kPlanes>(codes, bytes, n, whole, stride, table, shrink, steps, sums,
                                                 cache.head_dim / 8, cache.head_dim,
                                                 ahead + kFirst / kPlanes * (n / 2) * kStepAhead, kStepAhead);
        };
        pass(Int<0>{}), pass(Int<2>{}), pass(Int<4>{}), pass(Int<6>{});
    }
};
