// exp of a whole register, for every level.
//
//   exp(x) = 2**n * exp(r),   n = round(x / ln 2),   |r| <= ln(2) / 2
//
// ln 2 is subtracted in two parts; exp(r) is 1 + r and r * r times a polynomial of degree 4, fitted to the least relative error,
// 3e-9, so that the rounding of FP32 remains: 7.8e-8 at most of 20 million numbers of [-87, 0]. Below, the result is exp(-87.3), which no
// sum of FP32 numbers near 1 can see. A NaN stays one.
template <class L> inline typename L::F exponential(typename L::F x) {
    x = L::max(L::set1(-87.3f), x); // in this order a NaN in x passes
    const typename L::F n = L::round(L::mul(x, L::set1(1.44269504f)));
    typename L::F r = L::fma(n, L::set1(-0.693359375f), x);
    r = L::fma(n, L::set1(2.12194440e-4f), r);
    constexpr float kCoefficients[] = {8.3687175e-3f, 4.16683890e-2f, 0.166665211f, 0.49999994f, 1.0f, 1.0f};
    typename L::F y = L::set1(1.38145965e-3f);
    for (float c : kCoefficients) y = L::fma(y, r, L::set1(c));
    return L::times_power_of_two(y, n);
}
