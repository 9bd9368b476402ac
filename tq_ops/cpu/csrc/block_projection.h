// Projections of weights that lie in blocks of a few bits a number, row by row as a GGUF file has them (block_types.h).
//
// Each 32 numbers of a token become 16-bit integers q, with a step s of their own:
//     s = max(largest size / 32767, sum of sizes / 524000);  q = x / s, rounded
// so that no sum of 32 products overflows 32 bits: levels stay below 2**12 in size, and sizes of q add up to less than 2**19.
// The sum I of a block's products is therefore exact, by any instructions and in any order. In FP32 a row then adds in eight
// chains, block b to chain b % 8 and each in order:
//     chain = fma(I, D * s, chain);  chain = fma(M, -s * sum of q, chain)
// and the chains are added as `reduce_add` adds eight lanes. One token and many do the same, so that a number of y has the
// same bits whatever is projected beside it.
//
// Of few tokens, each row is read once, and meets them as it is unpacked. Of many, as many rows as a register has lanes are
// unpacked into a strip first, number pairs of all rows beside each other, and panels of tokens pass over it.

constexpr int kGroup = kBlocksTogether, kPairs = kBlock / 2;

inline int64_t whole_groups(int64_t in) { return (in / kBlock + kGroup - 1) / kGroup * kGroup; }

// Where a panel of tokens is prepared. Blocks that are there for whole groups alone are zero.
struct BlockPanel {
    int32_t *pairs, *totals;   // [blocks, pairs of integers, tokens] and their sums [blocks, tokens]
    float *steps, *negatives;  // [blocks, tokens]; -step * total

    BlockPanel(void* prepared, int64_t in, int64_t first_token, int tokens) {
        const int64_t blocks = whole_groups(in);
        pairs = static_cast<int32_t*>(prepared) + first_token * kBlockFloats * blocks;
        totals = pairs + blocks * kPairs * tokens;
        steps = reinterpret_cast<float*>(totals + blocks * tokens);
        negatives = steps + blocks * tokens;
    }
};

inline TokenPanels block_panels(int64_t tokens) { return TokenPanels(tokens, tokens <= kFewTokens ? 1 : kBlockPanelTokens); }

// 32 numbers of x to integers [32], their step, and their sum.
template <class Simd> inline int32_t to_integers(const float* x, int16_t* q, float* step) {
    typedef typename Simd::F F;
    F most = Simd::zero(), total = Simd::zero();
    for (int i = 0; i < kBlock; i += Simd::width) {
        const F size = Simd::max(Simd::load(x + i), Simd::mul(Simd::load(x + i), Simd::set1(-1.0f)));
        most = Simd::max(size, most), total = Simd::fma(size, Simd::set1(1.0f / 524000.0f), total);
    }
    float s = Simd::reduce_max(most) / 32767.0f;
    const float of_total = Simd::reduce_add(total);
    if (!(of_total <= s)) s = of_total;  // also if it is a NaN
    if (!(s < INFINITY)) s = NAN;
    const float inverse = s > 1e-35f ? 1.0f / s : 0.0f;  // so small a step is none, and a NaN's integers do not matter
    *step = inverse > 0.0f || s != s ? s : 0.0f;
    float rounded[kBlock];
    for (int i = 0; i < kBlock; i += Simd::width)
        Simd::store(rounded + i,
                    inverse > 0.0f ? Simd::round(Simd::mul(Simd::load(x + i), Simd::set1(inverse))) : Simd::zero());
    int32_t sum = 0;
    for (int i = 0; i < kBlock; ++i) q[i] = static_cast<int16_t>(static_cast<int32_t>(rounded[i]));
    for (int i = 0; i < kBlock; ++i) sum += q[i];
    return sum;
}

template <class Simd> void prepare_blocks(const Projection& p, int64_t begin, int64_t end) {
    const TokenPanels panels = block_panels(p.tokens);
    const int64_t blocks = p.in / kBlock, whole = whole_groups(p.in);
    for (int64_t token = begin; token < end; ++token) {
        const int64_t panel = panels.of_token(token), first = panels.first_token(panel);
        const int n = panels.tokens(panel);
        const int t = static_cast<int>(token - first);
        const BlockPanel to(p.prepared, p.in, first, n);
        for (int64_t b = 0; b < whole; ++b) {
            float x[kBlock], step = 0.0f;
            int16_t q[kBlock] = {};
            int32_t total = 0;
            if (b < blocks) {
                const int64_t at = token * p.in + b * kBlock;
                if (p.x_bf16)
                    for (int i = 0; i < kBlock; ++i) x[i] = bf16_to_float(static_cast<const uint16_t*>(p.x)[at + i]);
                else
                    std::memcpy(x, static_cast<const float*>(p.x) + at, sizeof x);
                if (p.weight.column_scales)
                    for (int i = 0; i < kBlock; ++i) x[i] *= p.weight.column_scales[b * kBlock + i];
                total = to_integers<Simd>(x, q, &step);
            }
            int32_t pairs[kPairs];
            std::memcpy(pairs, q, sizeof pairs);
            for (int i = 0; i < kPairs; ++i) to.pairs[(b * kPairs + i) * n + t] = pairs[i];
            to.totals[b * n + t] = total, to.steps[b * n + t] = step;
            to.negatives[b * n + t] = -step * static_cast<float>(total);
        }
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
        end = data + (p.out - 1) * row_bytes + (Type::whole_groups ? groups : p.in / kBlock) * Type::bytes;
    }
    const uint8_t* row(int64_t i) const { return data + i * row_bytes; }
    // The last group of a row, as it lies or copied, of which `blocks` can be read.
    const uint8_t* last(const uint8_t* row, int blocks, uint8_t* copy) const {
        const uint8_t* group = row + groups * Type::group_bytes;
        if (group + blocks * Type::bytes <= end) return group;
        std::memset(copy, 0, Type::group_bytes), std::memcpy(copy, group, rest * Type::bytes);
        return copy;
    }
};

// A token as `BlockPanel` has it, alone in its panel.
struct BlockToken {
    const int32_t *pairs, *totals;
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
        const int32_t* x = token.pairs + block * kPairs;
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
                const int32_t* pairs = x + J * kPairs;
                each[J] = Words::dot(a, Words::numbers(pairs), each[J]);
                each[J] = Words::dot(b, Words::numbers(pairs + kPairs / 2), each[J]);
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

// Rows begin ... end - 1 by TOKENS tokens from `first` on, each a panel of its own.
template <class Words, class Type, int TOKENS>
void project_block_rows(const Projection& p, int64_t first, int64_t begin, int64_t end) {
    typedef typename Words::Floats Floats;
    const BlockRows<Type> rows(p);
    BlockToken tokens[TOKENS];
    for (int t = 0; t < TOKENS; ++t) {
        const BlockPanel x(p.prepared, p.in, first + t, 1);
        tokens[t] = {x.pairs, x.totals, x.steps, x.negatives};
    }
    for (int64_t i = begin; i < end; ++i) {
        typename Words::F chains[TOKENS];
        for (int t = 0; t < TOKENS; ++t) chains[t] = Floats::zero();
        const uint8_t *row = rows.row(i), *group = row;
        int64_t block = 0;
        for (int64_t g = 0; g < rows.groups; ++g, group += Type::group_bytes, block += kGroup)
            add_group<Words, Type, kGroup>(group, kGroup, block, tokens, chains);
        if constexpr (!Type::whole_groups) {
            uint8_t copy[Type::group_bytes];
            if (rows.rest > kGroup / 2)
                add_group<Words, Type, kGroup>(rows.last(row, kGroup, copy), rows.rest, block, tokens, chains);
            else if (rows.rest > 0)
                add_group<Words, Type, kGroup / 2>(rows.last(row, kGroup / 2, copy), rows.rest, block, tokens, chains);
        }
        const float scale = p.weight.row_scales ? p.weight.row_scales[i] : 1.0f;
        for (int t = 0; t < TOKENS; ++t) p.y[(first + t) * p.out + i] = Floats::reduce_add(chains[t]) * scale;
    }
}

// As many rows as a register has lanes, unpacked.
template <class Lanes> struct Strip {
    int32_t* pairs;          // [blocks, pairs, rows]
    float *scales, *minima;  // [blocks, rows]

    Strip(float* scratch, int64_t blocks)
        : pairs(reinterpret_cast<int32_t*>(scratch)),
          scales(scratch + blocks * kPairs * Lanes::width),
          minima(scales + blocks * Lanes::width) {}
};

// Of rows that are not there the last one stands.
template <class Simd, class Words, class Lanes, class Type>
void unpack_strip(const Projection& p, int64_t row, int64_t end, const Strip<Lanes>& to) {
    constexpr int kRows = Lanes::width;
    const BlockRows<Type> rows(p);
    alignas(64) uint8_t words[kGroup][kRows][kBlock * 2];
    uint8_t copy[Type::group_bytes];
    const int64_t groups = rows.groups + (rows.rest > 0);
    for (int64_t g = 0; g < groups; ++g) {
        const int n = g < rows.groups ? kGroup : rows.rest;
        for (int r = 0; r < kRows; ++r) {
            const uint8_t* whole = rows.row(row + r < end ? row + r : end - 1);
            const uint8_t* group = g < rows.groups ? whole + g * Type::group_bytes : rows.last(whole, kGroup, copy);
            each_below<kGroup>([&](auto j) {
                constexpr int J = decltype(j)::value;
                typename Words::W a, b;
                Type::template levels<J>(group, a, b);
                if constexpr (Type::shift >= 0) a = Words::minus(a, 1 << Type::shift), b = Words::minus(b, 1 << Type::shift);
                Words::store(words[J][r], a), Words::store(words[J][r] + kBlock, b);
            });
            typename Words::F d, m;
            float each[kGroup], least[kGroup];
            Type::scales(group, n, d, m);
            Words::Floats::store(each, d);
            if constexpr (Type::minimum) Words::Floats::store(least, m);
            for (int j = 0; j < n; ++j) {
                to.scales[(g * kGroup + j) * kRows + r] = each[j];
                if constexpr (Type::minimum) to.minima[(g * kGroup + j) * kRows + r] = least[j];
            }
        }
        for (int j = 0; j < n; ++j)
            Simd::transpose(words[j][0], kPairs, kRows,
                            reinterpret_cast<uint32_t*>(to.pairs) + (g * kGroup + j) * kPairs * kRows, kRows);
    }
}

// A strip by the TOKENS tokens of a panel.
template <class Simd, class Lanes, bool MINIMUM, int TOKENS>
void project_panel_of_blocks(const Projection& p, const Strip<Lanes>& strip, int64_t token, int64_t row, int64_t end) {
    typedef typename Simd::F F;
    constexpr int kRows = Lanes::width;
    const BlockPanel x(p.prepared, p.in, token, TOKENS);
    F chains[kGroup][TOKENS];
    for (int j = 0; j < kGroup; ++j)
        for (int t = 0; t < TOKENS; ++t) chains[j][t] = Simd::zero();
    const int64_t blocks = p.in / kBlock;
    for (int64_t b = 0; b < blocks; ++b) {
        typename Lanes::I sums[TOKENS];
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) sums[t] = Lanes::set1(0);
        const int32_t *w = strip.pairs + b * kPairs * kRows, *q = x.pairs + b * kPairs * TOKENS;
#pragma GCC unroll 4
        for (int i = 0; i < kPairs; ++i) {
            const typename Lanes::I pairs = Lanes::load(w + i * kRows);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) sums[t] = Lanes::dot(pairs, q + i * TOKENS + t, sums[t]);
        }
        const F scale = Simd::load(strip.scales + b * kRows);
        F* to = chains[b % kGroup];
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) {
            const F by = Simd::mul(scale, Simd::set1(x.steps[b * TOKENS + t]));
            to[t] = Simd::fma(Lanes::floats(sums[t]), by, to[t]);
            if constexpr (MINIMUM)
                to[t] = Simd::fma(Simd::load(strip.minima + b * kRows), Simd::set1(x.negatives[b * TOKENS + t]), to[t]);
        }
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

template <class Simd, class Lanes, bool MINIMUM, int TOKENS = kBlockPanelTokens>
void project_some_of_blocks(const Projection& p, const Strip<Lanes>& strip, int64_t token, int tokens, int64_t row,
                            int64_t end) {
    if constexpr (TOKENS > 1)
        if (tokens < TOKENS)
            return project_some_of_blocks<Simd, Lanes, MINIMUM, TOKENS - 1>(p, strip, token, tokens, row, end);
    project_panel_of_blocks<Simd, Lanes, MINIMUM, TOKENS>(p, strip, token, row, end);
}

template <class Words, class Type, int TOKENS = Words::tokens>
void project_few(const Projection& p, int64_t first, int tokens, int64_t begin, int64_t end) {
    if constexpr (TOKENS > 1)
        if (tokens < TOKENS) return project_few<Words, Type, TOKENS - 1>(p, first, tokens, begin, end);
    project_block_rows<Words, Type, TOKENS>(p, first, begin, end);
}

template <class Simd, class Words, class Lanes, class Type>
void project_of_type(const Projection& p, int64_t begin, int64_t end, float* scratch) {
    if (p.tokens <= kFewTokens) {
        const TokenPanels few(p.tokens, Words::tokens);
        for (int64_t i = 0; i < few.count; ++i) project_few<Words, Type>(p, few.first_token(i), few.tokens(i), begin, end);
        return;
    }
    const TokenPanels panels = block_panels(p.tokens);
    constexpr int kTwo = 2;
    const int64_t blocks = p.in / kBlock, floats = blocks * (kPairs + 2) * Lanes::width;
    for (int64_t row = begin; row < end; row += kTwo * Lanes::width) {
        const Strip<Lanes> strips[kTwo] = {{scratch, blocks}, {scratch + floats, blocks}};
        for (int s = 0; s < kTwo && row + s * Lanes::width < end; ++s)
            unpack_strip<Simd, Words, Lanes, Type>(p, row + s * Lanes::width, end, strips[s]);
        for (int64_t i = 0; i < panels.count; ++i)
            for (int s = 0; s < kTwo && row + s * Lanes::width < end; ++s)
                project_some_of_blocks<Simd, Lanes, Type::minimum>(p, strips[s], panels.first_token(i), panels.tokens(i),
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
