// The C interface to rows of a weight in blocks, restored: the embeddings of a step's tokens. They are the bits that gguf
// makes. A row takes a microsecond or so, so that one translation unit serves every instruction set.
//
// A product of a scale and a level fits FP32 without rounding, 11 and 8 bits. So it does not matter whether a minimum is taken
// off it by a fused operation.
#pragma GCC diagnostic ignored "-Wpsabi"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "calls.h"
#include "driver.h"
#include "numbers.h"

namespace haarkv {
namespace {
#include "common.h"
#include "simd_portable.h"
#include "words_portable.h"
#include "block_types.h"

template <class Type> void restore_row(const uint8_t* group, int64_t blocks, float* y) {
    typedef WordsPortable Words;
    for (int64_t left = blocks; left > 0; left -= kBlocksTogether, group += Type::group_bytes) {
        const int n = static_cast<int>(std::min<int64_t>(left, kBlocksTogether));
        typename Words::F d, m;
        float scales[kBlocksTogether], minima[kBlocksTogether];
        Type::scales(group, n, d, m);
        Words::Floats::store(scales, d);
        if constexpr (Type::minimum) Words::Floats::store(minima, m);
        each_below<kBlocksTogether>([&](auto j) {
            constexpr int J = decltype(j)::value;
            if (J >= n) return;
            Words::W levels[2];
            Type::template levels<J>(group, levels[0], levels[1]);
            for (int i = 0; i < kBlock; ++i) {
                const int level = levels[i / 16].x[i % 16] - (Type::shift < 0 ? 0 : 1 << (Type::shift < 0 ? 0 : Type::shift));
                const float number = scales[J] * static_cast<float>(level);
                y[J * kBlock + i] = Type::minimum ? number - minima[J] : number;
            }
        });
        y += n * kBlock;
    }
}

// The same of Q6_K, whose levels have a signed scale in them for products: a zero would lose its sign.
void restore_row_of_q6_k(const uint8_t* group, int64_t blocks, float* y) {
    constexpr int kBytes = Q6_K<WordsPortable>::group_bytes;
    for (int64_t block = 0; block < blocks; ++block, y += kBlock) {
        const int place = block % kBlocksTogether, half = place / 4, quarter = place % 4;
        const uint8_t* whole = group + block / kBlocksTogether * kBytes;
        const uint8_t *low = whole + half * 64 + quarter % 2 * 32, *high = whole + 128 + half * 32;
        const float d = half_to_float(read_as<uint16_t>(whole + 208));
        for (int i = 0; i < kBlock; ++i) {
            const int four = quarter < 2 ? low[i] & 0xf : low[i] >> 4, two = high[i] >> 2 * quarter & 3;
            const float scale = d * static_cast<float>(static_cast<int8_t>(whole[192 + 2 * place + i / 16]));
            y[i] = scale * static_cast<float>((four | two << 4) - 32);
        }
    }
}

typedef void (*Restore)(const uint8_t*, int64_t, float*);

Restore restoring(int32_t stored) {
    typedef WordsPortable Words;
    switch (stored) {
        case kQ8_0:
            return restore_row<Q8_0<Words>>;
        case kQ4_0:
            return restore_row<Q4_0<Words>>;
        case kQ4_1:
            return restore_row<Q4_1<Words>>;
        case kQ5_0:
            return restore_row<Q5_0<Words>>;
        case kQ5_1:
            return restore_row<Q5_1<Words>>;
        case kQ4_K:
            return restore_row<Q4_K<Words>>;
        case kQ5_K:
            return restore_row<Q5_K<Words>>;
        case kQ6_K:
            return restore_row_of_q6_k;
        case kIq4Nl:
            return restore_row<Iq4Nl<Words>>;
        default:
            return restore_row<Mxfp4<Words>>;
    }
}

}  // namespace
}  // namespace haarkv

extern "C" {

// 1 if there is no such row; nothing was written then.
__attribute__((visibility("default"))) int32_t haarkv_rows(const HaarkvRows* r) {
    constexpr int64_t kTogether = 8;
    for (int64_t i = 0; i < r->count; ++i)
        if (r->rows[i] < 0 || r->rows[i] >= r->outputs) return 1;
    const auto restore = restoring(r->weight.stored);
    auto some = [&](int64_t item, int) {
        for (int64_t i = item * kTogether; i < std::min(r->count, (item + 1) * kTogether); ++i)
            restore(static_cast<const uint8_t*>(r->weight.data) + r->rows[i] * r->weight.row_bytes, r->inputs / kBlock,
                    r->y + i * r->inputs);
    };
    parallel_for(r->threads, divide_up(r->count, kTogether), some);
    return 0;
}

}  // extern "C"
