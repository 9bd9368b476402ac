#include "intrinsics.h"

#include "kernels.h"

namespace haarkv {

const Kernels& avx512bf16_kernels() {
    static const Kernels kernels = avx512vnni_kernels();
    return kernels;
}

}  // namespace haarkv
