// Projections of weights that lie in blocks of a few bits a number, row by row as a GGUF file has them (block_types.h).
//
// Each 32 numbers of a token become 16-bit integers q, with a step s of their own:
//     s = max(largest size / 32767, sum of sizes / 524000);  q = x / s, rounded
// so that no sum of 32 products overflows 32 bits: levels stay below 2**12 in size, and sizes of q add up to less than 2**19.
// Where the weight says so (`x_bits` is 8) they are integers of 8 bits, s = largest size / 127. Instructions for bytes take
// twice as many numbers then (`BYTES`, of words that have them); others multiply the same integers as they do any.
//
// The sum I of a block's products is therefore exact, by any instructions and in any order. In FP32 a row then adds in eight
// chains, block b to chain b % 8 and each in order:
//     chain = fma(I, D * s, chain);  chain = fma(M, -s * sum of q, chain)
// and the chains are added as `reduce_add` adds eight lanes. One token and many do the same, so that a number of y has the
// same bits whatever is projected beside it.
//
// Of few tokens, each row is read once, and meets them as it is unpacked. Of many, as many rows as a register has lanes are
// unpacked into a strip first, number pairs of all rows beside each other, and panels of tokens pass over it.

constexpr int kGroup = kBlocksTogether;

// Words of 32 bits that a block's integers take.
template <bool BYTES> constexpr int kWords = kBlock / (BYTES ? 4 : 2);

inline int64_t whole_groups(int64_t in) { return (in / kBlock + kGroup - 1) / kGroup * kGroup; }

// Where a panel of tokens is prepared. Blocks that are there for whole groups alone are zero.
template <bool BYTES> struct BlockPanel {
    int32_t *words, *totals;   // integers [blocks, words, tokens] and their sums [blocks, tokens]
    float *steps, *negatives;  // [blocks, tokens]; -step * total
    int32_t *firsts, *lasts;   // [blocks, tokens], of bytes alone: sums of either half

    BlockPanel(void* prepared, int64_t in, int64_t first_token, int tokens) {
        const int64_t blocks = whole_groups(in);
        words = static_cast<int32_t*>(prepared) + first_token * kBlockFloats * blocks;
        totals = words + blocks * kWords<BYTES> * tokens;
        steps = reinterpret_cast<float*>(totals + blocks * tokens);
        negatives = steps + blocks * tokens;
        firsts = reinterpret_cast<int32_t*>(negatives + blocks * tokens), lasts = firsts + blocks * tokens;
    }
};

inline TokenPanels block_panels(int64_t tokens) { return TokenPanels(tokens, tokens <= kFewTokens ? 1 : kBlockPanelTokens); }

// 32 numbers of x to integers [32] of so many bits, and their step.
template <class Simd> inline void to_integers(const float* x, int bits, int16_t* q, float* step) {
    typedef typename Simd::F F;
    F most = Simd::zero(), total = Simd::zero();
    for (int i = 0; i < kBlock; i += Simd::width) {
        const F size = Simd::max(Simd::load(x + i), Simd::mul(Simd::load(x + i), Simd::set1(-1.0f)));
        most = Simd::max(size, most), total = Simd::fma(size, Simd::set1(1.0f / 524000.0f), total);
    }
    float s = Simd::reduce_max(most) / (bits == 8 ? 127.0f : 32767.0f);
    const float of_total = Simd::reduce_add(total);
    if (!(of_total <= s)) s = of_total;  // also if it is a NaN
    if (!(s < INFINITY)) s = NAN;
    const float inverse = s > 1e-35f ? 1.0f / s : 0.0f;  // so small a step is none, and a NaN's integers do not matter
    *step = inverse > 0.0f || s != s ? s : 0.0f;
    float rounded[kBlock];
    for (int i = 0; i < kBlock; i += Simd::width)
        Simd::store(rounded + i,
                    inverse > 0.0f ? Simd::round(Simd::mul(Simd::load(x + i), Simd::set1(inverse))) : Simd::zero());
    for (int i = 0; i < kBlock; ++i) q[i] = static_cast<int16_t>(static_cast<int32_t>(rounded[i]));
}

// Block b of a token, as number t of n in its panel.
template <class Simd, bool BYTES>
inline __attribute__((always_inline)) void prepare_block(const Projection& p, int64_t token, int64_t b,
                                                         const BlockPanel<BYTES>& to, int n, int t) {
    float x[kBlock], step = 0.0f;
    int16_t q[kBlock] = {};
    if (b < p.in / kBlock) {
        const int64_t at = token * p.in + b * kBlock;
        if (p.x_bf16)
            for (int i = 0; i < kBlock; ++i) x[i] = bf16_to_float(static_cast<const uint16_t*>(p.x)[at + i]);
        else
            std::memcpy(x, static_cast<const float*>(p.x) + at, sizeof x);
        if (p.weight.column_scales)
            for (int i = 0; i < kBlock; ++i) x[i] *= p.weight.column_scales[b * kBlock + i];
        to_integers<Simd>(x, p.weight.x_bits, q, &step);
    }
    int32_t words[kWords<BYTES>], first = 0, last = 0;
    if constexpr (BYTES) {
        int8_t bytes[kBlock];
        for (int i = 0; i < kBlock; ++i) bytes[i] = static_cast<int8_t>(q[i]);
        std::memcpy(words, bytes, sizeof words);
    } else {
        std::memcpy(words, q, sizeof words);
    }
    for (int i = 0; i < kWords<BYTES>; ++i) to.words[(b * kWords<BYTES> + i) * n + t] = words[i];
    for (int i = 0; i < kBlock / 2; ++i) first += q[i], last += q[kBlock / 2 + i];
    if constexpr (BYTES) to.firsts[b * n + t] = first, to.lasts[b * n + t] = last;
    to.totals[b * n + t] = first + last, to.steps[b * n + t] = step;
    to.negatives[b * n + t] = -step * static_cast<float>(first + last);
}

template <class Simd, bool BYTES = false> void prepare_blocks(const Projection& p, int64_t begin, int64_t end) {
    const TokenPanels panels = block_panels(p.tokens);
    const int64_t whole = whole_groups(p.in);
    for (int64_t token = begin; token < end; ++token) {
        const int64_t panel = panels.of_token(token), first = panels.first_token(panel);
        const int n = panels.tokens(panel);
        const BlockPanel<BYTES> to(p.prepared, p.in, first, n);
        for (int64_t b = 0; b < whole; ++b) prepare_block<Simd, BYTES>(p, token, b, to, n, static_cast<int>(token - first));
    }
}

// Rows of a weight whose last group has `rest` blocks, and may not be read as if it were whole at the weight's end.
template <class Type> struct BlockRows {
    const uint8_t *data, *end;
    int64_t row_bytes, groups;  // whole ones
    int rest;

    explicit BlockRows(const Projection& p)
        : data(static_cast<const uint8_t*>(p.weight.data)),
          row_bytes(p.weight.row_bytes),
          groups(p.in / (kBlock * kGroup)),
          rest(static_cast<int>(p.in / kBlock % kGroup)) {
        end = data + (p.out - 1) * row_bytes + (Type::whole_groups ? groups : p.in / kBlock) * Type::block_bytes;
    }
    const uint8_t* row(int64_t i) const { return data + i * row_bytes; }
    // The last group of a row, as it lies or copied, of which `blocks` can be read.
    const uint8_t* last(const uint8_t* row, int blocks, uint8_t* copy) const {
        const uint8_t* group = row + groups * Type::group_bytes;
        if (group + blocks * Type::block_bytes <= end) return group;
        std::memset(copy, 0, Type::group_bytes), std::memcpy(copy, group, rest * Type::block_bytes);
        return copy;
    }
};

// A token as `BlockPanel` has it, alone in its panel.
struct BlockToken {
    const int32_t *words, *totals, *firsts, *lasts;
    const float *steps, *negatives;
};

// N blocks of a group, the first n with scales, by each of the tokens.
template <class Words, class Type, int N, int TOKENS>
inline __attribute__((always_inline)) void add_group(const uint8_t* group, int n, int64_t block,
                                                     const BlockToken (&tokens)[TOKENS], typename Words::F (&chains)[TOKENS]) {
    typedef typename Words::Floats Floats;
    typedef typename Words::W W;
    constexpr bool kAlone = TOKENS == 1;  // then levels are multiplied as they come
    W levels[kAlone ? 1 : 2 * N];
    if constexpr (!kAlone)
        each_below<N>([&](auto j) {
            constexpr int J = decltype(j)::value;
            Type::template levels<J>(group, levels[2 * J], levels[2 * J + 1]);
        });
    typename Words::F d, m;
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) {
        const BlockToken& token = tokens[t];
        const int32_t* x = token.words + block * kWords<false>;
        typename Words::I each[kGroup];
        each_below<kGroup>([&](auto j) {
            constexpr int J = decltype(j)::value;
            each[J] = Words::none();
            if constexpr (J < N) {
                W a, b;
                if constexpr (kAlone)
                    Type::template levels<J>(group, a, b);
                else
                    a = levels[2 * J], b = levels[2 * J + 1];
                const int32_t* pairs = x + J * kWords<false>;
                each[J] = Words::dot(a, Words::numbers(pairs), each[J]);
                each[J] = Words::dot(b, Words::numbers(pairs + kWords<false> / 2), each[J]);
            }
        });
        if (t == 0) Type::scales(group, n, d, m);
        typename Words::I all = Words::totals(each);
        if constexpr (Type::shift >= 0)
            all = Words::template less_shifted < Type::shift<0 ? 0 : Type::shift>(all, Words::load(token.totals + block));
        chains[t] = Floats::fma(Words::floats(all), Floats::mul(d, Floats::load(token.steps + block)), chains[t]);
        if constexpr (Type::minimum) chains[t] = Floats::fma(m, Floats::load(token.negatives + block), chains[t]);
    }
}

// The same with integers of 8 bits.
template <class Words, class Type, int N, int TOKENS>
inline __attribute__((always_inline)) void add_group_of_bytes(const uint8_t* group, int n, int64_t block,
                                                              const BlockToken (&tokens)[TOKENS],
                                                              typename Words::F (&chains)[TOKENS]) {
    typedef typename Words::Floats Floats;
    typedef typename Words::I I;
    I levels[N];
    each_below<N>([&](auto j) { levels[decltype(j)::value] = Type::template bytes<decltype(j)::value>(group); });
    typename Words::F d, m;
    Type::scales(group, n, d, m);
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) {
        const BlockToken& token = tokens[t];
        I each[kGroup];
        each_below<kGroup>([&](auto j) {
            constexpr int J = decltype(j)::value;
            each[J] = Words::none();
            if constexpr (J < N)
                each[J] = Words::dot_bytes(levels[J], Words::load(token.words + (block + J) * kWords<true>), each[J]);
        });
        I all;
        if constexpr (Type::halves) {
            I first, last, by_first, by_last;
            Words::half_totals(each, first, last);
            first = Words::template less_shifted<Type::byte_shift>(first, Words::load(token.firsts + block));
            last = Words::template less_shifted<Type::byte_shift>(last, Words::load(token.lasts + block));
            Type::half_scales(group, by_first, by_last);
            all = Words::sum_of_products(first, by_first, last, by_last);
        } else {
            all = Words::totals(each);
            if constexpr (Type::byte_shift > 0)
                all = Words::template less_shifted<Type::byte_shift>(all, Words::load(token.totals + block));
        }
        chains[t] = Floats::fma(Words::floats(all), Floats::mul(d, Floats::load(token.steps + block)), chains[t]);
        if constexpr (Type::minimum) chains[t] = Floats::fma(m, Floats::load(token.negatives + block), chains[t]);
    }
}

template <class Words, class Type, int N, bool BYTES, int TOKENS>
inline __attribute__((always_inline)) void add_any(const uint8_t* group, int n, int64_t block,
                                                   const BlockToken (&tokens)[TOKENS], typename Words::F (&chains)[TOKENS]) {
    if constexpr (BYTES)
        add_group_of_bytes<Words, Type, N>(group, n, block, tokens, chains);
    else
        add_group<Words, Type, N>(group, n, block, tokens, chains);
}

// Rows begin ... end - 1 by TOKENS tokens from `first` on, each a panel of its own.
template <class Words, class Type, bool BYTES, int TOKENS>
void project_block_rows(const Projection& p, int64_t first, int64_t begin, int64_t end) {
    typedef typename Words::Floats Floats;
    const BlockRows<Type> rows(p);
    BlockToken tokens[TOKENS];
    for (int t = 0; t < TOKENS; ++t) {
        const BlockPanel<BYTES> x(p.prepared, p.in, first + t, 1);
        tokens[t] = {x.words, x.totals, x.firsts, x.lasts, x.steps, x.negatives};
    }
    for (int64_t i = begin; i < end; ++i) {
        typename Words::F chains[TOKENS];
        for (int t = 0; t < TOKENS; ++t) chains[t] = Floats::zero();
        const uint8_t *row = rows.row(i), *group = row;
        int64_t block = 0;
        for (int64_t g = 0; g < rows.groups; ++g, group += Type::group_bytes, block += kGroup)
            add_any<Words, Type, kGroup, BYTES>(group, kGroup, block, tokens, chains);
        if constexpr (!Type::whole_groups) {
            uint8_t copy[Type::group_bytes];
            if (rows.rest > kGroup / 2)
                add_any<Words, Type, kGroup, BYTES>(rows.last(row, kGroup, copy), rows.rest, block, tokens, chains);
            else if (rows.rest > 0)
                add_any<Words, Type, kGroup / 2, BYTES>(rows.last(row, kGroup / 2, copy), rows.rest, block, tokens, chains);
        }
        const float scale = p.weight.row_scales ? p.weight.row_scales[i] : 1.0f;
        for (int t = 0; t < TOKENS; ++t) p.y[(first + t) * p.out + i] = Floats::reduce_add(chains[t]) * scale;
    }
}

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
template <class Words, class Type, bool BYTES, int J> void put_levels(const uint8_t* group, uint8_t* to) {
    if constexpr (BYTES) {
        Words::store(to, Type::template bytes<J>(group));
    } else {
        typename Words::W a, b;
        Type::template levels<J>(group, a, b);
        if constexpr (Type::shift >= 0) a = Words::minus(a, 1 << Type::shift), b = Words::minus(b, 1 << Type::shift);
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
                put_levels<Words, Type, BYTES, J>(group, words[J][r]);
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
void project_panel_of_blocks(const Projection& p, const Strip<Lanes, BYTES>& strip, int64_t token, int64_t row, int64_t end) {
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

template <class Simd, class Lanes, class Type, bool BYTES, int TOKENS = kBlockPanelTokens>
void project_some_of_blocks(const Projection& p, const Strip<Lanes, BYTES>& strip, int64_t token, int tokens, int64_t row,
                            int64_t end) {
    if constexpr (TOKENS > 1)
        if (tokens < TOKENS)
            return project_some_of_blocks<Simd, Lanes, Type, BYTES, TOKENS - 1>(p, strip, token, tokens, row, end);
    project_panel_of_blocks<Simd, Lanes, Type, BYTES, TOKENS>(p, strip, token, row, end);
}

template <class Words, class Type, bool BYTES, int TOKENS = Words::tokens>
void project_few(const Projection& p, int64_t first, int tokens, int64_t begin, int64_t end) {
    if constexpr (TOKENS > 1)
        if (tokens < TOKENS) return project_few<Words, Type, BYTES, TOKENS - 1>(p, first, tokens, begin, end);
    project_block_rows<Words, Type, BYTES, TOKENS>(p, first, begin, end);
}

template <class Simd, class Words, class Lanes, class Type, bool BYTES = false>
void project_of_type(const Projection& p, int64_t begin, int64_t end, float* scratch) {
    if constexpr (Words::has_bytes && !BYTES)
        if (p.weight.x_bits == 8) return project_of_type<Simd, Words, Lanes, Type, true>(p, begin, end, scratch);
    if (p.tokens <= kFewTokens) {
        const TokenPanels few(p.tokens, Words::tokens);
        for (int64_t i = 0; i < few.count; ++i)
            project_few<Words, Type, BYTES>(p, few.first_token(i), few.tokens(i), begin, end);
        return;
    }
    const TokenPanels panels = block_panels(p.tokens);
    constexpr int kTwo = 2;
    const int64_t blocks = p.in / kBlock, floats = blocks * (kStripFloats / kTwo);
    for (int64_t row = begin; row < end; row += kTwo * Lanes::width) {
        const Strip<Lanes, BYTES> strips[kTwo] = {{scratch, blocks}, {scratch + floats, blocks}};
        for (int s = 0; s < kTwo && row + s * Lanes::width < end; ++s)
            unpack_strip<Simd, Words, Lanes, Type, BYTES>(p, row + s * Lanes::width, end, strips[s]);
        for (int64_t i = 0; i < panels.count; ++i)
            for (int s = 0; s < kTwo && row + s * Lanes::width < end; ++s)
                project_some_of_blocks<Simd, Lanes, Type, BYTES>(p, strips[s], panels.first_token(i), panels.tokens(i),
                                                                 row + s * Lanes::width, end);
    }
}

template <class Simd, class Words, class Lanes>
void project_blocks(const Projection& p, int64_t begin, int64_t end, float* scratch) {
    switch (p.weight.stored) {
        case kQ8_0:
            return project_of_type<Simd, Words, Lanes, Q8_0<Words>>(p, begin, end, scratch);
        case kQ4_0:
            return project_of_type<Simd, Words, Lanes, Q4_0<Words>>(p, begin, end, scratch);
        case kQ4_1:
            return project_of_type<Simd, Words, Lanes, Q4_1<Words>>(p, begin, end, scratch);
        case kQ5_0:
            return project_of_type<Simd, Words, Lanes, Q5_0<Words>>(p, begin, end, scratch);
        case kQ5_1:
            return project_of_type<Simd, Words, Lanes, Q5_1<Words>>(p, begin, end, scratch);
        case kQ4_K:
            return project_of_type<Simd, Words, Lanes, Q4_K<Words>>(p, begin, end, scratch);
        case kQ5_K:
            return project_of_type<Simd, Words, Lanes, Q5_K<Words>>(p, begin, end, scratch);
        case kQ6_K:
            return project_of_type<Simd, Words, Lanes, Q6_K<Words>>(p, begin, end, scratch);
        case kIq4Nl:
            return project_of_type<Simd, Words, Lanes, Iq4Nl<Words>>(p, begin, end, scratch);
        default:
            return project_of_type<Simd, Words, Lanes, Mxfp4<Words>>(p, begin, end, scratch);
    }
}
