/* semaphores.cuh: blocks that add to the same numbers in a fixed order: a semaphore, 0 at first, counts those that have
 * added; a block awaits its turn there and hands it on. It may wait only for blocks that began before it, which run or
 * have ended. */
#ifndef FDM_SEMAPHORES_CUH
#define FDM_SEMAPHORES_CUH

#include "cuda/ptx/global.cuh"

/* How many blocks began before this one: those it may wait for. `scratch`: a word of shared memory. */
__device__ __forceinline__ uint32_t take_ticket(int *tickets, int *scratch) {
    if (threadIdx.x == 0)
        *scratch = atomicAdd(tickets, 1);
    __syncthreads();
    const uint32_t ticket = *scratch;
    __syncthreads();
    return ticket;
}
__device__ __forceinline__ void wait_semaphore(const int *semaphore, int mine) {
    while (ld_acquire(semaphore) != mine) {
    }
}
/* By one thread, when all of the block have added. */
__device__ __forceinline__ void release_semaphore(int *semaphore, int mine) { st_release(semaphore, mine + 1); }

#endif
