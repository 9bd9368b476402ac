// Q.K of levels of several widths (`Columns`) in FP32: one key per lane, as of nibbles (float_keys.h). Each step takes one
// level out of a word of every key, in the order of columns, words, units and parts; queries lie in that order, too.

// One column's steps. A word holds two units of two bytes, or four of one.
struct WordSteps {
    int words, units, parts, count;  // words of a vector, units of a word, levels of a unit, steps of a word
    const Column& column;

    WordSteps(const Column& column, int levels)
        : words(levels / kEighths * column.bytes / 4),
          units(4 / column.bytes),
          parts(column.count),
          count(units * parts),
          column(column) {}

    const ColumnPart& part(int step) const { return column.parts[step % parts]; }
    int shift(int step) const { return part(step).shift + step / parts * 8 * column.bytes; }
};
constexpr int kMostSteps = 20;

// Calls body(level of the vector) for each step of each word.
template <class Body> inline void each_level_in_steps(const Side& side, Body body) {
    for (int c = 0; c < side.columns->count; ++c) {
        const WordSteps steps(side.columns->column[c], side.levels);
        for (int word = 0; word < steps.words; ++word)
            for (int s = 0; s < steps.count; ++s)
                body(steps.part(s).eighth * (side.levels / kEighths) + word * steps.units + s / steps.parts);
    }
}

// Centroids of each width up to 4 bits, again and again: a lookup takes four bits, whatever lies above a level.
constexpr int kRepeated = 16;
inline void repeat_centroids(const Side& side, float* tables) {
    for (int bits = 1; bits <= 4; ++bits)
        for (int i = 0; i < kRepeated; ++i) *tables++ = side.centroids[centroids_begin(bits) + i % (1 << bits)];
}

// Calls body(values of TILES tiles of keys) for each step of each word, [word][stride keys].
template <class Simd, int TILES, class Body>
inline __attribute__((always_inline)) void each_step(const Side& side, const float* repeated, const uint32_t* words,
                                                     int stride, Body body) {
    const auto five = Simd::template wide_table<5>(side.centroids + centroids_begin(5));
    const auto six = Simd::template wide_table<6>(side.centroids + centroids_begin(6));
    for (int c = 0; c < side.columns->count; ++c) {
        const WordSteps steps(side.columns->column[c], side.levels);
        int shifts[kMostSteps], bits[kMostSteps];
        for (int s = 0; s < steps.count; ++s) shifts[s] = steps.shift(s), bits[s] = steps.part(s).bits;
        for (int word = 0; word < steps.words; ++word, words += stride)
            for (int s = 0; s < steps.count; ++s) {
                typename Simd::I x[TILES];
                typename Simd::F value[TILES];
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) x[t] = Simd::shift_by(Simd::load_words(words + t * Simd::width), shifts[s]);
                if (bits[s] <= 4) {
                    const typename Simd::Table table = Simd::table(repeated + (bits[s] - 1) * kRepeated);
#pragma GCC unroll 4
                    for (int t = 0; t < TILES; ++t) value[t] = Simd::lookup(table, x[t]);
                } else if (bits[s] == 5) {
#pragma GCC unroll 4
                    for (int t = 0; t < TILES; ++t) value[t] = Simd::template lookup_wide<5>(five, x[t]);
                } else {
#pragma GCC unroll 4
                    for (int t = 0; t < TILES; ++t) value[t] = Simd::template lookup_wide<6>(six, x[t]);
                }
                body(value);
            }
    }
}

// Logits of TILES tiles of keys, as `score`: `steps` calls what it is given with the values of each step, in the order in
// which queries lie.
template <class Simd, int R, int TILES, class Steps>
inline __attribute__((always_inline)) void score_in_steps(Steps steps, const float* q, const float* scale, float softmax_scale,
                                                          int stride, float* logits, Ahead ahead) {
    typename Simd::F acc[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = Simd::zero();
    int turn = 0;
    steps([&](const typename Simd::F* value) __attribute__((always_inline)) {
        if (turn++ % 8 == 0) ahead.turn();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename Simd::F query = Simd::set1(q[r]);
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t) acc[t][r] = Simd::fma(value[t], query, acc[t][r]);
        }
        q += R;
    });
    write_logits<Simd, R, TILES>(acc, scale, softmax_scale, stride, logits);
}

// Of columns, and of planes.
template <class Simd, int R, int TILES>
inline void score_columns(const Side& side, const float* repeated, const uint32_t* words, int stride, const float* q,
                          const float* scale, float softmax_scale, float* logits, Ahead ahead) {
    auto steps = [&](auto body)
                     __attribute__((always_inline)) { each_step<Simd, TILES>(side, repeated, words, stride, body); };
    score_in_steps<Simd, R, TILES>(steps, q, scale, softmax_scale, stride, logits, ahead);
}
template <class Simd, int R, int TILES, int HIGH>
inline void score_planes(const Side& side, const uint32_t* words, int stride, const float* q, const float* scale,
                         float softmax_scale, float* logits, Ahead ahead) {
    auto steps = [&](auto body)
                     __attribute__((always_inline)) { each_plane_step<Simd, TILES, HIGH>(side, words, stride, body); };
    score_in_steps<Simd, R, TILES>(steps, q, scale, softmax_scale, stride, logits, ahead);
}

// Logits [R, stride] of the block's first n keys; the rest of each row is undefined. Prefetches V's codes of them at `ahead`.
// `repeated`: as `repeat_centroids` leaves them, where widths differ.
template <class Simd, int R>
void score_block(const Cache& cache, Place at, int n, const float* q, const float* repeated, float softmax_scale, int stride,
                 uint32_t* words, float* scale, float* logits, const uint8_t* ahead, const uint8_t* later) {
    constexpr int kTiles = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
    const int count = key_words(cache.k), turns = cache.k.levels / 8;
    const int64_t bytes = cache.v.bytes, early = early_bytes(cache);
    const typename Simd::Table table = Simd::table(cache.k.columns ? repeated : cache.k.centroids);
    auto tiles = [&](auto number, int key) __attribute__((always_inline)) {
        constexpr int kNumber = decltype(number)::value, kLanes = kNumber * Simd::width;
        const Ahead share(ahead + key * bytes, kLanes * bytes, turns, later + key * early, kLanes * early);
        if (cache.k.columns)
            return score_columns<Simd, R, kNumber>(cache.k, repeated, words + key, stride, q, scale + key, softmax_scale,
                                                   logits + key, share);
        if (has_planes(cache.k) && cache.k.planes[1] == 1)
            return score_planes<Simd, R, kNumber, 1>(cache.k, words + key, stride, q, scale + key, softmax_scale, logits + key,
                                                     share);
        if (has_planes(cache.k))
            return score_planes<Simd, R, kNumber, 2>(cache.k, words + key, stride, q, scale + key, softmax_scale, logits + key,
                                                     share);
        score<Simd, R, kNumber>(WordsOfKeys<Simd>{words + key, stride, table}, stride, turns, q, scale + key, softmax_scale,
                                logits + key, share);
    };
    for (int key = 0; key < n; key += Simd::width)
        Simd::transpose(at.codes + static_cast<int64_t>(key) * count * 4, count, smaller(n - key, Simd::width), words + key,
                        stride);
    Simd::widen_halves(at.scales, n, stride, scale);
    int key = 0;
    for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width) tiles(Int<kTiles>{}, key);
    for (; key < n; key += Simd::width) tiles(Int<1>{}, key);
}
