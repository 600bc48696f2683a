/* blackwell_ring.cuh: rings of slots in shared memory between the warps of a pair of blocks.
 *
 * A slot has a full and an empty mbarrier. Where a product by tcgen05 reads a slot, its two halves lie at the same
 * place of both blocks and its full barrier in the leader, the block whose thread issues the products; empty barriers
 * lie in each block, and a commit arrives at both. Who fills and who empties each walk with a ring_place of their
 * own. */
#ifndef FDM_BLACKWELL_RING_CUH
#define FDM_BLACKWELL_RING_CUH

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/tcgen05.cuh"
#include "cuda/ring.cuh"

enum { LEADER = 0, PAIR = 2 };      /* rank of the block that issues products; blocks of a cluster */
constexpr uint16_t BOTH_BLOCKS = 3; /* of a multicast commit */

/* One arrival of a warp by its first lane, after all lanes have come here: at a barrier of this block, and at the
 * leader's. It orders the warp's earlier accesses to tensor memory before those of a thread that has waited and
 * fenced. */
__device__ __forceinline__ void arrive_warp(uint32_t barrier) {
    tcgen05_fence_before_thread_sync();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barrier);
}
__device__ __forceinline__ void arrive_warp_at_leader(uint32_t barrier) {
    tcgen05_fence_before_thread_sync();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive_remote(mapa_shared(barrier, LEADER));
}

#endif
