// The registers of the set that a unit is compiled for: Simd, and Narrow of half the width where there are any. To include in
// the unit's unnamed namespace, as all that follows.
#include "common.h"
#if defined(__AVX512VNNI__)
#include "simd_avx2.h"
#include "simd_avx512.h"
typedef Avx512 Simd;
typedef Avx2 Narrow;
#elif defined(__AVX2__)
#include "simd_avx2.h"
typedef Avx2 Simd, Narrow;
#else
#include "simd_portable.h"
typedef Portable Simd, Narrow;
#endif
