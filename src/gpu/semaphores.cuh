/* semaphores.cuh: additions of several blocks to the same numbers in a fixed order. A semaphore is 0 at first and
 * counts the blocks that have added; a block waits until it has its own number, adds, and releases it. A block may
 * wait only for blocks that began before it, which run or have ended. */
#ifndef FDM_SEMAPHORES_CUH
#define FDM_SEMAPHORES_CUH

#include "cuda/ptx/global.cuh"

/* How many blocks began before this one, which it may wait for. `scratch` is a word of shared memory. */
__device__ __forceinline__ uint32_t take_ticket(int *tickets, int *scratch) {
    if (threadIdx.x == 0)
        *scratch = atomicAdd(tickets, 1);
    __syncthreads();
    const uint32_t ticket = *scratch;
    __syncthreads();
    return ticket;
}
__device__ __forceinline__ void wait_semaphore(const int *semaphore, int value) {
    while (ld_acquire(semaphore) != value) {
    }
}
/* One thread calls it, when all threads of the block have added. */
__device__ __forceinline__ void release_semaphore(int *semaphore, int value) { st_release(semaphore, value + 1); }

#endif
