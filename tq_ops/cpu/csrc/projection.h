// Projections on vector registers. The weight is read as it lies in memory, once for a few tokens; it is never widened there.
//
// A sum runs over the inputs in steps, in the lanes of one register, and the lanes are added at the end. Neither other tokens
// nor other rows take part in it, so a number of y has the same bits whatever is projected beside it.
//
// `Products` says how a step is multiplied: Weight and X, the types of the weight's numbers and of x as it is prepared; step,
// inputs at a time; F, zero, reduce_add; W, load and add. `put` prepares one step of x.

// By FMA. A 32-bit word holds two BF16 weights; a shift or a mask widens each, so x is prepared as even inputs, then odd ones.
template <class Simd> struct Bf16Fma {
    typedef uint16_t Weight;
    typedef float X;
    typedef typename Simd::F F;
    typedef typename Simd::I W;
    static constexpr int step = 2 * Simd::width, registers = Simd::registers;

    static F zero() { return Simd::zero(); }
    static float reduce_add(F x) { return Simd::reduce_add(x); }
    static W load(const Weight* weight) { return Simd::load_words(weight); }
    static F add(W w, const X* x, F sum) {
        sum = Simd::fma(Simd::low_bf16(w), Simd::load(x), sum);
        return Simd::fma(Simd::high_bf16(w), Simd::load(x + Simd::width), sum);
    }
    static void put(const float* x, X* to) {
        for (int i = 0; i < Simd::width; ++i) to[i] = x[2 * i], to[Simd::width + i] = x[2 * i + 1];
    }
};

template <class Simd> struct FloatFma {
    typedef float Weight;
    typedef float X;
    typedef typename Simd::F F;
    typedef F W;
    static constexpr int step = Simd::width, registers = Simd::registers;

    static F zero() { return Simd::zero(); }
    static float reduce_add(F x) { return Simd::reduce_add(x); }
    static W load(const Weight* weight) { return Simd::load(weight); }
    static F add(W w, const X* x, F sum) { return Simd::fma(w, Simd::load(x), sum); }
    static void put(const float* x, X* to) { std::memcpy(to, x, step * sizeof(float)); }
};

constexpr int64_t kRowAhead = 512;  // bytes that a row is fetched ahead; the hardware foresees nothing beyond a page

template <class Products> int64_t whole_steps(int64_t in) {
    return (in + Products::step - 1) / Products::step * Products::step;
}

// Inputs of x that are not there are zero.
template <class Products> void prepare_tokens(const Projection& p, int64_t begin, int64_t end) {
    const int64_t padded = whole_steps<Products>(p.in);
    for (int64_t t = begin; t < end; ++t)
        for (int64_t i = 0; i < padded; i += Products::step) {
            float x[Products::step] = {};
            const int64_t n = p.in - i < Products::step ? p.in - i : Products::step, first = t * p.in + i;
            if (p.x_bf16)
                for (int64_t j = 0; j < n; ++j) x[j] = bf16_to_float(static_cast<const uint16_t*>(p.x)[first + j]);
            else
                std::memcpy(x, static_cast<const float*>(p.x) + first, n * sizeof(float));
            Products::put(x, static_cast<typename Products::X*>(p.prepared) + t * padded + i);
        }
}

// ROWS rows of the weight by TOKENS tokens of x.
template <class Products, int ROWS, int TOKENS> inline void project_rows(const Projection& p, int64_t row, int64_t token) {
    typedef typename Products::Weight Weight;
    typename Products::F sums[ROWS][TOKENS];
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TOKENS; ++t) sums[r][t] = Products::zero();
    const int64_t padded = whole_steps<Products>(p.in), whole = p.in / Products::step * Products::step;
    const Weight* weight = static_cast<const Weight*>(p.weight) + row * p.in;
    const typename Products::X* x = static_cast<const typename Products::X*>(p.prepared) + token * padded;
    auto step = [&](const Weight* weights, int64_t distance, int64_t i) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const typename Products::W w = Products::load(weights + r * distance);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) sums[r][t] = Products::add(w, x + t * padded + i, sums[r][t]);
        }
    };
    constexpr int64_t kAhead = kRowAhead / static_cast<int64_t>(sizeof(Weight));
    for (int64_t i = 0; i < whole; i += Products::step) {
        // Where these rows end, those that follow.
        const int64_t ahead = i + kAhead < p.in ? i + kAhead : i + kAhead + (ROWS - 1) * p.in;
        for (int r = 0; r < ROWS; ++r) __builtin_prefetch(weight + r * p.in + ahead, 0, 3);
        step(weight + i, p.in, i);
    }
    if (whole < p.in) {
        Weight last[ROWS * Products::step] = {};
        for (int r = 0; r < ROWS; ++r)
            std::memcpy(last + r * Products::step, weight + r * p.in + whole, (p.in - whole) * sizeof(Weight));
        step(last, Products::step, whole);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TOKENS; ++t) p.y[(token + t) * p.out + row + r] = Products::reduce_add(sums[r][t]);
}

template <class Products, int TOKENS> void project_tokens(const Projection& p, int64_t begin, int64_t end, int64_t token) {
    int64_t row = begin;
    for (; row + 4 <= end; row += 4) project_rows<Products, 4, TOKENS>(p, row, token);
    for (; row < end; ++row) project_rows<Products, 1, TOKENS>(p, row, token);
}

// All tokens by rows begin ... end - 1, by so many rows at a time as stay in the L2 cache while the tokens take turns.
template <class Products> void project_by(const Projection& p, int64_t begin, int64_t end) {
    constexpr int64_t kBytes = 256 * 1024;
    constexpr int kMost = Products::registers >= 32 ? 4 : 2;  // four rows of sums stay in registers
    int64_t rows = kBytes / (p.in * static_cast<int64_t>(sizeof(typename Products::Weight))) / 4 * 4;
    if (rows < 4) rows = 4;
    for (int64_t row = begin; row < end; row += rows) {
        const int64_t last = row + rows < end ? row + rows : end;
        int64_t token = 0;
        for (; token + kMost <= p.tokens; token += kMost) project_tokens<Products, kMost>(p, row, last, token);
        for (; token + 2 <= p.tokens; token += 2) project_tokens<Products, 2>(p, row, last, token);
        if (token < p.tokens) project_tokens<Products, 1>(p, row, last, token);
    }
}

template <class Simd> int64_t prepared_floats(const Projection& p) {
    return p.tokens * (p.weight_bf16 ? whole_steps<Bf16Fma<Simd>>(p.in) : whole_steps<FloatFma<Simd>>(p.in));
}

template <class Simd> void prepare(const Projection& p, int64_t begin, int64_t end) {
    if (p.weight_bf16) return prepare_tokens<Bf16Fma<Simd>>(p, begin, end);
    prepare_tokens<FloatFma<Simd>>(p, begin, end);
}

template <class Simd> void project(const Projection& p, int64_t begin, int64_t end, float*) {
    if (p.weight_bf16) return project_by<Bf16Fma<Simd>>(p, begin, end);
    project_by<FloatFma<Simd>>(p, begin, end);
}
