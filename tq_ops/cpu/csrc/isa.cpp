// HAARKV_PORTABLE and so on say which instruction sets the library was compiled for (build.py).
#include "kernels.h"

#if defined(HAARKV_AMX)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace haarkv {
namespace {

#if defined(HAARKV_AMX)
// Whether the CPU has tiles with products of BF16 and of bytes, and moves bytes anywhere in a register: compilers' own names
// for this differ.
bool has_tiles() {
    unsigned a, b, c, d;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
    constexpr unsigned kMovesBytes = 1u << 1;  // AVX512_VBMI
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAll) == kAll && (c & kMovesBytes);
}

// Asks the kernel to keep tiles when it switches threads. It answers for the whole process, threads and forked children
// included, and refuses where a thread's signal stack is too small for them.
bool tiles_are_permitted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

int find_isas() {
    int isas = 0;
#if defined(HAARKV_PORTABLE)
    isas |= 1 << kPortable;
#endif
#if defined(HAARKV_AVX2)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isas |= 1 << kAvx2;
#endif
#if defined(HAARKV_AVX512VNNI)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni"))
        return isas;
    isas |= 1 << kAvx512Vnni;
#if defined(HAARKV_BF16)
    if (!__builtin_cpu_supports("avx512bf16")) return isas;
    isas |= kBf16Products;
#if defined(HAARKV_AMX)
    if (has_tiles() && tiles_are_permitted()) isas |= 1 << kAmx;
#endif
#endif
#endif
    return isas;
}

// BF16 products, where this CPU has them.
inline void add_products([[maybe_unused]] Kernels& kernels) {
#if defined(HAARKV_BF16)
    if (available_isas() & kBf16Products) add_bf16(kernels);
#endif
}

template <class... Add> Kernels kernels_by(Add... add) {
    Kernels kernels{};
    (add(kernels), ...);
    return kernels;
}

}  // namespace

int available_isas() {
    static const int isas = find_isas();
    return isas;
}

const Kernels& kernels_of(int isa) {
#if defined(HAARKV_AMX)
    if (isa == kAmx) {
        static const Kernels amx = kernels_by([](Kernels& k) { k = kernels_of(kAvx512Vnni); }, add_amx);
        return amx;
    }
#endif
#if defined(HAARKV_AVX512VNNI)
    if (isa == kAvx512Vnni) {
        static const Kernels vnni =
            kernels_by(avx512vnni::add_attention, avx512vnni::add_dense, avx512vnni::add_blocks, add_integers, add_products);
        return vnni;
    }
#endif
#if defined(HAARKV_AVX2)
    if (isa == kAvx2) {
        static const Kernels avx2 = kernels_by(avx2::add_attention, avx2::add_dense, avx2::add_blocks);
        return avx2;
    }
#endif
    (void)isa;
#if defined(HAARKV_PORTABLE)
    static const Kernels portable = kernels_by(portable::add_attention, portable::add_dense, portable::add_blocks);
#else
    static const Kernels portable{};  // never asked for where it is not available
#endif
    return portable;
}

}  // namespace haarkv

extern "C" {

__attribute__((visibility("default"))) int haarkv_isas() { return haarkv::available_isas(); }

// Which headers it was compiled with (build.py).
__attribute__((visibility("default"))) int haarkv_interface() { return HAARKV_INTERFACE; }

}  // extern "C"
