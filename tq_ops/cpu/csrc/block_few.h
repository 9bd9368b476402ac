// Few tokens by weights in blocks: each row is read once, and meets them as it is unpacked.

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
template <class Words, class Type, int N, bool BYTES, int TOKENS>
inline __attribute__((always_inline)) void add_group(const uint8_t* group, int n, int64_t block,
                                                     const BlockToken (&tokens)[TOKENS], typename Words::F (&chains)[TOKENS]) {
    typedef typename Words::Floats Floats;
    typedef typename Words::W W;
    typedef typename Words::I I;
    constexpr bool kAtOnce = BYTES || TOKENS > 1;  // else levels are multiplied as they come
    W levels[!kAtOnce ? 1 : BYTES ? N : 2 * N];
    if constexpr (kAtOnce)
        each_below<N>([&](auto j) {
            constexpr int J = decltype(j)::value;
            if constexpr (BYTES)
                levels[J] = Type::template bytes<J>(group);
            else
                Type::template levels<J>(group, levels[2 * J], levels[2 * J + 1]);
        });
    typename Words::F d, m;
    if constexpr (BYTES) Type::scales(group, n, d, m);
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) {
        const BlockToken& token = tokens[t];
        I each[kGroup], all;
        each_below<kGroup>([&](auto j) {
            constexpr int J = decltype(j)::value;
            const int32_t* x = token.words + (block + J) * kWords<BYTES>;
            each[J] = Words::none();
            if constexpr (J < N && BYTES) {
                each[J] = Words::dot_bytes(levels[J], Words::load(x), each[J]);
            } else if constexpr (J < N) {
                W a, b;
                if constexpr (kAtOnce)
                    a = levels[2 * J], b = levels[2 * J + 1];
                else
                    Type::template levels<J>(group, a, b);
                each[J] = Words::dot(a, Words::numbers(x), each[J]);
                each[J] = Words::dot(b, Words::numbers(x + kWords<BYTES> / 2), each[J]);
            }
        });
        if (!BYTES && t == 0) Type::scales(group, n, d, m);
        constexpr int kShift = BYTES ? Type::byte_shift : Type::shift;
        if constexpr (BYTES && Type::halves) {
            I first, last, by_first, by_last;
            Words::half_totals(each, first, last);
            first = Words::template less_shifted<kShift>(first, Words::load(token.firsts + block));
            last = Words::template less_shifted<kShift>(last, Words::load(token.lasts + block));
            Type::half_scales(group, by_first, by_last);
            all = Words::sum_of_products(first, by_first, last, by_last);
        } else {
            all = Words::totals(each);
            if constexpr (kShift > 0) all = Words::template less_shifted<kShift>(all, Words::load(token.totals + block));
        }
        chains[t] = Floats::fma(Words::floats(all), Floats::mul(d, Floats::load(token.steps + block)), chains[t]);
        if constexpr (Type::minimum) chains[t] = Floats::fma(m, Floats::load(token.negatives + block), chains[t]);
    }
}

// Fetches the bytes a page behind a group of rows: what the hardware fetches by itself ends with a page. Where tokens fill the
// first cache, these bytes would drive them out of it, and go to the second.
template <class Type> inline void fetch_ahead(const uint8_t* group, bool to_first) {
    constexpr int kPage = 4096;
    for (int i = 0; i < Type::group_bytes; i += kLine)
        if (to_first)
            __builtin_prefetch(group + kPage + i, 0, 3);
        else
            __builtin_prefetch(group + kPage + i, 0, 2);
}

// Rows begin ... end - 1 by TOKENS tokens from `first` on, each a panel of its own.
template <class Words, class Type, bool BYTES, int TOKENS>
__attribute__((noinline)) void project_block_rows(const Projection& p, int64_t first, int64_t begin, int64_t end) {
    typedef typename Words::Floats Floats;
    const BlockRows<Type> rows(p);
    BlockToken tokens[TOKENS];
    for (int t = 0; t < TOKENS; ++t) {
        const BlockPanel<BYTES> x(p.prepared, p.in, first + t, 1);
        tokens[t] = {x.words, x.totals, x.firsts, x.lasts, x.steps, x.negatives};
    }
    constexpr int64_t kBesideRows = 10240;  // bytes of tokens that stay in a first cache of 32 KB while rows pass
    const bool to_first = TOKENS * p.in * (BYTES ? 1 : 2) <= kBesideRows;
    for (int64_t i = begin; i < end; ++i) {
        typename Words::F chains[TOKENS];
        for (int t = 0; t < TOKENS; ++t) chains[t] = Floats::zero();
        const uint8_t *row = rows.row(i), *group = row;
        int64_t block = 0;
        for (int64_t g = 0; g < rows.groups; ++g, group += Type::group_bytes, block += kGroup) {
            fetch_ahead<Type>(group, to_first);
            add_group<Words, Type, kGroup, BYTES>(group, kGroup, block, tokens, chains);
        }
        if constexpr (!Type::whole_groups) {
            uint8_t copy[Type::group_bytes];
            if (rows.rest > kGroup / 2)
                add_group<Words, Type, kGroup, BYTES>(rows.last(row, kGroup, copy), rows.rest, block, tokens, chains);
            else if (rows.rest > 0)
                add_group<Words, Type, kGroup / 2, BYTES>(rows.last(row, kGroup / 2, copy), rows.rest, block, tokens, chains);
        }
        const float scale = p.weight.row_scales ? p.weight.row_scales[i] : 1.0f;
        for (int t = 0; t < TOKENS; ++t) p.y[(first + t) * p.out + i] = Floats::reduce_add(chains[t]) * scale;
    }
}
