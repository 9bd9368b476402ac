// One step of the online softmax whose weights go to tiles of bytes without a stop in memory: of blocks whose weights are one
// stretch and whose values are nibbles, none of them in BF16. The bits are those of `soften` and of `weigh` after it.

// Bytes of the four registers of integers that are packed to `a` and `b`: even ones of a lane of `a`, then of `b`, or odd
// ones.
inline __m512i bytes_of(__m512i a, __m512i b, bool odd) {
    alignas(64) static constexpr struct Places {
        int8_t of[2][64] = {};
        constexpr Places() {
            for (int i = 0; i < 128; ++i)
                of[i / 64][i % 64] = static_cast<int8_t>(i % 64 / 16 * 16 + i % 8 * 2 + i / 64 + (i % 16 < 8 ? 0 : 64));
        }
    } kPlaces;
    return _mm512_permutex2var_epi8(a, _mm512_load_si512(kPlaces.of[odd]), b);
}

// Turns logits [R, kStretch] of a block, of which row r sees seen[r], into the bytes of its weights `scale * p`: the upper
// ones of row r at `bytes + r * kChunk`, the lower ones a tile later, of the second chunk a pair of tiles later. `SEEN` says
// that every row sees all keys. Returns the steps of the integers.
template <int R, bool SEEN>
inline void soften_to_bytes(const float* logits, const int* seen, const float* scale, float most_total, float* maxima,
                            float* totals, float* shrink, float* steps, int8_t* bytes) {
    constexpr int kRegisters = kStretch / 16;
    auto shown = [&](int r, int i, __m512 x, __m512 other)
                     __attribute__((always_inline)) { return SEEN ? x : Avx512::first(seen[r] - i * 16, x, other); };
    float block_max[R], new_max[R], factor[R];
    for (int r = 0; r < R; ++r, logits += kStretch) {
        __m512 most = Avx512::set1(-INFINITY);
#pragma GCC unroll 8
        for (int i = 0; i < kRegisters; ++i)
            most = Avx512::max(shown(r, i, Avx512::load(logits + i * 16), Avx512::set1(-INFINITY)), most);
        block_max[r] = Avx512::reduce_max(most);
        new_max[r] = block_max[r] > maxima[r] ? block_max[r] : maxima[r];
    }
    logits -= R * kStretch;
    exponentials<Avx512>(R, maxima, block_max, new_max, shrink, factor);
    const __m512 share = Avx512::set1(1.0f / most_total);
    for (int r = 0; r < R; ++r, logits += kStretch, bytes += kChunk) {
        __m512 weight[kRegisters], sum = Avx512::zero(), most = Avx512::zero(), total = Avx512::zero();
        const __m512 by = Avx512::set1(factor[r]);
#pragma GCC unroll 8
        for (int i = 0; i < kRegisters; ++i) {
            const __m512 p = shown(r, i, Avx512::exp_bf16(Avx512::load(logits + i * 16), block_max[r]), Avx512::zero());
            sum = Avx512::add(sum, p);
            weight[i] = Avx512::mul(Avx512::mul(p, by), Avx512::load(scale + i * 16));
            const __m512 size = _mm512_abs_ps(weight[i]);
            most = Avx512::max(size, most), total = Avx512::fma(size, share, total);
        }
        totals[r] = __builtin_fmaf(totals[r], shrink[r], Avx512::reduce_add(sum) * factor[r]);
        maxima[r] = new_max[r];
        float inverse;
        steps[r] = step_of(Avx512::reduce_max(most), Avx512::reduce_add(total), &inverse);
        const __m512 per_step = Avx512::set1(inverse);
#pragma GCC unroll 2
        for (int c = 0; c < kStretch / kChunk; ++c) {
            auto whole = [&](int i) __attribute__((always_inline)) { return to_integers(weight[c * 4 + i], per_step); };
            const __m512i a = _mm512_packs_epi32(whole(0), whole(1)), b = _mm512_packs_epi32(whole(2), whole(3));
            const __m512i half = _mm512_set1_epi16(128);
            int8_t* to = bytes + c * kPairBytes;
            _mm512_store_si512(to, bytes_of(_mm512_add_epi16(a, half), _mm512_add_epi16(b, half), true));
            _mm512_store_si512(to + kTileBytes, bytes_of(a, b, false));
        }
    }
}
