// Q.K of packed keys, one key per lane, so that nothing is summed across a register. `Sums` is the arithmetic: FloatSums, or
// the exact IntegerSums (integer_sums.h). Keys are read in steps; a step is `Sums::levels` levels of every key, in TILES
// registers, and queries lie in the order of the steps. How keys are stored decides what a step reads:
//   NibbleKeys   levels of 4 bits, in words of eight
//   ColumnKeys   levels of several widths (`Columns`)
//   PlaneKeys    levels of 5 and 6 bits: a plane of nibbles, then one of the bits above them
//   SlabKeys     values that a pass has looked up for all of its tiles

constexpr int kSlabKeys = 32;  // keys that a pass looks up at a time

// Words [word][stride keys]; `next_word` is called before the steps of each.
template <class Sums> struct NibbleKeys {
    const int turns;  // calls of `next_word`
    const typename Sums::Table table;

    explicit NibbleKeys(const Side& k) : turns(k.levels / 8), table(Sums::table(k)) {}

    template <int TILES, class Next, class Body>
    __attribute__((always_inline)) void each(const uint32_t* words, int stride, Next next_word, Body body) const {
#pragma GCC unroll 1
        for (int word = 0; word < turns; ++word, words += stride) {
            next_word();
            each_below<8 / Sums::levels>([&](auto level) __attribute__((always_inline)) {
                constexpr int kLevel = decltype(level)::value;
                typename Sums::Value value[TILES];
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t)
                    value[t] = Sums::template look_up<kLevel>(table, words + t * Sums::Simd::width);
                body(value);
            });
        }
    }
};

template <class Sums, int TILES> struct SlabKeys {
    const float* values;  // [steps, kSlabKeys], as `Sums::store` leaves them
    const int turns;

    template <int, class Next, class Body>
    __attribute__((always_inline)) void each(const uint32_t*, int, Next next_word, Body body) const {
        const float* step = values;
#pragma GCC unroll 1
        for (int word = 0; word < turns; ++word) {
            next_word();
            each_below<8 / Sums::levels>([&](auto) __attribute__((always_inline)) {
                typename Sums::Value value[TILES];
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) value[t] = Sums::load(step + t * Sums::Simd::width);
                body(value);
                step += kSlabKeys;
            });
        }
    }
};

// The steps of one column, each of PER levels of a word: one of every PER-th part of it. A word holds two units of two bytes,
// or four of one.
template <int PER> struct ColumnSteps {
    static constexpr int most = 20 / PER;
    const Column& column;
    const int words, units, count;  // words of a vector, units of a part of a word, steps of a word

    ColumnSteps(const Column& column, int levels)
        : column(column),
          words(levels / kEighths * column.bytes / 4),
          units(4 / column.bytes / PER),
          count(units * column.count) {}

    const ColumnPart& part(int step) const { return column.parts[step % column.count]; }
    int shift(int step) const { return part(step).shift + step / column.count * 8 * column.bytes; }
    int level(int levels, int word, int step, int i) const {
        return part(step).eighth * (levels / kEighths) + (word * PER + i) * units + step / column.count;
    }
};

template <class Sums> struct ColumnKeys {
    const Side& side;
    const float* tables;  // as `Sums::put_tables` leaves them
    const int turns;

    ColumnKeys(const Side& k, const float* tables) : side(k), tables(tables), turns(k.bytes / 4) {}

    template <int TILES, class Next, class Body>
    __attribute__((always_inline)) void each(const uint32_t* words, int stride, Next next_word, Body body) const {
        for (int c = 0; c < side.columns->count; ++c) {
            const ColumnSteps<Sums::levels> steps(side.columns->column[c], side.levels);
            const typename Sums::ColumnTables by_step(side, tables, steps);
            for (int word = 0; word < steps.words; ++word, words += stride) {
                next_word();
                for (int step = 0; step < steps.count; ++step) {
                    typename Sums::Value value[TILES];
                    by_step.template look_up<TILES>(step, words, value);
                    body(value);
                }
            }
        }
    }
};

// HIGH bits of a level lie in the second plane.
template <class Simd, int HIGH> struct PlaneKeys {
    const Side& side;
    const int turns;

    explicit PlaneKeys(const Side& k) : side(k), turns(k.levels / 8) {}

    template <int TILES, class Next, class Body>
    __attribute__((always_inline)) void each(const uint32_t* words, int stride, Next next_word, Body body) const {
        const auto table = Simd::template wide_table<4 + HIGH>(side.centroids);
        const int part = side.levels * HIGH / 8;  // levels of a part of the second plane, which are its bytes
        const uint32_t* const second = words + side.levels / 8 * stride;
        auto half = [&](int word, int upper) __attribute__((always_inline)) {
            const int first = word * 4 + upper * side.levels / 2, up = first / part * HIGH;
            const uint32_t* const high = second + first % part / 4 * stride;
            typename Simd::I level[TILES];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t) {
                const typename Simd::I above = Simd::load_words(high + t * Simd::width),
                                       below = Simd::load_words(words + word * stride + t * Simd::width);
                level[t] = Simd::join_nibbles(Simd::shift_by(below, 4 * upper),
                                              up < 4 ? Simd::shift_up_by(above, 4 - up) : Simd::shift_by(above, up - 4));
            }
            each_below<4>([&](auto byte) __attribute__((always_inline)) {
                typename Simd::F value[TILES];
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t)
                    value[t] =
                        Simd::template lookup_wide<4 + HIGH>(table, Simd::template shift<8 * decltype(byte)::value>(level[t]));
                body(value);
            });
        };
        for (int word = 0; word < turns; ++word) next_word(), half(word, 0), half(word, 1);
    }
};

// Calls body(levels [PER] of a step) for every step of keys.
template <int PER, class Body> inline void each_step_of_keys(const Side& k, Body body) {
    int level[PER];
    if (k.columns) {
        for (int c = 0; c < k.columns->count; ++c) {
            const ColumnSteps<PER> steps(k.columns->column[c], k.levels);
            for (int word = 0; word < steps.words; ++word)
                for (int step = 0; step < steps.count; ++step) {
                    for (int i = 0; i < PER; ++i) level[i] = steps.level(k.levels, word, step, i);
                    body(level);
                }
        }
        return;
    }
    const bool planes = has_planes(k);
    for (int step = 0; step < k.levels / PER; ++step) {
        const int word = step * PER / 8, place = step % (8 / PER);
        for (int i = 0; i < PER; ++i)
            level[i] = planes ? word * 4 + place % 4 + place / 4 * k.levels / 2 : word * 8 + place + i * (8 / PER);
        body(level);
    }
}

// FP32: one level a step.
template <class Register> struct FloatSums {
    typedef Register Simd;
    typedef typename Simd::F Value, Sum;
    typedef typename Simd::Table Table;
    typedef float Query;
    static constexpr int levels = 1;
    static constexpr bool reads_planes = true;
    static constexpr int repeated = 16, table_floats = 4 * repeated;

    static Table table(const Side& k) { return Simd::table(k.centroids); }
    template <int LEVEL> static Value look_up(const Table& table, const uint32_t* words) {
        return centroids_of<Simd, LEVEL, true>(table, words);
    }
    static Value load(const float* values) { return Simd::load(values); }
    static void store(float* values, Value x) { Simd::store(values, x); }
    static Sum zero() { return Simd::zero(); }
    static Value query(const Query* q) { return Simd::set1(*q); }
    static Sum add(Value value, Value query, Sum sum) { return Simd::fma(value, query, sum); }
    static typename Simd::F floats(Sum sum) { return sum; }

    // Queries [steps, R].
    template <int R> static constexpr int row = 1;
    template <int R> static constexpr int step = R;
    template <int R> static int64_t query_floats(const Side& k) { return R * k.levels; }
    template <int R> static void put_queries(const Side& k, const Tile& tile, Query* q, float* factor) {
        each_step_of_keys<1>(k, [&](const int* level) {
            for (int r = 0; r < R; ++r) *q++ = tile.q[r][*level];
        });
        for (int r = 0; r < R; ++r) factor[r] = tile.softmax_scale;
    }

    // Centroids of each width up to 4 bits, again and again: a lookup takes four bits, whatever lies above a level.
    static void put_tables(const Side& k, float* tables) {
        for (int bits = 1; bits <= 4; ++bits)
            for (int i = 0; i < repeated; ++i) *tables++ = k.centroids[centroids_begin(bits) + i % (1 << bits)];
    }
    struct ColumnTables {
        const float* tables;
        decltype(Simd::template wide_table<5>(nullptr)) five;
        decltype(Simd::template wide_table<6>(nullptr)) six;
        int shifts[ColumnSteps<1>::most], bits[ColumnSteps<1>::most];

        ColumnTables(const Side& k, const float* tables, const ColumnSteps<1>& steps)
            : tables(tables),
              five(Simd::template wide_table<5>(k.centroids + centroids_begin(5))),
              six(Simd::template wide_table<6>(k.centroids + centroids_begin(6))) {
            for (int s = 0; s < steps.count; ++s) shifts[s] = steps.shift(s), bits[s] = steps.part(s).bits;
        }
        template <int TILES> __attribute__((always_inline)) void look_up(int step, const uint32_t* words, Value* value) const {
            typename Simd::I x[TILES];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t) x[t] = Simd::shift_by(Simd::load_words(words + t * Simd::width), shifts[step]);
            if (bits[step] <= 4) {
                const Table table = Simd::table(tables + (bits[step] - 1) * repeated);
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) value[t] = Simd::lookup(table, x[t]);
            } else if (bits[step] == 5) {
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) value[t] = Simd::template lookup_wide<5>(five, x[t]);
            } else {
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) value[t] = Simd::template lookup_wide<6>(six, x[t]);
            }
        }
    };
};

// Logits of TILES tiles of keys; each value serves R query rows. Prefetches meanwhile.
template <class Sums, int R, int TILES, class Keys>
inline void score(const Keys& keys, const uint32_t* words, const typename Sums::Query* q, const float* scale,
                  const float* factor, int stride, float* logits, Ahead ahead) {
    typedef typename Sums::Simd Simd;
    typename Sums::Sum acc[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = Sums::zero();
    keys.template each<TILES>(
        words, TILES * Simd::width, [&]() __attribute__((always_inline)) { ahead.turn(); },
        [&](const typename Sums::Value* value) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const typename Sums::Value query = Sums::query(q + r * Sums::template row<R>);
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) acc[t][r] = Sums::add(value[t], query, acc[t][r]);
            }
            q += Sums::template step<R>;
        });
    for (int t = 0; t < TILES; ++t) {
        const typename Simd::F own = Simd::load(scale + t * Simd::width);
        for (int r = 0; r < R; ++r)
            Simd::store(logits + r * stride + t * Simd::width,
                        Simd::mul(Sums::floats(acc[t][r]), Simd::mul(own, Simd::set1(factor[r]))));
    }
}

// The products of R query rows with keys.
template <class Sums, int R> class KeyProducts {
    typedef typename Sums::Simd Simd;
    typedef typename Sums::Query Query;

  public:
    // Whether these products take keys as they are stored.
    static bool scores(const Side& k) {
        return k.cell == kNibble || k.cell == kMixed || (Sums::reads_planes && has_planes(k));
    }
    static int64_t floats(const Cache& cache) { return Sums::template query_floats<R>(cache.k) + Sums::table_floats; }

    KeyProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache_(cache), stride_(stride), tables_(scratch), q_(reinterpret_cast<Query*>(scratch + Sums::table_floats)) {
        if (!scores(cache.k)) return;
        Sums::template put_queries<R>(cache.k, tile, q_, factor_);
        if (cache.k.columns) Sums::put_tables(cache.k, tables_);
    }

    // Logits [R, stride] of the block's first n keys; the rest of each row is undefined. Prefetches V's codes of them at
    // `ahead`, and of the next keys at `later` what V's time does not suffice for.
    void score(Place at, int n, uint32_t* words, float* scale, float* logits, const uint8_t* ahead,
               const uint8_t* later) const {
        constexpr int kTiles = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
        const int64_t bytes = cache_.v.bytes, early = early_bytes(cache_);
        widen_halves<Simd>(at.scales, n, stride_, scale);
        with_keys([&](const auto& keys) __attribute__((always_inline)) {
            auto tiles = [&](auto number, int key) __attribute__((always_inline)) {
                constexpr int kNumber = decltype(number)::value, kLanes = kNumber * Simd::width;
                transpose<kNumber>(at.codes, key, n, words);
                const Ahead share(ahead + key * bytes, kLanes * bytes, keys.turns, later + key * early, kLanes * early);
                haarkv::score<Sums, R, kNumber>(keys, words, q_, scale + key, factor_, stride_, logits + key, share);
            };
            int key = 0;
            for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width) tiles(Int<kTiles>{}, key);
            for (; key < n; key += Simd::width) tiles(Int<1>{}, key);
        });
    }

    // -- In a pass: what its tiles share is looked up to a slab.

    static int64_t slab_floats(const Cache& cache) { return cache.k.levels / Sums::levels * kSlabKeys; }

    // Values of up to kSlabKeys keys.
    void look_up_keys(const uint8_t* codes, int n, uint32_t* words, float* slab) const {
        constexpr int kTiles = kSlabKeys / Simd::width;
        transpose<kTiles>(codes, 0, n, words);
        with_keys([&](const auto& keys) __attribute__((always_inline)) {
            keys.template each<kTiles>(
                words, kSlabKeys, []() __attribute__((always_inline)) {},
                [&](const typename Sums::Value* value) __attribute__((always_inline)) {
                    for (int t = 0; t < kTiles; ++t, slab += Simd::width) Sums::store(slab, value[t]);
                });
        });
    }

    // Logits of those keys.
    void score_slab(const float* slab, int n, const float* scale, float* logits) const {
        constexpr int kTiles = R * 2 <= kAccumulators<Simd> ? 2 : 1;
        auto tiles = [&](auto number, int key) __attribute__((always_inline)) {
            constexpr int kNumber = decltype(number)::value;
            const SlabKeys<Sums, kNumber> keys{slab + key, cache_.k.levels / 8};
            haarkv::score<Sums, R, kNumber>(keys, nullptr, q_, scale + key, factor_, stride_, logits + key,
                                            Ahead(nullptr, 0, 1));
        };
        int key = 0;
        for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width) tiles(Int<kTiles>{}, key);
        for (; key < n; key += Simd::width) tiles(Int<1>{}, key);
    }

  private:
    const Cache& cache_;
    const int stride_;  // keys of a row of logits
    float* const tables_;
    Query* const q_;
    float factor_[R];  // of logits

    template <class Body> __attribute__((always_inline)) void with_keys(Body body) const {
        if (cache_.k.columns) return body(ColumnKeys<Sums>(cache_.k, tables_));
        if constexpr (Sums::reads_planes) {
            if (has_planes(cache_.k) && cache_.k.planes[1] == 1) return body(PlaneKeys<Simd, 1>(cache_.k));
            if (has_planes(cache_.k)) return body(PlaneKeys<Simd, 2>(cache_.k));
        }
        body(NibbleKeys<Sums>(cache_.k));
    }

    // Words of TILES tiles of keys from `key` on, of which n are there: [word][key].
    template <int TILES>
    __attribute__((always_inline)) void transpose(const uint8_t* codes, int key, int n, uint32_t* words) const {
        const int count = key_words(cache_.k);
        codes += static_cast<int64_t>(key) * count * 4;
        for (int i = 0; i < TILES * Simd::width && key + i < n; i += Simd::width)
            Simd::transpose(codes + i * count * 4, count, smaller(n - key - i, Simd::width), words + i, TILES * Simd::width);
    }
};
