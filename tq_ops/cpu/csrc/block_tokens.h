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

// The largest size of 32 numbers, and a fraction of their sizes' sum.
template <class Simd> inline void measure_block(const float* x, float* most, float* of_total) {
    typename Simd::F sizes = Simd::zero(), total = Simd::zero();
    for (int i = 0; i < kBlock; i += Simd::width) {
        const typename Simd::F size = Simd::max(Simd::load(x + i), Simd::mul(Simd::load(x + i), Simd::set1(-1.0f)));
        sizes = Simd::max(size, sizes), total = Simd::fma(size, Simd::set1(1.0f / 524000.0f), total);
    }
    *most = Simd::reduce_max(sizes), *of_total = Simd::reduce_add(total);
}

// The step of a block, and its inverse; each 0 where there is none.
inline void find_step(float most, float of_total, int bits, float* step, float* inverse) {
    float s = most / (bits == 8 ? 127.0f : 32767.0f);
    if (!(of_total <= s)) s = of_total;  // also if it is a NaN
    if (!(s < INFINITY)) s = NAN;
    *inverse = s > 1e-35f ? 1.0f / s : 0.0f;  // so small a step is none, and a NaN's integers do not matter
    *step = *inverse > 0.0f || s != s ? s : 0.0f;
}

// Block b of a token as integers, number t of n in its panel; x is not read where the inverse is 0.
template <class Simd, bool BYTES>
inline __attribute__((always_inline)) void put_block(const float* x, float step, float inverse, int64_t b,
                                                     const BlockPanel<BYTES>& to, int n, int t) {
    typedef typename Simd::F F;
    constexpr int kHalf = kBlock / 2;
    float rounded[kBlock] = {};
    F sums[2] = {Simd::zero(), Simd::zero()};  // of either half; exact, being integers below 2**24
    for (int i = 0; inverse > 0.0f && i < kBlock; i += Simd::width) {
        const F integers = Simd::round(Simd::mul(Simd::load(x + i), Simd::set1(inverse)));
        Simd::store(rounded + i, integers);
        sums[i / kHalf] = Simd::add(sums[i / kHalf], integers);
    }
    const int32_t first = static_cast<int32_t>(Simd::reduce_add(sums[0])),
                  last = static_cast<int32_t>(Simd::reduce_add(sums[1]));
    typename std::conditional<BYTES, int8_t, int16_t>::type q[kBlock];
    for (int i = 0; i < kBlock; ++i) q[i] = static_cast<int16_t>(static_cast<int32_t>(rounded[i]));
    int32_t words[kWords<BYTES>];
    std::memcpy(words, q, sizeof words);
    for (int i = 0; i < kWords<BYTES>; ++i) to.words[(b * kWords<BYTES> + i) * n + t] = words[i];
    if constexpr (BYTES) to.firsts[b * n + t] = first, to.lasts[b * n + t] = last;
    to.totals[b * n + t] = first + last, to.steps[b * n + t] = step;
    to.negatives[b * n + t] = -step * static_cast<float>(first + last);
}

// A group of blocks from `begin` on of a token, number t of n in its panel. They are measured, then get their steps, then
// become integers: one block after the other, each would wait for the divisions of the one before.
template <class Simd, bool BYTES>
void prepare_group(const Projection& p, int64_t token, int64_t begin, const BlockPanel<BYTES>& to, int n, int t) {
    float x[kGroup * kBlock], most[kGroup], of_total[kGroup], steps[kGroup] = {}, inverses[kGroup] = {};
    const int there = static_cast<int>(smaller(p.in / kBlock - begin, int64_t{kGroup}));
    read(p.x, p.x_bf16, token * p.in + begin * kBlock, there * kBlock, x);
    for (int i = 0; p.weight.column_scales && i < there * kBlock; ++i) x[i] *= p.weight.column_scales[begin * kBlock + i];
    for (int b = 0; b < there; ++b) measure_block<Simd>(x + b * kBlock, most + b, of_total + b);
    for (int b = 0; b < there; ++b) find_step(most[b], of_total[b], p.weight.x_bits, steps + b, inverses + b);
    for (int b = 0; b < kGroup; ++b) put_block<Simd, BYTES>(x + b * kBlock, steps[b], inverses[b], begin + b, to, n, t);
}

// Tokens begin ... end - 1. The tokens of a panel take turns at a group of blocks, whose integers lie side by side.
template <class Simd, bool BYTES = false> void prepare_blocks(const Projection& p, int64_t begin, int64_t end) {
    const TokenPanels panels = block_panels(p.tokens);
    for (int64_t token = begin, next; token < end; token = next) {
        const int64_t panel = panels.of_token(token), first = panels.first_token(panel);
        const int n = panels.tokens(panel);
        next = smaller(end, first + n);
        const BlockPanel<BYTES> to(p.prepared, p.in, first, n);
        for (int64_t block = 0; block < p.in / kBlock; block += kGroup)
            for (int64_t t = token; t < next; ++t) prepare_group<Simd, BYTES>(p, t, block, to, n, static_cast<int>(t - first));
    }
}
