// P.V in FP32, of nibbles and of levels of 5 and 6 bits, whose bits above the nibbles lie in a second plane.

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

// The products of R rows' weights with values.
template <class Simd, class Narrow, int R> class FloatValues {
  public:
    // Whether these products take values as they are stored, whole registers of which are looked up.
    static bool mixes(const Side& v) { return v.cell == kNibble || in_planes(v); }
    static int64_t floats(const Cache& cache) {
        return is_short(cache) ? padded(cache.block_size) * Narrow::width + kLine / 4 : 0;
    }

    FloatValues(const Cache& cache, int stride, float* scratch)
        : cache_(cache), stride_(stride), spaced_(reinterpret_cast<uint8_t*>(scratch)) {}

    // Adds n vectors to the sums, and prefetches K's codes of as many at `ahead`. Each register prefetches its share.
    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) const {
        const int words = cache_.v.levels / 8;
        const int64_t total = n * (cache_.k.bytes - early_bytes(cache_));
        int64_t bytes = nibble_bytes(cache_.v);
        if (cache_.v.cell == kNibble && is_short(cache_)) bytes = put_apart(at.codes, n), at.codes = spaced_;
        ahead += n * early_bytes(cache_);
        units(words, [&](auto unit, int word) __attribute__((always_inline)) {
            typedef decltype(unit) U;
            const int64_t begin = total * (word + unit.first) / words, end = total * (word + unit.last) / words;
            const Ahead share(ahead + begin, end - begin, n);
            auto add = [&](const auto& values) __attribute__((always_inline)) {
                haarkv::mix<R>(unit, values, n, weights, stride_, shrink, sums + word, words, share);
            };
            if (with_planes<U>(cache_.v, at.codes, word, add)) return;
            add(CodesOfValues<U>{at.codes + word * 4, bytes, U::Simd::table(cache_.v.centroids)});
        });
    }

    // Puts the sums of all values in the order of the format's levels.
    void order(float* sums) const {
        if (in_planes(cache_.v)) order_levels<R>(cache_.v.levels, sums);
    }

    // -- In a pass: what its tiles share is looked up to a slab.

    static constexpr int kValuesTogether = 64;

    static int64_t slab_floats(const Cache&) { return kValuesTogether * 8 * Simd::width; }

    // Calls body(unit, word) for what is looked up of so many words of values at a time.
    template <class Body> __attribute__((always_inline)) static void units(int words, Body body) {
        each_unit<R, Simd, Narrow>(words, body);
    }

    // A unit's centroids of up to kValuesTogether values.
    template <class U> static void look_up_values(U, const Cache& cache, const uint8_t* codes, int word, int n, float* slab) {
        typedef typename U::Simd Register;
        const typename Register::Table table = Register::table(cache.v.centroids);
        const int64_t bytes = nibble_bytes(cache.v);
        auto store = [&](int key, const typename Register::F* value) __attribute__((always_inline)) {
            for (int k = 0; k < U::kPlanes; ++k) Register::store(slab + (key * U::kPlanes + k) * Register::width, value[k]);
        };
        auto each = [&](const auto& values) __attribute__((always_inline)) {
            typename Register::F value[U::kPlanes];
            for (int key = 0; key < n; ++key) values.template at<true>(key, value), store(key, value);
        };
        if (with_planes<U>(cache.v, codes, word, each)) return;
        codes += word * 4;
        auto put = [&](int key, const CodesOfValues<U>& of, auto past) __attribute__((always_inline)) {
            typename Register::F value[U::kPlanes];
            of.template at<decltype(past)::value>(0, value);
            store(key, value);
        };
        for (int key = 0; key < n; ++key, codes += bytes) {
            if (is_short(cache)) {
                uint8_t vector[4 * Narrow::width + kLine] = {};
                std::memcpy(vector, codes, bytes);
                put(key, {vector, 0, table}, Int<true>{});
            } else if (key + 1 < n) {
                put(key, {codes, 0, table}, Int<true>{});
            } else {
                put(key, {codes, 0, table}, Int<false>{});
            }
        }
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
    const int stride_;       // keys of a row of weights
    uint8_t* const spaced_;  // [stride, 4 * Narrow::width], vectors shorter than a narrow register, and a word past them
    const float* weights_;   // by `weigh`

    static bool in_planes(const Side& v) { return Simd::looks_up_64 && has_planes(v) && v.levels / 8 % Simd::width == 0; }

    // Calls body(values) of a unit whose levels lie in planes; whether they do.
    template <class U, class Body>
    __attribute__((always_inline)) static bool with_planes(const Side& v, const uint8_t* codes, int word, Body body) {
        if constexpr (U::Simd::looks_up_64) {
            if (!in_planes(v)) return false;
            const Above above(v);
            if (v.planes[1] == 1)
                body(PlanesOfValues<U, 1>(v, above, codes, word));
            else
                body(PlanesOfValues<U, 2>(v, above, codes, word));
            return true;
        }
        return false;
    }

    static bool is_short(const Cache& cache) { return cache.v.levels / 8 < Narrow::width; }

    // Copies vectors to `spaced_`; bytes from one to the next.
    int64_t put_apart(const uint8_t* codes, int n) const {
        constexpr int64_t kBytes = 4 * Narrow::width;
        const int64_t bytes = nibble_bytes(cache_.v);
        for (int key = 0; key < n; ++key) std::memcpy(spaced_ + key * kBytes, codes + key * bytes, bytes);
        return kBytes;
    }
};
