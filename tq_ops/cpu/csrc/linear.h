// Projections of the same tokens by several weights.
#pragma once

#include "calls.h"

namespace haarkv {

constexpr int kMostTogether = 3;

// As `haarkv_linear` of each, bit by bit; all have the same x, tokens, instruction set and threads.
void project_together(const HaarkvLinear* linears, int count);

}  // namespace haarkv
