#include "intrinsics.h"

#include <cmath>
#include <cstring>
#include <new>

#include "kernels.h"
#include "numbers.h"

namespace haarkv {
namespace {
#include "common.h"
#include "exponential.h"
#include "simd_avx2.h"
#include "simd_avx512.h"
#include "simd_vnni.h"
#include "integers.h"
#include "integer_keys.h"
#include "integer_values.h"
#include "integer_products.h"
#include "unpacked.h"
template <> void numbers_of<Avx512>(const Side& side, Place at, int key, int n, uint8_t* bytes, float* out) {
    avx512_kernels().numbers(side, at, key, n, bytes, out);
}
#include "kept.h"
#include "attention.h"
#include "pass.h"
#include "pass_attention.h"
#include "words_avx2.h"
#include "words_vnni.h"
#include "lanes_avx512.h"
#include "block_types.h"
#include "block_projection.h"

// Only levels of up to 4 bits, or of several widths, and BF16 activations become integers; FP32 stays FP32.
void attend_either(const Cache& cache, const Tile* tiles, int count, float* scratch) {
    if (tiles->bf16 && (cache.k.cell == kNibble || cache.k.columns || cache.v.cell == kNibble))
        return attend_pass<Avx512, IntegerProducts>(cache, tiles, count, scratch);
    avx512_kernels().attend(cache, tiles, count, scratch);
}

void prepare_either(const Projection& p, int64_t begin, int64_t end) {
    if (p.weight.x_bits == 8) return prepare_blocks<Avx2, true>(p, begin, end);
    avx512_kernels().prepare_blocks(p, begin, end);
}

int64_t scratch_of_either(const Cache& cache) {
    const int64_t floats = avx512_kernels().scratch_floats(cache),
                  integers = scratch_of_passes<Avx512, IntegerProducts>(cache);
    return floats > integers ? floats : integers;
}
}  // namespace

const Kernels& avx512vnni_kernels() {
    static const Kernels kernels = [] {
        Kernels k = avx512_kernels();
        k.scratch_floats = scratch_of_either, k.attend = attend_either;
        k.prepare_blocks = prepare_either, k.project_blocks = project_blocks<Avx512, WordsVnni, Lanes512>;
        return k;
    }();
    return kernels;
}

}  // namespace haarkv
