// Sixteen lanes of AVX-512 F, BW, DQ and VL. `vpermps` looks up all 16 centroids and ignores all but the low 4 bits of an
// index.
struct Avx512 {
    static constexpr int width = 16, registers = 32;
    static constexpr bool moves_each = true;
    static constexpr bool looks_up_64 = true;  // in registers
    typedef Avx2 Half;
    typedef __m512 F;
    typedef __m512i I;
    typedef __m512 Table;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load(const uint16_t* bf16) {
        return low_bf16(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bf16))));
    }
    static F load_halves(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static void stream(float* p, F x) { _mm512_stream_ps(p, x); }
    static void fence() { _mm_sfence(); }
    static F set1(float x) { return _mm512_set1_ps(x); }
    static F zero() { return _mm512_setzero_ps(); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F times_power_of_two(F x, F n) { return _mm512_scalef_ps(x, n); }
    static F expf(F x) { return exponential<Avx512>(x); }
    // exp(x - most) rounded to BF16. It is 2**floor(t) * 2**r with 0 <= r < 1; 2**r is 1 + r * p(r), p of degree 3 fitted to
    // the least relative error, 2.9e-6. To add 1.5 * 2**16 rounds what lies between 1 and 2 to BF16. Below 2**-126 the result
    // is that. A NaN stays a NaN.
    static F exp_bf16(F x, float most) {
        constexpr float kPerTwo = 1.44269504f, kRound = 98304.0f;
        const F t = max(set1(-126.0f), fma(x, set1(kPerTwo), set1(-kPerTwo * most)));
        const F r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        F y = fma(set1(1.34273982e-2f), r, set1(5.22410236e-2f));
        y = fma(y, r, set1(0.241281122f));
        y = fma(y, r, set1(0.693044662f));
        y = fma(y, r, set1(1.0f + kRound));
        return _mm512_scalef_ps(_mm512_sub_ps(y, set1(kRound)), t);
    }
    static F round_bf16(F x) {
        const I u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        const I moved = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        return _mm512_castsi512_ps(_mm512_and_si512(moved, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static F first(int n, F a, F b) {
        return n >= width ? a : _mm512_mask_mov_ps(b, static_cast<__mmask16>(n > 0 ? (1u << n) - 1u : 0u), a);
    }
    static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
    static void reduce_each(F a, F b, F c, F d, float* out) {
        const F ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        const F cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
        F sums = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
        sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
        sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
        const I firsts = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
        _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, sums)));
    }
    static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

    static Table table(const float* centroids) { return load(centroids); }
    static I load_words(const void* p) { return _mm512_loadu_si512(p); }
    template <int N> static I shift(I x) { return N ? _mm512_srli_epi32(x, N) : x; }
    static I shift_by(I x, int bits) { return _mm512_srl_epi32(x, _mm_cvtsi32_si128(bits)); }
    static I shift_up_by(I x, int bits) { return _mm512_sll_epi32(x, _mm_cvtsi32_si128(bits)); }
    // Of each byte the lower nibble of one and the upper nibble of the other.
    static I join_nibbles(I lower, I upper) { return _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x0f), lower, upper, 0xca); }
    static F lookup(Table t, I x) { return _mm512_permutexvar_ps(x, t); }
    // Numbers by levels of BITS bits, a byte each: as many registers as hold up to 64 of them, or memory.
    template <int BITS> struct WideTable {
        F part[BITS > 6 ? 1 : 1 << (BITS - 4)];
        const float* all;
    };
    template <int BITS> static WideTable<BITS> wide_table(const float* centroids) {
        WideTable<BITS> t;
        t.all = centroids;
        if constexpr (BITS <= 6)
            for (int i = 0; i < 1 << (BITS - 4); ++i) t.part[i] = load(centroids + 16 * i);
        return t;
    }
    template <int BITS> static F lookup_bytes(const WideTable<BITS>& t, const uint8_t* level) {
        const I x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(level)));
        if constexpr (BITS > 6) return _mm512_i32gather_ps(x, t.all, 4);
        if constexpr (BITS <= 6) return lookup_wide<BITS>(t, x);
    }
    // By the lowest BITS bits, 5 or 6.
    template <int BITS> static F lookup_wide(const WideTable<BITS>& t, I x) {
        const F low = _mm512_permutex2var_ps(t.part[0], x, t.part[1]);
        if constexpr (BITS == 5) return low;
        [[maybe_unused]] const __mmask16 upper = _mm512_test_epi32_mask(x, _mm512_set1_epi32(32));
        if constexpr (BITS == 6) return _mm512_mask_blend_ps(upper, low, _mm512_permutex2var_ps(t.part[2], x, t.part[3]));
    }
    template <int BYTES> static I repeated(const uint8_t* p) {
        if constexpr (BYTES == 16) return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        if constexpr (BYTES == 32) return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return load_words(p);
    }
    // The first `lanes` eight bytes, 2, 4 or 8 of them, again and again.
    static I again(const uint8_t* p, int lanes) {
        return lanes == 2 ? repeated<16>(p) : lanes == 4 ? repeated<32>(p) : load_words(p);
    }
    static I down(I x, const uint64_t* bits) { return _mm512_srlv_epi64(x, load_words(bits)); }
    static I two_bits(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x33)); }
    static I three_bits(I two, I one, const uint64_t* bits) {
        const I third = _mm512_rorv_epi64(one, _mm512_sub_epi64(load_words(bits), _mm512_set1_epi64(2)));
        return _mm512_ternarylogic_epi64(two_bits(two), third, _mm512_set1_epi8(0x44), 0xf8);  // two | (third & 0x44)
    }
    static void store_words(void* p, I x) { _mm512_storeu_si512(p, x); }
    static I no_words() { return _mm512_setzero_si512(); }
    static I add_reached(I n, F y, F boundary) {
        return _mm512_mask_add_epi32(n, _mm512_cmp_ps_mask(y, boundary, _CMP_GE_OQ), n, _mm512_set1_epi32(1));
    }
    static void interleave(F even, F odd, F* first, F* second) {
        const I lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        *first = _mm512_permutex2var_ps(even, lower, odd);
        *second = _mm512_permutex2var_ps(even, _mm512_add_epi32(lower, _mm512_set1_epi32(8)), odd);
    }
    static F low_bf16(I x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
    static F high_bf16(I x) {
        return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    __attribute__((always_inline)) static void transpose(const uint8_t* codes, int words, int keys, uint32_t* out,
                                                         int stride) {
        alignas(64) uint8_t copy[width * kMaxWords * 4];
        if (keys < width) {
            for (int i = 0; i < width; ++i)
                std::memcpy(copy + i * words * 4, codes + smaller(i, keys - 1) * words * 4, words * 4);
            codes = copy;
        }
        transpose_known<4>(codes, words, out, stride);
    }

  private:
    // Where the number of words is known, so are the distances between keys.
    template <int WORDS> static void transpose_known(const uint8_t* codes, int words, uint32_t* out, int stride) {
        if (words == WORDS) return transpose_words<WORDS>(codes, words, out, stride);
        if constexpr (WORDS < 24) return transpose_known<WORDS + 2>(codes, words, out, stride);
        if (words == 32) return transpose_words<32>(codes, words, out, stride);
        transpose_words<0>(codes, words, out, stride);
    }

    static __m128i quarter(const uint8_t* codes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)); }

    // Four words of 16 keys at a time; the last four overlap those before where their number is no multiple of four. Loads
    // gather keys i, 4 + i, 8 + i and 12 + i into one register, which any port can do, so only the last two steps shuffle.
    // WORDS is their number where it is known, or 0.
    template <int WORDS> static void transpose_words(const uint8_t* first, int words, uint32_t* to, int stride) {
        const int count = WORDS ? WORDS : words, bytes = count * 4;
#pragma GCC unroll 1
        for (int j = 0; j < count; j += 4) {
            const int at = smaller(j, count - 4);
            const uint8_t* codes = first + at * 4;
            uint32_t* out = to + at * stride;
            I r[4], t[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                r[i] = _mm512_castsi128_si512(quarter(codes + i * bytes));
                r[i] = _mm512_inserti32x4(r[i], quarter(codes + (4 + i) * bytes), 1);
                r[i] = _mm512_inserti32x4(r[i], quarter(codes + (8 + i) * bytes), 2);
                r[i] = _mm512_inserti32x4(r[i], quarter(codes + (12 + i) * bytes), 3);
            }
            t[0] = _mm512_unpacklo_epi32(r[0], r[1]), t[1] = _mm512_unpackhi_epi32(r[0], r[1]);
            t[2] = _mm512_unpacklo_epi32(r[2], r[3]), t[3] = _mm512_unpackhi_epi32(r[2], r[3]);
            put(out, _mm512_unpacklo_epi64(t[0], t[2]));
            put(out + stride, _mm512_unpackhi_epi64(t[0], t[2]));
            put(out + 2 * stride, _mm512_unpacklo_epi64(t[1], t[3]));
            put(out + 3 * stride, _mm512_unpackhi_epi64(t[1], t[3]));
        }
    }

    static void put(uint32_t* p, I x) { _mm512_storeu_si512(p, x); }
};
