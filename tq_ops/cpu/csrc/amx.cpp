#include "intrinsics.h"

#include <cstring>

#include "kernels.h"
#include "numbers.h"

namespace haarkv {
namespace {
#include "common.h"
#include "tiles.h"
#include "tile_projection.h"

// FP32 in the weight or in x stays what it is.
bool all_bf16(const Projection& p) { return p.weight_bf16 && p.x_bf16; }

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
        Kernels k = avx512bf16_kernels();
        k.prepared_floats = prepared_amx, k.prepare = prepare_amx, k.project = project_amx;
        return k;
    }();
    return kernels;
}

}  // namespace haarkv
