// Queries and weights as 16-bit integers, each row with a step of its own: as fine as 16 bits allow, yet coarse enough that no
// 32-bit sum of their products with the integer centroids can overflow, whatever the codes. Integer sums are therefore exact,
// in any order and by any instructions; the only errors are those of rounding centroids to their unit, and queries and weights
// to half a step.

constexpr int kStretch = 128;  // keys whose weights one 32-bit sum can hold; of a query it holds all levels
// The largest integer whose upper byte still fits in a signed byte when the lower one is signed too.
constexpr float kLargestInteger = 127 * 256 + 127;

// The largest sum of the magnitudes of n rounded integers whose products with the centroids still fit in 32 bits. A margin of
// a thousandth covers the rounding of FP32 sums.
inline float most_total(const int16_t* integers, int n, int entries = 16) {
    int largest = 0;
    for (int i = 0; i < entries; ++i) {
        const int size = integers[i] < 0 ? -integers[i] : integers[i];
        largest = size > largest ? size : largest;
    }
    return 0.999f * 2147483647.0f / static_cast<float>(largest) - 0.5f * static_cast<float>(n);
}

// The step for numbers of magnitude up to `most`, whose magnitudes add up to `total` times the allowed sum. NaN if they are
// not finite; 0, and `inverse` too, if they are too small to matter.
inline float step_of(float most, float total, float* inverse) {
    float step = most / kLargestInteger;
    if (!(total <= step)) step = total;  // also if the total is a NaN
    *inverse = step > 1e-35f ? 1.0f / step : 0.0f;
    return step < INFINITY ? step > 1e-35f ? step : 0.0f : NAN;
}

inline __m512i to_integers(__m512 x, __m512 inverse) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)); }
inline __m256i to_halves(__m512 x, __m512 inverse) { return _mm512_cvtsepi32_epi16(to_integers(x, inverse)); }

// The steps of n numbers of each row, queries or weights, and what turns those into integers.
template <int R>
inline void steps_of_rows(const float* x, int stride, int n, float most_total, float* steps, __m512* inverse) {
    const __m512 share = _mm512_set1_ps(1.0f / most_total);
    __m512 most[R], total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) most[r] = total[r] = _mm512_setzero_ps();
    for (int i = 0; i < n; i += 16)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512 size = _mm512_abs_ps(_mm512_loadu_ps(x + r * stride + i));
            most[r] = _mm512_max_ps(size, most[r]), total[r] = _mm512_fmadd_ps(size, share, total[r]);
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        float by;
        steps[r] = step_of(_mm512_reduce_max_ps(most[r]), _mm512_reduce_add_ps(total[r]), &by);
        inverse[r] = _mm512_set1_ps(by);
    }
}
