// With VNNI: levels as unsigned bytes, 32 in a register, and exact products of them with signed bytes.
struct WordsVnni : Words256 {
    static constexpr bool has_bytes = true;

    // Four products of unsigned w and signed x are added to each lane.
    static I dot_bytes(I w, I x, I sum) { return _mm256_dpbusd_epi32(sum, w, x); }

    static I bytes_of(I x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask))); }
    static I flipped(I x, int mask) { return _mm256_xor_si256(x, _mm256_set1_epi8(static_cast<char>(mask))); }
    static I either(I a, I b) { return _mm256_or_si256(a, b); }
    // N bits up, down where it is negative; bits of the byte beside may come in.
    template <int N> static I bytes_up(I x) {
        return N < 0 ? _mm256_srli_epi16(x, N < 0 ? -N : 0) : _mm256_slli_epi16(x, N < 0 ? 0 : N);
    }
    // Lower halves of 16 bytes, then their upper halves.
    static I byte_nibbles(const uint8_t* p) {
        const I both = _mm256_broadcastsi128_si256(sixteen(p));
        return bytes_of(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), 0xf);
    }
    static I bytes_looked_up(const int8_t* table, const uint8_t* p) {
        const I entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
        return _mm256_shuffle_epi8(entries, byte_nibbles(p));
    }
    static I bytes_sixteen_more(I x, uint32_t bits) { return _mm256_mask_add_epi8(x, bits, x, _mm256_set1_epi8(16)); }

    static I sum_of_products(I a, I b, I c, I d) {
        return _mm256_add_epi32(_mm256_mullo_epi32(a, b), _mm256_mullo_epi32(c, d));
    }
    // Sixteen signed bytes, those at even places and those at odd ones.
    static void signed_bytes_of_two(const uint8_t* p, I& even, I& odd) {
        const __m128i both = sixteen(p);
        even = _mm256_cvtepi16_epi32(_mm_srai_epi16(_mm_slli_epi16(both, 8), 8));
        odd = _mm256_cvtepi16_epi32(_mm_srai_epi16(both, 8));
    }
};

// Sums of sixteen rows of a weight beside each other.
struct Lanes512 {
    static constexpr int width = 16;
    typedef __m512i I;

    static I set1(int32_t x) { return _mm512_set1_epi32(x); }
    static I load(const void* p) { return _mm512_loadu_si512(p); }
    // sum, and in each lane the products of a row's two numbers with the pair at x.
    static I dot(I w, const int32_t* x, I sum) {
        asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
        return sum;
    }
    // Four products of unsigned bytes of w with the signed ones at x.
    static I dot_bytes(I w, const int32_t* x, I sum) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
        return sum;
    }
    template <int N> static I less_shifted(I a, const int32_t* b) {
        return _mm512_sub_epi32(a, _mm512_slli_epi32(set1(*b), N));
    }
    static I sum_of_products(I a, I b, I c, I d) {
        return _mm512_add_epi32(_mm512_mullo_epi32(a, b), _mm512_mullo_epi32(c, d));
    }
    static __m512 floats(I x) { return _mm512_cvtepi32_ps(x); }
};
