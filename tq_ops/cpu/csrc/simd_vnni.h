// `vpdpwssd`: sums of products of 16-bit integers, two per 32-bit lane. `vpermw` looks up 16-bit centroids by the low bits of
// each half word and ignores the rest.
struct Vnni512 {
    typedef __m512i I;

    static I zero() { return _mm512_setzero_si512(); }
    static I load(const void* p) { return _mm512_loadu_si512(p); }
    // 32 entries, each centroid twice, so that the fifth bit of an index has no effect.
    static I table(const int16_t* integers) {
        return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(integers)));
    }
    static I lookup(I table, I x) { return _mm512_permutexvar_epi16(x, table); }
    template <int N> static I shift(I x) { return N ? _mm512_srli_epi16(x, N) : x; }
    static I upper(I x) { return _mm512_srli_epi32(x, 16); }
    // Inline assembly: with the intrinsic, compilers keep two copies of every sum in a loop and spill half of the registers.
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
    // The lower (or upper) halves of two vectors' words side by side: those of `a` below, those at `b` above. Loading from two
    // bytes before `b` moves its lower halves into the upper places; the mask keeps the load from reading there.
    static I lower_halves(I a, const uint8_t* b) { return _mm512_mask_loadu_epi16(a, 0xaaaaaaaau, b - 2); }
    static I upper_halves(I a, const uint8_t* b) { return _mm512_mask_loadu_epi16(a, 0xaaaaaaaau, b); }
};
