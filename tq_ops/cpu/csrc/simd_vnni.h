// What `vpdpwssd` adds: sums of products of 16-bit integers, two a lane of 32 bits. `vpermw` looks up 16-bit levels by the low bits
// of every half word and minds no others.
struct Vnni512 {
    typedef Avx512 Floats;
    typedef __m512i I;

    static I zero() { return _mm512_setzero_si512(); }
    static I load(const void* p) { return _mm512_loadu_si512(p); }
    // Of 32 entries, each level twice: the fifth bit of an index decides nothing.
    static I table(const int16_t* levels) { return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(levels))); }
    static I lookup(I table, I x) { return _mm512_permutexvar_epi16(x, table); }
    template <int N> static I shift(I x) { return N ? _mm512_srli_epi16(x, N) : x; }
    static I upper(I x) { return _mm512_srli_epi32(x, 16); }
    // As text: given the intrinsic, compilers keep two copies of every sum of a loop, and half of the registers on the stack.
    static I dot(I a, I b, I sum) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
    static I pair(const int16_t* p) {
        int32_t both;
        std::memcpy(&both, p, 4);
        return _mm512_set1_epi32(both);
    }
    static __m512 to_floats(I x) { return _mm512_cvtepi32_ps(x); }
    // The lower halves of two vectors' words side by side, and the upper ones: `a` below, those at `b` above. A load from two bytes
    // before lifts lower halves to where they go, and the mask keeps it from reading there.
    static I lower_halves(I a, const uint8_t* b) { return _mm512_mask_loadu_epi16(a, 0xaaaaaaaau, b - 2); }
    static I upper_halves(I a, const uint8_t* b) { return _mm512_mask_loadu_epi16(a, 0xaaaaaaaau, b); }
};

struct Vnni256 {
    typedef Avx2 Floats;
    typedef __m256i I;

    static I zero() { return _mm256_setzero_si256(); }
    static I load(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
    static I table(const int16_t* levels) { return load(levels); }
    static I lookup(I table, I x) { return _mm256_permutexvar_epi16(x, table); }
    template <int N> static I shift(I x) { return N ? _mm256_srli_epi16(x, N) : x; }
    static I upper(I x) { return _mm256_srli_epi32(x, 16); }
    static I dot(I a, I b, I sum) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
    static I pair(const int16_t* p) {
        int32_t both;
        std::memcpy(&both, p, 4);
        return _mm256_set1_epi32(both);
    }
    static __m256 to_floats(I x) { return _mm256_cvtepi32_ps(x); }
    static I lower_halves(I a, const uint8_t* b) { return _mm256_mask_loadu_epi16(a, 0xaaaa, b - 2); }
    static I upper_halves(I a, const uint8_t* b) { return _mm256_mask_loadu_epi16(a, 0xaaaa, b); }
};
