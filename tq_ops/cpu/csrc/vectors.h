// Whole vectors: rotated by a matrix, and quantized.

// y [R, D] = x @ matrix, for a matrix in FP32 or BF16.
template <class Simd, int R, class M> void rotate_rows(const float* x, const M* matrix, int dim, float* y) {
    constexpr int kColumns = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
    for (int column = 0; column < dim; column += kColumns * Simd::width) {
        typename Simd::F acc[kColumns][R];
        for (int c = 0; c < kColumns; ++c)
            for (int r = 0; r < R; ++r) acc[c][r] = Simd::zero();
        for (int i = 0; i < dim; ++i) {
            const M* row = matrix + static_cast<int64_t>(i) * dim + column;
            typename Simd::F value[kColumns];
            for (int c = 0; c < kColumns; ++c) value[c] = Simd::load(row + c * Simd::width);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const typename Simd::F factor = Simd::set1(x[r * dim + i]);
#pragma GCC unroll 4
                for (int c = 0; c < kColumns; ++c) acc[c][r] = Simd::fma(value[c], factor, acc[c][r]);
            }
        }
        for (int c = 0; c < kColumns; ++c)
            for (int r = 0; r < R; ++r) Simd::store(y + r * dim + column + c * Simd::width, acc[c][r]);
    }
}

template <class Simd, class M> void rotate(const float* x, int rows, const M* matrix, int dim, float* y) {
    switch (rows) {
        case 1:
            return rotate_rows<Simd, 1>(x, matrix, dim, y);
        case 2:
            return rotate_rows<Simd, 2>(x, matrix, dim, y);
        case 3:
            return rotate_rows<Simd, 3>(x, matrix, dim, y);
        case 4:
            return rotate_rows<Simd, 4>(x, matrix, dim, y);
        case 5:
            return rotate_rows<Simd, 5>(x, matrix, dim, y);
        case 6:
            return rotate_rows<Simd, 6>(x, matrix, dim, y);
        case 7:
            return rotate_rows<Simd, 7>(x, matrix, dim, y);
        default:
            return rotate_rows<Simd, 8>(x, matrix, dim, y);
    }
}

// Writes x / ||x|| rounded to BF16 and returns the norm. Doubles neither underflow nor overflow here; the norm's mantissa is
// rounded to FP32 once, as in the reference.
inline double normalize(const float* x, int dim, float* unit) {
    double sums[8] = {};
    for (int i = 0; i < dim; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(x[i + j]) * x[i + j];
    double total = 0.0;
    for (double sum : sums) total += sum;
    int exponent;
    const double mantissa = static_cast<float>(std::frexp(std::sqrt(total), &exponent));
    const double norm = std::ldexp(mantissa, exponent), inverse = total > 0.0 ? std::ldexp(1.0, -exponent) : 0.0;
    // Scaling by a power of two is exact; the quotient is rounded once.
    const float divisor = total > 0.0 ? static_cast<float>(mantissa) : 1.0f;
    for (int i = 0; i < dim; ++i) {
        const uint32_t u = bits_of(static_cast<float>(x[i] * inverse) / divisor);  // finite
        unit[i] = float_of((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
    }
    return norm;
}

template <class Simd>
void quantize(const Quantizer& by, const float* x, int rows, float* scratch, uint8_t* const* codes, uint16_t* const* scales) {
    const int dim = by.head_dim;
    float *unit = scratch, *rotated = scratch + rows * dim;
    double norms[kMaxRows];
    for (int r = 0; r < rows; ++r) norms[r] = normalize(x + r * dim, dim, unit + r * dim);
    rotate<Simd>(unit, rows, by.rotation, dim, rotated);
    int32_t* level = reinterpret_cast<int32_t*>(unit);
    const typename Simd::Table table = Simd::table(by.centroids);
    for (int r = 0; r < rows; ++r) {
        const float* y = rotated + r * dim;
        for (int begin = 0; begin < dim; begin += 64) {
            int32_t passed[64] = {};
            for (int b = 0; b < 15; ++b)
                for (int i = 0; i < 64; ++i) passed[i] += y[begin + i] >= by.boundaries[b];
            for (int i = 0; i < 64; ++i) level[begin + i] = passed[i];
        }
        typename Simd::F sums = Simd::zero();
        for (int i = 0; i < dim; i += Simd::width) {
            const typename Simd::F centroid = Simd::lookup(table, Simd::load_words(level + i));
            sums = Simd::fma(centroid, centroid, sums);
        }
        const float squares = Simd::reduce_add(sums);
        for (int i = 0; i < dim / 2; ++i) codes[r][i] = static_cast<uint8_t>(level[i] | level[i + dim / 2] << 4);
        const double scale = norms[r] / static_cast<double>(std::sqrt(squares));
        *scales[r] = float_to_half(scale < 65504.0 ? static_cast<float>(scale) : 65504.0f);
    }
}
