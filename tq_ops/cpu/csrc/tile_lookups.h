// Nibbles become tiles of signed bytes by `vpshufb`, once for all rows of a pass: centroids of 16 keys, or 16 levels of
// values.
//
// A centroid is an integer of 16 bits, 256 * upper + lower, both signed bytes. One tile holds upper bytes, the next one the
// lower ones.

constexpr int kPairBytes = 2 * kTileBytes;  // upper and lower bytes of the same rows, or centroids

inline int chunks_of(int n) { return (n + kChunk - 1) / kChunk; }

// Tables of the upper and lower bytes of 16 integers, for `vpshufb`.
struct ByteTables {
    __m512i upper, lower;

    explicit ByteTables(const int16_t* integers) {
        alignas(16) int8_t bytes[2][16];
        for (int i = 0; i < 16; ++i) {
            const int up = (integers[i] + 128) >> 8;
            bytes[0][i] = static_cast<int8_t>(up), bytes[1][i] = static_cast<int8_t>(integers[i] - 256 * up);
        }
        upper = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[0])));
        lower = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[1])));
    }

    // A row of both tiles, from the low nibbles of bytes.
    void put(__m512i nibbles, int8_t* row) const {
        _mm512_store_si512(row, _mm512_shuffle_epi8(upper, nibbles));
        _mm512_store_si512(row + kTileBytes, _mm512_shuffle_epi8(lower, nibbles));
    }
};

inline __m512i low_nibbles(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline __m512i high_nibbles(__m512i x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }

constexpr int kSlabKeys = 32;                 // looked up at a time
constexpr int kTilesAtOnce = kSlabKeys / 16;  // of keys, or of levels of values

// n keys, up to kSlabKeys, as pairs of tiles, [16 keys][chunk]: each row holds four levels of 16 keys.
inline void look_up_keys(const Cache& cache, const uint8_t* codes, int n, int8_t* out) {
    const int words = cache.k.levels / 8, chunks = chunks_of(cache.k.levels);
    const int64_t bytes = nibble_bytes(cache.k);
    const ByteTables tables(cache.k.integers);
    alignas(64) uint32_t turned[kMaxDim / 8 * 16];
    for (int key = 0; key < n; key += 16, out += chunks * kPairBytes) {
        Avx512::transpose(codes + key * bytes, words, smaller(n - key, 16), turned, 16);
        for (int word = 0; word < words; ++word) {
            const __m512i x = _mm512_load_si512(turned + word * 16);
            int8_t* row = out + word / 8 * kPairBytes + word % 8 * 2 * kChunk;
            tables.put(low_nibbles(x), row), tables.put(high_nibbles(x), row + kChunk);
        }
    }
}

// Nibbles of a query in that order: of a word the even levels, then the odd ones.
inline void put_query(const float* q, int levels, __m512 inverse, int8_t* upper, int8_t* lower) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    auto put = [&](__m512i x, int i, int8_t* row) {
        const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(x), order);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row + i / kChunk * kPairBytes + i % kChunk), bytes);
    };
    for (int i = 0; i < levels; i += 16) {
        const __m512i x = to_integers(_mm512_loadu_ps(q + i), inverse);
        put(_mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8), i, upper), put(x, i, lower);
    }
}

// Four vectors' bytes side by side, of up to 64 bytes each: `found[z]` holds bytes 4 * z ... 4 * z + 3 of each 16.
inline void interleave(const __m512i (&x)[4], __m512i (&found)[4]) {
    const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
    found[0] = _mm512_unpacklo_epi16(a, c), found[1] = _mm512_unpackhi_epi16(a, c);
    found[2] = _mm512_unpacklo_epi16(b, d), found[3] = _mm512_unpackhi_epi16(b, d);
}

// Where the four weights from key 4 * four on lie among those of 64, in fours.
inline int row_of(int four) { return four % 4 * 4 + four / 4; }

// The codes of n values, up to kStretch, four beside each other: [two tiles][n / 4, 64 bytes]. Prefetches `keys`, the next
// ones of K.
inline void interleave_values(const Cache& cache, const uint8_t* codes, int n, const uint8_t* keys, uint8_t* out) {
    constexpr int64_t kApart = kStretch * 16;
    const int levels = cache.v.levels;
    const int64_t bytes = nibble_bytes(cache.v);
    for (int key = 0; key < n; key += 4, out += 64) {
        fetch_bytes(keys + key * cache.k.bytes, 4 * cache.k.bytes);
        uint8_t* row = out;
        for (int level = 0; level < levels; level += 128) {
            const int here = smaller(levels - level, 128) / 2;
            const __mmask64 mask = here < 64 ? (uint64_t{1} << here) - 1 : ~uint64_t{0};
            __m512i x[4], found[4];
            for (int i = 0; i < 4; ++i)
                x[i] = _mm512_maskz_loadu_epi8(key + i < n ? mask : 0, codes + (key + i) * bytes + level / 2);
            interleave(x, found);
            if (here <= 32) {  // the upper halves are empty
                found[0] = _mm512_inserti64x4(found[0], _mm512_castsi512_si256(found[1]), 1);
                found[1] = _mm512_inserti64x4(found[2], _mm512_castsi512_si256(found[3]), 1);
            }
            for (int z = 0; z < (here <= 32 ? 2 : 4); ++z, row += kApart) _mm512_store_si512(row, found[z]);
        }
    }
}

// Two tiles' levels of those values as pairs of tiles, [tile][chunk of keys]: each row holds 16 levels of four keys.
inline void look_up_values(const ByteTables& tables, const uint8_t* codes, int n, int8_t* out) {
    constexpr int64_t kApart = kStretch / kChunk * kPairBytes;
    for (int key = 0; key < n; key += 4) {
        const __m512i x = _mm512_load_si512(codes + key * 16);
        int8_t* row = out + key / kChunk * kPairBytes + row_of(key % kChunk / 4) * kChunk;
        tables.put(low_nibbles(x), row), tables.put(high_nibbles(x), row + kApart);
    }
}

// Turns the four by four numbers of each 16 bytes.
inline void four_by_four(const __m512 (&x)[4], __m512 (&y)[4]) {
    auto pairs = [](__m512 a, __m512 b, bool upper) {
        const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
        return _mm512_castpd_ps(upper ? _mm512_unpackhi_pd(c, d) : _mm512_unpacklo_pd(c, d));
    };
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpacklo_ps(x[2], x[3]);
    const __m512 c = _mm512_unpackhi_ps(x[0], x[1]), d = _mm512_unpackhi_ps(x[2], x[3]);
    y[0] = pairs(a, b, false), y[1] = pairs(a, b, true), y[2] = pairs(c, d, false), y[3] = pairs(c, d, true);
}

// Where column `lane` of tile `tile` of V lies among 64 levels of a vector, in plane order.
inline int level_of(int tile, int lane) {
    const int byte = lane / 4 % 2 * 16 + (tile / 2 * 2 + lane / 8) * 4 + lane % 4;
    return (byte % 4 * 2 + tile % 2) * 8 + byte / 4;
}
