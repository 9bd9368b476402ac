// One step of the online softmax whose weights go to tiles of bytes: of blocks whose weights are one stretch and whose values
// are nibbles, none of them in BF16. The bits are those of `soften` and of `weigh` after it, which take row by row; here what
// each of eight rows needs once is computed for all of them, in the lanes of one register.

// Joins the lanes of each of eight registers in the order of `_mm512_reduce_add_ps`: halves, then quarters, then pairs.
template <class Join> inline __m256 reduce_eight(const __m512 (&x)[8], Join join) {
    __m512 half[4], quarter[2];
    for (int i = 0; i < 4; ++i)
        half[i] = join(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x44), _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xee));
    for (int i = 0; i < 2; ++i)
        quarter[i] = join(_mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0x88),
                          _mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0xdd));
    const __m512d a = _mm512_castps_pd(quarter[0]), b = _mm512_castps_pd(quarter[1]);
    const __m512 pair = join(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, join(pair, _mm512_movehdup_ps(pair))));
}
inline __m256 sums_of_eight(const __m512 (&x)[8]) {
    return reduce_eight(x, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}
inline __m256 largest_of_eight(const __m512 (&x)[8]) {
    return reduce_eight(x, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}

// As `exponentials`. The block's maxima in, the running ones out.
inline void rescale_eight(__m256 block, float* maxima, float* shrink, float* factor) {
    const __m256 before = _mm256_loadu_ps(maxima), now = _mm256_max_ps(block, before);
    const __m256 of_no_key = _mm256_set1_ps(-INFINITY);
    const __m512 power =
        Avx512::expf(_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_sub_ps(before, now)), _mm256_sub_ps(block, now), 1));
    const __mmask8 had = _mm256_cmp_ps_mask(before, of_no_key, _CMP_NEQ_UQ),
                   has = _mm256_cmp_ps_mask(block, of_no_key, _CMP_NEQ_UQ);
    _mm256_storeu_ps(shrink, _mm256_maskz_mov_ps(had, _mm512_castps512_ps256(power)));
    _mm256_storeu_ps(factor, _mm256_maskz_mov_ps(has, _mm512_extractf32x8_ps(power, 1)));
    _mm256_storeu_ps(maxima, now);
}

// As `step_of`.
inline void steps_of_eight(__m256 most, __m256 total, float* steps, float* inverse) {
    __m256 step = _mm256_div_ps(most, _mm256_set1_ps(kLargestInteger));
    step = _mm256_mask_mov_ps(total, _mm256_cmp_ps_mask(total, step, _CMP_LE_OQ), step);
    const __mmask8 matters = _mm256_cmp_ps_mask(step, _mm256_set1_ps(1e-35f), _CMP_GT_OQ);
    const __mmask8 finite = _mm256_cmp_ps_mask(step, _mm256_set1_ps(INFINITY), _CMP_LT_OQ);
    _mm256_storeu_ps(inverse, _mm256_maskz_div_ps(matters, _mm256_set1_ps(1.0f), step));
    _mm256_storeu_ps(steps, _mm256_mask_mov_ps(_mm256_set1_ps(NAN), finite, _mm256_maskz_mov_ps(matters, step)));
}

// Turns logits [R, kStretch] of a block, of which row r sees seen[r], into weights `scale * p`, and those into bytes: row r's
// at `bytes + r * kChunk`. `SEEN` says that every row sees all keys. Returns the steps of the integers.
template <int R, bool SEEN>
inline void soften_to_bytes(float* logits, const Seen* seen, const float* scale, float most_total, float* maxima,
                            float* totals, float* shrink, float* steps, int8_t* bytes) {
    static_assert(R == 8);
    constexpr int kRegisters = kStretch / 16;
    auto seen_of = [&](int r, int i, __m512 x, __m512 other)
                       __attribute__((always_inline)) { return SEEN ? x : shown<Avx512>(seen[r], i * 16, x, other); };
    const __m512 lowest = Avx512::set1(-INFINITY), share = Avx512::set1(1.0f / most_total);
    __m512 most[R], sum[R], total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        most[r] = lowest;
#pragma GCC unroll 8
        for (int i = 0; i < kRegisters; ++i)
            most[r] = Avx512::max(seen_of(r, i, Avx512::load(logits + r * kStretch + i * 16), lowest), most[r]);
    }
    float block_max[R], factor[R], inverse[R];
    const __m256 block = largest_of_eight(most);
    _mm256_storeu_ps(block_max, block);
    rescale_eight(block, maxima, shrink, factor);
#pragma GCC unroll 1
    for (int r = 0; r < R; ++r) {
        const __m512 by = Avx512::set1(factor[r]);
        most[r] = sum[r] = total[r] = Avx512::zero();
#pragma GCC unroll 8
        for (int i = 0; i < kRegisters; ++i) {
            float* at = logits + r * kStretch + i * 16;
            const __m512 p = seen_of(r, i, Avx512::exp_bf16(Avx512::load(at), block_max[r]), Avx512::zero());
            const __m512 weight = Avx512::mul(Avx512::mul(p, by), Avx512::load(scale + i * 16)), size = _mm512_abs_ps(weight);
            Avx512::store(at, weight);
            sum[r] = Avx512::add(sum[r], p), most[r] = Avx512::max(size, most[r]),
            total[r] = Avx512::fma(size, share, total[r]);
        }
    }
    const __m256 before = _mm256_mul_ps(sums_of_eight(sum), _mm256_loadu_ps(factor));
    _mm256_storeu_ps(totals, _mm256_fmadd_ps(_mm256_loadu_ps(totals), _mm256_loadu_ps(shrink), before));
    steps_of_eight(largest_of_eight(most), sums_of_eight(total), steps, inverse);
#pragma GCC unroll 1
    for (int r = 0; r < R; ++r) {
        const __m512 per_step = Avx512::set1(inverse[r]);
        put_weight_bytes(kStretch / kChunk, bytes + r * kChunk, [&](int i) __attribute__((always_inline)) {
            return to_integers(Avx512::load(logits + r * kStretch + i), per_step);
        });
    }
}
