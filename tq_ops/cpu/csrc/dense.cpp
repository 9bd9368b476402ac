// What a layer does with whole vectors, by the instructions of one set: all but attention and weights in blocks.
#include "set.h"

namespace haarkv {
namespace {
#include "registers.h"
#include "vectors.h"
#include "projection.h"
#include "elementwise.h"
#include "delta.h"
}  // namespace

void HAARKV_SET::add_dense(Kernels& kernels) {
    kernels.rotate = rotate<Simd>, kernels.quantize = quantize<Simd>;
    kernels.dense = {prepared_floats<Simd>, prepare<Simd>, project<Simd>};
    kernels.rms_norm = rms_norm<Simd>, kernels.rope = rope, kernels.gated_mul = gated_mul<Simd>;
    kernels.delta_inputs = delta_inputs<Simd>, kernels.delta_columns = delta_columns<Simd>;
    kernels.widen = widen, kernels.narrow = narrow, kernels.add_up = add_up;
}

}  // namespace haarkv
