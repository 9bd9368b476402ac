// P.V of nibbles by dot products of 16-bit integers, of two keys per lane and instruction, for BF16 activations.

// Some words of n vectors, `bytes` apart, and the weights of row r at weights[r * stride].
struct PackedValues {
    const uint8_t* codes;
    int64_t bytes;
    int n;
    const int16_t* weights;
    int stride;

    // Calls body(key, halves) for each two keys. The cache may end right after the last vector. An odd one out is paired with
    // itself, at weight zero.
    template <class Unit, class Body> __attribute__((always_inline)) void each_two(Body body) const {
        const uint8_t* a = codes;
        int key = 0;
        for (; key + 2 < n; key += 2, a += 2 * bytes) body(key, Unit::template halves<false>(a, a + bytes));
        body(key, Unit::template halves<true>(a, key + 1 < n ? a + bytes : a));
    }
};

// What a register's lanes hold of the vectors of two keys at a and b is a unit. It says which 16-bit halves of their words
// those are, and to which sums the lanes belong: plane k of kPlanes is their levels kFirst + k.

// 16 words, of which kPlanes of the eight levels.
template <int FIRST, int PLANES> struct WideUnit {
    static constexpr int kFirst = FIRST, kPlanes = PLANES;

    template <bool LAST> __attribute__((always_inline)) static __m512i halves(const uint8_t* a, const uint8_t* b) {
        using V = Vnni512;
        if constexpr (FIRST < 4) return V::lower_halves(V::load(a), b);
        return V::upper_halves(LAST ? V::upper(V::load(a)) : V::load(a + 2), b);
    }
    static __m512 load(const float* sums, int) { return _mm512_loadu_ps(sums); }
    static void store(float* sums, int, __m512 x) { _mm512_storeu_ps(sums, x); }
};

// Where 16-bit halves lie in the words of two keys, of eight words each: the lower ones of all, then the upper ones.
struct NarrowLanes {
    int16_t from[32] = {};

    constexpr NarrowLanes() {
        for (int i = 0; i < 32; ++i) from[i] = static_cast<int16_t>(i % 2 * 16 + i / 2 % 8 * 2 + i / 16);
    }
};

// Eight words: a lane has a lower half, and another one four levels further up.
template <int FIRST, int PLANES> struct NarrowUnit {
    static constexpr int kFirst = FIRST, kPlanes = PLANES;
    static constexpr NarrowLanes kLanes{};

    template <bool> __attribute__((always_inline)) static __m512i halves(const uint8_t* a, const uint8_t* b) {
        const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
        const __m512i both = _mm512_inserti64x4(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
        return _mm512_permutexvar_epi16(_mm512_loadu_si512(kLanes.from), both);
    }
    static __m512 load(const float* sums, int words) {
        return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(sums)), _mm256_loadu_ps(sums + 4 * words), 1);
    }
    static void store(float* sums, int words, __m512 x) {
        _mm256_storeu_ps(sums, _mm512_castps512_ps256(x)), _mm256_storeu_ps(sums + 4 * words, _mm512_extractf32x8_ps(x, 1));
    }
};

// sums[r] = sums[r] * shrink[r] + step[r] * acc[r]
template <class Unit, int R, int PLANES>
inline void put_unit(const __m512i (&acc)[PLANES][R], const float* shrink, const float* step, float* sums, int words) {
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float* sum = sums + (r * 8 + Unit::kFirst + k) * words;
            const __m512 before = _mm512_mul_ps(Unit::load(sum, words), _mm512_set1_ps(shrink[r]));
            Unit::store(sum, words, _mm512_fmadd_ps(Vnni512::floats(acc[k][r]), _mm512_set1_ps(step[r]), before));
        }
}

// Centroids of the planes of two keys' halves.
template <class Unit> __attribute__((always_inline)) inline void look_up_planes(__m512i table, __m512i both, __m512i* value) {
    using V = Vnni512;
    each_below<Unit::kPlanes>([&](auto k) __attribute__((always_inline)) {
        constexpr int kPlane = decltype(k)::value;
        value[kPlane] = V::lookup(table, V::shift<(Unit::kFirst + kPlane) % 4 * 4>(both));
    });
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
        for (int k = 0; k < PLANES; ++k) acc[k][r] = V::add(value[k], weight, acc[k][r]);
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
    of.template each_two<Unit>([&](int key, __m512i both) __attribute__((always_inline)) {
        ahead.turn();
        look_up_planes<Unit>(table, both, value);
        add_two(value, of.weights + key, of.stride, acc);
    });
    to_fetch = ahead;
    put_unit<Unit>(acc, shrink, step, sums, words);
}

// The same in two steps: a unit's centroids of up to kStretch keys, [n / 2, kPlanes], which rows share ...
template <class Unit> inline void look_up_unit(const PackedValues& of, __m512i table, __m512i* slab) {
    of.template each_two<Unit>([&](int, __m512i both) __attribute__((always_inline)) {
        look_up_planes<Unit>(table, both, slab);
        slab += Unit::kPlanes;
    });
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
    put_unit<Unit>(acc, shrink, step, sums, words);
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
        const int words = cache_.v.levels / 8, passes = words / 2 / kPlanes;
        const int64_t bytes = nibble_bytes(cache_.v), early = early_bytes(cache_), late = cache_.k.bytes - early;
        const __m512i table = Vnni512::table(cache_.v.integers);
        for (int key = 0; key < n; key += kStretch) {
            const int keys = smaller(n - key, kStretch);
            weigh(weights + key, keys);
            Ahead share(ahead + n * early + key * late, keys * late, keys > 1 ? passes * (keys / 2) : 1);
            units(words, [&](auto unit, int word) __attribute__((always_inline)) {
                const PackedValues of{at.codes + key * bytes + word * 4, bytes, keys, whole_, stride_};
                mix_unit<R, decltype(unit)>(of, table, key ? kOnes : shrink, steps_, sums + word, words, share);
            });
        }
    }

    // -- In a pass: what its tiles share is looked up to a slab.

    static constexpr int kValuesTogether = kStretch;

    static int64_t slab_floats(const Cache&) { return kStretch / 2 * kPlanes * static_cast<int64_t>(Simd::width); }

    // Calls body(unit, word) for what is looked up at a time of values of this many words.
    template <class Body> __attribute__((always_inline)) static void units(int words, Body body) {
        for (int word = 0; word + 16 <= words; word += 16)
            each_below<8 / kPlanes>([&](auto pass) __attribute__((always_inline)) {
                body(WideUnit<decltype(pass)::value * kPlanes, kPlanes>{}, word);
            });
        if (words >= 16) return;
        each_below<4 / kPlanes>([&](auto pass) __attribute__((always_inline)) {
            body(NarrowUnit<decltype(pass)::value * kPlanes, kPlanes>{}, 0);
        });
    }

    // A unit's centroids of up to kValuesTogether values.
    template <class Unit>
    static void look_up_values(Unit, const Cache& cache, const uint8_t* codes, int word, int n, float* slab) {
        const PackedValues of{codes + word * 4, nibble_bytes(cache.v), n, nullptr, 0};
        look_up_unit<Unit>(of, Vnni512::table(cache.v.integers), reinterpret_cast<__m512i*>(slab));
    }

    // Converts the weights of up to kStretch keys to integers, zero after the last.
    void weigh(const float* weights, int n) {
        __m512 inverse[R];
        steps_of_rows<R>(weights, stride_, n, most_total(cache_.v.integers, kStretch), steps_, inverse);
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
};
