/* gemm_items.cuh: which tiles of C the blocks of a persistent kernel walk, and the ring of stages they come by. */
#ifndef FDM_GEMM_ITEMS_CUH
#define FDM_GEMM_ITEMS_CUH

#include "companions/gemm/gemm.h"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"

/* A tile of C: its first row in this block and column, the steps of k, its batch and split. */
struct item {
    int row, column, first_step, last_step, batch, split;
};
/* Tiles of `rows` x `columns`; the blocks of a cluster have tiles below each other. Items go down groups of GEMM_GROUP
 * tiles of rows, so that the blocks at work at one time share A and B in L2. */
template <int rows, int columns, int cluster>
__device__ __forceinline__ struct item item_of(const struct gemm_tma_params &a, int number) {
    const int tiles = a.row_tiles * a.column_tiles, tile = number % tiles, rest = number / tiles;
    constexpr int group = GEMM_GROUP / cluster;
    const int first = tile / (group * a.column_tiles) * group, height = min(group, a.row_tiles - first);
    const int within = tile - first * a.column_tiles, split = rest % a.in.splits;
    const int row = (first + within % height) * cluster + (cluster > 1 ? (int)cluster_ctarank() : 0);
    return {row * rows,
            within / height * columns,
            split * a.steps_per_split,
            min((split + 1) * a.steps_per_split, a.steps),
            rest / a.in.splits,
            split};
}

/* A stage of the ring, and the parity of the phase in which it is full. */
struct position {
    int stage;
    uint32_t parity;
};
template <int stages> __device__ __forceinline__ void advance(struct position &p) {
    if (++p.stage == stages) {
        p.stage = 0;
        p.parity ^= 1;
    }
}

/* One thread's: the barriers of stages, 8 bytes each. Full: an arrival of the producer; empty: so many as are given. */
template <int stages> __device__ __forceinline__ void init_ring(uint32_t full, uint32_t empty, uint32_t arrivals) {
    for (int stage = 0; stage < stages; stage++) {
        mbarrier_init(full + 8 * stage, 1);
        mbarrier_init(empty + 8 * stage, arrivals);
    }
    fence_mbarrier_init();
}

#endif
