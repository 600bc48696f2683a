/* isa.h: which of the CPU's instruction sets this machine, this build and FLASH_DMATTN_CPU_ISA allow. */
#ifndef FDM_ISA_H
#define FDM_ISA_H

#include <stdint.h>

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
/* Whether it is built, and the processor and the operating system can run it. Cached. */
int cpu_isa_present(enum cpu_isa isa);
/* The best one present, at most FLASH_DMATTN_CPU_ISA. */
enum cpu_isa cpu_isa_best(void);
/* Bytes of L1d, L2, L3 of one core; 0 where unknown. */
void cpu_cache_bytes(int64_t bytes[3]);

#endif
