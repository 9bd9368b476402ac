// Which instruction sets this CPU has, and the kernels of each.
#pragma once

#include "kernels.h"

namespace haarkv {

// Each needs all of those before it.
enum Isa { kPortable = 0, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

// The last that this CPU has and this library was compiled for. Where that is AMX, the process may use tiles from now on.
Isa best_isa();

const Kernels& kernels_of(int isa);

}  // namespace haarkv
