/* isa.c: stub. */
#include "isa.h"

#include <string.h>

static const char *const names[CPU_ISA_COUNT] = {"scalar", "neon", "avx2", "avx512", "avx512_bf16", "amx"};
const char *cpu_isa_name(enum cpu_isa isa) { return names[isa]; }
int cpu_isa_from_name(const char *name) {
    for (int i = 0; i < CPU_ISA_COUNT; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    return -1;
}
const struct cpu_kernels *cpu_isa_kernels(enum cpu_isa isa) {
    (void)isa;
    return 0;
}
int cpu_isa_present(enum cpu_isa isa) { return isa == CPU_ISA_SCALAR; }
enum cpu_isa cpu_isa_best(void) { return CPU_ISA_SCALAR; }
void cpu_cache_bytes(int64_t bytes[3]) { bytes[0] = bytes[1] = bytes[2] = 0; }
