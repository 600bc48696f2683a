/* control.cuh: control flow (PTX ISA, "Control flow instructions"). */
#ifndef FDM_PTX_CONTROL_CUH
#define FDM_PTX_CONTROL_CUH

/* The thread ends when the condition holds. */
__device__ __forceinline__ void exit_if(bool condition) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p exit;\n}" : : "r"((int)condition) : "memory");
}

#endif
