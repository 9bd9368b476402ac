// P.V of nibbles by dot products of 16-bit integers, of two keys per lane and instruction, for BF16 activations.

// Some words of n vectors, `bytes` apart, and the weights of row r at weights[r * stride].
struct Words {
    const uint8_t* codes;
    int64_t bytes;
    int n;
    const int16_t* weights;
    int stride;
};

// What a register's lanes hold of two keys' vectors is a unit. It says which 16-bit halves of their words those are, and to
// which sums the lanes belong: plane k of kPlanes is their levels kFirst + k.

// 16 words, of which kPlanes of the eight levels.
template <int FIRST, int PLANES> struct Wide {
    static constexpr int kFirst = FIRST, kPlanes = PLANES;

    template <bool LAST> __attribute__((always_inline)) static __m512i halves(const Words& of, int key) {
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

// WORDS words, all of their levels.
template <int WORDS, int FIRST, int PLANES> struct Narrow {
    static constexpr int kFirst = FIRST, kPlanes = PLANES;
    static constexpr Lanes<WORDS> kLanes{};

    template <bool LAST> __attribute__((always_inline)) static __m512i halves(const Words& of, int key) {
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
};

// Calls body(unit, word) for all units of so many words.
template <int PLANES, class Body> __attribute__((always_inline)) inline void each_unit(int words, Body body) {
    int word = 0;
    for (; word + 16 <= words; word += 16) {
        body(Wide<0, PLANES>{}, word);
        if constexpr (PLANES == 2) body(Wide<2, PLANES>{}, word);
        body(Wide<4, PLANES>{}, word);
        if constexpr (PLANES == 2) body(Wide<6, PLANES>{}, word);
    }
    if (words - word >= 8) {
        body(Narrow<8, 0, PLANES>{}, word);
        if constexpr (PLANES == 2) body(Narrow<8, 2, PLANES>{}, word);
        word += 8;
    }
    if (words - word >= 4) body(Narrow<4, 0, 2>{}, word), word += 4;
    if (words - word >= 2) body(Narrow<2, 0, 1>{}, word);
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
inline void mix_unit(const Words& of, __m512i table, const float* shrink, const float* step, float* sums, int words,
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
template <class Unit> inline void look_up_unit(const Words& of, __m512i table, __m512i* found) {
    int key = 0;
    for (; key + 2 < of.n; key += 2, found += Unit::kPlanes)
        look_up_planes<Unit>(table, Unit::template halves<false>(of, key), found);
    look_up_planes<Unit>(table, Unit::template halves<true>(of, key), found);
}

// ... and their sums.
template <int R, class Unit>
inline void mix_found(const __m512i* found, const Words& of, const float* shrink, const float* step, float* sums, int words) {
    __m512i acc[Unit::kPlanes][R];
    clear(acc);
    for (int key = 0; key < of.n; key += 2, found += Unit::kPlanes) {
        __m512i value[Unit::kPlanes];
#pragma GCC unroll 4
        for (int k = 0; k < Unit::kPlanes; ++k) value[k] = found[k];
        add_two(value, of.weights + key, of.stride, acc);
    }
    Unit::put(acc, shrink, step, sums, words);
}
