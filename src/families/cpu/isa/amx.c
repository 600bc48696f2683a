/* amx.c: the table of the amx instruction set for bfloat16. */
#define PARTS 1
#include "families/cpu/isa/amx_overlap.h"

const struct cpu_kernels cpu_kernels_amx = {AMX_ENTRIES};
