// HAARKV_AVX2 and so on say which instruction sets the library was compiled for.
#include "isa.h"

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

Isa find_best() {
#if defined(HAARKV_AVX2)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kPortable;
#if defined(HAARKV_AVX512)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx512) return kAvx2;
#if defined(HAARKV_AVX512VNNI)
    if (!__builtin_cpu_supports("avx512vnni")) return kAvx512;
#if defined(HAARKV_AVX512BF16)
    if (!__builtin_cpu_supports("avx512bf16")) return kAvx512Vnni;
#if defined(HAARKV_AMX)
    return has_tiles() && tiles_are_permitted() ? kAmx : kAvx512Bf16;
#endif
    return kAvx512Bf16;
#endif
    return kAvx512Vnni;
#endif
    return kAvx512;
#endif
    return kAvx2;
#endif
    return kPortable;
}

}  // namespace

Isa best_isa() {
    static const Isa best = find_best();
    return best;
}

const Kernels& kernels_of(int isa) {
#if defined(HAARKV_AMX)
    if (isa == kAmx) return amx_kernels();
#endif
#if defined(HAARKV_AVX512BF16)
    if (isa == kAvx512Bf16) return avx512bf16_kernels();
#endif
#if defined(HAARKV_AVX512VNNI)
    if (isa == kAvx512Vnni) return avx512vnni_kernels();
#endif
#if defined(HAARKV_AVX512)
    if (isa == kAvx512) return avx512_kernels();
#endif
#if defined(HAARKV_AVX2)
    if (isa == kAvx2) return avx2_kernels();
#endif
    (void)isa;
    return portable_kernels();
}

}  // namespace haarkv
