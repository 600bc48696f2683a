/* hopper_ring.cuh: rings of stages in shared memory between warpgroups of a block.
 *
 * A ring has a full and an empty mbarrier for each stage, eight bytes apart. Who fills and who reads count what has
 * passed; a count names the stage and the parity of the phase in which it is full. */
#ifndef FDM_HOPPER_RING_CUH
#define FDM_HOPPER_RING_CUH

#include "cuda/ptx/mbarrier.cuh"

template <int stages> __device__ __forceinline__ uint32_t stage_of(uint32_t count) { return count % stages; }
template <int stages> __device__ __forceinline__ uint32_t parity_of(uint32_t count) { return count / stages & 1; }
template <int stages> __device__ __forceinline__ void wait_full(uint32_t barriers, uint32_t count) {
    mbarrier_wait(barriers + 8 * stage_of<stages>(count), parity_of<stages>(count));
}
template <int stages> __device__ __forceinline__ void wait_empty(uint32_t barriers, uint32_t count) {
    mbarrier_wait(barriers + 8 * stage_of<stages>(count), parity_of<stages>(count) ^ 1);
}
/* One thread of each warp says that the warp is done with a stage. */
template <int stages> __device__ __forceinline__ void release(uint32_t barriers, uint32_t count) {
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barriers + 8 * stage_of<stages>(count));
}

#endif
