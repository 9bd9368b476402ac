// Q.K and P.V of levels of 5 and 6 bits in FP32, as of nibbles (float_keys.h, float_values.h). A plane of nibbles comes first,
// then one of the bit or the two bits above them.

// Calls body(word of nibbles, whether its upper nibbles) for every four levels.
template <class Body> inline void each_four(int levels, Body body) {
    for (int word = 0; word < levels / 8; ++word) body(word, 0), body(word, 1);
}

// Calls body(level of the vector) in the order of the steps.
template <class Body> inline void each_level_of_planes(const Side& side, Body body) {
    each_four(side.levels, [&](int word, int upper) {
        for (int byte = 0; byte < 4; ++byte) body(word * 4 + byte + upper * side.levels / 2);
    });
}

// Calls body(values of TILES tiles of keys) for each level, HIGH bits of which lie in the second plane, [word][stride keys].
template <class Simd, int TILES, int HIGH, class Body>
inline __attribute__((always_inline)) void each_plane_step(const Side& side, const uint32_t* words, int stride, Body body) {
    const auto table = Simd::template wide_table<4 + HIGH>(side.centroids);
    const int part = side.levels * HIGH / 8;  // levels of a part of the second plane, which are its bytes
    const uint32_t* const second = words + side.levels / 8 * stride;
    each_four(side.levels, [&](int word, int upper) __attribute__((always_inline)) {
        const int first = word * 4 + upper * side.levels / 2, up = first / part * HIGH;
        const uint32_t* const high = second + first % part / 4 * stride;
        typename Simd::I level[TILES];
#pragma GCC unroll 4
        for (int t = 0; t < TILES; ++t) {
            const typename Simd::I above = Simd::load_words(high + t * Simd::width);
            level[t] = Simd::join_nibbles(Simd::shift_by(Simd::load_words(words + word * stride + t * Simd::width), 4 * upper),
                                          up < 4 ? Simd::shift_up_by(above, 4 - up) : Simd::shift_by(above, up - 4));
        }
        auto byte = [&](auto number) __attribute__((always_inline)) {
            typename Simd::F value[TILES];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t)
                value[t] =
                    Simd::template lookup_wide<4 + HIGH>(table, Simd::template shift<8 * decltype(number)::value>(level[t]));
            body(value);
        };
        byte(Int<0>{}), byte(Int<1>{}), byte(Int<2>{}), byte(Int<3>{});
    });
}

// How the second plane of values lies beside the words of nibbles: bytes of a part of it, and by how much the bits of each
// eight bytes of nibbles stand up in it, of the lower nibbles and of the upper ones.
struct Above {
    int part;
    alignas(64) uint64_t up[2][kMaxDim / 16];

    explicit Above(const Side& v) : part(v.levels * v.planes[1] / 8) {
        for (int i = 0; i < v.levels; i += 8) up[i >= v.levels / 2][i % (v.levels / 2) / 8] = i / part * v.planes[1];
    }
};

// As `CodesOfValues`, HIGH bits of a level in the second plane. Nothing behind a vector is read.
template <class Unit, int HIGH> struct PlanesOfValues {
    typedef typename Unit::Simd Simd;
    typedef decltype(Simd::template wide_table<4 + HIGH>(nullptr)) Table;
    const uint8_t *codes, *high;
    int64_t bytes;
    int lanes;
    const uint64_t *lower, *upper;
    Table table;

    PlanesOfValues(const Side& v, const Above& above, const uint8_t* vectors, int word)
        : codes(vectors + word * 4),
          high(vectors + v.levels / 2 + (above.part < kBytes ? 0 : word * 4 % above.part)),
          bytes(v.bytes),
          lanes(smaller(above.part, kBytes) / 8),
          lower(above.up[0] + word / 2),
          upper(above.up[1] + word / 2),
          table(Simd::template wide_table<4 + HIGH>(v.centroids)) {}

    template <bool> __attribute__((always_inline)) void at(int key, typename Simd::F* value) const {
        const typename Simd::I nibbles = Simd::load_words(codes + key * bytes), bits = Simd::again(high + key * bytes, lanes);
        const typename Simd::I level[2] = {
            Simd::join_nibbles(nibbles, Simd::shift_up_by(Simd::down(bits, lower), 4)),
            Simd::join_nibbles(Simd::template shift<4>(nibbles), Simd::shift_up_by(Simd::down(bits, upper), 4))};
        auto plane = [&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value, kLevel = Unit::kFirst + kPlane;
            if constexpr (kPlane < Unit::kPlanes)
                value[kPlane] =
                    Simd::template lookup_wide<4 + HIGH>(table, Simd::template shift<kLevel / 2 * 8>(level[kLevel % 2]));
        };
        plane(Int<0>{}), plane(Int<1>{}), plane(Int<2>{}), plane(Int<3>{});
        plane(Int<4>{}), plane(Int<5>{}), plane(Int<6>{}), plane(Int<7>{});
    }

  private:
    static constexpr int kBytes = 4 * Simd::width;
};

// Sums [R, levels] of values that were mixed so, from the order of words to that of levels.
template <int R> inline void order_levels(int levels, float* sums) {
    const int words = levels / 8;
    float ordered[kMaxDim];
    for (int r = 0; r < R; ++r, sums += levels) {
        for (int k = 0; k < 8; ++k)
            for (int word = 0; word < words; ++word) ordered[word * 4 + k / 2 + k % 2 * levels / 2] = sums[k * words + word];
        std::memcpy(sums, ordered, levels * sizeof *sums);
    }
}
