#include "cpu.h"

#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#define SAKIYOMI_X86 1
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sakiyomi {

namespace {

#if defined(SAKIYOMI_X86)

struct Registers {
    uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r{};
#if defined(_MSC_VER)
    int found[4];
    __cpuidex(found, static_cast<int>(leaf), static_cast<int>(subleaf));
    r = {static_cast<uint32_t>(found[0]), static_cast<uint32_t>(found[1]), static_cast<uint32_t>(found[2]),
         static_cast<uint32_t>(found[3])};
#else
    __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
#endif
    return r;
}

// The registers that the system saves: without that, instructions are there and can't be used.
uint64_t saved_state() {
    if (!(cpuid(1, 0).ecx >> 27 & 1)) return 0;
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
#endif
}

bool all(uint32_t bits, std::initializer_list<int> wanted) {
    for (const int bit : wanted)
        if (!(bits >> bit & 1)) return false;
    return true;
}

#if defined(SAKIYOMI_HAVE_AMX)
// Linux gives a process the tiles only when asked.
bool tiles_allowed() {
#if defined(__linux__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif

#endif

std::vector<const Kernels *> find() {
    std::vector<const Kernels *> found;
#if defined(SAKIYOMI_X86)
    const uint32_t highest = cpuid(0, 0).eax;
    const Registers basic = cpuid(1, 0), extended = highest >= 7 ? cpuid(7, 0) : Registers{};
    const Registers more = extended.eax >= 1 ? cpuid(7, 1) : Registers{};
    const uint64_t saved = saved_state();
    const bool avx2 = (saved & 0x6) == 0x6 && all(basic.ecx, {12, 28}) && all(extended.ebx, {5});  // fma, avx; avx2
    const bool avx512 = avx2 && (saved & 0xe0) == 0xe0 && all(extended.ebx, {16, 17, 30, 31});     // f, dq, bw, vl
    const bool bf16 = avx512 && all(extended.ecx, {11}) && all(more.eax, {5});                     // vnni; bf16
    const bool amx = bf16 && (saved & 0x60000) == 0x60000 && all(extended.edx, {22, 24, 25});      // bf16, tile, int8
#if defined(SAKIYOMI_HAVE_AMX)
    if (amx && tiles_allowed()) found.push_back(amx_kernels());
#endif
#if defined(SAKIYOMI_HAVE_AVX512_BF16)
    if (bf16) found.push_back(avx512_bf16_kernels());
#endif
#if defined(SAKIYOMI_HAVE_AVX512)
    if (avx512) found.push_back(avx512_kernels());
#endif
#if defined(SAKIYOMI_HAVE_AVX2)
    if (avx2) found.push_back(avx2_kernels());
#endif
    (void)amx;
#endif
    found.push_back(plain_kernels());
    return found;
}

}  // namespace

const std::vector<const Kernels *> &paths() {
    static const std::vector<const Kernels *> found = find();
    return found;
}

const Kernels *path(const char *name) {
    for (const Kernels *kernels : paths())
        if (std::strcmp(kernels->name, name) == 0) return kernels;
    return nullptr;
}

}  // namespace sakiyomi
