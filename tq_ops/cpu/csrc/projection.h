// Projections on vector registers. Four rows of the weight, read as they lie in memory, meet a panel of tokens: as many as
// have room for their sums in registers. The weight is never widened in memory.
//
// A sum runs over the inputs in steps, in the lanes of one register, and the lanes are added at the end. Neither other tokens
// nor other rows take part in it, so a number of y has the same bits whatever is projected beside it.
//
// `Products` says how a step is multiplied: Weight and X, the types of the weight's numbers and of x as it is prepared; step,
// inputs at a time, in `parts` registers of `lanes` numbers of x each; F, zero, reduce_add and reduce_each, of sums; W, load,
// load_x and add. `put` prepares one step of x; without it x is taken as it is.

// By FMA, of FP32 weights.
template <class Simd> struct FloatFma : Simd {
    typedef float Weight;
    typedef float X;
    typedef typename Simd::F W;
    static constexpr int step = Simd::width, parts = 1, lanes = Simd::width;

    template <int PART> static W load(const Weight* weight) { return Simd::load(weight); }
    static W load_x(const X* x) { return Simd::load(x); }
    static W add(W w, W x, W sum) { return Simd::fma(w, x, sum); }
    static void put(const float* x, X* to) { std::memcpy(to, x, step * sizeof(float)); }
};

// A 32-bit word holds two BF16 weights; a shift or a mask widens each, so x is prepared as even inputs, then odd ones.
template <class Simd> struct Bf16Fma : FloatFma<Simd> {
    typedef uint16_t Weight;
    static constexpr int step = 2 * Simd::width, parts = 2;

    template <int PART> static typename Simd::F load(const Weight* weight) {
        const typename Simd::I words = Simd::load_words(weight);
        return PART ? Simd::high_bf16(words) : Simd::low_bf16(words);
    }
    static void put(const float* x, float* to) {
        for (int i = 0; i < Simd::width; ++i) to[i] = x[2 * i], to[Simd::width + i] = x[2 * i + 1];
    }
};

constexpr int kRowsAtOnce = 4;

template <class Products> int64_t steps_of(int64_t in) { return (in + Products::step - 1) / Products::step; }

// Numbers of a token as it is prepared.
template <class Products> int64_t prepared_numbers(int64_t in) {
    return steps_of<Products>(in) * Products::parts * Products::lanes;
}

// Panels of a token's sums, which stay in registers. x is prepared panel by panel, and in each as [steps, parts, tokens,
// lanes], so that it is read from end to end.
template <class Products> struct Panels : TokenPanels {
    static constexpr int most = Products::registers >= 32 ? 6 : 2;

    explicit Panels(int64_t tokens) : TokenPanels(tokens, most) {}
};

// Inputs of x that are not there are zero.
template <class Products> void prepare_tokens(const Projection& p, int64_t begin, int64_t end) {
    typedef typename Products::X X;
    constexpr int kStep = Products::step, kLanes = Products::lanes;
    const Panels<Products> panels(p.tokens);
    for (int64_t token = begin; token < end; ++token) {
        const int64_t panel = panels.of_token(token), first = panels.first_token(panel), n = panels.tokens(panel);
        X* to = static_cast<X*>(p.prepared) + first * prepared_numbers<Products>(p.in) + (token - first) * kLanes;
        for (int64_t i = 0; i < p.in; i += kStep, to += n * Products::parts * kLanes) {
            const int64_t there = p.in - i < kStep ? p.in - i : kStep, at = token * p.in + i;
            X made[Products::parts * kLanes] = {};
            if constexpr (sizeof(X) == sizeof(uint16_t)) {
                std::memcpy(made, static_cast<const uint16_t*>(p.x) + at, there * sizeof(uint16_t));
            } else {
                float x[kStep] = {};
                read(p.x, p.x_bf16, at, there, x);
                Products::put(x, made);
            }
            for (int part = 0; part < Products::parts; ++part)
                std::memcpy(to + part * n * kLanes, made + part * kLanes, kLanes * sizeof(X));
        }
    }
}

// One part of a step: rows of the weight that lie `distance` numbers apart, by the tokens of a panel. What there are fewer of
// stays in registers.
template <class Products, int PART, int ROWS, int TOKENS>
inline __attribute__((always_inline)) void multiply_part(const typename Products::Weight* weight, int64_t distance,
                                                         const typename Products::X* x,
                                                         typename Products::F (&sums)[TOKENS][ROWS]) {
    typedef typename Products::W W;
    x += PART * TOKENS * Products::lanes;
    if constexpr (kRowsAtOnce <= Panels<Products>::most) {
        W rows[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) rows[r] = Products::template load<PART>(weight + r * distance);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) {
            const W token = Products::load_x(x + t * Products::lanes);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) sums[t][r] = Products::add(rows[r], token, sums[t][r]);
        }
    } else {
        W tokens[TOKENS];
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) tokens[t] = Products::load_x(x + t * Products::lanes);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const W row = Products::template load<PART>(weight + r * distance);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) sums[t][r] = Products::add(row, tokens[t], sums[t][r]);
        }
    }
}

// Which lines of the weight are fetched beside each step, all into the L2 cache: a fetch into L1 would hold one of its few
// buffers until memory answers, and loads from L2 need these.
enum class Fetched {
    kNone,
    kOneBelow,  // of one of the next rows, or of two
    kTwoBelow,
    kAlong,     // the same rows' kRowAhead later; where they end, those of the next ones
    kNextPage,  // of the page behind the one at hand its first half, with which the hardware goes on
};
constexpr int64_t kRowAhead = 2048, kPage = 4096;  // bytes; the hardware foresees nothing beyond a page

// ROWS rows from `row` on by the TOKENS tokens of a panel from `token` on. `below`: what is fetched, in the next rows.
template <class Products, int ROWS, int TOKENS, Fetched FETCHED>
__attribute__((noinline)) void project_panel(const Projection& p, int64_t row, int64_t token,
                                             const typename Products::Weight* below) {
    typedef typename Products::Weight Weight;
    typename Products::F sums[TOKENS][ROWS];
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) sums[t][r] = Products::zero();
    const Weight* weight = static_cast<const Weight*>(p.weight.data) + row * p.in;
    const auto* x = static_cast<const typename Products::X*>(p.prepared) + token * prepared_numbers<Products>(p.in);
    auto step = [&](const Weight* rows, int64_t distance) __attribute__((always_inline)) {
        multiply_part<Products, 0>(rows, distance, x, sums);
        if constexpr (Products::parts == 2) multiply_part<Products, 1>(rows, distance, x, sums);
        x += Products::parts * TOKENS * Products::lanes;
    };
    constexpr int64_t kAhead = kRowAhead / static_cast<int64_t>(sizeof(Weight));
    const int64_t whole = p.in / Products::step * Products::step;
    for (int64_t i = 0; i < whole; i += Products::step) {
        if constexpr (FETCHED == Fetched::kAlong) {
            const int64_t ahead = i + kAhead < p.in ? i + kAhead : i + kAhead + (ROWS - 1) * p.in;
            for (int r = 0; r < ROWS; ++r) __builtin_prefetch(weight + r * p.in + ahead, 0, 2);
        }
        if constexpr (FETCHED == Fetched::kNextPage)
            if (reinterpret_cast<uintptr_t>(weight + i) % kPage < kPage / 2)
                __builtin_prefetch(weight + i + kPage / static_cast<int64_t>(sizeof(Weight)), 0, 2);
        if constexpr (FETCHED == Fetched::kOneBelow || FETCHED == Fetched::kTwoBelow) __builtin_prefetch(below + i, 0, 2);
        if constexpr (FETCHED == Fetched::kTwoBelow) __builtin_prefetch(below + p.in + i, 0, 2);
        step(weight + i, p.in);
    }
    if (whole < p.in) {
        Weight last[ROWS * Products::step] = {};
        for (int r = 0; r < ROWS; ++r)
            std::memcpy(last + r * Products::step, weight + r * p.in + whole, (p.in - whole) * sizeof(Weight));
        step(last, Products::step);
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
        float* y = p.y + (token + t) * p.out + row;
        if constexpr (ROWS == 4)
            Products::reduce_each(sums[t][0], sums[t][1], sums[t][2], sums[t][3], y);
        else
            for (int r = 0; r < ROWS; ++r) y[r] = Products::reduce_add(sums[t][r]);
    }
}

// The same where the number of tokens is known only now.
template <class Products, int ROWS, Fetched FETCHED>
void project_some(const Projection& p, int64_t row, int64_t token, int tokens, const typename Products::Weight* below) {
    with_number<Panels<Products>::most>(
        tokens, [&](auto n) { project_panel<Products, ROWS, decltype(n)::value, FETCHED>(p, row, token, below); });
}

// ROWS rows by panels first ... last - 1. Of several panels the first ones fetch the next rows between them.
template <class Products, int ROWS>
void project_rows(const Projection& p, const Panels<Products>& panels, int64_t row, int64_t first, int64_t last) {
    const auto* below = static_cast<const typename Products::Weight*>(p.weight.data) + (row + ROWS) * p.in;
    const int64_t count = last - first;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = panels.first_token(first + i);
        const int tokens = panels.tokens(first + i);
        if (ROWS < kRowsAtOnce || count == 1)
            project_some<Products, ROWS, Fetched::kAlong>(p, row, token, tokens, below);
        else if constexpr (ROWS == kRowsAtOnce) {
            if (count < ROWS && 2 * i < ROWS)
                project_some<Products, ROWS, Fetched::kTwoBelow>(p, row, token, tokens, below + 2 * i * p.in);
            else if (count >= ROWS && i < ROWS)
                project_some<Products, ROWS, Fetched::kOneBelow>(p, row, token, tokens, below + i * p.in);
            else
                project_some<Products, ROWS, Fetched::kNone>(p, row, token, tokens, below);
        }
    }
}

// All tokens by rows begin ... end - 1: as many tokens at a time as stay in the L2 cache while the rows take turns.
template <class Products> void project_by(const Projection& p, int64_t begin, int64_t end) {
    constexpr int64_t kBytes = 256 * 1024;
    const Panels<Products> panels(p.tokens);
    const int64_t bytes = panels.most * prepared_numbers<Products>(p.in) * static_cast<int64_t>(sizeof(typename Products::X));
    const int64_t most = (kBytes + bytes - 1) / bytes, turns = (panels.count + most - 1) / most;
    const int64_t together = turns ? (panels.count + turns - 1) / turns : 1;
    // One token waits for the weight alone, and nothing reads memory faster than one row after the other. Where
    // registers are narrow, or a step has two parts, sums would wait for themselves.
    if (Products::registers >= 32 && Products::parts == 1 && p.tokens == 1) {
        for (int64_t row = begin; row < end; ++row) project_panel<Products, 1, 1, Fetched::kNextPage>(p, row, 0, nullptr);
        return;
    }
    for (int64_t first = 0; first < panels.count; first += together) {
        const int64_t last = first + together < panels.count ? first + together : panels.count;
        int64_t row = begin;
        for (; row + kRowsAtOnce <= end; row += kRowsAtOnce) project_rows<Products, kRowsAtOnce>(p, panels, row, first, last);
        for (; row < end; ++row) project_rows<Products, 1>(p, panels, row, first, last);
    }
}

template <class Simd> int64_t prepared_floats(const Projection& p) {
    return p.tokens * (p.weight_bf16() ? prepared_numbers<Bf16Fma<Simd>>(p.in) : prepared_numbers<FloatFma<Simd>>(p.in));
}

template <class Simd> void prepare(const Projection& p, int64_t begin, int64_t end) {
    if (p.weight_bf16()) return prepare_tokens<Bf16Fma<Simd>>(p, begin, end);
    prepare_tokens<FloatFma<Simd>>(p, begin, end);
}

template <class Simd> void project(const Projection& p, int64_t begin, int64_t end, float*) {
    if (p.weight_bf16()) return project_by<Bf16Fma<Simd>>(p, begin, end);
    project_by<FloatFma<Simd>>(p, begin, end);
}
