/* isa.c: which instruction sets run on a processor, in this build, with this setting. */
#include "device/isa.h"

#include <string.h>

#include "base/settings.h"
#include "system/system.h"

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

static int has_all(uint64_t bits, uint64_t wanted) { return (bits & wanted) == wanted; }

/* Intel's manual, volume 2, CPUID leaves 1 and 7; bits of XCR0: 1, 2 SSE and AVX, 5 to 7 AVX-512, 17 and 18 tiles. */
static int runs_on(const struct processor *p, enum cpu_isa isa) {
    switch (isa) {
    case CPU_ISA_SCALAR: return 1;
    case CPU_ISA_NEON: return p->arm64;
    case CPU_ISA_AVX2:
        return has_all(p->leaf1_ecx, 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29) && /* FMA, OSXSAVE, AVX, F16C */
               has_all(p->leaf7_ebx, 1u << 5) && has_all(p->enabled_states, 0x6);
    case CPU_ISA_AVX512:
        return runs_on(p, CPU_ISA_AVX2) && has_all(p->enabled_states, 0xe6) &&
               has_all(p->leaf7_ebx, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31); /* F, DQ, BW, VL */
    case CPU_ISA_AVX512_BF16: return runs_on(p, CPU_ISA_AVX512) && has_all(p->leaf7_1_eax, 1u << 5);
    case CPU_ISA_AMX:
        return runs_on(p, CPU_ISA_AVX512_BF16) && has_all(p->leaf7_edx, 1u << 22 | 1u << 24) && /* AMX-BF16, AMX-TILE */
               has_all(p->enabled_states, 0x60000) && p->tiles_granted;
    case CPU_ISA_COUNT: break;
    }
    return 0;
}

/* vdpbf16ps runs at twice the rate of FMA on AMD's processors and at half of it on Intel's, where it gains nothing over
 * float32: there it is chosen only where the setting names it. */
enum cpu_isa_use cpu_isa_use_on(const struct processor *processor, int limit, enum cpu_isa isa) {
    if (!cpu_isa_built(isa))
        return CPU_ISA_NOT_BUILT;
    if (!runs_on(processor, isa))
        return CPU_ISA_ABSENT;
    if (limit >= 0 && (int)isa > limit)
        return CPU_ISA_FORBIDDEN;
    return isa == CPU_ISA_AVX512_BF16 && processor->intel && limit != CPU_ISA_AVX512_BF16 ? CPU_ISA_BY_NAME
                                                                                          : CPU_ISA_FREE;
}

static int limit_set(void) {
    const char *setting = setting_get(SETTING_CPU_ISA);
    return setting ? cpu_isa_from_name(setting) : -1;
}

const char *cpu_isa_refusal(enum cpu_isa isa) {
    switch (cpu_isa_use_on(processor_here(), limit_set(), isa)) {
    case CPU_ISA_NOT_BUILT: return "this build has no kernels for its instruction set";
    case CPU_ISA_ABSENT: return "the processor or the operating system does not have its instruction set";
    case CPU_ISA_FORBIDDEN: return "FLASH_DMATTN_CPU_ISA allows lower instruction sets only";
    default: return NULL;
    }
}

struct cpu_isas cpu_isas(void) {
    const int limit = limit_set();
    struct cpu_isas isas = {CPU_ISA_SCALAR, CPU_ISA_SCALAR};
    for (int i = 0; i < CPU_ISA_COUNT; i++) {
        const enum cpu_isa_use use = cpu_isa_use_on(processor_here(), limit, (enum cpu_isa)i);
        if (use >= CPU_ISA_BY_NAME)
            isas.highest = (enum cpu_isa)i;
        if (use == CPU_ISA_FREE)
            isas.best = (enum cpu_isa)i;
    }
    return isas;
}

void cpu_cache_bytes(int64_t bytes[3]) {
    for (int level = 1; level <= 3; level++)
        bytes[level - 1] = system_cache_bytes(level);
}
