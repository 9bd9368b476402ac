// Many tokens by weights in blocks: as many rows as a register has lanes are unpacked into a strip first, words of all rows
// beside each other, and panels of tokens pass over it.

// As many rows as a register has lanes, unpacked.
template <class Lanes, bool BYTES> struct Strip {
    int32_t* words;                       // [blocks, words, rows]
    float *scales, *minima;               // [blocks, rows]
    int32_t *first_halves, *last_halves;  // [blocks, rows], of bytes alone: what either half is multiplied with

    Strip(float* scratch, int64_t blocks)
        : words(reinterpret_cast<int32_t*>(scratch)),
          scales(scratch + blocks * kWords<BYTES> * Lanes::width),
          minima(scales + blocks * Lanes::width),
          first_halves(reinterpret_cast<int32_t*>(minima + blocks * Lanes::width)),
          last_halves(first_halves + blocks * Lanes::width) {}
};

// Block J's levels as a strip has them, offset and all where they are bytes.
template <class Words, class Type, bool BYTES, int J> void put_in_strip(const uint8_t* group, uint8_t* to) {
    if constexpr (BYTES) {
        Words::store(to, Type::template bytes<J>(group));
    } else {
        typename Words::W a, b;
        Type::template levels<J>(group, a, b);
        if constexpr (Type::shift > 0) a = Words::minus(a, 1 << Type::shift), b = Words::minus(b, 1 << Type::shift);
        Words::store(to, a), Words::store(to + kBlock, b);
    }
}

// Of rows that are not there the last one stands.
template <class Simd, class Words, class Lanes, class Type, bool BYTES>
void unpack_strip(const Projection& p, int64_t row, int64_t end, const Strip<Lanes, BYTES>& to) {
    constexpr int kRows = Lanes::width;
    const BlockRows<Type> rows(p);
    alignas(64) uint8_t words[kGroup][kRows][kWords<BYTES> * 4];
    uint8_t copy[Type::group_bytes];
    const int64_t groups = rows.groups + (rows.rest > 0);
    for (int64_t g = 0; g < groups; ++g) {
        const int n = g < rows.groups ? kGroup : rows.rest;
        for (int r = 0; r < kRows; ++r) {
            const uint8_t* whole = rows.row(row + r < end ? row + r : end - 1);
            const uint8_t* group = g < rows.groups ? whole + g * Type::group_bytes : rows.last(whole, kGroup, copy);
            each_below<kGroup>([&](auto j) {
                constexpr int J = decltype(j)::value;
                put_in_strip<Words, Type, BYTES, J>(group, words[J][r]);
            });
            typename Words::F d, m;
            float each[kGroup], least[kGroup];
            Type::scales(group, n, d, m);
            Words::Floats::store(each, d);
            if constexpr (Type::minimum) Words::Floats::store(least, m);
            for (int j = 0; j < n; ++j) {
                const int64_t at = (g * kGroup + j) * kRows + r;
                to.scales[at] = each[j];
                if constexpr (Type::minimum) to.minima[at] = least[j];
                if constexpr (BYTES && Type::halves)
                    to.first_halves[at] = Type::half_scale(group, 2 * j),
                    to.last_halves[at] = Type::half_scale(group, 2 * j + 1);
            }
        }
        for (int j = 0; j < n; ++j)
            Simd::transpose(words[j][0], kWords<BYTES>, kRows,
                            reinterpret_cast<uint32_t*>(to.words) + (g * kGroup + j) * kWords<BYTES> * kRows, kRows);
    }
}

// Sums of products of WORDS words of each row of a strip with those of the TOKENS tokens of a panel.
template <class Lanes, bool BYTES, int WORDS, int TOKENS>
inline __attribute__((always_inline)) void add_words(const int32_t* w, const int32_t* x, typename Lanes::I (&sums)[TOKENS]) {
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) sums[t] = Lanes::set1(0);
#pragma GCC unroll 4
    for (int i = 0; i < WORDS; ++i) {
        const typename Lanes::I words = Lanes::load(w + i * Lanes::width);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) {
            if constexpr (BYTES)
                sums[t] = Lanes::dot_bytes(words, x + i * TOKENS + t, sums[t]);
            else
                sums[t] = Lanes::dot(words, x + i * TOKENS + t, sums[t]);
        }
    }
}

// The exact sums of block b.
template <class Lanes, class Type, bool BYTES, int TOKENS>
inline __attribute__((always_inline)) void add_block(const Strip<Lanes, BYTES>& strip, const BlockPanel<BYTES>& x, int64_t b,
                                                     typename Lanes::I (&sums)[TOKENS]) {
    constexpr int kRows = Lanes::width, kAll = kWords<BYTES>, kHalf = kAll / 2;
    const int32_t *w = strip.words + b * kAll * kRows, *q = x.words + b * kAll * TOKENS;
    if constexpr (BYTES && Type::halves) {
        typename Lanes::I first[TOKENS];
        add_words<Lanes, BYTES, kHalf, TOKENS>(w, q, first);
        add_words<Lanes, BYTES, kHalf, TOKENS>(w + kHalf * kRows, q + kHalf * TOKENS, sums);
        const typename Lanes::I by_first = Lanes::load(strip.first_halves + b * kRows),
                                by_last = Lanes::load(strip.last_halves + b * kRows);
        for (int t = 0; t < TOKENS; ++t) {
            sums[t] = Lanes::sum_of_products(
                Lanes::template less_shifted<Type::byte_shift>(first[t], x.firsts + b * TOKENS + t), by_first,
                Lanes::template less_shifted<Type::byte_shift>(sums[t], x.lasts + b * TOKENS + t), by_last);
        }
    } else {
        add_words<Lanes, BYTES, kAll, TOKENS>(w, q, sums);
        if constexpr (BYTES && Type::byte_shift > 0)
            for (int t = 0; t < TOKENS; ++t)
                sums[t] = Lanes::template less_shifted<Type::byte_shift>(sums[t], x.totals + b * TOKENS + t);
    }
}

// A strip by the TOKENS tokens of a panel.
template <class Simd, class Lanes, class Type, bool BYTES, int TOKENS>
__attribute__((noinline)) void project_panel_of_blocks(const Projection& p, const Strip<Lanes, BYTES>& strip, int64_t token,
                                                       int64_t row, int64_t end) {
    typedef typename Simd::F F;
    constexpr int kRows = Lanes::width;
    const BlockPanel<BYTES> x(p.prepared, p.in, token, TOKENS);
    F chains[kGroup][TOKENS];
    const int64_t blocks = p.in / kBlock;
    for (int j = 0; j < kGroup; ++j) {  // a chain stays in registers
        F chain[TOKENS];
        for (int t = 0; t < TOKENS; ++t) chain[t] = Simd::zero();
        for (int64_t b = j; b < blocks; b += kGroup) {
            typename Lanes::I sums[TOKENS];
            add_block<Lanes, Type, BYTES, TOKENS>(strip, x, b, sums);
            const F scale = Simd::load(strip.scales + b * kRows);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) {
                const F by = Simd::mul(scale, Simd::set1(x.steps[b * TOKENS + t]));
                chain[t] = Simd::fma(Lanes::floats(sums[t]), by, chain[t]);
                if constexpr (Type::minimum)
                    chain[t] =
                        Simd::fma(Simd::load(strip.minima + b * kRows), Simd::set1(x.negatives[b * TOKENS + t]), chain[t]);
            }
        }
        for (int t = 0; t < TOKENS; ++t) chains[j][t] = chain[t];
    }
    const int there = static_cast<int>(end - row < kRows ? end - row : kRows);
    for (int t = 0; t < TOKENS; ++t) {
        for (int i = 0; i < kGroup / 2; ++i) chains[i][t] = Simd::add(chains[i][t], chains[i + 4][t]);
        const F sum = Simd::add(Simd::add(chains[0][t], chains[2][t]), Simd::add(chains[1][t], chains[3][t]));
        float y[kRows];
        Simd::store(y, sum);
        if (p.weight.row_scales)
            for (int r = 0; r < there; ++r) y[r] *= p.weight.row_scales[row + r];
        std::memcpy(p.y + (token + t) * p.out + row, y, there * sizeof(float));
    }
}
