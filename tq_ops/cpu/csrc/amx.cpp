#include "intrinsics.h"

#include "kernels.h"

namespace haarkv {
namespace {
#include "tiles.h"
}  // namespace

const Kernels& amx_kernels() {
    static const Kernels kernels = avx512bf16_kernels();
    return kernels;
}

}  // namespace haarkv
