/* isa.h: which of the CPU's instruction sets this machine, this build and FLASH_DMATTN_CPU_ISA allow. Whoever wants to
 * know whether a kernel runs here asks this file: families, checks, tools and tests. */
#ifndef FDM_ISA_H
#define FDM_ISA_H

#include <stdint.h>

#include "device/processor.h"

/* From lowest to highest; the order of the family's preference. */
enum cpu_isa {
    CPU_ISA_SCALAR,
    CPU_ISA_NEON,
    CPU_ISA_AVX2,
    CPU_ISA_AVX512,
    CPU_ISA_AVX512_BF16,
    CPU_ISA_AMX,
    CPU_ISA_COUNT
};

const char *cpu_isa_name(enum cpu_isa isa);
/* -1 if there is no such name. */
int cpu_isa_from_name(const char *name);
/* Whether this build has kernels for it (none of NEON on x86). */
int cpu_isa_built(enum cpu_isa isa);

/* What a machine does with an instruction set. */
enum cpu_isa_use {
    CPU_ISA_NOT_BUILT,
    CPU_ISA_ABSENT,    /* the processor does not have it, or the operating system does not save its registers */
    CPU_ISA_FORBIDDEN, /* above FLASH_DMATTN_CPU_ISA */
    CPU_ISA_BY_NAME,   /* it runs where it is named; where nothing is, a lower one that is as fast runs */
    CPU_ISA_FREE       /* it runs, and may be chosen */
};
/* Pure: of a processor, with the setting's instruction set as the limit, or -1 where nothing is set. */
enum cpu_isa_use cpu_isa_use_on(const struct processor *processor, int limit, enum cpu_isa isa);
/* On this machine with this environment: a clause that says why it does not run; NULL where it does. */
const char *cpu_isa_refusal(enum cpu_isa isa);

/* On this machine with this environment: the best that may be chosen, and the highest that runs by name. */
struct cpu_isas {
    enum cpu_isa best, highest;
};
struct cpu_isas cpu_isas(void);

/* Bytes of L1d, L2, L3 of one core; 0 where unknown. */
void cpu_cache_bytes(int64_t bytes[3]);

#endif
