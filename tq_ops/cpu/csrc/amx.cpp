#include "set.h"

namespace haarkv {
namespace {
#include "registers.h"
#include "integers.h"
#include "tiles.h"
#include "unpacked.h"
#include "kept.h"
#include "attention.h"
#include "number_tiles.h"
#include "tile_lookups.h"
#include "tile_products.h"
#include "tile_softmax.h"
#include "tile_attention.h"
#include "tile_rotation.h"
#include "tile_projection.h"

Kernels others;  // for what takes no tiles

bool in_tiles(const Cache& cache) {
    auto fits = [](const Side& side) { return side.cell == kNibble || side.cell == kBf16; };
    return fits(cache.k) && fits(cache.v);
}

// Of one tile's rows, looking up and multiplying by `vpdpwssd` takes less, and of nibbles the bits are the same either way.
void attend_either(const Cache& cache, const Tile* tiles, int count, float* scratch) {
    const bool nibbles = cache.k.cell == kNibble && cache.v.cell == kNibble;
    if (tiles->bf16 && in_tiles(cache) && (count > 1 || !nibbles)) return attend_tiles(cache, tiles, count, scratch);
    others.attend(cache, tiles, count, scratch);
}

int64_t scratch_of_either(const Cache& cache) {
    return larger(in_tiles(cache) ? scratch_of_tiles(cache) : 0, others.scratch_floats(cache));
}

int64_t prepared_amx(const Projection& p) {
    return p.all_bf16() ? p.tokens * (whole_tiles(p.in) / 2) : others.prepared_floats(p);
}

void prepare_amx(const Projection& p, int64_t begin, int64_t end) {
    if (p.all_bf16()) return prepare_tiles(p, begin, end);
    others.prepare(p, begin, end);
}

void project_amx(const Projection& p, int64_t begin, int64_t end, float* aside) {
    if (p.all_bf16()) return project_tiles(p, begin, end, aside);
    others.project(p, begin, end, aside);
}
}  // namespace

void add_amx(Kernels& kernels) {
    others = kernels;
    kernels.scratch_floats = scratch_of_either, kernels.attend = attend_either;
    kernels.rotate_pairs = rotate_tiles;
    kernels.prepared_floats = prepared_amx, kernels.prepare = prepare_amx, kernels.project = project_amx;
}

}  // namespace haarkv
