// What the ops of the C interface share.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "calls.h"
#include "kernels.h"
#include "numbers.h"

namespace haarkv {

// -- Parallel loops of microseconds: on the threads of torch's OpenMP where torch may use several, else on threads of our own.

using Body = void (*)(void* context, int64_t item, int thread);

// Calls body(context, item, thread) for every item in [0, items), each once, on up to `threads` threads, the caller among
// them; thread is in [0, threads). Calls from several threads take turns.
void parallel_for(int threads, int64_t items, Body body, void* context);

template <class F> void parallel_for(int threads, int64_t items, F& function) {
    parallel_for(threads, items, [](void* f, int64_t item, int thread) { (*static_cast<F*>(f))(item, thread); }, &function);
}

// -- Which kernels take what.

inline const Attender& attender(const Kernels& kernels, const Cache& cache, const Tile* tiles, int count) {
    for (const Attender* by : {&kernels.by_tiles, &kernels.by_integers})
        if (by->attend && by->takes(cache, tiles, count)) return *by;
    return kernels.by_floats;
}

// Floats of scratch that any of them needs.
inline int64_t attention_floats(const Kernels& kernels, const Cache& cache) {
    int64_t most = kernels.by_floats.scratch_floats(cache);
    for (const Attender* by : {&kernels.by_tiles, &kernels.by_integers})
        if (by->attend) most = std::max(most, by->scratch_floats(cache));
    return most;
}

inline const Projector& projector(const Kernels& kernels, const Projection& p) {
    if (in_blocks(p.weight.stored)) return kernels.blocks;
    return p.all_bf16() && kernels.bf16.project ? kernels.bf16 : kernels.dense;
}

// -- Projections of the same tokens by several weights.

constexpr int kMostTogether = 3;

// As `haarkv_linear` of each, bit by bit; all have the same x, tokens, instruction set and threads.
void project_together(const HaarkvLinear* linears, int count);

namespace {

// Converts x [n], BF16 or FP32, to FP32.
inline void widen(const Kernels& kernels, const void* x, bool bf16, int64_t n, float* out) {
    if (bf16) return kernels.widen(static_cast<const uint16_t*>(x), n, out);
    std::memcpy(out, x, n * sizeof(float));
}

inline const void* at(const void* x, bool bf16, int64_t index) { return static_cast<const char*>(x) + index * (bf16 ? 2 : 4); }

// Positions of a stretch, and keys of one item of attention. Fixed, so that sums do not depend on the number of threads or on
// the rest of the batch.
constexpr int kStretchKeys = 1024;

struct Free {
    void operator()(float* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float[], Free>;

// Aligned to a cache line: a load that straddles two lines costs two.
inline Floats floats(int64_t n) {
    void* p = std::aligned_alloc(64, static_cast<size_t>((n * 4 + 63) / 64 * 64));
    if (p == nullptr) throw std::bad_alloc();
    return Floats(static_cast<float*>(p));
}

// Memory that grows and is not given back: fresh pages, which the system has to clear, would take as long as a small op.
class Scratch {
  public:
    float* of(int64_t n) {
        if (n > size_) size_ = 0, numbers_.reset(), numbers_ = floats(n), size_ = n;
        return numbers_.get();
    }

  private:
    Floats numbers_;
    int64_t size_ = 0;
};

// Stretches a key or a query x back by the position at which a stretch begins.
inline void turn_back(const Stretches& stretches, int64_t stretch, float* x) {
    const float *cos = stretches.cos + stretch * stretches.half, *sin = stretches.sin + stretch * stretches.half;
    float* high = x + stretches.half;
    for (int i = 0; i < stretches.half; ++i) {
        const float a = x[i], b = high[i];
        x[i] = a * cos[i] + b * sin[i], high[i] = b * cos[i] - a * sin[i];
    }
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

}  // namespace
}  // namespace haarkv
