/* blackwell_ring.cuh: rings of slots in shared memory between the warps of a pair of blocks.
 *
 * A slot has a full and an empty mbarrier. Where a product by tcgen05 reads a slot, its two halves lie at the same
 * place of both blocks and its full barrier in the leader, the block whose thread issues the products; empty barriers
 * lie in each block, and a commit arrives at both. A place in a ring is one value, an index and the parity of its
 * phase; who fills and who empties each walk with one of their own. */
#ifndef FDM_BLACKWELL_RING_CUH
#define FDM_BLACKWELL_RING_CUH

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tcgen05.cuh"

enum { LEADER = 0, PAIR = 2 };      /* rank of the block that issues products; blocks of a cluster */
constexpr uint16_t BOTH_BLOCKS = 3; /* of a multicast commit */

/* Where slots are a power of two the place is the number of those that passed. */
template <int slots, bool counted = (slots & (slots - 1)) == 0> struct ring_place {
    uint32_t count;

    __device__ __forceinline__ ring_place() : count(0) {}
    __device__ __forceinline__ uint32_t index() const { return count % slots; }
    __device__ __forceinline__ uint32_t phase() const { return count / slots & 1; }
    __device__ __forceinline__ void next() { count++; }
    /* Barriers lie one behind the other. */
    __device__ __forceinline__ uint32_t barrier(uint32_t barriers) const { return barriers + 8 * index(); }
    __device__ __forceinline__ void wait_full(uint32_t full) const { mbarrier_wait(barrier(full), phase()); }
    __device__ __forceinline__ void wait_empty(uint32_t empty) const { mbarrier_wait(barrier(empty), phase() ^ 1); }
};
template <int slots> struct ring_place<slots, false> {
    uint32_t at, parity;

    __device__ __forceinline__ ring_place() : at(0), parity(0) {}
    __device__ __forceinline__ uint32_t index() const { return at; }
    __device__ __forceinline__ uint32_t phase() const { return parity; }
    __device__ __forceinline__ void next() {
        if (++at == slots) {
            at = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ uint32_t barrier(uint32_t barriers) const { return barriers + 8 * at; }
    __device__ __forceinline__ void wait_full(uint32_t full) const { mbarrier_wait(barrier(full), parity); }
    __device__ __forceinline__ void wait_empty(uint32_t empty) const { mbarrier_wait(barrier(empty), parity ^ 1); }
};

/* One arrival of a warp, by its first lane, when all lanes have come here: at a barrier of this block, and at the
 * leader's. Accesses to tensor memory before it come before those of whoever has waited and fenced. */
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
