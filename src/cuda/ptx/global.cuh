/* global.cuh: additions, hand-overs and wide loads in global memory (PTX ISA, "red", "ld.acquire", "st.release",
 * "ld.global.nc"). */
#ifndef FDM_PTX_GLOBAL_CUH
#define FDM_PTX_GLOBAL_CUH

#include "cuda/ptx/types.cuh"

__device__ __forceinline__ void red_add(float *at, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" : : "l"(at), "f"(x) : "memory");
}
/* From 9.0 on; before, for branches that are not taken. Four neighbours; the address is a multiple of 16. */
__device__ __forceinline__ void red_add_4(float *at, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(at), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
/* 16 bytes from an address that is a multiple of 16, or zeros where `take` is 0, and nothing is read; `once`: they are
 * not read again, and L1 does not keep them. */
__device__ __forceinline__ void ld_global_16(uint32_t (&r)[4], const void *from, int take) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
                 "mov.b32 %3, 0;\n@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
                 : "l"(from), "r"(take));
}
__device__ __forceinline__ void ld_global_16_once(uint32_t (&r)[4], const void *from, int take) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
                 "mov.b32 %3, 0;\n@p ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
                 : "l"(from), "r"(take));
}
/* Of memory that no launch writes. The load is where it stands, far before what uses x, which waits for it. */
__device__ __forceinline__ uint32_t ld_global_2_early(const void *from) {
    uint32_t x;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}
__device__ __forceinline__ uint32_t ld_global_4_early(const void *from) {
    uint32_t x;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}
__device__ __forceinline__ int ld_acquire(const int *at) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void st_release(int *at, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" : : "l"(at), "r"(x) : "memory");
}
/* What other blocks see whole or not at all; nothing else is ordered by it. A load is under way until x is used. */
__device__ __forceinline__ int ld_relaxed(const int *at) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ uint64_t ld_relaxed_8(const uint64_t *at) {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void st_relaxed_8(uint64_t *at, uint64_t x) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" : : "l"(at), "l"(x) : "memory");
}

#endif
