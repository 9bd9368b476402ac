// Whole vectors: turned by a matrix, and quantized, over an instruction level `L` of level.h.

// Of a matrix in FP32 or BF16.
template <class L, int R, class M> void rotate_rows(const float* x, const M* matrix, int dim, float* y) {
    constexpr int kColumns = R * 4 <= kAccumulators<L> ? 4 : R * 2 <= kAccumulators<L> ? 2 : 1;
    for (int column = 0; column < dim; column += kColumns * L::width) {
        typename L::F acc[kColumns][R];
        for (int c = 0; c < kColumns; ++c)
            for (int r = 0; r < R; ++r) acc[c][r] = L::zero();
        for (int i = 0; i < dim; ++i) {
            const M* row = matrix + static_cast<int64_t>(i) * dim + column;
            typename L::F value[kColumns];
            for (int c = 0; c < kColumns; ++c) value[c] = L::load(row + c * L::width);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const typename L::F factor = L::set1(x[r * dim + i]);
#pragma GCC unroll 4
                for (int c = 0; c < kColumns; ++c) acc[c][r] = L::fma(value[c], factor, acc[c][r]);
            }
        }
        for (int c = 0; c < kColumns; ++c)
            for (int r = 0; r < R; ++r) L::store(y + r * dim + column + c * L::width, acc[c][r]);
    }
}

template <class L, class M> void rotate(const float* x, int rows, const M* matrix, int dim, float* y) {
    switch (rows) {
        case 1: return rotate_rows<L, 1>(x, matrix, dim, y);
        case 2: return rotate_rows<L, 2>(x, matrix, dim, y);
        case 3: return rotate_rows<L, 3>(x, matrix, dim, y);
        case 4: return rotate_rows<L, 4>(x, matrix, dim, y);
        case 5: return rotate_rows<L, 5>(x, matrix, dim, y);
        case 6: return rotate_rows<L, 6>(x, matrix, dim, y);
        case 7: return rotate_rows<L, 7>(x, matrix, dim, y);
        default: return rotate_rows<L, 8>(x, matrix, dim, y);
    }
}

// Unit vector rounded to BF16, and the norm. In double nothing under- or overflows, and the one rounding of the norm's mantissa to
// FP32 is the reference's own.
inline double normalize(const float* x, int dim, float* unit) {
    double sums[8] = {};
    for (int i = 0; i < dim; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(x[i + j]) * x[i + j];
    double total = 0.0;
    for (double sum : sums) total += sum;
    int exponent;
    const double mantissa = static_cast<float>(std::frexp(std::sqrt(total), &exponent));
    const double norm = std::ldexp(mantissa, exponent), inverse = total > 0.0 ? std::ldexp(1.0, -exponent) : 0.0;
    // A power of two costs no bit; the quotient of FP32 numbers is rounded once.
    const float divisor = total > 0.0 ? static_cast<float>(mantissa) : 1.0f;
    for (int i = 0; i < dim; ++i) {
        const uint32_t u = bits_of(static_cast<float>(x[i] * inverse) / divisor); // finite
        unit[i] = float_of((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
    }
    return norm;
}

template <class L>
void quantize(const Quantizer& by, const float* x, int rows, float* scratch, uint8_t* const* codes, uint16_t* const* scales) {
    const int dim = by.head_dim;
    float *unit = scratch, *turned = scratch + rows * dim;
    double norms[kMaxRows];
    for (int r = 0; r < rows; ++r) norms[r] = normalize(x + r * dim, dim, unit + r * dim);
    rotate<L>(unit, rows, by.rotation, dim, turned);
    int32_t* level = reinterpret_cast<int32_t*>(unit);
    const typename L::Table table = L::table(by.centroids);
    for (int r = 0; r < rows; ++r) {
        const float* y = turned + r * dim;
        for (int begin = 0; begin < dim; begin += 64) {
            int32_t passed[64] = {};
            for (int b = 0; b < 15; ++b)
                for (int i = 0; i < 64; ++i) passed[i] += y[begin + i] >= by.boundaries[b];
            for (int i = 0; i < 64; ++i) level[begin + i] = passed[i];
        }
        typename L::F sums = L::zero();
        for (int i = 0; i < dim; i += L::width) {
            const typename L::F centroid = L::lookup(table, L::load_words(level + i));
            sums = L::fma(centroid, centroid, sums);
        }
        const float squares = L::reduce_add(sums);
        for (int i = 0; i < dim / 2; ++i) codes[r][i] = static_cast<uint8_t>(level[i] | level[i + dim / 2] << 4);
        const double scale = norms[r] / static_cast<double>(std::sqrt(squares));
        *scales[r] = float_to_half(scale < 65504.0 ? static_cast<float>(scale) : 65504.0f);
    }
}
