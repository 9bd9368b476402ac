// P.V of nibbles in FP32.

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

// A register's width of a vector's words, of which lanes first ... last - 1 are summed, and PLANES of their levels from FIRST
// on.
template <class Register, int FIRST, int PLANES> struct Unit {
    typedef Register Simd;
    static constexpr int kFirst = FIRST, kPlanes = PLANES;
    int first, last;
};

// Centroids of a unit of n vectors: looked up in their codes, `bytes` apart ...
template <class Unit> struct CodesOfValues {
    typedef typename Unit::Simd Simd;
    const uint8_t* codes;
    int64_t bytes;
    typename Simd::Table table;

    // PAST says whether bytes behind the vector may be read: the cache may end right after the last one.
    template <bool PAST> __attribute__((always_inline)) void at(int key, typename Simd::F* value) const {
        auto plane = [&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value;
            if constexpr (kPlane < Unit::kPlanes)
                value[kPlane] = centroids_of<Simd, Unit::kFirst + kPlane, PAST>(table, codes + key * bytes);
        };
        plane(Int<0>{}), plane(Int<1>{}), plane(Int<2>{}), plane(Int<3>{});
        plane(Int<4>{}), plane(Int<5>{}), plane(Int<6>{}), plane(Int<7>{});
    }
};

// ... or found before, [n, PLANES].
template <class Unit> struct FoundValues {
    typedef typename Unit::Simd Simd;
    const float* values;

    template <bool> __attribute__((always_inline)) void at(int key, typename Simd::F* value) const {
#pragma GCC unroll 8
        for (int k = 0; k < Unit::kPlanes; ++k) value[k] = Simd::load(values + (key * Unit::kPlanes + k) * Simd::width);
    }
};

// sums[r] = sums[r] * shrink[r] + weights[r] @ values of n vectors, of a unit.
template <int R, class Unit, class Values>
__attribute__((noinline)) void mix(Unit of, const Values& values, int n, const float* weights, int stride, const float* shrink,
                                   float* sums, int words, Ahead ahead) {
    typedef typename Unit::Simd Simd;
    constexpr int FIRST = Unit::kFirst, PLANES = Unit::kPlanes;
    typename Simd::F acc[PLANES][R];
    for (int k = 0; k < PLANES; ++k)
        for (int r = 0; r < R; ++r)
            acc[k][r] =
                Simd::mul(load_lanes<Simd>(sums + (r * 8 + FIRST + k) * words, of.first, of.last), Simd::set1(shrink[r]));
    auto add = [&](int key, auto past) __attribute__((always_inline)) {
        if constexpr (FIRST == 0) ahead.turn();
        typename Simd::F value[PLANES];
        values.template at<decltype(past)::value>(key, value);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename Simd::F weight = Simd::set1(weights[r * stride + key]);
#pragma GCC unroll 8
            for (int k = 0; k < PLANES; ++k) acc[k][r] = Simd::fma(value[k], weight, acc[k][r]);
        }
    };
    for (int key = 0; key + 1 < n; ++key) add(key, Int<true>{});
    add(n - 1, Int<false>{});
    for (int k = 0; k < PLANES; ++k)
        for (int r = 0; r < R; ++r) store_lanes<Simd>(sums + (r * 8 + FIRST + k) * words, of.first, of.last, acc[k][r]);
}

// Calls body(unit, word) for all levels of a register's width of words: of as many planes as leave R rows' sums in registers.
template <int R, class Simd, class Body>
__attribute__((always_inline)) inline void each_plane(int first, int last, int word, Body& body) {
    constexpr int kMost = kAccumulators<Simd>;
    constexpr int kPlanes = R * 8 <= kMost ? 8 : R * 4 <= kMost ? 4 : R * 2 <= kMost ? 2 : 1;
    auto pass = [&](auto from) __attribute__((always_inline)) {
        constexpr int kFirst = decltype(from)::value;
        if constexpr (kFirst % kPlanes == 0) body(Unit<Simd, kFirst, kPlanes>{first, last}, word);
    };
    pass(Int<0>{}), pass(Int<1>{}), pass(Int<2>{}), pass(Int<3>{});
    pass(Int<4>{}), pass(Int<5>{}), pass(Int<6>{}), pass(Int<7>{});
}

// The same of all words. `Narrow` is a register of half the width, for vectors shorter than one; the last one overlaps the one
// before, whose words it leaves alone.
template <int R, class Wide, class Narrow, class Body>
__attribute__((always_inline)) inline void each_unit(int words, Body body) {
    if (words < Narrow::width) return each_plane<R, Narrow>(0, words, 0, body);
    int word = 0;
    for (; word + Wide::width <= words; word += Wide::width) each_plane<R, Wide>(0, Wide::width, word, body);
    for (; word < words; word += Narrow::width) {
        const int from = smaller(word, words - Narrow::width);
        each_plane<R, Narrow>(word - from, Narrow::width, from, body);
    }
}
