// What a layer does number by number. A row's bits depend on that row alone.

inline void narrow(const float* x, int64_t n, uint16_t* y) {
    for (int64_t i = 0; i < n; ++i) y[i] = float_to_bf16(x[i]);
}

// As `Kernels::add_up`.
inline void add_up(const float* x, int64_t apart, const float* factors, int64_t rows, float share, int64_t n, float* sum) {
    if (rows == 1 && factors[0] == 1.0f) {
        for (int64_t i = 0; i < n; ++i) sum[i] = x[i] * share;
        return;
    }
    for (int64_t i = 0; i < n; ++i) sum[i] = 0.0f;
    for (int64_t row = 0; row < rows; ++row, x += apart) {
        if (factors[row] == 0.0f) continue;
        for (int64_t i = 0; i < n; ++i) sum[i] += x[i] * factors[row];
    }
    for (int64_t i = 0; i < n; ++i) sum[i] *= share;
}

inline void write(const float* x, bool bf16, int64_t to, int64_t n, void* out) {
    if (bf16) return narrow(x, n, static_cast<uint16_t*>(out) + to);
    std::memcpy(static_cast<float*>(out) + to, x, n * sizeof(float));
}

constexpr int64_t kPiece = 64;  // numbers at a time, a multiple of every register's lanes

constexpr int64_t kHead = 256;  // numbers of a row whose weights are kept at hand

inline float rms_scale(float sum, const RmsNorm& o) { return 1.0f / std::sqrt(sum / static_cast<float>(o.width) + o.eps); }

// Rows that are heads, in FP32. The bits are those of `rms_norm`.
template <class Simd> void rms_norm_heads(const RmsNorm& o, int64_t begin, int64_t end) {
    alignas(64) float weight[kHead];
    read(o.weight, o.weight_bf16, 0, o.width, weight);
    for (int64_t row = begin; row < end; ++row) {
        const float* x = static_cast<const float*>(o.x) + row * o.width;
        float* y = static_cast<float*>(o.y) + row * o.width;
        typename Simd::F sums = Simd::zero();
        for (int64_t i = 0; i < o.width; i += Simd::width) {
            const typename Simd::F value = Simd::load(x + i);
            sums = Simd::fma(value, value, sums);
        }
        const typename Simd::F scale = Simd::set1(rms_scale(Simd::reduce_add(sums), o));
        for (int64_t i = 0; i < o.width; i += Simd::width)
            Simd::store(y + i, Simd::mul(Simd::mul(Simd::load(x + i), scale), Simd::load(weight + i)));
    }
}

template <class Simd> void rms_norm(const RmsNorm& o, int64_t begin, int64_t end) {
    if (!o.bf16 && o.width <= kHead && o.width % Simd::width == 0) return rms_norm_heads<Simd>(o, begin, end);
    for (int64_t row = begin; row < end; ++row) {
        typename Simd::F sums = Simd::zero();
        alignas(64) float x[kPiece], weight[kPiece];
        for (int64_t i = 0; i < o.width; i += kPiece) {
            const int64_t n = o.width - i < kPiece ? o.width - i : kPiece;
            for (int64_t j = n; j < kPiece; ++j) x[j] = 0.0f;
            read(o.x, o.bf16, row * o.width + i, n, x);
            for (int64_t j = 0; j < kPiece; j += Simd::width) {
                const typename Simd::F value = Simd::load(x + j);
                sums = Simd::fma(value, value, sums);
            }
        }
        const float scale = rms_scale(Simd::reduce_add(sums), o);
        for (int64_t i = 0; i < o.width; i += kPiece) {
            const int64_t n = o.width - i < kPiece ? o.width - i : kPiece;
            read(o.x, o.bf16, row * o.width + i, n, x);
            read(o.weight, o.weight_bf16, i, n, weight);
            for (int64_t j = 0; j < n; ++j) x[j] = x[j] * scale * weight[j];
            write(x, o.bf16, row * o.width + i, n, o.y);
        }
    }
}

// Rows are heads of tokens.
inline void rope(const Rope& o, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float *low = o.x + row * 2 * o.half, *high = low + o.half;
        const float *cos = o.cos + row / o.heads * o.half, *sin = o.sin + row / o.heads * o.half;
        float *new_low = o.y + row * 2 * o.half, *new_high = new_low + o.half;
        for (int64_t i = 0; i < o.half; ++i) {
            new_low[i] = low[i] * cos[i] - high[i] * sin[i];
            new_high[i] = high[i] * cos[i] + low[i] * sin[i];
        }
    }
}

// e = exp(-|e|) of kPiece numbers.
template <class Simd> void decay(float* e) {
    for (int64_t j = 0; j < kPiece; ++j) e[j] = e[j] > 0.0f ? -e[j] : e[j];
    for (int64_t j = 0; j < kPiece; j += Simd::width) Simd::store(e + j, Simd::expf(Simd::load(e + j)));
}

// gate / (1 + exp(-z)) * up, with exp of what is not positive: 1 / (1 + exp(-z)) is exp(z) / (1 + exp(z)) where z is negative.
// z is the gate, or by GELU twice what its tanh is taken of: (1 + tanh(t)) / 2 is 1 / (1 + exp(-2 * t)). By a sigmoid the
// gate before the quotient is 1.
template <class Simd> void gated_mul(const GatedMul& o, int64_t begin, int64_t end) {
    constexpr float kTwice = 1.5957691216f;  // 2 * sqrt(2 / pi)
    alignas(64) float e[kPiece], y[kPiece];
    for (int64_t i = begin; i < end; i += kPiece) {
        const int64_t n = end - i < kPiece ? end - i : kPiece;
        const float *gate = o.gate + i, *up = o.up + i;
        for (int64_t j = 0; j < n; ++j) e[j] = gate[j];
        for (int64_t j = 0; o.function == kGelu && j < n; ++j) e[j] *= kTwice * (1.0f + 0.044715f * gate[j] * gate[j]);
        for (int64_t j = n; j < kPiece; ++j) e[j] = 0.0f;
        decay<Simd>(e);
        if (o.function == kSigmoid)
            for (int64_t j = 0; j < n; ++j) y[j] = (gate[j] > 0.0f ? 1.0f : e[j]) / (1.0f + e[j]) * up[j];
        else
            for (int64_t j = 0; j < n; ++j) y[j] = gate[j] * (gate[j] > 0.0f ? 1.0f : e[j]) / (1.0f + e[j]) * up[j];
        write(y, o.bf16, i, n, o.y);
    }
}
