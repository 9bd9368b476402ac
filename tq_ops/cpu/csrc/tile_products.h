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

// Sums one product in tiles 0, 1 and 2: upper by upper bytes, one by the other, and lower by lower ones.
inline void multiply(Product of, int chunks) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>();
    for (int c = 0; c < chunks; ++c, of.rows += kPairBytes, of.pair += kPairBytes) {
        load_tile<4>(of.rows), load_tile<6>(of.pair);
        add_products<0, 4, 6>();
        load_tile<7>(of.pair + kTileBytes);
        add_products<1, 4, 7>();
        load_tile<5>(of.rows + kTileBytes);
        add_products<2, 5, 7>();
        add_products<1, 5, 6>();
    }
}

constexpr int kSums = 3 * 256;  // of a product, in 32 bits: [upper by upper, mixed, lower by lower][16][16]

// Of n products each(i): done(i, sums). A product's sums are looked at while the next one runs.
template <class Each, class Done> inline void multiply_all(int n, int chunks, Each each, Done done) {
    alignas(64) int32_t sums[2][kSums];
    for (int i = 0; i <= n; ++i) {
        if (i < n) {
            int32_t* to = sums[i % 2];
            multiply(each(i), chunks);
            store_tile<0>(to), store_tile<1>(to + 256), store_tile<2>(to + 512);
        }
        if (i) done(i - 1, sums[1 - i % 2]);
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

// Integers of the rows of two tiles, in scratch, as `Product` takes them.
struct RowBytes {
    int8_t *const q, *const p;  // p of a stretch's weights

    static int64_t size_of_q(const Cache& cache) { return chunks_of(cache.k.levels) * kPairBytes; }
    static int64_t size_of_p() { return kStretch / kChunk * kPairBytes; }
    static int64_t floats(const Cache& cache) { return (size_of_q(cache) + size_of_p()) / 4; }

    RowBytes(const Cache& cache, float* scratch) : q(reinterpret_cast<int8_t*>(scratch)), p(q + size_of_q(cache)) {}
    // Levels past the last; what is in rows that no tile has, or has not written yet, only meets sums that nobody reads.
    void clear(const Cache& cache) {
        if (cache.k.levels % kChunk) std::memset(q, 0, size_of_q(cache));
    }
};

// What R rows are multiplied by, and their sums: the products of a tile in a pass. The lookups are the pass's own.
template <int R> struct TileProducts {
    const Cache& cache;
    const int stride, columns;
    int8_t* const q;     // of numbers, as `put_queries` says
    int8_t* const p;     // and as `put_weights` says
    float* const sums;   // [R, columns, 16]
    int8_t* weights_at;  // this tile's rows in `RowBytes::p`
    float factor[R];     // of logits: the query's step, the centroids' unit and the softmax scale
    float steps[R];

    static int tiles_of_queries(const Side& k) { return k.cell == kNibble ? 0 : k.levels / kPairs; }
    static int tiles_of_weights(const Side& v) { return v.cell == kNibble ? 0 : kStretch / kPairs; }
    static int64_t floats(const Cache& cache) {
        return (tiles_of_queries(cache.k) + tiles_of_weights(cache.v)) * kTileBytes / 4 + R * columns_of(cache.v.levels) * 16;
    }

    TileProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache(cache),
          stride(stride),
          columns(columns_of(cache.v.levels)),
          q(reinterpret_cast<int8_t*>(scratch)),
          p(q + tiles_of_queries(cache.k) * kTileBytes),
          sums(reinterpret_cast<float*>(p + tiles_of_weights(cache.v) * kTileBytes)) {
        std::memset(sums, 0, R * columns * 16 * sizeof(float));
        if (cache.k.cell != kNibble) put_queries(tile.q, cache.k.levels, q);
    }

    // Puts the integers of the tile's rows beside those of another's: `half` 1 is the second of both.
    void take(const Tile& tile, const RowBytes& rows, int half) {
        weights_at = rows.p + half * R * kChunk;
        if (cache.k.cell != kNibble) return;
        const float most = most_total(cache.k.integers, cache.k.levels);
        int8_t* upper = rows.q + half * R * kChunk;
        for (int r = 0; r < R; ++r, upper += kChunk) {
            float inverse;
            factor[r] = query_step(tile.q[r], cache.k.levels, most, &inverse) * cache.k.unit * tile.softmax_scale;
            put_query(tile.q[r], cache.k.levels, _mm512_set1_ps(inverse), upper, upper + kTileBytes);
        }
    }

    // Logits [R, stride] of 16 keys from `key` on, of their products from the first row on.
    void score(const int32_t* found, int key, const float* scale, float* logits) const {
        const __m512 own = Avx512::load(scale + key);
        for (int r = 0; r < R; ++r) {
            const __m512 by = Avx512::mul(own, Avx512::set1(factor[r]));
            Avx512::store(logits + r * stride + key, Avx512::fma(whole_sums(found, r), by, Avx512::zero()));
        }
    }

    // Takes the weights [R, stride] of the next n values, up to kStretch. Packing leaves them in the order of `row_of`.
    void weigh(const float* weights, int n) {
        __m512 inverse[R];
        weight_steps<R>(weights, stride, n, most_total(cache.v.integers, kStretch), steps, inverse);
        for (int r = 0; r < R; ++r) steps[r] *= cache.v.unit;
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < chunks_of(n); ++c) {
                auto of = [&](int i) {
                    i += c * kChunk;
                    return i < n ? to_integers(Avx512::load(weights + r * stride + i), inverse[r]) : _mm512_setzero_si512();
                };
                const __m512i a = _mm512_packs_epi32(of(0), of(16)), b = _mm512_packs_epi32(of(32), of(48));
                auto up = [](__m512i x) { return _mm512_srai_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(128)), 8); };
                auto low = [](__m512i x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); };
                int8_t* row = weights_at + c * kPairBytes + r * kChunk;
                _mm512_store_si512(row, _mm512_packs_epi16(up(a), up(b)));
                _mm512_store_si512(row + kTileBytes, _mm512_packs_epi16(low(a), low(b)));
            }
    }

    // Adds the products of values and those weights to the sums of tile `column`, which shrink first.
    void mix(const int32_t* found, int column, const float* shrink) {
        for (int r = 0; r < R; ++r) {
            float* sum = sums + (r * columns + column) * 16;
            const __m512 before = _mm512_mul_ps(_mm512_load_ps(sum), _mm512_set1_ps(shrink[r]));
            _mm512_store_ps(sum, _mm512_fmadd_ps(whole_sums(found, r), _mm512_set1_ps(steps[r]), before));
        }
    }

    // The sums [R, v.levels] in plane order. Of 128 levels, four tiles hold those of even places in a word, four the others:
    // each 16 bytes are a matrix of four words by four places, the wrong way round.
    void finish(float* out) const {
        const int levels = cache.v.levels, words = levels / 8, whole = levels / 128 * 8;
        for (int r = 0; r < R; ++r)
            for (int tile = 0; tile < whole; tile += 8)
                for (int odd = 0; odd < 2; ++odd) {
                    __m512 x[4], y[4];
                    for (int z = 0; z < 4; ++z) x[z] = _mm512_load_ps(sums + (r * columns + tile + 2 * z + odd) * 16);
                    four_by_four(x, y);
                    for (int i = 0; i < 4; ++i) Avx512::store(out + r * levels + (2 * i + odd) * words + tile * 2, y[i]);
                }
        for (int tile = whole; tile < columns; ++tile)
            for (int lane = 0; lane < 16; ++lane) {
                const int level = level_of(levels, tile, lane);
                for (int r = 0; level >= 0 && r < R; ++r) out[r * levels + level] = sums[(r * columns + tile) * 16 + lane];
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
    static int64_t size_of_values(const Cache& cache) {
        return static_cast<int64_t>(columns_of(cache.v.levels)) / 2 * kStretch * 16;
    }
    static int64_t floats(const Cache& cache) {
        return (size_of_bytes(cache) + size_of_values(cache)) / 4 + padded(cache.block_size);
    }

    LookedUp(const Cache& cache, float* scratch)
        : bytes(reinterpret_cast<int8_t*>(scratch)),
          values(reinterpret_cast<uint8_t*>(bytes + size_of_bytes(cache))),
          k_scale(reinterpret_cast<float*>(values + size_of_values(cache))) {}
};
