// exp of a whole register, for every level.
//
//   exp(x) = 2**n * exp(r),   n = round(x / ln 2),   |r| <= ln(2) / 2
//
// ln 2 is subtracted in two parts; exp(r) is its Taylor polynomial of degree 7, whose remainder is below 6e-9. Relative error at
// most 2e-7 for -87 <= x <= 0, measured against float64 over all such FP32 numbers of a grid; below, the result is exp(-87.3),
// which no sum of FP32 numbers near 1 can see. A NaN stays one.
template <class L> inline typename L::F exponential(typename L::F x) {
    x = L::max(L::set1(-87.3f), x); // in this order a NaN in x passes
    const typename L::F n = L::round(L::mul(x, L::set1(1.44269504f)));
    typename L::F r = L::fma(n, L::set1(-0.693359375f), x);
    r = L::fma(n, L::set1(2.12194440e-4f), r);
    typename L::F y = L::set1(1.0f / 5040);
    constexpr float kCoefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float c : kCoefficients) y = L::fma(y, r, L::set1(c));
    return L::times_power_of_two(y, n);
}
