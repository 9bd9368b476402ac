// How vectors that no matrix rotates are stored. They are finite, and none is larger than `Quantizer::most`.
#pragma once

#include "kernels.h"

namespace haarkv {

// Where a vector goes, or a group of them.
struct Stored {
    uint8_t* codes;
    uint16_t* scales;  // or FP32
    float* zeros;
};

// A vector x [D] in any cell but kNibble, kByte, kChannels and kRestored.
void put_numbers(const Quantizer& by, const float* x, Stored to);

// `by.group` vectors x [group][D] in BF16, as kChannels.
void put_channels(const Quantizer& by, const uint16_t* const* x, Stored to);

}  // namespace haarkv
