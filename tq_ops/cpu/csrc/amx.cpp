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
#include "integers.h"
#include "tiles.h"
#include "unpacked.h"
#include "kept.h"
#include "attention.h"
#include "pass.h"
#include "number_tiles.h"
#include "tile_lookups.h"
#include "tile_products.h"
#include "tile_softmax.h"
#include "tile_attention.h"
#include "tile_rotation.h"
#include "tile_projection.h"

bool in_tiles(const Cache& cache) {
    auto fits = [](const Side& side) { return side.cell == kNibble || side.cell == kBf16; };
    return fits(cache.k) && fits(cache.v);
}

// Of one tile's rows, looking up and multiplying by `vpdpwssd` takes less, and of nibbles the bits are the same either way.
void attend_either(const Cache& cache, const Tile* tiles, int count, float* scratch) {
    const bool nibbles = cache.k.cell == kNibble && cache.v.cell == kNibble;
    if (tiles->bf16 && in_tiles(cache) && (count > 1 || !nibbles)) return attend_tiles(cache, tiles, count, scratch);
    avx512bf16_kernels().attend(cache, tiles, count, scratch);
}

int64_t scratch_of_either(const Cache& cache) {
    return larger(in_tiles(cache) ? scratch_of_tiles(cache) : 0, avx512bf16_kernels().scratch_floats(cache));
}

// FP32 in the weight or in x stays what it is.
bool all_bf16(const Projection& p) { return p.weight_bf16() && p.x_bf16; }

int64_t prepared_amx(const Projection& p) {
    return all_bf16(p) ? p.tokens * (whole_tiles(p.in) / 2) : avx512_kernels().prepared_floats(p);
}

void prepare_amx(const Projection& p, int64_t begin, int64_t end) {
    if (all_bf16(p)) return prepare_tiles(p, begin, end);
    avx512_kernels().prepare(p, begin, end);
}

void project_amx(const Projection& p, int64_t begin, int64_t end, float* aside) {
    if (all_bf16(p)) return project_tiles(p, begin, end, aside);
    avx512_kernels().project(p, begin, end, aside);
}
}  // namespace

const Kernels& amx_kernels() {
    static const Kernels kernels = [] {
        Kernels made = avx512bf16_kernels();
        made.scratch_floats = scratch_of_either, made.attend = attend_either;
        made.rotate_pairs = rotate_tiles;
        made.prepared_floats = prepared_amx, made.prepare = prepare_amx, made.project = project_amx;
        return made;
    }();
    return kernels;
}

}  // namespace haarkv
