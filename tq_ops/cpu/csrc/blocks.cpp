// Vectors that no matrix rotates become codes and scales: to the byte what `tq_ops.formats` makes of them, so that this unit
// is compiled without contraction of products and sums.
#include "blocks.h"

#include <algorithm>
#include <cmath>

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

uint16_t signed_half(float x) {
    const uint32_t sign = bits_of(x) >> 31;
    return static_cast<uint16_t>(float_to_half(std::fabs(x)) | sign << 15);
}

// `q8_0`: d = max |x| / 127;  code = round(x * (1 / d)).
void put_int8(const float* x, int n, uint8_t* codes, uint16_t* scale) {
    float most = 0.0f;
    for (int i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
    const float d = most / 127.0f, inverse = reciprocal(d);
    for (int i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(round_half_away(x[i] * inverse));
    *scale = signed_half(d);
}

// `q4_0`: d = (the value of largest magnitude, the first of equals) / -8;  level = min(15, trunc(x * (1 / d) + 8.5)).
void put_halves(const float* x, int n, uint8_t* codes, uint16_t* scale) {
    float most = 0.0f, value = x[0];
    for (int i = 0; i < n; ++i)
        if (std::fabs(x[i]) > most) most = std::fabs(x[i]), value = x[i];
    const float d = value / -8.0f, inverse = reciprocal(d);
    auto level = [&](int i) { return std::max(0, std::min(15, static_cast<int>(x[i] * inverse + 8.5f))); };
    for (int i = 0; i < n / 2; ++i) codes[i] = static_cast<uint8_t>(level(i) | level(i + n / 2) << 4);
    *scale = signed_half(d);
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

}  // namespace

void put_numbers(const Quantizer& by, const float* x, Stored to) {
    const int dim = by.matrix.inputs, count = by.scales_per_vector;
    switch (by.cell) {
        case kBf16:
            for (int i = 0; i < dim; ++i) {
                const uint16_t number = float_to_bf16(x[i]);
                std::memcpy(to.codes + 2 * i, &number, 2);
            }
            return;
        case kFp32:
            std::memcpy(to.codes, x, dim * sizeof(float));
            return;
        case kFp8:
            for (int i = 0; i < dim; ++i) to.codes[i] = to_fp8(x[i]);
            return;
        default:
            break;
    }
    const int part = dim / count, bytes = by.bytes / count;
    for (int s = 0; s < count; ++s, x += part, to.codes += bytes) {
        if (by.cell == kInt8) put_int8(x, part, to.codes, to.scales + s);
        if (by.cell == kHalves) put_halves(x, part, to.codes, to.scales + s);
        if (by.cell == kStream)
            put_range(x, part, by.planes[0], to.codes, reinterpret_cast<float*>(to.scales) + s, to.zeros + s);
    }
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
