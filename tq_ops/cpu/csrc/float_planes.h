// Q.K of levels of 5 and 6 bits in FP32: one key per lane, as of nibbles (float_keys.h). A plane of nibbles comes first, then
// one of the bit or the two bits above them.

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
