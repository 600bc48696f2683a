/* global.cuh: additions and hand-overs in global memory (PTX ISA, "red", "ld.acquire", "st.release"). */
#ifndef FDM_PTX_GLOBAL_CUH
#define FDM_PTX_GLOBAL_CUH

#include "cuda/ptx/types.cuh"

__device__ __forceinline__ void red_add(float *at, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" : : "l"(at), "f"(x) : "memory");
}
#if __CUDA_ARCH__ >= 900
/* Four neighbours; the address is a multiple of 16. */
__device__ __forceinline__ void red_add_4(float *at, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(at), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
#endif
__device__ __forceinline__ int ld_acquire(const int *at) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void st_release(int *at, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" : : "l"(at), "r"(x) : "memory");
}
/* Eight bytes that other blocks see whole or not at all; nothing else is ordered by them. */
__device__ __forceinline__ uint64_t ld_relaxed_8(const uint64_t *at) {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void st_relaxed_8(uint64_t *at, uint64_t x) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" : : "l"(at), "l"(x) : "memory");
}

#endif
