// Q.K and P.V of BF16 numbers by tiles, for BF16 activations.
// Queries that were rotated, and weights, are the sum of two such numbers, upper and lower, which hold 16 bits of a mantissa
// together. Products are exact. Sums are FP32, in an order of their own, the same for one row as for many.
//
// Keys are rows of a tile, as they lie in memory; of eight queries a tile has
// the upper numbers as columns and then the lower ones, of their weights as rows.

constexpr int kPairs = 32;  // BF16 numbers in a row of a tile

template <int T> inline void store_sums(float* p) { store_tile<T>(reinterpret_cast<int32_t*>(p)); }

inline __m512i two_in_bf16(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }
inline __m512 widened(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

// 32 numbers as upper and lower ones.
inline void split(__m512 first, __m512 second, void* upper, void* lower) {
    const __m512i up = two_in_bf16(first, second);
    first = _mm512_sub_ps(first, widened(_mm512_castsi512_si256(up)));
    second = _mm512_sub_ps(second, widened(_mm512_extracti64x4_epi64(up, 1)));
    _mm512_storeu_si512(upper, up), _mm512_storeu_si512(lower, two_in_bf16(first, second));
}

// What the tiles of a pass share, in scratch: keys [32, D], or values of a stretch as tiles [32 keys][16 numbers].
// How many floats.
inline int64_t number_floats(const Cache& cache) {
    const bool any = cache.k.cell != kNibble || cache.v.cell != kNibble;
    return any ? kStretch * larger(cache.k.levels, cache.v.levels) / 2 : 0;
}

// Queries [kMaxRows, levels] as tiles [levels / 32], columns of pairs.
inline void put_queries(const float* const* q, int levels, int8_t* out) {
    alignas(64) uint16_t rows[2 * kMaxRows * kMaxDim];
    for (int r = 0; r < kMaxRows; ++r)
        for (int i = 0; i < levels; i += kPairs)
            split(Avx512::load(q[r] + i), Avx512::load(q[r] + i + 16), rows + r * levels + i,
                  rows + (kMaxRows + r) * levels + i);
    Avx512::transpose(reinterpret_cast<const uint8_t*>(rows), levels / 2, 16, reinterpret_cast<uint32_t*>(out), 16);
}

// The rows of 16 keys, of which n are there; in `room` where these are not all.
inline const uint16_t* key_rows(const Side& side, Place at, int key, int n, uint16_t* room) {
    if (n <= 0) return room;
    const uint8_t* codes = at.codes + static_cast<int64_t>(key) * side.bytes;
    if (n >= 16) return reinterpret_cast<const uint16_t*>(codes);
    std::memcpy(room, codes, static_cast<size_t>(n) * side.bytes);  // the cache may end behind the last
    return room;
}

// Logits [kMaxRows, stride] of 32 keys.
inline void score_tile(const uint16_t* const* keys, const int8_t* queries, int levels, float factor, int stride,
                       float* logits) {
    alignas(64) float sums[512], turned[256];
    zero_tile<0>(), zero_tile<1>();
    for (int i = 0; i < levels; i += kPairs) {
        load_tile<4>(queries + i / kPairs * kTileBytes);
        load_rows<5>(keys[0] + i, 2 * levels), add_bf16_products<0, 5, 4>();
        load_rows<6>(keys[1] + i, 2 * levels), add_bf16_products<1, 6, 4>();
    }
    store_sums<0>(sums), store_sums<1>(sums + 256);
    for (int half = 0; half < 2; ++half) {
        const auto* columns = reinterpret_cast<const uint8_t*>(sums + half * 256);
        Avx512::transpose(columns, 16, 16, reinterpret_cast<uint32_t*>(turned), 16);
        for (int r = 0; r < kMaxRows; ++r) {
            const __m512 sum = Avx512::add(Avx512::load(turned + r * 16), Avx512::load(turned + (kMaxRows + r) * 16));
            Avx512::store(logits + r * stride + half * 16, Avx512::mul(sum, Avx512::set1(factor)));
        }
    }
}

// Words of 16 numbers of two vectors, `first` the lower halves.
inline __m512i in_pairs(const uint16_t* first, const uint16_t* second) {
    auto wide = [](const uint16_t* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    return _mm512_or_si512(wide(first), _mm512_slli_epi32(wide(second), 16));
}

// 16 vectors from place `first` of a stretch on, [16, levels], as halves of its tiles.
inline void put_pairs(const uint16_t* x, int levels, int first, uint16_t* out) {
    for (int pair = 0; pair < 8; ++pair, x += 2 * levels)
        for (int d = 0; d < levels; d += 16) {
            const int64_t tile = first / kPairs * (levels / 16) + d / 16;
            _mm512_storeu_si512(out + tile * 512 + (first % kPairs / 2 + pair) * 32, in_pairs(x + d, x + levels + d));
        }
}

// Values key ... key + n - 1 of a block as tiles, up to kStretch of them: zeros after the last, up to a multiple of 32.
// Prefetches at `ahead` the same number of vectors of `ahead_bytes`.
inline void put_values(const Side& side, Place at, int key, int n, uint16_t* out, const uint8_t* ahead, int64_t ahead_bytes) {
    alignas(64) uint16_t room[16 * kMaxDim];
    for (int first = 0; first < padded(n); first += 16) {
        const int here = larger(0, smaller(n - first, 16));
        const uint8_t* codes = at.codes + static_cast<int64_t>(key + first) * side.bytes;
        fetch_bytes(ahead + first * ahead_bytes, here * ahead_bytes);
        if (here == 16) {
            put_pairs(reinterpret_cast<const uint16_t*>(codes), side.levels, first, out);
            continue;
        }
        if (here) std::memcpy(room, codes, static_cast<size_t>(here) * side.bytes);
        std::memset(room + here * side.levels, 0, static_cast<size_t>(16 - here) * side.bytes);
        put_pairs(room, side.levels, first, out);
    }
}

// Weights [kMaxRows, stride] of n values as tiles of rows; zeros after the last.
inline void put_weights(const float* weights, int stride, int n, int8_t* out) {
    auto of = [&](int r, int i) {
        return i < n ? Avx512::first(n - i, Avx512::load(weights + r * stride + i), Avx512::zero()) : Avx512::zero();
    };
    for (int i = 0; i < padded(n); i += kPairs, out += kTileBytes)
        for (int r = 0; r < kMaxRows; ++r) split(of(r, i), of(r, i + 16), out + r * kChunk, out + (kMaxRows + r) * kChunk);
}

// 32 columns of sums[r * levels], which shrink first, plus the products of the weights of n values.
inline void mix_tile(const uint16_t* values, int column, int n, const int8_t* weights, int levels, const float* shrink,
                     float* sums) {
    alignas(64) float found[2][256];
    zero_tile<0>(), zero_tile<1>();
    for (int i = 0; i < padded(n); i += kPairs) {
        const uint16_t* tiles = values + (i / kPairs * (levels / 16) + column / 16) * 512;
        load_tile<4>(weights + i / kPairs * kTileBytes);
        load_rows<5>(tiles, kChunk), add_bf16_products<0, 4, 5>();
        load_rows<6>(tiles + 512, kChunk), add_bf16_products<1, 4, 6>();
    }
    store_sums<0>(found[0]), store_sums<1>(found[1]);
    for (int half = 0; half < 2; ++half)
        for (int r = 0; r < kMaxRows; ++r) {
            const float* row = found[half] + r * 16;
            const __m512 sum = Avx512::add(Avx512::load(row), Avx512::load(row + kMaxRows * 16));
            float* to = sums + r * levels + column + half * 16;
            Avx512::store(to, Avx512::fma(Avx512::load(to), Avx512::set1(shrink[r]), sum));
        }
}
