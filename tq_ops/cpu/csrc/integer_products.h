// Q.K and P.V of nibbles by 16-bit integers: the products of R rows, as `attend_rows` and passes call them.

template <int R> struct IntegerProducts {
    using Simd = Avx512;
    static constexpr int kPlanes = R * 4 <= kAccumulators<Simd> ? 4 : 2;

    const Cache& cache;
    const int stride;      // keys of a row in scratch
    int16_t* const q;      // [R, kQueryStride]
    int16_t* const whole;  // [R, stride], a stretch's weights
    float step[R];         // of the queries' integers
    float steps[R];        // of the weights', as `weigh` leaves them

    static int64_t floats(const Cache& cache) { return R * (kQueryStride + padded(cache.block_size)) / 2; }

    IntegerProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache(cache), stride(stride), q(reinterpret_cast<int16_t*>(scratch)), whole(q + R * kQueryStride) {
        if (!scores(cache.k)) return;
        const Side& k = cache.k;
        const float most = most_total(k.integers, k.levels, k.columns ? kIntegers : 16);
        for (int r = 0; r < R; ++r) {
            int16_t* pairs = q + r * kQueryStride;
            step[r] = k.unit * (k.columns ? whole_query_in_steps(k, tile.q[r], most, pairs)
                                          : whole_query(tile.q[r], k.levels, most, pairs));
        }
    }

    // Whether these products take a side's keys as they are stored.
    static bool scores(const Side& k) { return k.cell == kNibble || k.cell == kMixed; }
    static bool mixes(const Side& v) { return v.cell == kNibble; }
    void order(float*) const {}

    void score(Place at, int n, float softmax_scale, uint32_t* words, float* scale, float* logits, const uint8_t* ahead,
               const uint8_t* later) const {
        constexpr int kTiles = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
        const int count = key_words(cache.k);
        const int64_t bytes = cache.v.bytes, early = early_bytes(cache);
        float factor[R];
        for (int r = 0; r < R; ++r) factor[r] = step[r] * softmax_scale;
        Simd::widen_halves(at.scales, n, stride, scale);
        auto tiles = [&](auto number, int key) __attribute__((always_inline)) {
            constexpr int kNumber = decltype(number)::value, kLanes = kNumber * Simd::width;
            const uint8_t* codes = at.codes + static_cast<int64_t>(key) * count * 4;
            for (int i = 0; i < kLanes && key + i < n; i += Simd::width)
                Simd::transpose(codes + i * count * 4, count, smaller(n - key - i, Simd::width), words + i, kLanes);
            const Ahead share(ahead + key * bytes, kLanes * bytes, cache.k.levels / 8, later + key * early, kLanes * early);
            if (cache.k.columns)
                return score_steps<R, kNumber>(cache.k, words, q, scale + key, factor, logits + key, stride, share);
            const WordsOfKeys<kNumber> keys{words, Vnni512::table(cache.k.integers)};
            score_whole<R, kNumber>(keys, count, q, scale + key, factor, logits + key, stride, share);
        };
        int key = 0;
        for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width) tiles(Int<kTiles>{}, key);
        for (; key < n; key += Simd::width) tiles(Int<1>{}, key);
    }

    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) {
        const int words = cache.v.levels / 8;
        const int64_t bytes = nibble_bytes(cache.v), early = early_bytes(cache), late = cache.k.bytes - early;
        for (int key = 0; key < n; key += kStretch) {
            const int keys = smaller(n - key, kStretch);
            weigh(weights + key, keys);
            float own[R];
            for (int r = 0; r < R; ++r) own[r] = key ? 1.0f : shrink[r];
            mix_stretch(at.codes + key * bytes, words, keys, own, sums, ahead + n * early + key * late, keys * late);
        }
    }

    // -- In a pass: what its tiles share is looked up to `found`.

    static constexpr int kKeysTogether = kSlabKeys, kValuesTogether = kStretch;

    static int64_t found_floats(const Cache& cache) {
        return larger(cache.k.levels / 8 * 4 * kSlabTiles, kStretch / 2 * kPlanes) * static_cast<int64_t>(Simd::width);
    }

    // Centroids of up to kKeysTogether keys.
    static void look_up_keys(const Cache& cache, const uint8_t* codes, int n, uint32_t* words, float* found) {
        const int count = key_words(cache.k);
        for (int i = 0; i < n; i += Simd::width)
            Simd::transpose(codes + i * count * 4, count, smaller(n - i, Simd::width), words + i, kSlabKeys);
        auto* values = reinterpret_cast<__m512i*>(found);
        if (!cache.k.columns) return look_up_words(words, count, cache.k.integers, values);
        each_step<kSlabTiles>(cache.k, words, [&](const __m512i* value) {
            for (int t = 0; t < kSlabTiles; ++t) *values++ = value[t];
        });
    }

    // Logits of those keys.
    void score_found(const float* found, int n, float softmax_scale, const float* scale, float* logits) const {
        const int count = cache.k.levels / 8;
        float factor[R];
        for (int r = 0; r < R; ++r) factor[r] = step[r] * softmax_scale;
        auto tiles = [&](auto number) __attribute__((always_inline)) {
            score_whole<R, decltype(number)::value>(FoundKeys{reinterpret_cast<const __m512i*>(found)}, count, q, scale,
                                                    factor, logits, stride, Ahead(nullptr, 0, 1));
        };
        if (n > Simd::width) return tiles(Int<kSlabTiles>{});
        tiles(Int<1>{});
    }

    // Calls body(unit, word) for what is looked up of so many words of values at a time.
    template <class Body> static void units(int words, Body body) { each_unit<kPlanes>(words, body); }

    // A unit's centroids of up to kValuesTogether values.
    template <class Unit>
    static void look_up_values(Unit, const Cache& cache, const uint8_t* codes, int word, int n, float* found) {
        const Words of{codes + word * 4, nibble_bytes(cache.v), n, nullptr, 0};
        look_up_unit<Unit>(of, Vnni512::table(cache.v.integers), reinterpret_cast<__m512i*>(found));
    }

    // Converts the weights of up to kStretch keys to integers, zero after the last.
    void weigh(const float* weights, int n) {
        __m512 inverse[R];
        weight_steps<R>(weights, stride, n, most_total(cache.v.integers, kStretch), steps, inverse);
        for (int i = 0; i < n; i += Simd::width)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole + r * stride + i),
                                    to_halves(Simd::load(weights + r * stride + i), inverse[r]));
        for (int r = 0; r < R; ++r) steps[r] *= cache.v.unit;
    }

    // Adds a unit's sums of the n keys that `weigh` took.
    template <class Unit> void mix_shared(Unit, const float* found, int n, const float* shrink, float* sums) const {
        mix_found<R, Unit>(reinterpret_cast<const __m512i*>(found), {nullptr, 0, n, whole, stride}, shrink, steps, sums,
                           cache.v.levels / 8);
    }

  private:
    // `words` words of each vector; prefetches `share` bytes at `at`.
    void mix_stretch(const uint8_t* codes, int words, int n, const float* shrink, float* sums, const uint8_t* at,
                     int64_t share) const {
        const __m512i table = Vnni512::table(cache.v.integers);
        const int passes =
            words / 16 * 8 / kPlanes + (words % 16 / 8 * 4 + kPlanes - 1) / kPlanes + words % 8 / 4 + words % 4 / 2;
        Ahead ahead(at, share, n > 1 ? passes * (n / 2) : 1);
        each_unit<kPlanes>(words, [&](auto unit, int word) __attribute__((always_inline)) {
            mix_unit<R, decltype(unit)>({codes + word * 4, nibble_bytes(cache.v), n, whole, stride}, table, shrink, steps,
                                        sums + word, cache.v.levels / 8, ahead);
        });
    }
};
