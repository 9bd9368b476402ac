// Sums of sixteen rows of a weight beside each other.
struct Lanes512 {
    static constexpr int width = 16;
    typedef __m512i I;

    static I set1(int32_t x) { return _mm512_set1_epi32(x); }
    static I load(const void* p) { return _mm512_loadu_si512(p); }
    // sum, and in each lane the products of a row's two numbers with the pair at x.
    static I dot(I w, const int32_t* x, I sum) {
#ifdef __AVX512VNNI__
        asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
        return sum;
#else
        return _mm512_add_epi32(sum, _mm512_madd_epi16(w, set1(*x)));
#endif
    }
#ifdef __AVX512VNNI__
    // Four products of unsigned bytes of w with the signed ones at x.
    static I dot_bytes(I w, const int32_t* x, I sum) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
        return sum;
    }
#endif
    template <int N> static I less_shifted(I a, const int32_t* b) {
        return _mm512_sub_epi32(a, _mm512_slli_epi32(set1(*b), N));
    }
    static I sum_of_products(I a, I b, I c, I d) {
        return _mm512_add_epi32(_mm512_mullo_epi32(a, b), _mm512_mullo_epi32(c, d));
    }
    static __m512 floats(I x) { return _mm512_cvtepi32_ps(x); }
};
