// Whole vectors: rotated by a matrix, and quantized.

// COLUMNS registers of columns from `column` on of y [R, size] = x [R, size] @ matrix. Each pair of registers holds even
// columns, then odd ones: one load widens to both.
template <class Simd, int R, int COLUMNS>
inline void rotate_columns(const float* x, const uint16_t* matrix, int size, int column, float* y) {
    typename Simd::F acc[COLUMNS][R];
    for (int c = 0; c < COLUMNS; ++c)
        for (int r = 0; r < R; ++r) acc[c][r] = Simd::zero();
    for (int i = 0; i < size; ++i) {
        const uint16_t* row = matrix + static_cast<int64_t>(i) * size + column;
        typename Simd::F value[COLUMNS];
        if constexpr (COLUMNS == 1) value[0] = Simd::load(row);
#pragma GCC unroll 8
        for (int c = 0; c + 1 < COLUMNS; c += 2) {
            const typename Simd::I words = Simd::load_words(row + c * Simd::width);
            value[c] = Simd::low_bf16(words), value[c + 1] = Simd::high_bf16(words);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename Simd::F factor = Simd::set1(x[r * size + i]);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) acc[c][r] = Simd::fma(value[c], factor, acc[c][r]);
        }
    }
    for (int c = 0; c + 1 < COLUMNS; c += 2)
        for (int r = 0; r < R; ++r) {
            const typename Simd::F even = acc[c][r], odd = acc[c + 1][r];
            Simd::interleave(even, odd, &acc[c][r], &acc[c + 1][r]);
        }
    for (int c = 0; c < COLUMNS; ++c)
        for (int r = 0; r < R; ++r) Simd::store(y + r * size + column + c * Simd::width, acc[c][r]);
}

// For a matrix of a multiple of 16 columns.
template <class Simd, int R> void rotate_rows(const float* x, const uint16_t* matrix, int size, float* y) {
    constexpr int kColumns = R * 8 <= kAccumulators<Simd>   ? 8
                             : R * 4 <= kAccumulators<Simd> ? 4
                             : R * 2 <= kAccumulators<Simd> ? 2
                                                            : 1;
    int column = 0;
    for (; column + kColumns * Simd::width <= size; column += kColumns * Simd::width)
        rotate_columns<Simd, R, kColumns>(x, matrix, size, column, y);
    for (; column < size; column += Simd::width) rotate_columns<Simd, R, 1>(x, matrix, size, column, y);
}

template <class Simd> void rotate(const float* x, int rows, const Matrix& matrix, int head, float* y) {
    const uint16_t* numbers = matrix.numbers + head * matrix.head_stride;
    with_number<kMaxRows>(rows, [&](auto r) { rotate_rows<Simd, decltype(r)::value>(x, numbers, matrix.size, y); });
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

// level[i] = #{b : y[i] >= b} of n numbers; arrays have room for the next multiple of a register's lanes.
template <class Simd> void find_levels(const float* y, int n, const float* boundaries, int32_t* level, int count) {
    for (int i = 0; i < n; i += Simd::width) {
        const typename Simd::F value = Simd::load(y + i);
        typename Simd::I reached = Simd::no_words();
        for (int b = 0; b < count; ++b) reached = Simd::add_reached(reached, value, Simd::set1(boundaries[b]));
        Simd::store_words(level + i, reached);
    }
}

inline void put_levels(const int32_t* level, int n, uint8_t* codes) {
    for (int i = 0; i < n / 2; ++i) codes[i] = static_cast<uint8_t>(level[i] | level[i + n / 2] << 4);
}

// The same of any widths, as `Side` says.
inline void put_planes(const int32_t* level, int n, const int32_t (&planes)[2], uint8_t* codes) {
    for (int plane = 0, shift = 0; plane < 2 && planes[plane]; shift += planes[plane++]) {
        const int width = planes[plane], part = n * width / 8;
        for (int j = 0; j < part; ++j) {
            int byte = 0;
            for (int p = 0; p < 8 / width; ++p) byte |= (level[p * part + j] >> shift & ((1 << width) - 1)) << (p * width);
            codes[j] = static_cast<uint8_t>(byte);
        }
        codes += part;
    }
}

inline uint16_t saturated_half(double scale) { return float_to_half(scale < 65504.0 ? static_cast<float>(scale) : 65504.0f); }

// The same of several widths.
inline void put_columns(const int32_t* level, int n, const Columns& columns, uint8_t* codes) {
    const int units = n / kEighths;
    for (int c = 0; c < columns.count; ++c) {
        const Column& column = columns.column[c];
        for (int j = 0; j < units; ++j, codes += column.bytes) {
            uint32_t unit = 0;
            for (int p = 0; p < column.count; ++p)
                unit |= static_cast<uint32_t>(level[column.parts[p].eighth * units + j]) << column.parts[p].shift;
            codes[0] = static_cast<uint8_t>(unit);
            if (column.bytes == 2) codes[1] = static_cast<uint8_t>(unit >> 8);
        }
    }
}

// What levels restore of a vector: its weighted square, and how near it lies to the vector's direction.
struct Restored {
    float kept, fit;
};

// Levels of coordinates t [dim] of deviation 1, at `gain` times their size.
template <class Simd>
Restored try_gain(const Side& side, const Quantizer& by, int head, const float* t, int dim, float gain, int32_t* level) {
    alignas(64) float scaled[kMaxDim + 16], restored[kMaxDim + 16];
    alignas(64) int32_t found[kMaxDim];
    const int units = dim / kEighths;
    for (int i = 0; i < dim; ++i) scaled[i] = gain * t[i];
    for (int c = 0; c < side.columns->count; ++c)
        for (int p = 0; p < side.columns->column[c].count; ++p) {
            const ColumnPart& part = side.columns->column[c].parts[p];
            const int first = part.eighth * units;
            find_levels<Simd>(scaled + first, units, by.boundaries + boundaries_begin(part.bits), found, (1 << part.bits) - 1);
            const float* table = side.centroids + centroids_begin(part.bits);
            for (int i = 0; i < units; ++i) level[first + i] = found[i], restored[first + i] = table[found[i]];
        }
    const float* weights = by.weights + static_cast<int64_t>(head) * dim;
    typename Simd::F alongs = Simd::zero(), squares = Simd::zero();
    for (int i = 0; i < dim; i += Simd::width) {
        const typename Simd::F value = Simd::load(restored + i), weighted = Simd::mul(value, Simd::load(weights + i));
        alongs = Simd::fma(weighted, Simd::load(t + i), alongs);
        squares = Simd::fma(weighted, value, squares);
    }
    const float along = Simd::reduce_add(alongs), kept = Simd::reduce_add(squares);
    return {kept, along * along / kept};
}

// By learned coordinates.
template <class Simd>
void quantize_learned(const Side& side, const Quantizer& by, int head, const float* x, int rows, float* scratch,
                      uint8_t* const* codes, uint16_t* const* scales) {
    const int dim = side.levels;
    const int64_t of_head = static_cast<int64_t>(head) * dim;
    float *unit = scratch, *rotated = scratch + rows * dim;
    double gammas[kMaxRows];
    for (int r = 0; r < rows; ++r) {
        float* shifted = rotated + r * dim;
        for (int i = 0; i < dim; ++i) shifted[i] = x[r * dim + i] - side.mean[of_head + i];
        gammas[r] = normalize(shifted, dim, unit + r * dim);
    }
    rotate<Simd>(unit, rows, by.matrix, head, rotated);
    alignas(64) float t[kMaxDim + 16] = {};  // a register more: an eighth may be shorter than one
    for (int r = 0; r < rows; ++r) {
        const float* y = rotated + r * dim;
        typename Simd::F squares = Simd::zero(), weighted = Simd::zero();
        for (int i = 0; i < dim; i += Simd::width) {
            const typename Simd::F value = Simd::load(y + i);
            squares = Simd::fma(value, value, squares);
            weighted = Simd::fma(Simd::mul(value, value), Simd::load(by.weights + of_head + i), weighted);
        }
        const float rho = std::sqrt(Simd::reduce_add(squares) / static_cast<float>(dim));
        const float length = std::sqrt(Simd::reduce_add(weighted));
        for (int i = 0; i < dim; ++i) t[i] = rho > 0.0f ? y[i] / rho : 0.0f;
        int32_t levels[2][kMaxDim];
        int best = 0;
        Restored restored = try_gain<Simd>(side, by, head, t, dim, by.gains[0], levels[best]);
        for (int gain = 1; gain < by.tries; ++gain) {
            const Restored other = try_gain<Simd>(side, by, head, t, dim, by.gains[gain], levels[1 - best]);
            if (other.fit > restored.fit) restored = other, best = 1 - best;
        }
        put_columns(levels[best], dim, *side.columns, codes[r]);
        *scales[r] = saturated_half(restored.kept > 0.0f ? gammas[r] * length / std::sqrt(restored.kept) : 0.0);
    }
}

// By a rotation.
template <class Simd>
void quantize_rotated(const Side& side, const Quantizer& by, const float* x, int rows, float* scratch, uint8_t* const* codes,
                      uint16_t* const* scales) {
    const int dim = side.levels;
    float *unit = scratch, *rotated = scratch + rows * dim;
    double norms[kMaxRows];
    for (int r = 0; r < rows; ++r) norms[r] = normalize(x + r * dim, dim, unit + r * dim);
    rotate<Simd>(unit, rows, by.matrix, 0, rotated);
    int32_t* level = reinterpret_cast<int32_t*>(unit);
    const typename Simd::Table table = Simd::table(side.centroids);
    const int bits = side.planes[0] + side.planes[1];
    for (int r = 0; r < rows; ++r) {
        const float* y = rotated + r * dim;
        find_levels<Simd>(y, dim, by.boundaries, level, (1 << bits) - 1);
        typename Simd::F sums = Simd::zero();
        for (int i = 0; i < dim; i += Simd::width) {
            float wide[Simd::width];
            for (int j = 0; bits > 4 && j < Simd::width; ++j) wide[j] = side.centroids[level[i + j]];
            const typename Simd::F centroid = bits > 4 ? Simd::load(wide) : Simd::lookup(table, Simd::load_words(level + i));
            sums = Simd::fma(centroid, by.along ? Simd::load(y + i) : centroid, sums);
        }
        if (side.planes[0] == 4 && side.planes[1] == 0)
            put_levels(level, dim, codes[r]);
        else
            put_planes(level, dim, side.planes, codes[r]);
        const float sum = Simd::reduce_add(sums), length = by.along ? sum : std::sqrt(sum);
        *scales[r] = saturated_half(length > 0.0f ? norms[r] / static_cast<double>(length) : 0.0);
    }
}

template <class Simd>
void quantize(const Side& side, const Quantizer& by, int head, const float* x, int rows, float* scratch, uint8_t* const* codes,
              uint16_t* const* scales) {
    if (side.mean) return quantize_learned<Simd>(side, by, head, x, rows, scratch, codes, scales);
    quantize_rotated<Simd>(side, by, x, rows, scratch, codes, scales);
}
