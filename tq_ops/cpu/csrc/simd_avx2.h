// Eight lanes of AVX2 with FMA and F16C. With AVX-512VL as well, one instruction looks up all 16 centroids.
struct Avx2 {
    static constexpr int width = 8;
#ifdef __AVX512VL__
    static constexpr int registers = 32;
#else
    static constexpr int registers = 16;
#endif
    static constexpr bool moves_each = true;
    static constexpr bool looks_up_64 = false;  // in registers
    typedef Avx2 Half;
    typedef __m256 F;
    typedef __m256i I;
    struct Table {
        __m256 low, high;
    };

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load(const uint16_t* bf16) {
        return low_bf16(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bf16))));
    }
    static F load_halves(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static void stream(float* p, F x) { _mm256_stream_ps(p, x); }
    static void fence() { _mm_sfence(); }
    static F set1(float x) { return _mm256_set1_ps(x); }
    static F zero() { return _mm256_setzero_ps(); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F times_power_of_two(F x, F n) {
        const I exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
        return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
    }
    static F expf(F x) { return exponential<Avx2>(x); }
    static F exp_bf16(F x, float most) { return round_bf16(expf(add(x, set1(-most)))); }
    static F round_bf16(F x) {
        const I u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        const I moved = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        return _mm256_castsi256_ps(_mm256_and_si256(moved, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static F first(int n, F a, F b) {
        const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)));
    }
    static float reduce_add(F x) {
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
    }
    static void reduce_each(F a, F b, F c, F d, float* out) {
        const F ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
        const F cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
        const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
        F sums = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
        sums = _mm256_add_ps(sums, _mm256_permute_ps(sums, 0xb1));
        _mm_storeu_ps(out, _mm_blend_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1), 0xa));
    }
    static float reduce_max(F x) {
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
    }

    static Table table(const float* centroids) { return {load(centroids), load(centroids + 8)}; }
    static I load_words(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
    template <int N> static I shift(I x) { return N ? _mm256_srli_epi32(x, N) : x; }
    static I shift_by(I x, int bits) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(bits)); }
    static I shift_up_by(I x, int bits) { return _mm256_sll_epi32(x, _mm_cvtsi32_si128(bits)); }
    static I join_nibbles(I lower, I upper) {
        const I mask = _mm256_set1_epi8(0x0f);
        return _mm256_or_si256(_mm256_and_si256(mask, lower), _mm256_andnot_si256(mask, upper));
    }
    static F lookup(const Table& t, I x) {
#ifdef __AVX512VL__
        return _mm256_permutex2var_ps(t.low, x, t.high);
#else
        // Moves bit 3 to the sign, which selects the half.
        const F upper = _mm256_castsi256_ps(_mm256_slli_epi32(x, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, x), _mm256_permutevar8x32_ps(t.high, x), upper);
#endif
    }
    // Numbers by levels of BITS bits, a byte each.
    template <int BITS> static const float* wide_table(const float* centroids) { return centroids; }
    template <int BITS> static F lookup_bytes(const float* table, const uint8_t* level) {
        return _mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(level))), 4);
    }
    // By the lowest BITS bits.
    template <int BITS> static F lookup_wide(const float* table, I x) {
        return _mm256_i32gather_ps(table, _mm256_and_si256(x, _mm256_set1_epi32((1 << BITS) - 1)), 4);
    }
    template <int BYTES> static I repeated(const uint8_t* p) {
        if constexpr (BYTES == 8) return _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        if constexpr (BYTES == 16) return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return load_words(p);
    }
    static I down(I x, const uint64_t* bits) { return _mm256_srlv_epi64(x, load_words(bits)); }
    static I two_bits(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(0x33)); }
    static I three_bits(I two, I one, const uint64_t* bits) {
        const I third = _mm256_and_si256(_mm256_slli_epi64(down(one, bits), 2), _mm256_set1_epi8(0x44));
        return _mm256_or_si256(two_bits(two), third);
    }
    static void store_words(void* p, I x) { _mm256_storeu_si256(static_cast<I*>(p), x); }
    static I no_words() { return _mm256_setzero_si256(); }
    static I add_reached(I n, F y, F boundary) {
        return _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps(y, boundary, _CMP_GE_OQ)));
    }
    static void interleave(F even, F odd, F* first, F* second) {
        const F low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
        *first = _mm256_permute2f128_ps(low, high, 0x20), *second = _mm256_permute2f128_ps(low, high, 0x31);
    }
    static F low_bf16(I x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
    static F high_bf16(I x) {
        return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    // Four words of eight keys at a time; the last four overlap those before where their number is no multiple of four.
    static void transpose(const uint8_t* codes, int words, int keys, uint32_t* out, int stride) {
        for (int j = 0; j < words; j += 4) {
            const int at = smaller(j, words - 4);
            I r[4], t[4];
            for (int i = 0; i < 4; ++i) {
                r[i] = _mm256_castsi128_si256(four(codes + (smaller(i, keys - 1) * words + at) * 4));
                r[i] = _mm256_inserti128_si256(r[i], four(codes + (smaller(4 + i, keys - 1) * words + at) * 4), 1);
            }
            for (int i = 0; i < 4; i += 2)
                t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
            for (int c = 0; c < 2; ++c) {
                put(out + (at + 2 * c) * stride, _mm256_unpacklo_epi64(t[c], t[c + 2]));
                put(out + (at + 2 * c + 1) * stride, _mm256_unpackhi_epi64(t[c], t[c + 2]));
            }
        }
    }

  private:
    static __m128i four(const uint8_t* codes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)); }
    static void put(uint32_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<I*>(p), x); }
};
