/* launch.cuh: programmatic dependent launch (PTX ISA, "griddepcontrol"); nothing below compute capability 9.0. */
#ifndef FDM_PTX_LAUNCH_CUH
#define FDM_PTX_LAUNCH_CUH

#include "cuda/ptx/types.cuh"

/* The next grid of the stream may begin when all blocks of this one have come here or ended. */
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}
/* Waits until the grids before this one have ended and what they wrote can be seen. */
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
/* The same, once what `made` follows from has been made; the assembler would put that behind the wait. */
__device__ __forceinline__ void griddepcontrol_wait_after(uint32_t made) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\n.reg .b32 high;\nmul.hi.u32 high, %0, 16;\nsetp.lt.u32 p, high, 16;\n"
                 "@p griddepcontrol.wait;\n}"
                 :
                 : "r"(made)
                 : "memory");
#endif
}

#endif
