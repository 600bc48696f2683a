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
/* The same of blockIdx.x. */
__device__ __forceinline__ uint32_t ctaid_x_reread() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

#if __CUDA_ARCH__ >= 900
/* True for one lane of a whole warp. */
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}
#endif

#endif
