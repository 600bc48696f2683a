/* gemm_tma.cuh: what persistent kernels share whose tiles come by TMA: which tiles of C a block walks, the ring of
 * stages they come by and its producer.
 *
 * A kernel defines before including this, beside its constants: BLOCK_M and BLOCK_N, the tile; STAGE_BYTES and A_BYTES
 * of a stage, which holds A and then B; RING, where its barriers lie in shared memory; CLUSTER, blocks whose
 * tiles lie below each other and share B; B_BOX, rows of a copy of k-major B. */
#ifndef FDM_GEMM_TMA_CUH
#define FDM_GEMM_TMA_CUH

#include "companions/gemm/gemm.h"
#include "companions/gemm/gemm_elements.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ring.cuh"

constexpr int BLOCK_K = GEMM_TMA_BLOCK_K, PANEL = 64 * 128; /* 64 rows of 128 bytes */

/* ---- tiles ---- */

/* A tile of C: its first row in this block and column, the steps of k, its batch and split. */
struct item {
    int row, column, first_step, last_step, batch, split;
};
/* Items go down groups of GEMM_GROUP tiles of rows, so that the blocks at work at one time share A and B in L2. */
__device__ __forceinline__ struct item item_of(const struct gemm_tma_params &a, int number) {
    const int tiles = a.row_tiles * a.column_tiles, tile = number % tiles, rest = number / tiles;
    constexpr int group = GEMM_GROUP / CLUSTER;
    const int first = tile / (group * a.column_tiles) * group, height = min(group, a.row_tiles - first);
    const int within = tile - first * a.column_tiles, split = rest % a.in.splits;
    const int row = (first + within % height) * CLUSTER + (CLUSTER > 1 ? (int)cluster_ctarank() : 0);
    return {row * BLOCK_M,
            within / height * BLOCK_N,
            split * a.steps_per_split,
            min((split + 1) * a.steps_per_split, a.steps),
            rest / a.in.splits,
            split};
}

/* Two neighbours of a row of C whose sums are x and y; those outside of C are any number. */
__device__ __forceinline__ uint32_t finished_pair(const struct gemm_params &a, float x, float y, int batch, int row,
                                                  int column) {
    x *= a.alpha, y *= a.alpha;
    if (HAS_C && row < a.m) {
        if (column < a.n)
            x = fmaf(a.beta, widened(*element_of(a.c, batch, row, column)), x);
        if (column + 1 < a.n)
            y = fmaf(a.beta, widened(*element_of(a.c, batch, row, column + 1)), y);
    }
    return narrowed(x, y);
}

/* ---- the ring ---- */

typedef ring<STAGES, STAGE_BYTES> stage_ring;
typedef ring_place<STAGES, false> stage_place;
__device__ __forceinline__ stage_ring ring_at(uint32_t base) { return {base + RING, base}; }

/* By one thread. A stage is full after an arrival of the producer, and empty after `arrivals` of consumers. */
__device__ __forceinline__ void init_ring(uint32_t base, uint32_t arrivals) {
    for (int stage = 0; stage < STAGES; stage++)
        ring_at(base).init(stage, 1, arrivals);
    fence_mbarrier_init();
}

/* ---- the producer: one thread ---- */

__device__ __forceinline__ void load_stage(const struct gemm_tma_params &a, const struct item &item, uint32_t base,
                                           stage_place at, int k) {
    const uint32_t to = ring_at(base).tile(at), full = ring_at(base).full(at);
    const int a_batch = a.a_batched ? item.batch : 0, b_batch = a.b_batched ? item.batch : 0;
    constexpr int B_PANELS = (BLOCK_N + 63) / 64; /* n-major; of the last, all of which arrives, half may be used */
    constexpr int B_BYTES = (B_N_MAJOR ? B_PANELS * 64 : BLOCK_N) * BLOCK_K * 2;
    mbarrier_arrive_expect_tx(full, a.a_rows * BLOCK_K * 2 + B_BYTES);
    if (!A_M_MAJOR)
        cp_async_bulk_tensor_3d(to, &a.a_map, full, k, item.row, a_batch);
#pragma unroll
    for (int panel = 0; panel < BLOCK_M / 64 && A_M_MAJOR; panel++)
        cp_async_bulk_tensor_3d(to + panel * PANEL, &a.a_map, full, item.row + 64 * panel, k, a_batch);

    /* Of B the block's part, for all blocks: rows of its boxes, which are columns or of k. */
    const uint32_t rank = CLUSTER > 1 ? cluster_ctarank() : 0;
    constexpr int PART = B_N_MAJOR ? BLOCK_K / CLUSTER : B_BOX,
                  BOXES = B_N_MAJOR ? B_PANELS : BLOCK_N / CLUSTER / B_BOX;
#pragma unroll
    for (int box = 0; box < BOXES; box++) {
        const uint32_t there = to + A_BYTES + box * (B_N_MAJOR ? PANEL : B_BOX * 128) + rank * PART * 128;
        const int y = (B_N_MAJOR ? k : item.column + box * B_BOX) + (int)(rank * PART);
        const int x = B_N_MAJOR ? item.column + 64 * box : k;
        if (CLUSTER > 1)
            cp_async_bulk_tensor_3d_multicast(there, &a.b_map, full, x, y, b_batch, (1 << CLUSTER) - 1);
        else
            cp_async_bulk_tensor_3d(there, &a.b_map, full, x, y, b_batch);
    }
}

__device__ __forceinline__ void produce(const struct gemm_tma_params &a, uint32_t base) {
    stage_place at;
    for (int number = blockIdx.x / CLUSTER; number < a.items; number += gridDim.x / CLUSTER) {
        const struct item item = item_of(a, number);
        for (int step = item.first_step; step < item.last_step; step++, at.next()) {
            ring_at(base).wait_empty(at);
            load_stage(a, item, base, at, step * BLOCK_K);
        }
    }
}

#endif
