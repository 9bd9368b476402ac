// exp of a whole register, for every instruction set.
//
//   exp(x) = 2**n * exp(r),   n = round(x / ln 2),   |r| <= ln(2) / 2
//
// ln 2 is subtracted in two parts. exp(r) is 1 + r + r * r * p(r), with p of degree 4 fitted to the least relative error,
// 3e-9, so that FP32 rounding dominates: at most 7.8e-8 over 20 million numbers in [-87, 0]. Below that range the result is
// exp(-87.3), too small to change an FP32 sum near 1. A NaN stays a NaN.
template <class Simd> inline typename Simd::F exponential(typename Simd::F x) {
    x = Simd::max(Simd::set1(-87.3f), x);  // in this order a NaN in x survives
    const typename Simd::F n = Simd::round(Simd::mul(x, Simd::set1(1.44269504f)));
    typename Simd::F r = Simd::fma(n, Simd::set1(-0.693359375f), x);
    r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
    constexpr float kCoefficients[] = {8.3687175e-3f, 4.16683890e-2f, 0.166665211f, 0.49999994f, 1.0f, 1.0f};
    typename Simd::F y = Simd::set1(1.38145965e-3f);
    for (float c : kCoefficients) y = Simd::fma(y, r, Simd::set1(c));
    return Simd::times_power_of_two(y, n);
}
