/* amx_float32.c: the table of the amx instruction set for float32: three bfloat16 parts a number. */
#define PARTS 3
#include "families/cpu/isa/amx_overlap.h"

const struct cpu_kernels cpu_kernels_amx_float32 = {AMX_ENTRIES};
