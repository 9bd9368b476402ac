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
    static __m512 floats(I x) { return _mm512_cvtepi32_ps(x); }
};
