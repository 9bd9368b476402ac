// Parallel loops of microseconds: on the threads of torch's OpenMP where torch may use several, else on threads of our own.
#pragma once

#include <cstdint>

namespace haarkv {

using Body = void (*)(void* context, int64_t item, int thread);

// Calls body(context, item, thread) for every item in [0, items), each once, on up to `threads` threads, the caller among
// them; thread is in [0, threads). Calls from several threads take turns.
void parallel_for(int threads, int64_t items, Body body, void* context);

template <class F> void parallel_for(int threads, int64_t items, F& function) {
    parallel_for(threads, items, [](void* f, int64_t item, int thread) { (*static_cast<F*>(f))(item, thread); }, &function);
}

}  // namespace haarkv
