// Projections by weights in blocks, by the instructions of one set. `Words` are numbers of half a block, `Lanes` sums of rows.
#include "set.h"

namespace haarkv {
namespace {
#include "registers.h"
#if defined(__AVX512VNNI__)
#include "words_avx2.h"
#include "words_vnni.h"
typedef WordsVnni Words;
typedef Lanes512 Lanes;
#elif defined(__AVX2__)
#include "words_avx2.h"
typedef Words256 Words;
typedef Lanes256 Lanes;
#else
#include "words_portable.h"
typedef WordsPortable Words;
typedef LanesPortable Lanes;
#endif
#include "block_types.h"
#include "block_projection.h"

int64_t prepared_blocks(const Projection& p) { return whole_groups(p.in) * kBlockFloats * p.tokens; }

void prepare_either(const Projection& p, int64_t begin, int64_t end) {
    if constexpr (Words::has_bytes)
        if (p.weight.x_bits == 8) return prepare_blocks<Narrow, true>(p, begin, end);
    prepare_blocks<Narrow, false>(p, begin, end);
}
}  // namespace

void HAARKV_SET::add_blocks(Kernels& kernels) {
    kernels.blocks = {prepared_blocks, prepare_either, project_blocks<Simd, Words, Lanes>};
}

}  // namespace haarkv
