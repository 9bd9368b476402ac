// Vectors that no matrix rotates become codes and scales: to the byte what `tq_ops.formats` makes of them, so that this unit
// is compiled without contraction of products and sums.
#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "numbers.h"

namespace haarkv {
namespace {

// 1 / x; 0 where x is 0 or 1 / x is beyond FP32.
float reciprocal(float x) {
    const float inverse = 1.0f / x;
    return std::isinf(inverse) ? 0.0f : inverse;
}

// To the nearest integer, ties away from zero; |x| < 2**31.
int round_half_away(float x) {
    const int whole = static_cast<int>(x);
    const float left = x - static_cast<float>(whole);
    return whole + (left >= 0.5f) - (left <= -0.5f);
}

// Stores a scale; false if it rounds to infinity.
bool put_half(float x, uint16_t* scale) {
    const uint32_t sign = bits_of(x) >> 31;
    if (!(std::fabs(x) < 65520.0f)) return false;
    *scale = static_cast<uint16_t>(float_to_half(std::fabs(x)) | sign << 15);
    return true;
}

// `q8_0`: d = max |x| / 127;  code = round(x * (1 / d)).
bool put_int8(const float* x, int n, uint8_t* codes, uint16_t* scale) {
    float most = 0.0f;
    for (int i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
    const float d = most / 127.0f, inverse = reciprocal(d);
    for (int i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(round_half_away(x[i] * inverse));
    return put_half(d, scale);
}

// `q4_0`: d = (the value of largest magnitude, the first of equals) / -8;  level = min(15, trunc(x * (1 / d) + 8.5)).
bool put_halves(const float* x, int n, uint8_t* codes, uint16_t* scale) {
    float most = 0.0f, value = x[0];
    for (int i = 0; i < n; ++i)
        if (std::fabs(x[i]) > most) most = std::fabs(x[i]), value = x[i];
    const float d = value / -8.0f, inverse = reciprocal(d);
    auto level = [&](int i) { return std::max(0, std::min(15, static_cast<int>(x[i] * inverse + 8.5f))); };
    for (int i = 0; i < n / 2; ++i) codes[i] = static_cast<uint8_t>(level(i) | level(i + n / 2) << 4);
    return put_half(d, scale);
}

// E4M3, ties to even, saturating at 448.
uint8_t to_fp8(float x) {
    const uint32_t sign = bits_of(x) >> 24 & 0x80u;
    const float size = std::min(std::fabs(x), 448.0f);
    if (size < 0x1p-6f) {
        // Adding 2**14 leaves the last bit worth 2**-9, the smallest step.
        return static_cast<uint8_t>(sign | (bits_of(size + 16384.0f) - bits_of(16384.0f)));
    }
    const uint32_t u = bits_of(size) - (120u << 23);
    return static_cast<uint8_t>(sign | (u + 0x7ffffu + ((u >> 20) & 1u)) >> 20);
}

// How KIVI takes the levels of numbers between `least` and `most`:
//   scale = (most - least) / (2**bits - 1) + 1e-10;  level = clamp(round((x - least) / scale))
struct Range {
    float scale, zero;
    int top;

    Range(float least, float most, int bits)
        : scale((most - least) / static_cast<float>((1 << bits) - 1) + 1e-10f), zero(least), top((1 << bits) - 1) {}

    int level(float x) const { return std::max(0, std::min(top, round_half_away((x - zero) / scale))); }
};

// Values by a range of their own.
void put_range(const float* x, int n, int bits, uint8_t* codes, float* scale, float* zero) {
    const Range range(*std::min_element(x, x + n), *std::max_element(x, x + n), bits);
    const int together = 8 / bits;
    for (int byte = 0; byte < n / together; ++byte) {
        int packed = 0;
        for (int i = 0; i < together; ++i) packed |= range.level(x[byte * together + i]) << (i * bits);
        codes[byte] = static_cast<uint8_t>(packed);
    }
    *scale = range.scale, *zero = range.zero;
}

template <int STRIDE> void add_and_subtract(float* y, int n) {
    for (int i = 0; i < n; i += 2 * STRIDE)
        for (int j = i; j < i + STRIDE; ++j) {
            const float a = y[j], b = y[j + STRIDE];
            y[j] = a + b, y[j + STRIDE] = a - b;
        }
}

// y of x as `Quantizer::walsh` has it, of n numbers that it divides.
void transform(const Quantizer& by, const float* x, int n, float* y) {
    for (int first = 0; first < n; first += by.walsh, x += by.walsh, y += by.walsh) {
        for (int i = 0; i < by.walsh; ++i) y[i] = by.before ? x[i] * by.before[i] : x[i];
        add_and_subtract<1>(y, by.walsh);
        if (by.walsh > 2) add_and_subtract<2>(y, by.walsh);
        if (by.walsh > 4) add_and_subtract<4>(y, by.walsh);
        if (by.walsh > 8) add_and_subtract<8>(y, by.walsh);
        if (by.walsh > 16) add_and_subtract<16>(y, by.walsh);
        if (by.walsh > 32) add_and_subtract<32>(y, by.walsh);
        if (by.walsh > 64) add_and_subtract<64>(y, by.walsh);
        if (by.walsh > 128) add_and_subtract<128>(y, by.walsh);
        for (int i = 0; i < by.walsh; ++i) y[i] *= by.factor;
        for (int i = 0; by.after && i < by.walsh; ++i) y[i] *= by.after[i];
    }
}

// level[i] = #{b : y[i] >= b}
void find_levels(const float* y, int n, const float* boundaries, int count, int32_t* level) {
    std::fill(level, level + n, 0);
    for (int b = 0; b < count; ++b)
        for (int i = 0; i < n; ++i) level[i] += y[i] >= boundaries[b];
}

// Levels as a stream of bits, 8 of them in `bits` bytes.
void put_stream(const int32_t* level, int n, int bits, uint8_t* codes) {
    for (int i = 0; i < n; i += 8, codes += bits) {
        uint32_t word = 0;
        for (int j = 0; j < 8; ++j) word |= static_cast<uint32_t>(level[i + j]) << (bits * j);
        for (int byte = 0; byte < bits; ++byte) codes[byte] = static_cast<uint8_t>(word >> (8 * byte));
    }
}

float square_root(float x) { return static_cast<float>(std::sqrt(static_cast<double>(x))); }

// The length of x, its squares added from first to last.
float length_in_order(const float* x, int n) {
    float total = x[0] * x[0];
    for (int i = 1; i < n; ++i) total += x[i] * x[i];
    return square_root(total);
}

// Squares of x added in numpy's order: up to 128 in eight sums, which are added as a tree; more are cut in two.
float squares_in_pairs(const float* x, int n) {
    if (n > 128) return squares_in_pairs(x, n / 16 * 8) + squares_in_pairs(x + n / 16 * 8, n - n / 16 * 8);
    float sums[8];
    for (int j = 0; j < 8; ++j) sums[j] = x[j] * x[j];
    for (int i = 8; i < n; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += x[i + j] * x[i + j];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// `tq3_0`, of n rotated numbers.
bool put_by_largest(const Quantizer& by, const float* y, int n, uint8_t* codes, uint8_t* signs, uint16_t* scale) {
    alignas(64) float value[kMaxDim];
    alignas(64) int32_t level[kMaxDim], sign[kMaxDim];
    const int bits = by.planes[0];
    float most = 0.0f;
    for (int i = 0; i < n; ++i) most = std::max(most, std::fabs(y[i]));
    const float d = most / by.constant, inverse = reciprocal(d);
    for (int i = 0; i < n; ++i) value[i] = y[i] * inverse;
    find_levels(value, n, by.boundaries, (1 << bits) - 1, level);
    for (int i = 0; i < n; ++i) sign[i] = y[i] - by.centroids[level[i]] * d >= 0.0f;
    put_stream(level, n, bits, codes);
    put_stream(sign, n, 1, signs);
    return put_half(d, scale);
}

// `tbq4_0`, of n numbers.
bool put_by_length(const Quantizer& by, const float* x, int n, uint8_t* codes, uint16_t* scale) {
    alignas(64) float y[kMaxDim], unit[kMaxDim];
    alignas(64) int32_t level[kMaxDim];
    const float length = length_in_order(x, n), norm = length <= by.constant ? 0.0f : length, inverse = reciprocal(norm);
    for (int i = 0; i < n; ++i) unit[i] = x[i] * inverse;
    transform(by, unit, n, y);
    find_levels(y, n, by.boundaries, 15, level);
    for (int i = 0; i < n; ++i) y[i] = by.centroids[level[i]];
    put_stream(level, n, 4, codes);
    return put_half(norm / length_in_order(y, n), scale);
}

// `manthan3`, of the whole vector. A number on a boundary has the level below.
bool put_by_radius(const Quantizer& by, const float* x, int n, uint8_t* codes, float* scale) {
    alignas(64) float value[kMaxDim];
    alignas(64) int32_t level[kMaxDim];
    const int bits = by.planes[0];
    const float radius = square_root(squares_in_pairs(x, n)), above = radius + by.constant;
    const float root = static_cast<float>(std::sqrt(static_cast<double>(n)));
    for (int i = 0; i < n; ++i) value[i] = x[i] / above * root;
    std::fill(level, level + n, 0);
    for (int b = 0; b < (1 << bits) - 1; ++b)
        for (int i = 0; i < n; ++i) level[i] += value[i] > by.boundaries[b];
    put_stream(level, n, bits, codes);
    *scale = radius;
    return std::isfinite(radius);
}

}  // namespace

float most_tried(const Quantizer& by) {
    if (by.rule == kByRadius) return std::numeric_limits<float>::max();
    const bool by_half = by.rule != kOfCell || by.cell == kInt8 || by.cell == kHalves;
    // Any FP16 scale is infinite from there on, and below it no number on the way to one is.
    return by_half ? 0x1p40f : 0.0f;
}

bool put_numbers(const Quantizer& by, const float* x, Stored to) {
    const int dim = by.matrix.inputs, count = by.scales_per_vector;
    alignas(64) float rotated[kMaxDim];
    if (by.rule == kByRadius) return put_by_radius(by, x, dim, to.codes, reinterpret_cast<float*>(to.scales));
    if (by.walsh && by.rule != kByLength) transform(by, x, dim, rotated), x = rotated;
    switch (by.cell) {
        case kBf16:
            for (int i = 0; i < dim; ++i) {
                const uint16_t number = float_to_bf16(x[i]);
                std::memcpy(to.codes + 2 * i, &number, 2);
            }
            return true;
        case kFp32:
            std::memcpy(to.codes, x, dim * sizeof(float));
            return true;
        case kFp8:
            for (int i = 0; i < dim; ++i) to.codes[i] = to_fp8(x[i]);
            return true;
        default:
            break;
    }
    const int part = dim / count, bytes = by.bytes / count;
    bool finite = true;
    for (int s = 0; s < count; ++s, x += part, to.codes += bytes) {
        if (by.rule == kByLargest)
            finite &= put_by_largest(by, x, part, to.codes, to.signs + s * part / 8, to.scales + s);
        else if (by.rule == kByLength)
            finite &= put_by_length(by, x, part, to.codes, to.scales + s);
        else if (by.cell == kInt8)
            finite &= put_int8(x, part, to.codes, to.scales + s);
        else if (by.cell == kHalves)
            finite &= put_halves(x, part, to.codes, to.scales + s);
        else if (by.cell == kStream)
            put_range(x, part, by.planes[0], to.codes, reinterpret_cast<float*>(to.scales) + s, to.zeros + s);
    }
    return finite;
}

void put_channels(const Quantizer& by, const uint16_t* const* x, Stored to) {
    const int dim = by.matrix.inputs, bits = by.planes[0], apart = by.group * bits / 8;
    float* scales = reinterpret_cast<float*>(to.scales);
    std::memset(to.codes, 0, static_cast<size_t>(dim) * apart);
    for (int d = 0; d < dim; ++d) {
        float least = bf16_to_float(x[0][d]), most = least;
        for (int i = 1; i < by.group; ++i) {
            const float value = bf16_to_float(x[i][d]);
            least = std::min(least, value), most = std::max(most, value);
        }
        const Range range(least, most, bits);
        uint8_t* codes = to.codes + d * apart;
        for (int i = 0; i < by.group; ++i)
            codes[i * bits / 8] |= static_cast<uint8_t>(range.level(bf16_to_float(x[i][d])) << (i * bits % 8));
        scales[d] = range.scale, to.zeros[d] = range.zero;
    }
}

}  // namespace haarkv
