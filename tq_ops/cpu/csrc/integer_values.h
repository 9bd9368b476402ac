// P.V of nibbles by dot products of 16-bit integers, of two keys per lane and instruction, for BF16 activations.

// Some words of n vectors, `bytes` apart, and the weights of row r at weights[r * stride].
struct PackedValues {
    const uint8_t* codes;
    int64_t bytes;
    int n;
    const int16_t* weights;
    int stride;
};

// What a register's lanes hold of two keys' vectors is a unit. It says which 16-bit halves of their words those are, and to
// which sums the lanes belong: plane k of kPlanes is their levels kFirst + k.

// 16 words, of which kPlanes of the eight levels.
template <int FIRST, int PLANES> struct WideUnit {
    static constexpr int kFirst = FIRST, kPlanes = PLANES;

    template <bool LAST> __attribute__((always_inline)) static __m512i halves(const PackedValues& of, int key) {
        using V = Vnni512;
        const uint8_t* a = of.codes + key * of.bytes;
        // The cache may end right after the last vector. An odd one out is paired with itself, at weight zero.
        const uint8_t* b = LAST && key + 1 >= of.n ? a : a + of.bytes;
        if constexpr (FIRST < 4) return V::lower_halves(V::load(a), b);
        return V::upper_halves(LAST ? V::upper(V::load(a)) : V::load(a + 2), b);
    }

    // sums[r] = sums[r] * shrink[r] + step[r] * acc[r]
    template <int R>
    static void put(const __m512i (&acc)[PLANES][R], const float* shrink, const float* step, float* sums, int words) {
#pragma GCC unroll 4
        for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                float* sum = sums + (r * 8 + FIRST + k) * words;
                const __m512 before = _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(shrink[r]));
                _mm512_storeu_ps(sum, _mm512_fmadd_ps(Vnni512::to_floats(acc[k][r]), _mm512_set1_ps(step[r]), before));
            }
    }
};

// The lanes of a register for WORDS words, 8, 4 or 2, so that none is idle: the lower halves of all words, then the upper
// ones, then both again moved down by the levels that the planes before have, and so on.
template <int WORDS> struct UnitLanes {
    static constexpr int kPlanes = WORDS / 2;
    int16_t from[32] = {};  // where the half of a lane and key lies in the words of two keys
    int16_t down[32] = {};  // bits that it is moved down

    constexpr UnitLanes() {
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

// WORDS words, all of their levels.
template <int WORDS, int FIRST, int PLANES> struct NarrowUnit {
    static constexpr int kFirst = FIRST, kPlanes = PLANES;
    static constexpr UnitLanes<WORDS> kLanes{};

    template <bool LAST> __attribute__((always_inline)) static __m512i halves(const PackedValues& of, int key) {
        const uint8_t* a = of.codes + key * of.bytes;
        const uint8_t* b = LAST && key + 1 >= of.n ? a : a + of.bytes;
        const __m512i found = _mm512_permutexvar_epi16(_mm512_loadu_si512(kLanes.from), side_by_side<WORDS>(a, b));
        return WORDS == 8 ? found : _mm512_srlv_epi16(found, _mm512_loadu_si512(kLanes.down));
    }

    template <int R>
    static void put(const __m512i (&acc)[PLANES][R], const float* shrink, const float* step, float* sums, int words) {
#pragma GCC unroll 4
        for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                alignas(64) float blocks[16];
                auto each = [&](auto act) __attribute__((always_inline)) {
                    for (int block = 0; block < 16 / WORDS; ++block) {
                        float* sum = sums + (r * 8 + UnitLanes<WORDS>::level(block, FIRST + k)) * words;
                        for (int w = 0; w < WORDS; ++w) act(sum[w], blocks[block * WORDS + w]);
                    }
                };
                each([](float& sum, float& lane) { lane = sum; });
                const __m512 before = _mm512_mul_ps(_mm512_load_ps(blocks), _mm512_set1_ps(shrink[r]));
                _mm512_store_ps(blocks, _mm512_fmadd_ps(Vnni512::to_floats(acc[k][r]), _mm512_set1_ps(step[r]), before));
                each([](float& sum, float& lane) { sum = lane; });
            }
    }
};

// Calls body(unit, word) for all units of so many words.
template <int PLANES, class Body> __attribute__((always_inline)) inline void each_integer_unit(int words, Body body) {
    int word = 0;
    for (; word + 16 <= words; word += 16) {
        body(WideUnit<0, PLANES>{}, word);
        if constexpr (PLANES == 2) body(WideUnit<2, PLANES>{}, word);
        body(WideUnit<4, PLANES>{}, word);
        if constexpr (PLANES == 2) body(WideUnit<6, PLANES>{}, word);
    }
    if (words - word >= 8) {
        body(NarrowUnit<8, 0, PLANES>{}, word);
        if constexpr (PLANES == 2) body(NarrowUnit<8, 2, PLANES>{}, word);
        word += 8;
    }
    if (words - word >= 4) body(NarrowUnit<4, 0, 2>{}, word), word += 4;
    if (words - word >= 2) body(NarrowUnit<2, 0, 1>{}, word);
}

// Centroids of the planes of two keys' halves.
template <class Unit> __attribute__((always_inline)) inline void look_up_planes(__m512i table, __m512i both, __m512i* value) {
    using V = Vnni512;
    auto plane = [&](auto k) __attribute__((always_inline)) {
        constexpr int kPlane = decltype(k)::value;
        if constexpr (kPlane < Unit::kPlanes)
            value[kPlane] = V::lookup(table, V::shift<(Unit::kFirst + kPlane) % 4 * 4>(both));
    };
    plane(Int<0>{}), plane(Int<1>{}), plane(Int<2>{}), plane(Int<3>{});
}

// Adds integer products of two keys: a lane holds the same level of both.
template <int R, int PLANES>
__attribute__((always_inline)) inline void add_two(const __m512i* value, const int16_t* weights, int stride,
                                                   __m512i (&acc)[PLANES][R]) {
    using V = Vnni512;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const __m512i weight = V::pair(weights + r * stride);
#pragma GCC unroll 4
        for (int k = 0; k < PLANES; ++k) acc[k][r] = V::dot(value[k], weight, acc[k][r]);
    }
}

template <int R, int PLANES> inline void clear(__m512i (&acc)[PLANES][R]) {
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[k][r] = Vnni512::zero();
}

// sums[r] = sums[r] * shrink[r] + step[r] * (weights[r] @ integer centroids of the vectors), of a unit.
template <int R, class Unit>
inline void mix_unit(const PackedValues& of, __m512i table, const float* shrink, const float* step, float* sums, int words,
                     Ahead& to_fetch) {
    Ahead ahead = to_fetch;  // in registers
    __m512i acc[Unit::kPlanes][R], value[Unit::kPlanes];
    clear(acc);
    auto add = [&](int key, __m512i both) __attribute__((always_inline)) {
        look_up_planes<Unit>(table, both, value);
        add_two(value, of.weights + key, of.stride, acc);
    };
    int key = 0;
    for (; key + 2 < of.n; key += 2) {
        ahead.turn();
        add(key, Unit::template halves<false>(of, key));
    }
    add(key, Unit::template halves<true>(of, key));
    to_fetch = ahead;
    Unit::put(acc, shrink, step, sums, words);
}

// The same in two steps: a unit's centroids of up to kStretch keys, [n / 2, kPlanes], which rows share ...
template <class Unit> inline void look_up_unit(const PackedValues& of, __m512i table, __m512i* slab) {
    int key = 0;
    for (; key + 2 < of.n; key += 2, slab += Unit::kPlanes)
        look_up_planes<Unit>(table, Unit::template halves<false>(of, key), slab);
    look_up_planes<Unit>(table, Unit::template halves<true>(of, key), slab);
}

// ... and their sums.
template <int R, class Unit>
inline void mix_slab(const __m512i* slab, const PackedValues& of, const float* shrink, const float* step, float* sums,
                     int words) {
    __m512i acc[Unit::kPlanes][R];
    clear(acc);
    for (int key = 0; key < of.n; key += 2, slab += Unit::kPlanes) {
        __m512i value[Unit::kPlanes];
#pragma GCC unroll 4
        for (int k = 0; k < Unit::kPlanes; ++k) value[k] = slab[k];
        add_two(value, of.weights + key, of.stride, acc);
    }
    Unit::put(acc, shrink, step, sums, words);
}

// The products of R rows' weights with values.
template <int R> class IntegerValues {
    typedef Avx512 Simd;
    static constexpr int kPlanes = R * 4 <= kAccumulators<Simd> ? 4 : 2;

  public:
    static bool mixes(const Side& v) { return v.cell == kNibble; }
    static int64_t floats(const Cache& cache) { return R * padded(cache.block_size) / 2; }

    IntegerValues(const Cache& cache, int stride, float* scratch)
        : cache_(cache), stride_(stride), whole_(reinterpret_cast<int16_t*>(scratch)) {}

    void order(float*) const {}

    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) {
        const int words = cache_.v.levels / 8;
        const int64_t bytes = nibble_bytes(cache_.v), early = early_bytes(cache_), late = cache_.k.bytes - early;
        for (int key = 0; key < n; key += kStretch) {
            const int keys = smaller(n - key, kStretch);
            weigh(weights + key, keys);
            mix_stretch(at.codes + key * bytes, words, keys, key ? kOnes : shrink, sums, ahead + n * early + key * late,
                        keys * late);
        }
    }

    // -- In a pass: what its tiles share is looked up to a slab.

    static constexpr int kValuesTogether = kStretch;

    static int64_t slab_floats(const Cache&) { return kStretch / 2 * kPlanes * static_cast<int64_t>(Simd::width); }

    // Calls body(unit, word) for what is looked up of so many words of values at a time.
    template <class Body> static void units(int words, Body body) { each_integer_unit<kPlanes>(words, body); }

    // A unit's centroids of up to kValuesTogether values.
    template <class Unit>
    static void look_up_values(Unit, const Cache& cache, const uint8_t* codes, int word, int n, float* slab) {
        const PackedValues of{codes + word * 4, nibble_bytes(cache.v), n, nullptr, 0};
        look_up_unit<Unit>(of, Vnni512::table(cache.v.integers), reinterpret_cast<__m512i*>(slab));
    }

    // Converts the weights of up to kStretch keys to integers, zero after the last.
    void weigh(const float* weights, int n) {
        __m512 inverse[R];
        weight_steps<R>(weights, stride_, n, most_total(cache_.v.integers, kStretch), steps_, inverse);
        for (int i = 0; i < n; i += Simd::width)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole_ + r * stride_ + i),
                                    to_halves(Simd::load(weights + r * stride_ + i), inverse[r]));
        for (int r = 0; r < R; ++r) steps_[r] *= cache_.v.unit;
    }

    // Adds a unit's sums of the n keys that `weigh` took.
    template <class Unit> void mix_shared(Unit, const float* slab, int n, const float* shrink, float* sums) const {
        mix_slab<R, Unit>(reinterpret_cast<const __m512i*>(slab), {nullptr, 0, n, whole_, stride_}, shrink, steps_, sums,
                          cache_.v.levels / 8);
    }

  private:
    const Cache& cache_;
    const int stride_;      // keys of a row of weights
    int16_t* const whole_;  // [R, stride], a stretch's weights
    float steps_[R];        // of those integers, as `weigh` leaves them

    // `words` words of each vector; prefetches `share` bytes at `at`.
    void mix_stretch(const uint8_t* codes, int words, int n, const float* shrink, float* sums, const uint8_t* at,
                     int64_t share) const {
        const __m512i table = Vnni512::table(cache_.v.integers);
        const int passes =
            words / 16 * 8 / kPlanes + (words % 16 / 8 * 4 + kPlanes - 1) / kPlanes + words % 8 / 4 + words % 4 / 2;
        Ahead ahead(at, share, n > 1 ? passes * (n / 2) : 1);
        each_integer_unit<kPlanes>(words, [&](auto unit, int word) __attribute__((always_inline)) {
            mix_unit<R, decltype(unit)>({codes + word * 4, nibble_bytes(cache_.v), n, whole_, stride_}, table, shrink, steps_,
                                        sums + word, cache_.v.levels / 8, ahead);
        });
    }
};
