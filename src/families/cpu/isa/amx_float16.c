/* amx_float16.c: the table of the amx instruction set for float16: two bfloat16 parts a number. */
#define PARTS 2
#include "families/cpu/isa/amx_overlap.h"

const struct cpu_kernels cpu_kernels_amx_float16 = {AMX_ENTRIES};
