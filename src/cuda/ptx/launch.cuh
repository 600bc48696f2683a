/* launch.cuh: programmatic dependent launch (PTX ISA, "griddepcontrol"); nothing below compute capability 9.0. */
#ifndef FDM_PTX_LAUNCH_CUH
#define FDM_PTX_LAUNCH_CUH

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

#endif
