/* special.cuh: special registers (PTX ISA, "Special registers"). */
#ifndef FDM_PTX_SPECIAL_CUH
#define FDM_PTX_SPECIAL_CUH

#include "cuda/ptx/types.cuh"

/* threadIdx.x, read anew at every call: what is computed from it is not kept in registers between calls. */
__device__ __forceinline__ uint32_t tid_x_reread() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

#endif
