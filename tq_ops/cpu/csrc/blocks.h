// How vectors that no matrix rotates are stored.
#pragma once

#include "kernels.h"

namespace haarkv {

// Where a vector goes, or a group of them.
struct Stored {
    uint8_t* codes;
    uint16_t* scales;  // or FP32
    float* zeros;
    uint8_t* signs;
};

// A vector x [D], finite, in any cell but kByte, kChannels and kRestored; in kNibble by a rule. No number of x is larger than
// `Quantizer::most` or `most_tried`. Returns false if a scale is infinite as it is stored; what was written is of no use then.
bool put_numbers(const Quantizer& by, const float* x, Stored to);

// Up to this, `put_numbers` tells whether a vector can be stored; beyond it none can. 0 where that is not so.
float most_tried(const Quantizer& by);

// `by.group` vectors x [group][D] in BF16, as kChannels; none of their numbers is larger than `Quantizer::most`.
void put_channels(const Quantizer& by, const uint16_t* const* x, Stored to);

}  // namespace haarkv
