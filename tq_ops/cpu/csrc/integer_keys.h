// Q.K of nibbles, and of levels of several widths, by dot products of 16-bit integers, two products per lane and instruction,
// for BF16 activations.

constexpr int kQueryStride = kMaxDim;  // integers per row

inline __m256i to_halves(__m512 x, __m512 inverse) { return _mm512_cvtsepi32_epi16(to_integers(x, inverse)); }

// Converts a rotated row of N levels in word order to N / 2 pairs, levels k and k + 4 of a word. Returns the row's step.
inline float whole_query(const float* q, int levels, float most_total, int16_t* pairs) {
    float inverse;
    const float step = query_step(q, levels, most_total, &inverse);
    for (int i = 0; i < levels; i += 16) {
        const __m256i whole = to_halves(_mm512_loadu_ps(q + i), _mm512_set1_ps(inverse));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + i), _mm256_unpacklo_epi16(whole, _mm256_srli_si256(whole, 8)));
    }
    return step;
}

// Centroids of a word's levels kLevel and kLevel + 4 of 16 keys, one key per lane: looked up in transposed words
// [word][TILES][lane] ...
template <int TILES> struct WordsOfKeys {
    const uint32_t* words;
    __m512i table;

    template <int LEVEL> __m512i at(int word, int tile) const {
        const uint32_t* from = words + (word * TILES + tile) * Avx512::width;
        const __m512i x = Vnni512::load(reinterpret_cast<const char*>(from) + LEVEL / 2);
        return Vnni512::lookup(table, Vnni512::shift<LEVEL % 2 * 4>(x));
    }
};

// ... or found before, [word][4 levels][kSlabTiles], by `look_up_words`.
constexpr int kSlabTiles = 2,
              kSlabKeys = kSlabTiles * Avx512::width;  // keys that are looked up at a time for all rows of a pass
struct FoundKeys {
    const __m512i* values;

    template <int LEVEL> __m512i at(int word, int tile) const { return values[(word * 4 + LEVEL) * kSlabTiles + tile]; }
};

inline void look_up_words(const uint32_t* words, int count, const int16_t* integers, __m512i* values) {
    const WordsOfKeys<kSlabTiles> of{words, Vnni512::table(integers)};
    for (int word = 0; word < count; ++word, values += 4 * kSlabTiles)
        for (int tile = 0; tile < kSlabTiles; ++tile) {
            values[tile] = of.at<0>(word, tile), values[kSlabTiles + tile] = of.at<1>(word, tile);
            values[2 * kSlabTiles + tile] = of.at<2>(word, tile), values[3 * kSlabTiles + tile] = of.at<3>(word, tile);
        }
}

// Logits of TILES tiles of 16 keys, summed over `count` words; factor[r] scales row r's integers.
template <int R, int TILES, class Keys>
inline void score_whole(Keys keys, int count, const int16_t* q, const float* scale, const float* factor, float* logits,
                        int stride, Ahead ahead) {
    using V = Vnni512;
    constexpr int kWidth = Avx512::width;
    __m512i acc[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = V::zero();
#pragma GCC unroll 1
    for (int j = 0; j < count; ++j) {
        ahead.turn();
        const int16_t* column = q + j * 8;
        auto level = [&](auto k) __attribute__((always_inline)) {
            constexpr int kLevel = decltype(k)::value;
            __m512i value[TILES];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t) value[t] = keys.template at<kLevel>(j, t);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512i query = V::pair(column + r * kQueryStride + kLevel * 2);
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) acc[t][r] = V::dot(value[t], query, acc[t][r]);
            }
        };
        level(Int<0>{}), level(Int<1>{}), level(Int<2>{}), level(Int<3>{});
    }
    for (int t = 0; t < TILES; ++t) {
        const __m512 own = Avx512::load(scale + t * kWidth);
        for (int r = 0; r < R; ++r) {
            const __m512 by = Avx512::mul(own, Avx512::set1(factor[r]));
            Avx512::store(logits + r * stride + t * kWidth, Avx512::mul(V::to_floats(acc[t][r]), by));
        }
    }
}

// -- Levels of several widths --------------------------------------------------------------------------------------------
// A word of a column holds two units of two bytes, or four of one. A step takes two levels out of every word, one out of each
// half: `vpermw` ignores what lies above the lowest five bits, and tables of narrower levels repeat themselves.

// One column's steps: 2 * step + half of a word is one level.
struct Steps {
    int words, count, parts;
    const Column& column;

    Steps(const Column& column, int levels)
        : words(levels / kEighths * column.bytes / 4),
          count(column.count * (column.bytes == 1 ? 2 : 1)),
          parts(column.count),
          column(column) {}

    int shift(int step) const { return column.parts[step % parts].shift + step / parts * 8; }
    // The unit of a level, in a column of so many words.
    int unit(int word, int step, int half) const {
        return column.bytes == 1 ? 4 * word + 2 * half + step / parts : 2 * word + half;
    }
};

// Calls body(level of the vector) in the order of steps: columns, words, steps, halves.
template <class Body> inline void each_level(const Side& side, Body body) {
    for (int c = 0; c < side.columns->count; ++c) {
        const Steps steps(side.columns->column[c], side.levels);
        for (int word = 0; word < steps.words; ++word)
            for (int step = 0; step < steps.count; ++step)
                for (int half = 0; half < 2; ++half)
                    body(steps.column.parts[step % steps.parts].eighth * (side.levels / kEighths) +
                         steps.unit(word, step, half));
    }
}

// As `whole_query`, of a row in the vector's own order; the pairs are in the order of steps.
inline float whole_query_in_steps(const Side& side, const float* q, float most_total, int16_t* pairs) {
    alignas(64) int16_t whole[kMaxDim];
    float inverse;
    const float step = query_step(q, side.levels, most_total, &inverse);
    for (int i = 0; i < side.levels; i += 16)
        _mm256_store_si256(reinterpret_cast<__m256i*>(whole + i), to_halves(_mm512_loadu_ps(q + i), _mm512_set1_ps(inverse)));
    each_level(side, [&](int level) { *pairs++ = whole[level]; });
    return step;
}

// Calls body(x, lookup) for each step of each word, in order; lookup(x) are the centroids of the levels of a register of
// words.
template <int TILES, class Body>
inline __attribute__((always_inline)) void each_step(const Side& side, const uint32_t* words, Body body) {
    for (int c = 0; c < side.columns->count; ++c) {
        const Steps steps(side.columns->column[c], side.levels);
        __m512i low[10], high[10];
        __m128i shift[10];
        bool wide[10];
        for (int s = 0; s < steps.count; ++s) {
            const int bits = steps.column.parts[s % steps.parts].bits;
            low[s] = Vnni512::load(side.integers + integers_begin(bits));
            wide[s] = bits > 5;
            if (wide[s]) high[s] = Vnni512::load(side.integers + integers_begin(bits) + 32);
            shift[s] = _mm_cvtsi32_si128(steps.shift(s));
        }
        for (int word = 0; word < steps.words; ++word, words += TILES * Avx512::width)
            for (int s = 0; s < steps.count; ++s) {
                __m512i value[TILES];
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) {
                    const __m512i x = _mm512_srl_epi16(Vnni512::load(words + t * Avx512::width), shift[s]);
                    value[t] = wide[s] ? _mm512_permutex2var_epi16(low[s], x, high[s]) : Vnni512::lookup(low[s], x);
                }
                body(value);
            }
    }
}

// Logits of TILES tiles of 16 keys, as `score_whole`.
template <int R, int TILES>
inline void score_steps(const Side& side, const uint32_t* words, const int16_t* q, const float* scale, const float* factor,
                        float* logits, int stride, Ahead ahead) {
    using V = Vnni512;
    constexpr int kWidth = Avx512::width;
    __m512i acc[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = V::zero();
    int turn = 0;
    each_step<TILES>(side, words, [&](const __m512i* value) __attribute__((always_inline)) {
        if (turn++ % 4 == 0) ahead.turn();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i query = V::pair(q + r * kQueryStride);
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t) acc[t][r] = V::dot(value[t], query, acc[t][r]);
        }
        q += 2;
    });
    for (int t = 0; t < TILES; ++t) {
        const __m512 own = Avx512::load(scale + t * kWidth);
        for (int r = 0; r < R; ++r) {
            const __m512 by = Avx512::mul(own, Avx512::set1(factor[r]));
            Avx512::store(logits + r * stride + t * kWidth, Avx512::mul(V::to_floats(acc[t][r]), by));
        }
    }
}
