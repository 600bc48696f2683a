/* barrier.cuh: named barriers of a part of a block (PTX ISA, "barrier").
 *
 * Barrier 0 is that of __syncthreads(); `threads` is a multiple of 32, and whole warps arrive. */
#ifndef FDM_PTX_BARRIER_CUH
#define FDM_PTX_BARRIER_CUH

#include "cuda/ptx/types.cuh"

__device__ __forceinline__ void barrier_sync(uint32_t barrier, uint32_t threads) {
    asm volatile("barrier.sync.aligned %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}
/* Arrives without waiting: the other threads of the barrier wait by barrier_sync(). */
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t threads) {
    asm volatile("barrier.arrive.aligned %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}
/* barrier_sync(); true for all when `condition` is true for one. */
__device__ __forceinline__ bool barrier_red_or(uint32_t barrier, uint32_t threads, bool condition) {
    uint32_t result;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbarrier.red.or.pred.aligned q, %1, %2, p;\n"
                 "selp.b32 %0, 1, 0, q;\n}"
                 : "=r"(result)
                 : "r"(barrier), "r"(threads), "r"((uint32_t)condition)
                 : "memory");
    return result != 0;
}

#endif
