#include "driver.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>
#ifdef __linux__
#include <link.h>
#endif

namespace haarkv {
namespace {

// How long a thread polls before it sleeps: a worker for the next op of a layer, the caller for the last items of its own.
// Waking a thread takes about as long.
constexpr auto kAwake = std::chrono::microseconds(60);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

template <class F> void poll(F done) {
    const auto until = std::chrono::steady_clock::now() + kAwake;
    while (!done() && std::chrono::steady_clock::now() < until) pause();
}

class Pool {
  public:
    void run(int threads, int64_t items, Body body, void* context) {
        std::lock_guard<std::mutex> turn(turn_);
        grow(threads - 1);
        bool asleep;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            body_ = body, context_ = context, items_ = items, next_ = 0;
            seats_ = threads - 1;
            open_.store(open_.load() + 1);
            asleep = asleep_ > 0;
        }
        if (asleep) work_.notify_all();
        take(0);
        {
            // A worker that has not woken by now gets no seat, and is not waited for.
            std::lock_guard<std::mutex> lock(mutex_);
            seats_ = 0;
        }
        poll([this] { return active_.load(std::memory_order_acquire) == 0; });
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return active_.load() == 0; });
    }

  private:
    void grow(int workers) {
        for (int i = static_cast<int>(workers_.size()); i < workers; ++i) workers_.emplace_back([this] { live(); });
    }

    void take(int thread) {
        for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) body_(context_, item, thread);
    }

    [[noreturn]] void live() {
        uint64_t seen = 0;
        for (;;) {
            poll([&] { return open_.load(std::memory_order_relaxed) != seen; });
            int thread = 0;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                ++asleep_;
                work_.wait(lock, [&] { return open_.load() != seen; });
                --asleep_;
                seen = open_.load();
                if (seats_ > 0) thread = seats_--, active_.store(active_.load() + 1);
            }
            if (thread == 0) continue;
            take(thread);
            {
                std::lock_guard<std::mutex> lock(mutex_);
                active_.store(active_.load() - 1, std::memory_order_release);
                if (active_.load() == 0) done_.notify_one();
            }
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable work_, done_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> open_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<int> active_{0};
    int64_t items_ = 0;
    Body body_ = nullptr;
    void* context_ = nullptr;
    int seats_ = 0, asleep_ = 0;
};

// GNU OpenMP, under whatever name torch has loaded it: its entry to a parallel region, as compilers call it, and how many
// threads the caller's loops may have.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags) = nullptr;
    int (*most_threads)() = nullptr;
};

OpenMP loaded_openmp() {
    OpenMP found;
#ifdef __linux__
    auto find = [](dl_phdr_info* info, size_t, void* found) -> int {
        if (std::strstr(info->dlpi_name, "libgomp") == nullptr) return 0;
        void* library = dlopen(info->dlpi_name, RTLD_NOLOAD | RTLD_NOW);
        if (library == nullptr) return 0;
        OpenMP& openmp = *static_cast<OpenMP*>(found);
        openmp.parallel = reinterpret_cast<decltype(openmp.parallel)>(dlsym(library, "GOMP_parallel"));
        openmp.most_threads = reinterpret_cast<decltype(openmp.most_threads)>(dlsym(library, "omp_get_max_threads"));
        return openmp.parallel != nullptr && openmp.most_threads != nullptr;
    };
    if (!dl_iterate_phdr(find, &found)) found = OpenMP();
#endif
    return found;
}

struct Loop {
    Body body;
    void* context;
    int64_t items;
    std::atomic<int64_t> next{0};
    std::atomic<int> seat{0};
};

void take_part(void* argument) {
    Loop& loop = *static_cast<Loop*>(argument);
    const int thread = loop.seat.fetch_add(1);
    for (int64_t item; (item = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.items;)
        loop.body(loop.context, item, thread);
}

}  // namespace

void parallel_for(int threads, int64_t items, Body body, void* context) {
    if (threads <= 1 || items <= 1) {
        for (int64_t item = 0; item < items; ++item) body(context, item, 0);
        return;
    }
    // Where torch has threads, they spin for milliseconds after each of its loops: a second set on the same cores would get
    // half of the time. Where it has none, ours are better neighbours.
    static const OpenMP openmp = loaded_openmp();
    if (openmp.parallel != nullptr && openmp.most_threads() > 1) {
        Loop loop{body, context, items};
        openmp.parallel(take_part, &loop, static_cast<unsigned>(threads), 0);
        return;
    }
    // Never destroyed: its threads live as long as the process. A forked child has no threads and gets a pool of its own.
    static std::mutex mutex;
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    Pool* here;
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (owner != getpid()) pool = new Pool, owner = getpid();
        here = pool;
    }
    here->run(threads, items, body, context);
}

}  // namespace haarkv
