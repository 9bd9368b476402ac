// What the units of an instruction set include first. build.py compiles attention.cpp, dense.cpp and blocks.cpp once a set,
// each with the set's flags and with HAARKV_SET, its name.
#pragma once

#include <cmath>
#include <cstring>
#include <new>
#include <type_traits>

#include "kernels.h"

#if defined(__AVX2__)
// GCC 12 warns of "uninitialized" values that its own headers leave undefined on purpose (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#else
// GCC warns that without AVX the calling convention for vectors differs. No function that takes one leaves its unit.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
#include "numbers.h"
