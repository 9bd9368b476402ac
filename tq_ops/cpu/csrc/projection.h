// Projections of few tokens by a BF16 weight, which is read once and never widened in memory.

// ROWS rows of the weight by TOKENS tokens of x. A 32-bit word holds two BF16 weights; a shift or a mask widens each.
template <class Simd, int ROWS, int TOKENS> inline void project_rows(const Projection& p, int64_t row, int token) {
    typename Simd::F acc[ROWS][TOKENS];
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TOKENS; ++t) acc[r][t] = Simd::zero();
    const int64_t half = p.in / 2, whole = half / Simd::width * Simd::width;
    const uint16_t* weight = p.weight + row * p.in;
    const float *even = p.even + token * half, *odd = p.odd + token * half;
    for (int64_t i = 0; i < whole; i += Simd::width) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const typename Simd::I word = Simd::load_words(weight + r * p.in + 2 * i);
            const typename Simd::F low = Simd::low_bf16(word), high = Simd::high_bf16(word);
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) {
                acc[r][t] = Simd::fma(low, Simd::load(even + t * half + i), acc[r][t]);
                acc[r][t] = Simd::fma(high, Simd::load(odd + t * half + i), acc[r][t]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TOKENS; ++t) {
            float sum = Simd::reduce_add(acc[r][t]);
            for (int64_t i = 2 * whole; i < p.in; ++i)
                sum += bf16_to_float(weight[r * p.in + i]) * p.x[(token + t) * p.in + i];
            p.y[(token + t) * p.out + row + r] = sum;
        }
}

template <class Simd, int TOKENS> void project_tokens(const Projection& p, int64_t begin, int64_t end, int token) {
    int64_t row = begin;
    for (; row + 4 <= end; row += 4) project_rows<Simd, 4, TOKENS>(p, row, token);
    for (; row < end; ++row) project_rows<Simd, 1, TOKENS>(p, row, token);
}

// Rows begin ... end - 1 of the weight, a few at a time, so that each is read from memory once for all tokens.
template <class Simd> void project(const Projection& p, int64_t begin, int64_t end) {
    constexpr int64_t kStep = 8;
    for (int64_t row = begin; row < end; row += kStep) {
        const int64_t last = row + kStep < end ? row + kStep : end;
        int token = 0;
        for (; token + 4 <= p.tokens; token += 4) project_tokens<Simd, 4>(p, row, last, token);
        if (token + 2 <= p.tokens) project_tokens<Simd, 2>(p, row, last, token), token += 2;
        if (token < p.tokens) project_tokens<Simd, 1>(p, row, last, token);
    }
}
