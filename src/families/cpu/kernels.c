/* kernels.c: the table of each instruction set that this build has. */
#include "families/cpu/kernels.h"

const float cpu_zero_row[CPU_HEAD_DIM_MAX];

const struct cpu_kernels *cpu_isa_kernels(enum cpu_isa isa, fdm_dtype dtype) {
    (void)dtype;
    switch (isa) {
    case CPU_ISA_SCALAR: return &cpu_kernels_scalar;
#ifdef FDM_ISA_NEON
    case CPU_ISA_NEON: return &cpu_kernels_neon;
#endif
#ifdef FDM_ISA_AVX2
    case CPU_ISA_AVX2: return &cpu_kernels_avx2;
#endif
#ifdef FDM_ISA_AVX512
    case CPU_ISA_AVX512: return &cpu_kernels_avx512;
#endif
#ifdef FDM_ISA_AVX512_BF16
    case CPU_ISA_AVX512_BF16: return &cpu_kernels_avx512_bf16;
#endif
#ifdef FDM_ISA_AMX
    case CPU_ISA_AMX:
        return dtype == FDM_FLOAT32   ? &cpu_kernels_amx_float32
               : dtype == FDM_FLOAT16 ? &cpu_kernels_amx_float16
                                      : &cpu_kernels_amx;
#endif
    default: return NULL;
    }
}
