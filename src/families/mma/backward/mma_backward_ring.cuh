/* mma_backward_ring.cuh: the loop of mma_backward.cu over the rows of a query head where stages lie in a ring. */
#ifndef FDM_MMA_BACKWARD_RING_CUH
#define FDM_MMA_BACKWARD_RING_CUH

#include "families/mma/backward/mma_backward_sums.cuh"

/* COPIED: copies masks or biases of a stage's rows to the buffer `to`. */
__device__ __forceinline__ void copy_ahead(const struct work &on, uint32_t to, int row) {
    if (!COPIED)
        return;
    if (row != NO_ROW)
        copy_scores(on, on.tiles.staged + to, row);
    cp_async_commit();
}

/* Stages of 64 rows lie in a ring. A stage is loaded RING - 1 stages ahead, when all warps have left its slot. */
__device__ __forceinline__ void walk_ring(struct carried &carried, const struct work &on) {
    const struct gpu_backward_params &a = on.params.shared;
    const struct place &at = on.at;
    const struct tiles &tiles = on.tiles;
    const struct walk &walk = on.walk;
    const int h = on.h;
    int row = next_active(on, walk.first / STAGE_ROWS * STAGE_ROWS), next = NO_ROW;
    copy_ahead(on, carried.ds_buffer, row);
    if (TMA && KEYED) {
        fence_proxy_async(); /* narrow() wrote where TMA will */
        __syncthreads();
    }
    load_stage(on, carried.ring.slot, row);
    if (RING == 3) {
        next = following(on, row);
        load_stage(on, slot_after(carried.ring.slot), next);
    }
    cp_async_wait<0>();
    __syncthreads(); /* K and V are there */
    scrub_once(carried, tiles);
#pragma unroll 1
    while (row != NO_ROW) {
        const struct stage stage = stage_at(tiles, carried.ring.slot);
        const uint32_t staged = tiles.staged + carried.ds_buffer, scores_parity = carried.ds_buffer != 0;
        bool partial = row < walk.full_first || row + STAGE_ROWS > walk.full_last;
        if (BLOCK_MASKED)
            partial = partial || mask_kind(a, at, h, row) != GPU_BLOCK_FULL;
        carried.ds_buffer ^= SCORES_BYTES * (BY_COLUMNS ? 2 : 1);
        mbarrier_wait(stage.full, carried.ring.parity);
        clear_empty(walk, stage, row);
        if (FULL_TILE_PATH && !partial)
            add_own(carried.sums, on, {stage, staged, row, 0, false, false});
        else
            add_own(carried.sums, on, {stage, staged, row, 0, FULL_TILE_PATH || partial, false});
        mbarrier_wait(scores_barrier(tiles), scores_parity); /* scores are staged; all have left the stage before */
        if (DETERMINISTIC)
            release_before(carried.unreleased, a, at, h, row);
        const int last = following(on, RING == 3 ? next : row);
        carried.ring.slot = slot_after(carried.ring.slot);
        carried.ring.parity ^= carried.ring.slot == 0;
        copy_ahead(on, carried.ds_buffer, RING == 3 ? next : last);
        load_stage(on, RING == 3 ? slot_after(carried.ring.slot) : carried.ring.slot, last);
        if (NEEDS_DQ && DQ_EARLY)
            add_dq<0, DQ_EARLY>(on, staged, row, 0);
        if (BY_COLUMNS)
            add_others(carried.sums, tiles, stage, staged, 0);
        if (NEEDS_DQ)
            add_dq<DQ_EARLY>(on, staged, row, 0);
        row = RING == 3 ? next : last;
        next = last;
    }
}

#endif
