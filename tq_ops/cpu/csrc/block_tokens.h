// Tokens as they meet weights in blocks (block_projection.h): integers, panel by panel.

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

// 32 numbers of x to integers [32] of 16 or 8 bits, and their step.
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
        read(p.x, p.x_bf16, token * p.in + b * kBlock, kBlock, x);
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
