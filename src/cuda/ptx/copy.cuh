/* copy.cuh: asynchronous copies from global to shared memory (PTX ISA, "cp.async") and their groups. */
#ifndef FDM_PTX_COPY_CUH
#define FDM_PTX_COPY_CUH

#include "cuda/ptx/types.cuh"

/* Address of shared memory as the 32-bit number that ldmatrix and cp.async take. */
__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* 16 bytes, past L1. Both addresses are multiples of 16. */
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared), "l"(global) : "memory");
}
/* The first `bytes` (0 .. 16) of 16; the rest is filled with zeros. With 0 nothing is read. */
__device__ __forceinline__ void cp_async_16_fill(uint32_t shared, const void *global, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(shared), "l"(global), "r"(bytes) : "memory");
}
/* 4 bytes by way of L1, or (bytes 0) zeros. Both addresses are multiples of 4. */
__device__ __forceinline__ void cp_async_4_fill(uint32_t shared, const void *global, uint32_t bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
/* Waits until at most `pending` of this thread's groups are under way. */
template <int pending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
}

__device__ __forceinline__ void st_shared_16(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" : : "r"(shared), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void st_shared_4(uint32_t shared, uint32_t a) {
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(shared), "r"(a) : "memory");
}
__device__ __forceinline__ uint32_t ld_shared_4(uint32_t shared) {
    uint32_t a;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(shared) : "memory");
    return a;
}
__device__ __forceinline__ void ld_shared_16(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

__device__ __forceinline__ void ld_shared_8(uint32_t &a, uint32_t &b, uint32_t shared) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(shared) : "memory");
}
__device__ __forceinline__ uint32_t ld_shared_2(uint32_t shared) {
    uint16_t a;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(a) : "r"(shared) : "memory");
    return a;
}

#endif
