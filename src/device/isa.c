/* isa.c: asks the processor and the operating system which instruction sets can run. */
#define _GNU_SOURCE
#include "device/isa.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "base/settings.h"

#if defined(__x86_64__)
#    include <cpuid.h>
#    include <sys/syscall.h>
#endif

static const char *const names[CPU_ISA_COUNT] = {"scalar", "neon", "avx2", "avx512", "avx512_bf16", "amx"};

const char *cpu_isa_name(enum cpu_isa isa) { return names[isa]; }

int cpu_isa_from_name(const char *name) {
    for (int i = 0; i < CPU_ISA_COUNT; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    return -1;
}

/* The build says which kernels it has: one FDM_ISA_ macro for each instruction set compiled. */
int cpu_isa_built(enum cpu_isa isa) {
    switch (isa) {
    case CPU_ISA_SCALAR:
#ifdef FDM_ISA_NEON
    case CPU_ISA_NEON:
#endif
#ifdef FDM_ISA_AVX2
    case CPU_ISA_AVX2:
#endif
#ifdef FDM_ISA_AVX512
    case CPU_ISA_AVX512:
#endif
#ifdef FDM_ISA_AVX512_BF16
    case CPU_ISA_AVX512_BF16:
#endif
#ifdef FDM_ISA_AMX
    case CPU_ISA_AMX:
#endif
        return 1;
    default: return 0;
    }
}

static struct {
    pthread_once_t once;
    int present[CPU_ISA_COUNT];
    int bf16_dot_slow; /* vdpbf16ps at half the rate of FMA: no gain over float32 */
} processor = {.once = PTHREAD_ONCE_INIT};

#if defined(__x86_64__)
/* Register state the operating system saves; only to be asked where OSXSAVE is set. */
static uint64_t enabled_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Linux gives a process the 8 KiB of tile state on request only (Documentation/arch/x86/xstate.rst). */
static int request_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static int has_all(uint32_t bits, uint32_t wanted) { return (bits & wanted) == wanted; }

/* Intel's manual, volume 2, CPUID leaves 1 and 7; bits of XCR0: 1, 2 SSE and AVX, 5 to 7 AVX-512, 17 and 18 tiles. */
static void look_at_processor(void) {
    uint32_t a, b, c, d, b7, d7, a71 = 0;
    int intel = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has_all(c, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C))
        return;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c, &d7))
        return;
    if (a >= 1) {
        uint32_t unused[3];
        __get_cpuid_count(7, 1, &a71, &unused[0], &unused[1], &unused[2]);
    }
    uint64_t state = enabled_state();
    int *present = processor.present;
    present[CPU_ISA_AVX2] = has_all(b7, 1u << 5) && (state & 0x6) == 0x6;
    present[CPU_ISA_AVX512] = present[CPU_ISA_AVX2] && (state & 0xe6) == 0xe6 &&
                              has_all(b7, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31); /* F, DQ, BW, VL */
    present[CPU_ISA_AVX512_BF16] = present[CPU_ISA_AVX512] && has_all(a71, 1u << 5);
    present[CPU_ISA_AMX] = present[CPU_ISA_AVX512_BF16] && (state & 0x60000) == 0x60000 &&
                           has_all(d7, 1u << 22 | 1u << 24) && request_tiles(); /* AMX-BF16, AMX-TILE */
    processor.bf16_dot_slow = intel;
}
#else
static void look_at_processor(void) { processor.present[CPU_ISA_NEON] = 1; }
#endif

static void look(void) {
    look_at_processor();
    processor.present[CPU_ISA_SCALAR] = 1;
    for (int i = 0; i < CPU_ISA_COUNT; i++)
        if (!cpu_isa_built((enum cpu_isa)i))
            processor.present[i] = 0;
}

int cpu_isa_present(enum cpu_isa isa) {
    pthread_once(&processor.once, look);
    return processor.present[isa];
}

/* avx512_bf16 is the best where its dot product is faster than FMA (AMD), or where the setting names it. */
enum cpu_isa cpu_isa_best(void) {
    const char *setting = setting_get(SETTING_CPU_ISA);
    int limit = setting ? cpu_isa_from_name(setting) : -1;
    int named = limit >= 0;
    for (int i = named ? limit : CPU_ISA_COUNT - 1; i > CPU_ISA_SCALAR; i--) {
        if (!cpu_isa_present((enum cpu_isa)i))
            continue;
        if (i == CPU_ISA_AVX512_BF16 && processor.bf16_dot_slow && !(named && limit == i))
            continue;
        return (enum cpu_isa)i;
    }
    return CPU_ISA_SCALAR;
}

void cpu_cache_bytes(int64_t bytes[3]) {
    const int wanted[3] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE};
    for (int i = 0; i < 3; i++) {
        long size = sysconf(wanted[i]);
        bytes[i] = size > 0 ? size : 0;
    }
}
