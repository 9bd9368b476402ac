// The gated delta rule: what a token reads, and a head's memory token by token. A number's bits depend on its token, its head
// and its column alone: sums have one order, be there one token or many.

// tap[t] of channels from `first` on, [taps, kPiece].
inline void load_taps(const GatedDelta& o, int64_t first, int64_t n, float* taps) {
    constexpr int kUsual = 4;  // a transpose of known width, which compilers make of whole registers
    const float* conv = o.conv + first * o.taps;
    if (o.taps == kUsual && n == kPiece) {
        for (int64_t c = 0; c < kPiece; ++c)
            for (int t = 0; t < kUsual; ++t) taps[t * kPiece + c] = conv[c * kUsual + t];
        return;
    }
    for (int t = 0; t < o.taps; ++t)
        for (int64_t c = 0; c < n; ++c) taps[t * kPiece + c] = conv[c * o.taps + t];
}

// The input of channels from `first` on `back` tokens before a token; null where there was none.
inline const float* input_before(const GatedDelta& o, const DeltaTurn& turn, int64_t token, int back, int64_t first) {
    const int64_t from = token - back;
    if (from >= turn.begin) return o.x + from * o.channels + first;
    const int64_t row = o.taps - 1 - (turn.begin - from);
    return turn.window ? turn.window + row * o.channels + first : nullptr;
}

// x = silu(x) of kPiece numbers, as `gated_mul` makes it.
template <class Simd> void silu_piece(float* x) {
    alignas(64) float e[kPiece];
    std::memcpy(e, x, sizeof e);
    decay<Simd>(e);
    for (int64_t j = 0; j < kPiece; ++j) x[j] = x[j] * (x[j] > 0.0f ? 1.0f : e[j]) / (1.0f + e[j]);
}

// x = factor * x / sqrt(sum x^2 + eps).
inline void to_length(float* x, int64_t n, float factor) {
    constexpr float kEps = 1e-6f;
    float sums[8] = {};
    for (int64_t i = 0; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += x[i + j] * x[i + j];
    for (int64_t i = n / 8 * 8; i < n; ++i) sums[i % 8] += x[i] * x[i];
    float total = 0.0f;
    for (float sum : sums) total += sum;
    const float scale = factor / std::sqrt(total + kEps);
    for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

// As `Kernels::delta_inputs`.
template <class Simd> void delta_inputs(const GatedDelta& o, const DeltaTurn& turn, int64_t unit, int64_t begin, int64_t end) {
    const int64_t keys = 2 * o.key_heads, dim = unit < keys ? o.key_dim : o.value_dim;
    const int64_t first = unit < keys ? unit * dim : keys * o.key_dim + (unit - keys) * dim;
    alignas(64) float taps[kMostTaps * kPiece], sum[kPiece];
    for (int64_t c = first; c < first + dim; c += kPiece) {
        const int64_t n = first + dim - c < kPiece ? first + dim - c : kPiece;
        load_taps(o, c, n, taps);
        for (int64_t token = begin; token < end; ++token) {
            for (int64_t j = 0; j < kPiece; ++j) sum[j] = 0.0f;
            for (int t = 0; t < o.taps; ++t) {
                const float* x = input_before(o, turn, token, o.taps - 1 - t, c);
                for (int64_t j = 0; x && j < n; ++j) sum[j] += x[j] * taps[t * kPiece + j];
            }
            silu_piece<Simd>(sum);
            std::memcpy(o.mixed + token * o.channels + c, sum, n * sizeof(float));
        }
    }
    for (int64_t token = begin; token < end; ++token) {
        float* mixed = o.mixed + token * o.channels + first;
        if (unit < o.key_heads) to_length(mixed, dim, 1.0f / std::sqrt(static_cast<float>(dim)));
        if (unit >= o.key_heads && unit < keys) to_length(mixed, dim, 1.0f);
        if (unit >= keys) {
            const int64_t head = unit - keys, at = token * o.value_heads + head;
            const float z = o.a[at] + o.dt_bias[head], grown = std::log1p(std::exp(z > 0.0f ? -z : z));
            o.gates[2 * at] = std::exp(-std::exp(o.a_log[head]) * ((z > 0.0f ? z : 0.0f) + grown));
            o.gates[2 * at + 1] = 1.0f / (1.0f + std::exp(-o.b[at]));
        }
        if (token < turn.first_kept) continue;
        float* kept = turn.kept_window(o, token) + first;
        for (int t = 0; t < o.taps - 1; ++t) {
            const float* x = input_before(o, turn, token, o.taps - 2 - t, first);
            if (x)
                std::memcpy(kept + t * o.channels, x, dim * sizeof(float));
            else
                std::memset(kept + t * o.channels, 0, dim * sizeof(float));
        }
    }
}

// One number at a time, for columns that fill no register.
struct One {
    static constexpr int width = 1;
    typedef float F;
    static F load(const float* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    static void stream(float* p, F x) { *p = x; }
    static F set1(float x) { return x; }
    static F zero() { return 0.0f; }
    static F add(F a, F b) { return a + b; }
    static F mul(F a, F b) { return a * b; }
    static F fma(F a, F b, F c) { return a * b + c; }
};

// W registers of sums over rows, even and odd ones apart.
template <class Simd, int W> struct RowSums {
    typename Simd::F of[2][W];

    void clear() {
        for (int w = 0; w < W; ++w) of[0][w] = of[1][w] = Simd::zero();
    }
    typename Simd::F total(int w) const { return Simd::add(of[0][w], of[1][w]); }
};

// sums = k . S, of W registers of columns; rows of S are `stride` numbers apart.
template <class Simd, int W>
inline void read_memory(const float* memory, int64_t stride, const float* k, int rows, RowSums<Simd, W>* sums) {
    sums->clear();
    for (int i = 0; i < rows; ++i) {
        const typename Simd::F key = Simd::set1(k[i]);
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w)
            sums->of[i & 1][w] = Simd::fma(Simd::load(memory + i * stride + w * Simd::width), key, sums->of[i & 1][w]);
    }
}

// How a changed memory is written, and whether what the next token's k reads of it is summed as well.
enum Writing { kInPlace, kLast, kStreamed };

// One row of S = S * decay + k change, what q reads of it, and in place what the next token's k reads of it.
template <class Simd, int W, Writing WRITING>
inline void change_row(const float* from, float* to, float decay, float k, float q, float next,
                       const typename Simd::F (&change)[W], typename Simd::F (&out)[W], typename Simd::F (&told)[W]) {
    const typename Simd::F kept = Simd::set1(decay), key = Simd::set1(k), query = Simd::set1(q);
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) {
        const typename Simd::F s = Simd::fma(key, change[w], Simd::mul(Simd::load(from + w * Simd::width), kept));
        if constexpr (WRITING == kStreamed)
            Simd::stream(to + w * Simd::width, s);
        else
            Simd::store(to + w * Simd::width, s);
        out[w] = Simd::fma(s, query, out[w]);
        if constexpr (WRITING == kInPlace) told[w] = Simd::fma(s, Simd::set1(next), told[w]);
    }
}

// A token's numbers beside the memory: q, k and the next token's k, [key_dim] each, and what is left of the memory.
struct DeltaToken {
    const float *q, *k, *next;
    float decay;
};

// All rows of one token, from one place to another, which may be the same.
template <class Simd, int W, Writing WRITING>
inline void change_memory(const float* from, int64_t from_stride, float* to, int64_t to_stride, int rows, const DeltaToken& by,
                          const typename Simd::F (&change)[W], RowSums<Simd, W>* out, RowSums<Simd, W>* told,
                          const float* ahead) {
    out->clear(), told->clear();
    auto row = [&](int i, int parity) {
        if (ahead)
            for (int w = 0; w < W; ++w) __builtin_prefetch(ahead + i * from_stride + w * Simd::width, 0, 2);
        change_row<Simd, W, WRITING>(from + i * from_stride, to + i * to_stride, by.decay, by.k[i], by.q[i],
                                     WRITING == kInPlace ? by.next[i] : 0.0f, change, out->of[parity], told->of[parity]);
    };
    int i = 0;
    for (; i + 2 <= rows; i += 2) row(i, 0), row(i + 1, 1);
    if (i < rows) row(i, 0);
}

// What a token changes in W registers of columns, of what its k reads of the memory.
template <class Simd, int W>
inline void find_change(const RowSums<Simd, W>& told, const float* gates, const float* v, typename Simd::F (&change)[W]) {
    const typename Simd::F forgotten = Simd::set1(-gates[0]), strength = Simd::set1(gates[1]);
    for (int w = 0; w < W; ++w)
        change[w] = Simd::mul(Simd::fma(told.total(w), forgotten, Simd::load(v + w * Simd::width)), strength);
}

template <class Simd, int W> inline void put_out(const RowSums<Simd, W>& out, float* to) {
    for (int w = 0; w < W; ++w) Simd::store(to + w * Simd::width, out.total(w));
}

// Where a head's numbers of one token lie, from a column on.
struct DeltaPlaces {
    int64_t key, value, memory, out;

    DeltaPlaces(const GatedDelta& o, int64_t head, int64_t column)
        : key(head * o.key_heads / o.value_heads * o.key_dim),
          value(2 * o.key_heads * o.key_dim + head * o.value_dim + column),
          memory(head * o.key_dim * o.value_dim + column),
          out(head * o.value_dim + column) {}
};

// W registers of a head's columns, from `column` on, over all tokens of a turn. Scratch of [key_dim, W registers].
template <class Simd, int W>
void delta_block(const GatedDelta& o, const DeltaTurn& turn, int64_t head, int64_t column, float* scratch) {
    const int rows = o.key_dim;
    const DeltaPlaces at(o, head, column);
    const int64_t width = W * Simd::width, keys = o.key_heads * rows;
    for (int i = 0; i < rows; ++i)
        for (int w = 0; w < W; ++w)
            Simd::store(scratch + i * width + w * Simd::width,
                        turn.memory ? Simd::load(turn.memory + at.memory + i * o.value_dim + w * Simd::width) : Simd::zero());
    RowSums<Simd, W> told, out;
    const float* mixed = o.mixed + turn.begin * o.channels;
    read_memory<Simd, W>(scratch, width, mixed + keys + at.key, rows, &told);
    for (int64_t token = turn.begin; token < turn.end; ++token, mixed += o.channels) {
        const float *q = mixed + at.key, *k = q + keys, *gates = o.gates + 2 * (token * o.value_heads + head);
        typename Simd::F change[W];
        find_change<Simd, W>(told, gates, mixed + at.value, change);
        if (token + 1 < turn.end)
            change_memory<Simd, W, kInPlace>(scratch, width, scratch, width, rows, {q, k, k + o.channels, gates[0]}, change,
                                             &out, &told, nullptr);
        else
            change_memory<Simd, W, kLast>(scratch, width, scratch, width, rows, {q, k, nullptr, gates[0]}, change, &out, &told,
                                          nullptr);
        put_out(out, o.out + token * o.value_heads * o.value_dim + at.out);
        if (token < turn.first_kept) continue;
        float* kept = turn.kept_memory(o, token) + at.memory;
        for (int i = 0; i < rows; ++i) std::memcpy(kept + i * o.value_dim, scratch + i * width, width * sizeof(float));
    }
}

// The same of a single token: the memory is read once from where it was and written once to where it is kept.
template <class Simd, int W>
void delta_step(const GatedDelta& o, const DeltaTurn& turn, int64_t head, int64_t column, const float* ahead) {
    const DeltaPlaces at(o, head, column);
    const float *mixed = o.mixed + turn.begin * o.channels, *q = mixed + at.key, *k = q + o.key_heads * o.key_dim;
    const float *gates = o.gates + 2 * (turn.begin * o.value_heads + head), *memory = turn.memory + at.memory;
    float* kept = turn.kept_memory(o, turn.begin) + at.memory;
    RowSums<Simd, W> told, out;
    read_memory<Simd, W>(memory, o.value_dim, k, o.key_dim, &told);
    typename Simd::F change[W];
    find_change<Simd, W>(told, gates, mixed + at.value, change);
    constexpr uintptr_t kWhole = Simd::width * sizeof(float);
    const DeltaToken token{q, k, nullptr, gates[0]};
    if (reinterpret_cast<uintptr_t>(kept) % kWhole == 0 && o.value_dim % Simd::width == 0)
        change_memory<Simd, W, kStreamed>(memory, o.value_dim, kept, o.value_dim, o.key_dim, token, change, &out, &told,
                                          ahead);
    else
        change_memory<Simd, W, kLast>(memory, o.value_dim, kept, o.value_dim, o.key_dim, token, change, &out, &told, ahead);
    put_out(out, o.out + turn.begin * o.value_heads * o.value_dim + at.out);
}

// As `Kernels::delta_columns`.
template <class Simd>
void delta_columns(const GatedDelta& o, const DeltaTurn& turn, int64_t head, int64_t begin, int64_t end, float* scratch) {
    constexpr int kTogether = 2, kOfOne = Simd::registers > 16 ? 8 : 2;
    int64_t column = begin;
    if (turn.end - turn.begin == 1 && turn.memory && turn.first_kept == turn.begin) {
        // Of whole heads the next one is fetched meanwhile.
        const float* next = head + 1 < o.value_heads && begin == 0 && end == o.value_dim ? turn.memory : nullptr;
        for (; column + kOfOne * Simd::width <= end; column += kOfOne * Simd::width)
            delta_step<Simd, kOfOne>(o, turn, head, column,
                                     next ? next + (head + 1) * o.key_dim * o.value_dim + column : nullptr);
        Simd::fence();
    }
    for (; column + kTogether * Simd::width <= end; column += kTogether * Simd::width)
        delta_block<Simd, kTogether>(o, turn, head, column, scratch);
    for (; column + Simd::width <= end; column += Simd::width) delta_block<Simd, 1>(o, turn, head, column, scratch);
    for (; column < end; ++column) delta_block<One, 1>(o, turn, head, column, scratch);
}
