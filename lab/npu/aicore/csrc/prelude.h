// What PyPTO's headers and the emitted kernel functions need before they compile for a host, and what pto-isa's CPU backend
// lacks. Precompiled once for each kind of core.
#pragma once

// Hundreds of tile operations stand in one kernel function: inlined, each would be compiled for each of its calls.
#define always_inline

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// In place of pto/cpu/parallel.hpp: plain loops. One thread makes runs repeatable and compiles in a third of the time.
#define PTO_CPU_PARALLEL_HPP
#define PTO_CPU_PRAGMA(X)
#define PTO_CPU_VECTORIZE_LOOP
namespace pto::cpu {
inline unsigned get_thread_count() noexcept { return 1; }
template <typename Body> void parallel_for_1d(std::size_t begin, std::size_t end, std::size_t, Body body) {
    for (std::size_t i = begin; i < end; ++i)
        body(i);
}
template <typename Body> void parallel_for_rows(std::size_t rows, std::size_t, Body body) {
    for (std::size_t i = 0; i < rows; ++i)
        body(i);
}
} // namespace pto::cpu

#include "pto/common/cpu_stub.hpp"

static_assert(!std::is_same_v<bfloat16_t, half>, "BF16 must be computed as BF16");

#undef AICORE
#define AICORE
#define __aicore_host__
#define TILEOP static inline
#define EVENT_ID1 1
#define EVENT_ID2 2
#define EVENT_ID3 3
#define EVENT_ID4 4
#define EVENT_ID5 5
#define EVENT_ID6 6
#define EVENT_ID7 7
#define ENTIRE_DATA_CACHE 0
#define SINGLE_CACHE_LINE 0
#define CACHELINE_OUT 0

// Tasks are called one after the other, so that atomic stores need no more than a store. A kernel that *adds* atomically
// would be wrong here: it stops the run.
template <typename... Any> inline void set_atomic_none(Any...) {}
template <typename... Any> inline void set_atomic_f32(Any...) {}
template <typename... Any> inline void set_atomic_f16(Any...) {}
template <typename... Any> inline void set_atomic_bf16(Any...) {}
template <typename... Any> inline void set_atomic_s8(Any...) {}
template <typename... Any> inline void set_atomic_s16(Any...) {}
template <typename... Any> inline void set_atomic_s32(Any...) {}
template <typename... Any> inline void set_atomic_add(Any...) { std::abort(); }

// An address within a buffer of the core; the CPU backend finds the buffer by the type of the tile.
inline uint64_t get_imm(uint64_t address) { return address; }

#include "pto/pto-inst.hpp"

namespace pto {
// The device adds tiles of different strides, each by its own; the CPU backend has TADD of one type of tile only.
template <typename To, typename A, typename B>
    requires(!(std::is_same_v<To, A> && std::is_same_v<To, B>))
void TADD_IMPL(To &to, A &a, B &b) {
    for (int row = 0; row < to.GetValidRow(); row++)
        for (int col = 0; col < to.GetValidCol(); col++)
            to.SetElement(row, col, a.GetElement(row, col) + b.GetElement(row, col));
}
} // namespace pto

#ifdef __AIC__
#include "cube.h"
#endif

#include "TileOpImpl.h"
