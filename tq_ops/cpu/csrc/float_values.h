// P.V in FP32, of nibbles and of levels of 5 and 6 bits, whose bits above the nibbles lie in a second plane.

// A register's width of a vector's words, and PLANES of their levels from FIRST on.
template <class Register, int FIRST, int PLANES> struct Unit {
    typedef Register Simd;
    static constexpr int kFirst = FIRST, kPlanes = PLANES;
};

// Centroids of a unit of n vectors: looked up in their codes, `bytes` apart ...
template <class Unit> struct CodesOfValues {
    typedef typename Unit::Simd Simd;
    const uint8_t* codes;
    int64_t bytes;
    typename Simd::Table table;

    // PAST says whether bytes behind the vector may be read: the cache may end right after the last one.
    template <bool PAST> __attribute__((always_inline)) void at(int key, typename Simd::F* value) const {
        each_below<Unit::kPlanes>([&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value;
            value[kPlane] = centroids_of<Simd, Unit::kFirst + kPlane, PAST>(table, codes + key * bytes);
        });
    }
};

// ... or looked up before, [n, PLANES].
template <class Unit> struct SlabValues {
    typedef typename Unit::Simd Simd;
    const float* values;

    template <bool> __attribute__((always_inline)) void at(int key, typename Simd::F* value) const {
#pragma GCC unroll 8
        for (int k = 0; k < Unit::kPlanes; ++k) value[k] = Simd::load(values + (key * Unit::kPlanes + k) * Simd::width);
    }
};

// sums[r] = sums[r] * shrink[r] + weights[r] @ values of n vectors, of a unit.
template <int R, class Unit, class Values>
__attribute__((noinline)) void mix(Unit, const Values& values, int n, const float* weights, int stride, const float* shrink,
                                   float* sums, int words, Ahead ahead) {
    typedef typename Unit::Simd Simd;
    constexpr int FIRST = Unit::kFirst, PLANES = Unit::kPlanes;
    typename Simd::F acc[PLANES][R];
    for (int k = 0; k < PLANES; ++k)
        for (int r = 0; r < R; ++r)
            acc[k][r] = Simd::mul(Simd::load(sums + (r * 8 + FIRST + k) * words), Simd::set1(shrink[r]));
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
        for (int r = 0; r < R; ++r) Simd::store(sums + (r * 8 + FIRST + k) * words, acc[k][r]);
}

// Calls body(unit, word) for all levels of a register's width of words: of as many planes as leave R rows' sums in registers.
template <int R, class Simd, class Body> __attribute__((always_inline)) inline void each_plane(int word, Body& body) {
    constexpr int kMost = kAccumulators<Simd>;
    constexpr int kPlanes = R * 8 <= kMost ? 8 : R * 4 <= kMost ? 4 : R * 2 <= kMost ? 2 : 1;
    each_below<8 / kPlanes>(
        [&](auto pass) __attribute__((always_inline)) { body(Unit<Simd, decltype(pass)::value * kPlanes, kPlanes>{}, word); });
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
        each_below<Unit::kPlanes>([&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value, kLevel = Unit::kFirst + kPlane;
            value[kPlane] =
                Simd::template lookup_wide<4 + HIGH>(table, Simd::template shift<kLevel / 2 * 8>(level[kLevel % 2]));
        });
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

// The products of R rows' weights with values.
template <class Simd, class Narrow, int R> class FloatValues {
  public:
    // Whether these products take values as they are stored, whole registers of which are looked up.
    static bool mixes(const Side& v) { return v.cell == kNibble || in_planes(v); }
    static int64_t floats(const Cache&) { return 0; }

    FloatValues(const Cache& cache, int stride, float*) : cache_(cache), stride_(stride) {}

    // Adds n vectors to the sums, and prefetches K's codes of as many at `ahead`. Each register prefetches its share.
    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) const {
        const int words = cache_.v.levels / 8;
        const int64_t early = n * early_bytes(cache_), total = n * cache_.k.bytes - early;
        units(words, [&](auto unit, int word) __attribute__((always_inline)) {
            typedef decltype(unit) U;
            const int64_t begin = total * word / words, end = total * (word + U::Simd::width) / words;
            const Ahead share(ahead + early + begin, end - begin, n);
            with_values<U>(cache_.v, at.codes, word, [&](const auto& values) __attribute__((always_inline)) {
                haarkv::mix<R>(unit, values, n, weights, stride_, shrink, sums + word, words, share);
            });
        });
    }

    // Puts the sums of all values in the order of the format's levels.
    void order(float* sums) const {
        if (in_planes(cache_.v)) order_levels<R>(cache_.v.levels, sums);
    }

    // -- In a pass: what its tiles share is looked up to a slab.

    static constexpr int kValuesTogether = 64;

    static int64_t slab_floats(const Cache&) { return kValuesTogether * 8 * Simd::width; }

    // Calls body(unit, word) for what is looked up at a time of values of this many words.
    template <class Body> __attribute__((always_inline)) static void units(int words, Body body) {
        int word = 0;
        for (; word + Simd::width <= words; word += Simd::width) each_plane<R, Simd>(word, body);
        if (word < words) each_plane<R, Narrow>(word, body);
    }

    // A unit's centroids of up to kValuesTogether values.
    template <class U> static void look_up_values(U, const Cache& cache, const uint8_t* codes, int word, int n, float* slab) {
        typedef typename U::Simd Register;
        with_values<U>(cache.v, codes, word, [&](const auto& values) __attribute__((always_inline)) {
            auto put = [&](int key, auto past) __attribute__((always_inline)) {
                typename Register::F value[U::kPlanes];
                values.template at<decltype(past)::value>(key, value);
                for (int k = 0; k < U::kPlanes; ++k)
                    Register::store(slab + (key * U::kPlanes + k) * Register::width, value[k]);
            };
            for (int key = 0; key + 1 < n; ++key) put(key, Int<true>{});
            put(n - 1, Int<false>{});
        });
    }

    // Takes the weights of up to kValuesTogether values.
    void weigh(const float* weights, int) { weights_ = weights; }

    // Adds a unit's sums of the n values whose weights `weigh` took.
    template <class U> void mix_shared(U unit, const float* slab, int n, const float* shrink, float* sums) const {
        haarkv::mix<R>(unit, SlabValues<U>{slab}, n, weights_, stride_, shrink, sums, cache_.v.levels / 8,
                       Ahead(nullptr, 0, 1));
    }

  private:
    const Cache& cache_;
    const int stride_;      // keys of a row of weights
    const float* weights_;  // by `weigh`

    static bool in_planes(const Side& v) { return Simd::looks_up_64 && has_planes(v) && v.levels / 8 % Simd::width == 0; }

    // Calls body(values) of a unit, whose levels lie in planes or as nibbles.
    template <class U, class Body>
    __attribute__((always_inline)) static void with_values(const Side& v, const uint8_t* codes, int word, Body body) {
        if constexpr (U::Simd::looks_up_64)
            if (in_planes(v)) {
                const Above above(v);
                if (v.planes[1] == 1) return body(PlanesOfValues<U, 1>(v, above, codes, word));
                return body(PlanesOfValues<U, 2>(v, above, codes, word));
            }
        body(CodesOfValues<U>{codes + word * 4, nibble_bytes(v), U::Simd::table(v.centroids)});
    }
};
