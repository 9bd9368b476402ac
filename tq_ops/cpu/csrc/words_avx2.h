// Sixteen 16-bit integers, the numbers of half a block of a weight, and products of them that are exact. With AVX2.
struct Words256 {
    static constexpr int tokens = 4;          // that a row meets as it is unpacked once
    static constexpr bool has_bytes = false;  // whether there are products of bytes
    typedef __m256i W;
    typedef __m256i I;  // eight 32-bit sums
    typedef Avx2 Floats;
    typedef __m256 F;

    static __m128i sixteen(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static W unsigned_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi16(sixteen(p)); }
    static W signed_bytes(const uint8_t* p) { return _mm256_cvtepi8_epi16(sixteen(p)); }
    // Signed bytes by the lower or the upper half of each byte.
    template <bool UPPER> static W looked_up(const int8_t* table, const uint8_t* p) {
        const __m128i bytes = sixteen(p), half = UPPER ? _mm_srli_epi16(bytes, 4) : bytes;
        const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(entries, _mm_and_si128(half, _mm_set1_epi8(0xf))));
    }
    static W of(W x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi16(static_cast<short>(mask))); }
    static W both(W a, W b) { return _mm256_or_si256(a, b); }
    // N bits up; down where it is negative.
    template <int N> static W up(W x) {
        return N < 0 ? _mm256_srli_epi16(x, N < 0 ? -N : 0) : _mm256_slli_epi16(x, N < 0 ? 0 : N);
    }
    static W minus(W x, int n) { return _mm256_sub_epi16(x, _mm256_set1_epi16(static_cast<short>(n))); }
    static W times(W x, int n) { return _mm256_mullo_epi16(x, _mm256_set1_epi16(static_cast<short>(n))); }
    // x with 16 more where a bit is set: bit i of number i.
    static W sixteen_more(W x, uint32_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        return _mm256_mask_add_epi16(x, static_cast<__mmask16>(bits), x, _mm256_set1_epi16(16));
#else
        const W each = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
        const W set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(static_cast<short>(bits)), each), each);
        return _mm256_or_si256(x, _mm256_and_si256(set, _mm256_set1_epi16(16)));
#endif
    }
    static void store(void* p, W x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }

    static I none() { return _mm256_setzero_si256(); }
    static I load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    // 16 numbers of x, and sum, to each lane of which two of their products are added.
    static W numbers(const void* x) { return load(x); }
    static I dot(W w, W x, I sum) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        return _mm256_dpwssd_epi32(sum, w, x);
#else
        return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
#endif
    }
    template <int N> static I less_shifted(I x, I y) { return _mm256_sub_epi32(x, _mm256_slli_epi32(y, N)); }
    // The first four and the last four lanes of each of eight added up, in their order; and all of them.
    static I pairs(I a, I b) { return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); }
    static I fours(I a, I b) { return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)); }
    static void half_totals(const I (&x)[8], I& first, I& last) {
        const I low = fours(pairs(x[0], x[1]), pairs(x[2], x[3])), high = fours(pairs(x[4], x[5]), pairs(x[6], x[7]));
        first = _mm256_permute2x128_si256(low, high, 0x20), last = _mm256_permute2x128_si256(low, high, 0x31);
    }
    static I totals(const I (&x)[8]) {
        I first, last;
        half_totals(x, first, last);
        return _mm256_add_epi32(first, last);
    }

    static F floats(I x) { return _mm256_cvtepi32_ps(x); }
    // Eight scales as they are stored, the first four in `low`.
    static F halves(uint64_t low, uint64_t high) {
        return _mm256_cvtph_ps(_mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low)));
    }
    static I bytes(uint64_t x) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(x))); }
    // An FP16 number, in all lanes.
    static F half(const uint8_t* p) { return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(read_as<uint16_t>(p)))); }
    // Twice eight integers of six bits from 12 bytes. Bytes 0 to 3 have the first four, 4 to 7 of the second eight the first
    // four; of the others 8 to 11 have four bits each, and the upper two of bytes 0 to 7 their upper two.
    static void six_bits(const uint8_t* p, F& first, F& second) {
        const __m128i all = sixteen(p - 4), own = _mm_shuffle_epi32(all, 0xa5), fours = _mm_shuffle_epi32(all, 0xff);
        const __m128i lower = _mm_and_si128(_mm_srlv_epi32(own, _mm_setr_epi32(0, 2, 0, 2)),
                                            _mm_setr_epi32(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030));
        const __m128i upper =
            _mm_and_si128(_mm_srlv_epi32(fours, _mm_setr_epi32(0, 0, 0, 4)), _mm_setr_epi32(0, 0x0f0f0f0f, 0, 0x0f0f0f0f));
        const __m128i each = _mm_or_si128(lower, upper);
        first = floats(_mm256_cvtepu8_epi32(each)), second = floats(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(each, each)));
    }
    // 2**(x - 128), of eight bytes.
    static F powers(uint64_t x) {
        const I e = bytes(x), small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        const I normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1))));
    }
};

// Sums of eight rows of a weight beside each other.
struct Lanes256 {
    static constexpr int width = 8;
    typedef __m256i I;

    static I set1(int32_t x) { return _mm256_set1_epi32(x); }
    static I load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    // sum, and in each lane the products of a row's two numbers with the pair at x.
    static I dot(I w, const int32_t* x, I sum) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, set1(*x))); }
    static __m256 floats(I x) { return _mm256_cvtepi32_ps(x); }
};
