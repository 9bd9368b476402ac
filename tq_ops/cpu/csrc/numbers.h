// FP16 and BF16 by integer arithmetic, for any machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace haarkv {
namespace {

template <class T> inline T read_as(const void* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline uint32_t bits_of(float x) { return read_as<uint32_t>(&x); }

inline float float_of(uint32_t u) { return read_as<float>(&u); }

inline float bf16_to_float(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

inline void widen(const uint16_t* x, int64_t n, float* y) {
    for (int64_t i = 0; i < n; ++i) y[i] = bf16_to_float(x[i]);
}

// Numbers x [n], BF16 or FP32, from index `from` on.
inline void read(const void* x, bool bf16, int64_t from, int64_t n, float* out) {
    if (bf16) return widen(static_cast<const uint16_t*>(x) + from, n, out);
    std::memcpy(out, static_cast<const float*>(x) + from, n * sizeof(float));
}

// Round to nearest even; a NaN stays one.
inline uint16_t float_to_bf16(float x) {
    const uint32_t u = bits_of(x), rounded = u + 0x7fffu + ((u >> 16) & 1u);
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded >> 16);  // without a branch
}

inline float half_to_float(uint16_t h) {
    uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // Moved into FP32's exponent field, an FP16 number is off by 2**112; the product is exact, also for denormals.
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

// Round to nearest even, of 0 <= x <= 65504.
inline uint16_t float_to_half(float x) {
    if (x < 0x1p-14f) {
        // Adding 0.5 leaves the last bit worth 2**-24, FP16's smallest step.
        return static_cast<uint16_t>(bits_of(x + 0.5f) - bits_of(0.5f));
    }
    uint32_t u = bits_of(x) - (112u << 23);
    return static_cast<uint16_t>((u + 0xfffu + ((u >> 13) & 1u)) >> 13);
}

}  // namespace
}  // namespace haarkv
