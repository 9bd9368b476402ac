// The C interface to what a layer does number by number. Arrays are contiguous.
#include <algorithm>

#include "driver.h"
#include "pool.h"

using namespace haarkv;

namespace {

constexpr int64_t kNumbersPerItem = 16 * 1024;  // 10 microseconds of one thread

// Rows of `width` numbers; few of them are not worth waking a thread for.
template <class Op>
void by_rows(const Op& op, void (*kernel)(const Op&, int64_t, int64_t), int64_t rows, int64_t width, int threads) {
    const int64_t together = std::max<int64_t>(1, kNumbersPerItem / std::max<int64_t>(1, width));
    auto some = [&](int64_t item, int) { kernel(op, item * together, std::min(rows, (item + 1) * together)); };
    parallel_for(threads, divide_up(rows, together), some);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void haarkv_rms_norm(const RmsNorm* o) {
    by_rows(*o, kernels_of(o->isa).rms_norm, o->rows, o->width, o->threads);
}

__attribute__((visibility("default"))) void haarkv_rope(const Rope* o) {
    by_rows(*o, kernels_of(o->isa).rope, o->rows, 2 * o->half, o->threads);
}

__attribute__((visibility("default"))) void haarkv_gated_mul(const GatedMul* o) {
    by_rows(*o, kernels_of(o->isa).gated_mul, o->count, 1, o->threads);
}

}  // extern "C"
