/* mma_backward_staged.cuh: the loop of mma_backward.cu over the rows of a query head where BLOCK_M of them are staged
 * at a time. */
#ifndef FDM_MMA_BACKWARD_STAGED_CUH
#define FDM_MMA_BACKWARD_STAGED_CUH

#include "families/mma/backward/mma_backward_sums.cuh"

/* Copies masks and biases of the sub-tile after the one at `row` to the buffer `to`; after the last of the staged
 * rows, those of the sub-tile at `next`. */
__device__ __forceinline__ void load_under_dq(const struct work &on, const struct stage &stage, uint32_t to, int row,
                                              bool last, int next) {
    const struct gpu_backward_params &a = on.params.shared;
    if (COPIED && !last) {
        copy_scores(on, on.tiles.staged + to, row + SUB_ROWS);
        cp_async_commit();
    } else if (COPIED && next != NO_ROW) {
        copy_scores(on, on.tiles.staged + to, next + first_sub_tile(on.walk, next));
    }
    if (!last)
        return;
    if (STAGES == 1 && next != NO_ROW)
        load_q(a, on.at, on.h, on.tiles.q, next);
    if (!OVERLAY && next != NO_ROW)
        load_dout(a, on.at, on.h, stage, next);
    cp_async_commit();
}

/* BLOCK_M rows are staged at a time, and walked SUB_ROWS at a time. The next ones are loaded under the products of
 * dQ. */
__device__ __forceinline__ void walk_staged(struct carried &carried, const struct work &on) {
    const struct gpu_backward_params &a = on.params.shared;
    const struct place &at = on.at;
    const struct tiles &tiles = on.tiles;
    const struct walk &walk = on.walk;
    const int h = on.h;
    int buffer = 0, row = next_active(on, walk.first / BLOCK_M * BLOCK_M);
    if (row != NO_ROW) {
        if (COPIED)
            copy_scores(on, tiles.staged + carried.ds_buffer, row + first_sub_tile(walk, row));
        load_q(a, at, h, tiles.q, row);
        load_dout(a, at, h, {tiles.q, tiles.dout, tiles.rows}, row);
    }
    cp_async_commit();
#pragma unroll 1
    while (row != NO_ROW) {
        const int next = next_active(on, row + BLOCK_M);
        const struct stage stage = {tiles.q + buffer * Q_BYTES, tiles.dout, tiles.rows};
        if (STAGES == 2) {
            buffer ^= 1;
            if (next != NO_ROW)
                load_q(a, at, h, tiles.q + buffer * Q_BYTES, next);
            cp_async_commit();
        }
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        scrub_once(carried, tiles);
        clear_empty(walk, stage, row);
        const int begin = first_sub_tile(walk, row), end = min(BLOCK_M, walk.last - row);
#pragma unroll 1
        for (int sub = begin; sub < end; sub += SUB_ROWS) {
            const bool last = sub + SUB_ROWS >= end;
            bool partial = row + sub < walk.full_first || row + sub + SUB_ROWS > walk.full_last;
            if (BLOCK_MASKED)
                partial = partial || mask_kind(a, at, h, row) != GPU_BLOCK_FULL;
            const uint32_t staged = OVERLAY ? tiles.dout + sub * HEAD_DIM_V * 2 : tiles.staged + carried.ds_buffer;
            if (DS_BUFFERS == 2)
                carried.ds_buffer ^= SCORES_BYTES * (BY_COLUMNS ? 2 : 1);
            if (FULL_TILE_PATH && !partial)
                add_own(carried.sums, on, {stage, staged, row, sub, false, sub > begin});
            else
                add_own(carried.sums, on, {stage, staged, row, sub, FULL_TILE_PATH || partial, sub > begin});
            __syncthreads();
            if (DETERMINISTIC)
                release_before(carried.unreleased, a, at, h, row + sub);
            if (BY_COLUMNS) {
                add_others(carried.sums, tiles, stage, staged, sub);
                if (last)
                    __syncthreads();
            }
            load_under_dq(on, stage, carried.ds_buffer, row + sub, last, next);
            if (NEEDS_DQ)
                add_dq(on, staged, row, sub);
            if (DS_BUFFERS == 1) /* with two, the next sub-tile's barrier is enough */
                __syncthreads();
        }
        if (OVERLAY) {
            if (next != NO_ROW)
                load_dout(a, at, h, stage, next);
            cp_async_commit();
        }
        row = next;
    }
}

#endif
