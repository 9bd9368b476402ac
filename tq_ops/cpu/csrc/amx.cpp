#include "set.h"

namespace haarkv {
namespace {
#include "registers.h"
#include "integers.h"
#include "tiles.h"
#include "unpacked.h"
#include "residual_window.h"
#include "attention.h"
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
bool takes_tiles(const Cache& cache, const Tile* tiles, int count) {
    const bool nibbles = cache.k.cell == kNibble && cache.v.cell == kNibble;
    return tiles->bf16 && in_tiles(cache) && (count > 1 || !nibbles);
}

int64_t scratch_in_tiles(const Cache& cache) { return in_tiles(cache) ? scratch_of_tiles(cache) : 0; }

int64_t prepared_in_tiles(const Projection& p) { return p.tokens * (whole_tiles(p.in) / 2); }
}  // namespace

void add_amx(Kernels& kernels) {
    kernels.by_tiles = {takes_tiles, scratch_in_tiles, attend_tiles};
    kernels.rotate_pairs = rotate_tiles;
    kernels.bf16 = {prepared_in_tiles, prepare_tiles, project_tiles};
}

}  // namespace haarkv
