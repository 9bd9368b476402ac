// Q.K and P.V of packed codes by tiles of signed bytes, for BF16 activations: the integers of integers.h and their exact sums,
// so every bit is what `vpdpwssd` makes of them.
//
// A 16-bit integer is 256 * upper + lower, both signed bytes. Of 16 rows, which two tiles of a pass have, one tile of bytes
// holds the upper bytes and one the lower ones; both meet one with the upper bytes of centroids and one with the lower ones.
// The two products of an upper and a lower byte are summed together. Nibbles are looked up to such bytes once for all rows of
// a pass, by `vpshufb`, 32 keys at a time, or two tiles' levels of 128 values: 8 KB, which stay in the nearest cache beside
// the rows.

// What 16 rows are multiplied by: of each chunk their upper bytes and their lower ones, and the same of centroids.
struct Product {
    const int8_t *rows, *pair;
};

constexpr int kSums = 3 * 256;  // of a product, in 32 bits: [upper by upper, mixed, lower by lower][16][16]

// Adds one chunk of a product to tiles SET, SET + 1 and SET + 2: upper by upper bytes, one by the other, and lower by lower
// ones. Meanwhile, where `before` is, it stores the other set there: a processor stores one tile while it multiplies others,
// but only what stands between products in the program.
template <int SET> inline void multiply_chunk(Product of, int32_t* before) {
    constexpr int OTHER = 3 - SET;
    load_tile<6>(of.rows), load_tile<7>(of.pair);
    add_products<SET, 6, 7>();
    if (before) store_tile<OTHER>(before);
    load_tile<7>(of.pair + kTileBytes);
    add_products<SET + 1, 6, 7>();
    if (before) store_tile<OTHER + 1>(before + 256);
    load_tile<6>(of.rows + kTileBytes);
    add_products<SET + 2, 6, 7>();
    if (before) store_tile<OTHER + 2>(before + 512);
    load_tile<7>(of.pair);
    add_products<SET + 1, 6, 7>();
}

template <int SET> inline void multiply(Product of, int chunks, int32_t* before) {
    zero_tile<SET>(), zero_tile<SET + 1>(), zero_tile<SET + 2>();
    multiply_chunk<SET>(of, before);
    for (int c = 1; c < chunks; ++c) {
        of.rows += kPairBytes, of.pair += kPairBytes;
        multiply_chunk<SET>(of, nullptr);
    }
}

// Which of a product's rows and which of its pairs of tiles.
struct At {
    int rows, tile;

    void next(int tiles) {
        if (++tile == tiles) tile = 0, ++rows;
    }
};

// Of rows by tiles products each(At): done(At, sums). A product's sums are stored while the next one runs, and looked at while
// the one after that does. What the first turn stores means nothing and is not read.
template <class Each, class Done> inline void multiply_all(int rows, int tiles, int chunks, Each each, Done done) {
    alignas(64) int32_t sums[2][kSums];
    const int n = rows * tiles;
    At now{0, 0}, then{0, 0};
    auto turn = [&](int i, auto set) __attribute__((always_inline)) {
        constexpr int kSet = decltype(set)::value;
        int32_t* const before = sums[kSet ? 0 : 1];
        if (i < n) multiply<kSet>(each(now), chunks, before), now.next(tiles);
        if (i == n) store_tile<3 - kSet>(before), store_tile<4 - kSet>(before + 256), store_tile<5 - kSet>(before + 512);
        if (i > 1) done(then, sums[kSet ? 1 : 0]), then.next(tiles);
    };
    for (int i = 0; i <= n + 1; i += 2) {
        turn(i, Int<0>{});
        if (i <= n) turn(i + 1, Int<3>{});
    }
}

// Row r of a product: 65,536 * upper.upper + 256 * mixed + lower.lower. What does not fit in 32 bits meanwhile cancels out.
inline __m512 whole_sums(const int32_t* of, int r) {
    auto at = [&](int part) { return _mm512_load_si512(of + part * 256 + r * 16); };
    const __m512i above = _mm512_add_epi32(_mm512_slli_epi32(at(0), 8), at(1));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(above, 8), at(2)));
}

// All tiles are whole ones.
inline TileShapes whole_shapes() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16, kChunk);
    return shapes;
}

// Integers of the rows of two tiles, in scratch, as `Product` takes them. What is in rows that no tile has, or has not written
// yet, only meets sums that are not read.
struct RowBytes {
    int8_t *const q, *const p;  // p of a stretch's weights

    static int64_t size_of_q(const Cache& cache) { return chunks_of(cache.k.levels) * kPairBytes; }
    static int64_t size_of_p() { return kStretch / kChunk * kPairBytes; }
    static int64_t floats(const Cache& cache) { return (size_of_q(cache) + size_of_p()) / 4; }

    RowBytes(const Cache& cache, float* scratch) : q(reinterpret_cast<int8_t*>(scratch)), p(q + size_of_q(cache)) {}
};

// Bytes of the four registers of integers that are packed to `a` and `b`: even ones of a lane of `a`, then of `b`, or odd
// ones.
inline __m512i bytes_of(__m512i a, __m512i b, bool odd) {
    alignas(64) static constexpr struct Places {
        int8_t of[2][64] = {};
        constexpr Places() {
            for (int i = 0; i < 128; ++i)
                of[i / 64][i % 64] = static_cast<int8_t>(i % 64 / 16 * 16 + i % 8 * 2 + i / 64 + (i % 16 < 8 ? 0 : 64));
        }
    } kPlaces;
    return _mm512_permutex2var_epi8(a, _mm512_load_si512(kPlaces.of[odd]), b);
}

// Integers of a row's weights, 16 from weight i on by whole(i), as the bytes of its chunks: upper ones to `bytes`, lower ones
// a tile later, of the next chunk a pair of tiles later.
template <class Whole> inline __attribute__((always_inline)) void put_weight_bytes(int chunks, int8_t* bytes, Whole whole) {
    const __m512i half = _mm512_set1_epi16(128);
#pragma GCC unroll 2
    for (int i = 0; i < chunks * kChunk; i += kChunk, bytes += kPairBytes) {
        const __m512i a = _mm512_packs_epi32(whole(i), whole(i + 16)), b = _mm512_packs_epi32(whole(i + 32), whole(i + 48));
        _mm512_store_si512(bytes, bytes_of(_mm512_add_epi16(a, half), _mm512_add_epi16(b, half), true));
        _mm512_store_si512(bytes + kTileBytes, bytes_of(a, b, false));
    }
}

// What R rows are multiplied by, and their sums: the products of a tile in a pass. The lookups are the pass's own.
template <int R> struct TileProducts {
    const Cache& cache;
    const int stride, columns;
    int8_t* const q;     // of numbers, as `put_queries` says
    int8_t* const p;     // and as `put_weights` says
    float* const sums;   // [columns, R, 16]
    int8_t* weights_at;  // this tile's rows in `RowBytes::p`
    float factor[R];     // of logits: the query's step, the centroids' unit and the softmax scale
    float steps[R];

    static bool mixes(const Side& v) { return v.cell == kNibble; }
    static int tiles_of_queries(const Side& k) { return k.cell == kNibble ? 0 : k.levels / kPairs; }
    static int tiles_of_weights(const Side& v) { return v.cell == kNibble ? 0 : kStretch / kPairs; }
    static int64_t floats(const Cache& cache) {
        return (tiles_of_queries(cache.k) + tiles_of_weights(cache.v)) * kTileBytes / 4 + R * cache.v.levels;
    }

    TileProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache(cache),
          stride(stride),
          columns(cache.v.levels / 16),
          q(reinterpret_cast<int8_t*>(scratch)),
          p(q + tiles_of_queries(cache.k) * kTileBytes),
          sums(reinterpret_cast<float*>(p + tiles_of_weights(cache.v) * kTileBytes)) {
        std::memset(sums, 0, R * columns * 16 * sizeof(float));
        if (cache.k.cell != kNibble) put_queries(tile.q, cache.k.levels, q);
    }

    float* sums_of(int column, int r) const { return sums + (column * R + r) * 16; }
    void shrink(const float* by) const {
        for (int column = 0; column < columns; ++column) shrink_sums<R>(by, 16, sums_of(column, 0));
    }

    // Puts the integers of the tile's rows beside those of another's: `half` 1 is the second of both.
    void take(const Tile& tile, const RowBytes& rows, int half) {
        weights_at = rows.p + half * R * kChunk;
        if (cache.k.cell != kNibble) return;
        const float most = most_total(cache.k.integers, cache.k.levels);
        int8_t* upper = rows.q + half * R * kChunk;
        for (int r = 0; r < R; ++r, upper += kChunk) {
            float step;
            __m512 inverse;
            steps_of_rows<1>(tile.q[r], 0, cache.k.levels, most, &step, &inverse);
            factor[r] = step * cache.k.unit * tile.softmax_scale;
            put_query(tile.q[r], cache.k.levels, inverse, upper, upper + kTileBytes);
        }
    }

    // Logits [R, stride] of 16 keys from `key` on, of their products from the first row on.
    void score(const int32_t* found, int key, const float* scale, float* logits) const {
        const __m512 own = Avx512::load(scale + key);
        const int64_t apart = stride;
        logits += key;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r, logits += apart) {
            const __m512 by = Avx512::mul(own, Avx512::set1(factor[r]));
            Avx512::store(logits, Avx512::fma(whole_sums(found, r), by, Avx512::zero()));
        }
    }

    // Takes the weights [R, stride] of the next n values, up to kStretch. Packing leaves them in the order of `row_of`.
    void weigh(const float* weights, int n) {
        __m512 inverse[R];
        steps_of_rows<R>(weights, stride, n, most_total(cache.v.integers, kStretch), steps, inverse);
        for (int r = 0; r < R; ++r) steps[r] *= cache.v.unit;
        for (int r = 0; r < R; ++r)
            put_weight_bytes(chunks_of(n), weights_at + r * kChunk, [&](int i) {
                return i < n ? to_integers(Avx512::load(weights + r * stride + i), inverse[r]) : _mm512_setzero_si512();
            });
    }

    // Adds the products of values and those weights to the sums of tile `column`, which shrink first.
    void mix(const int32_t* found, int column, const float* shrink) {
        float* sum = sums_of(column, 0);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r, sum += 16) {
            const __m512 before = _mm512_mul_ps(_mm512_load_ps(sum), _mm512_set1_ps(shrink[r]));
            _mm512_store_ps(sum, _mm512_fmadd_ps(whole_sums(found, r), _mm512_set1_ps(steps[r]), before));
        }
    }

    // The sums [R, v.levels] in plane order. Of 128 levels, four tiles hold those of even places in a word, four the others:
    // each 16 bytes are a matrix of four words by four places, the wrong way round.
    void finish(float* out) const {
        const int levels = cache.v.levels, words = levels / 8;
        for (int r = 0; r < R; ++r, out += levels) {
            for (int tile = 0; tile + 8 <= columns; tile += 8)
                for (int odd = 0; odd < 2; ++odd) {
                    __m512 x[4], y[4];
                    for (int z = 0; z < 4; ++z) x[z] = _mm512_load_ps(sums_of(tile + 2 * z + odd, r));
                    four_by_four(x, y);
                    for (int i = 0; i < 4; ++i) Avx512::store(out + (2 * i + odd) * words + tile * 2, y[i]);
                }
            for (int i = 0; levels == 64 && i < levels; ++i) out[level_of(i / 16, i % 16)] = sums_of(i / 16, r)[i % 16];
        }
    }
};

// What the tiles of a pass share, in scratch.
struct LookedUp {
    int8_t* bytes;    // of keys or values
    uint8_t* values;  // interleaved
    float* k_scale;

    static int64_t size_of_bytes(const Cache& cache) {
        return kPairBytes * kTilesAtOnce * larger(chunks_of(cache.k.levels), kStretch / kChunk);
    }
    static int64_t size_of_values(const Cache& cache) { return static_cast<int64_t>(cache.v.levels) / 2 * kStretch; }
    static int64_t floats(const Cache& cache) {
        return (size_of_bytes(cache) + size_of_values(cache)) / 4 + padded(cache.block_size);
    }

    LookedUp(const Cache& cache, float* scratch)
        : bytes(reinterpret_cast<int8_t*>(scratch)),
          values(reinterpret_cast<uint8_t*>(bytes + size_of_bytes(cache))),
          k_scale(reinterpret_cast<float*>(values + size_of_values(cache))) {}
};
