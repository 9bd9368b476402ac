// Projections of weights that lie in blocks of a few bits a number, row by row as a GGUF file has them (block_types.h).
//
// Each 32 numbers of a token become 16-bit integers q, with a step s of their own:
//     s = max(largest size / 32767, sum of sizes / 524000);  q = x / s, rounded
// so that no sum of 32 products overflows 32 bits: levels stay below 2**12 in size, and sizes of q add up to less than 2**19.
// Where the weight says so (`x_bits` is 8) they are integers of 8 bits, s = largest size / 127. Instructions for bytes take
// twice as many numbers then (`BYTES`, of words that have them); others multiply the same integers as they do any.
//
// The sum I of a block's products is therefore exact, by any instructions and in any order. In FP32 a row then adds in eight
// chains, block b to chain b % 8 and each in order:
//     chain = fma(I, D * s, chain);  chain = fma(M, -s * sum of q, chain)
// and the chains are added as `reduce_add` adds eight lanes. One token and many do the same, so that a number of y has the
// same bits whatever is projected beside it.
//
// Few tokens meet each row as it is unpacked (block_few.h). Of many, panels pass over strips of rows (block_strips.h).

#include "block_tokens.h"

#include "block_few.h"
#include "block_strips.h"

template <class Simd, class Words, class Lanes, class Type, bool BYTES = false>
void project_of_type(const Projection& p, int64_t begin, int64_t end, float* scratch) {
    if constexpr (Words::has_bytes && !BYTES)
        if (p.weight.x_bits == 8) return project_of_type<Simd, Words, Lanes, Type, true>(p, begin, end, scratch);
    if (p.tokens <= kFewTokens) {
        const TokenPanels few(p.tokens, Words::tokens);
        for (int64_t i = 0; i < few.count; ++i)
            with_number<Words::tokens>(few.tokens(i), [&](auto n) {
                project_block_rows<Words, Type, BYTES, decltype(n)::value>(p, few.first_token(i), begin, end);
            });
        return;
    }
    const TokenPanels panels = block_panels(p.tokens);
    constexpr int kTwo = 2;
    const int64_t blocks = p.in / kBlock, floats = blocks * (kStripFloats / kTwo);
    for (int64_t row = begin; row < end; row += kTwo * Lanes::width) {
        const Strip<Lanes, BYTES> strips[kTwo] = {{scratch, blocks}, {scratch + floats, blocks}};
        for (int s = 0; s < kTwo && row + s * Lanes::width < end; ++s)
            unpack_strip<Simd, Words, Lanes, Type, BYTES>(p, row + s * Lanes::width, end, strips[s]);
        for (int64_t i = 0; i < panels.count; ++i)
            for (int s = 0; s < kTwo && row + s * Lanes::width < end; ++s)
                with_number<kBlockPanelTokens>(panels.tokens(i), [&](auto n) {
                    project_panel_of_blocks<Simd, Lanes, Type, BYTES, decltype(n)::value>(p, strips[s], panels.first_token(i),
                                                                                          row + s * Lanes::width, end);
                });
    }
}

template <class Simd, class Words, class Lanes>
void project_blocks(const Projection& p, int64_t begin, int64_t end, float* scratch) {
    auto by_type = [&](auto... types) {  // in the order of `WeightKind`
        constexpr decltype(Projector::project) kAll[] = {project_of_type<Simd, Words, Lanes, decltype(types)>...};
        kAll[p.weight.stored - kQ8_0](p, begin, end, scratch);
    };
    by_type(Q8_0<Words>{}, Q4_0<Words>{}, Q4_1<Words>{}, Q5_0<Words>{}, Q5_1<Words>{}, Q4_K<Words>{}, Q5_K<Words>{},
            Q6_K<Words>{}, Iq4Nl<Words>{}, Mxfp4<Words>{});
}
