// The instruction sets that this CPU has and this library was compiled for, and the kernels of each.
#pragma once

#include "kernels.h"

namespace haarkv {

// Each needs all of those before it.
enum Isa { kPortable = 0, kAvx2, kAvx512Vnni, kAmx };
constexpr int kBf16Products = 1 << 8;

// A bit for each set, and `kBf16Products` where `avx512vnni` multiplies BF16 numbers. Where `amx` is among them, the process
// may use tiles from now on.
int available_isas();

const Kernels& kernels_of(int isa);

}  // namespace haarkv
