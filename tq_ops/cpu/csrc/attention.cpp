// Attention in FP32 by the instructions of one set.
#include "set.h"

namespace haarkv {
namespace {
#include "registers.h"
#include "keys.h"
#include "float_values.h"
#include "unpacked.h"
#include "residual_window.h"
#include "attention.h"
#include "pass.h"

template <int R> using Floats = Products<KeyProducts<FloatSums<Simd>, R>, FloatValues<Simd, Narrow, R>>;
}  // namespace

void HAARKV_SET::add_attention(Kernels& kernels) {
    kernels.by_floats = {nullptr, Pass<Simd, Floats>::floats, attend_pass<Simd, Floats>};
}

}  // namespace haarkv
