/* mma_backward_semaphores.cuh: the semaphores by which blocks of mma_backward.cu add to the same sums in a fixed
 * order. */
#ifndef FDM_MMA_BACKWARD_SEMAPHORES_CUH
#define FDM_MMA_BACKWARD_SEMAPHORES_CUH

#include "families/mma/backward/mma_backward_place.cuh"

/* DETERMINISTIC: blocks add to SUB_ROWS rows of dQ, and to the gradient of a shared bias, in the order of their
 * tickets, one after the other; a semaphore counts those that have added. The last key block of a head begins first:
 * where keys are seen from their diagonal on, each block then reaches rows that the one before has just left, and
 * none waits. Where all blocks walk from the first row on, each is a step behind the one before, so that the blocks
 * of many heads are interleaved. */
__device__ __forceinline__ int *semaphore_of(const struct gpu_backward_params &a, const struct place &at, int h,
                                             int row) {
    return a.semaphores + (rows_begin(a, at, h) + row) / 16;
}
/* How many key blocks before this one process some of SUB_ROWS rows from `row` on, by window and ends. */
__device__ __forceinline__ int my_turn(const struct gpu_backward_params &a, const struct place &at, int row) {
    const int group = GATHER ? KEY_SORT_KEYS : BLOCK_N;
    int64_t last = at.seqlen_k - 1;
    if (WINDOW && a.in.window_right != UNBOUNDED && row + SUB_ROWS <= at.seqlen_q)
        last = min(last, (int64_t)row + SUB_ROWS - 1 + at.diagonal + a.in.window_right);
    const int blocks = ((int)(last / group) + 1) * (group / BLOCK_N);
    return min(blocks, (at.seqlen_k + BLOCK_N - 1) / BLOCK_N) - 1 - at.first_key / BLOCK_N;
}
/* The same for the bias' gradient: heads and batches that share it come in order. */
__device__ __forceinline__ int *dbias_semaphore_of(const struct gpu_backward_params &a, const struct place &at, int h,
                                                   int row) {
    const int batch = a.dbias_batches == 1 ? 0 : at.batch;
    return a.dbias_semaphores +
           (((int64_t)batch * a.dbias_heads + h / a.in.bias.group) * (FOLDED ? a.grid_x : gridDim.x) +
            at.first_key / BLOCK_N) *
               backward_semaphores(a.in.seqlen_q) +
           row / SUB_ROWS;
}
__device__ __forceinline__ int my_dbias_turn(const struct gpu_backward_params &a, const struct place &at, int h) {
    return (a.dbias_batches == 1 ? at.batch * a.in.bias.group : 0) + h % a.in.bias.group;
}

/* The semaphores of a head that the block has yet to release. */
struct unreleased {
    int row, added; /* the first rows of them; rows to which the block has added */
};
/* Rows of the sequence that take part: those of the walk; where lengths differ and batches share a bias, all. */
__device__ __forceinline__ struct unreleased first_unreleased(const struct walk &w) {
    return {ORDERED_DBIAS && UNEVEN ? 0 : w.first / SUB_ROWS * SUB_ROWS, NO_ROW};
}
/* Releases the semaphores of rows before `end`, when all warps have added to them. Where nothing was added the block
 * waits for its number first. */
__device__ __forceinline__ void release_up_to(struct unreleased &unreleased, const struct gpu_backward_params &a,
                                              const struct place &at, const struct walk &w, int h, int end) {
    if (threadIdx.x != 0)
        return;
    h = opaque(h);
#pragma unroll 1
    for (; unreleased.row < end; unreleased.row += SUB_ROWS) {
        const int row = unreleased.row;
        const bool walked = !(ORDERED_DBIAS && UNEVEN) || (row < w.last && row + SUB_ROWS > w.first);
        if (ORDERED_DQ && walked) {
            int *semaphore = semaphore_of(a, at, h, row);
            const int mine = my_turn(a, at, row);
            if (row != unreleased.added)
                wait_semaphore(semaphore, mine);
            release_semaphore(semaphore, mine);
        }
        if (ORDERED_DBIAS && row != unreleased.added) { /* else release_before() was there */
            int *semaphore = dbias_semaphore_of(a, at, h, row);
            const int mine = my_dbias_turn(a, at, h);
            wait_semaphore(semaphore, mine);
            release_semaphore(semaphore, mine);
        }
    }
}
/* Releases semaphores when all warps have made the scores of the rows from `row` on: those of dQ of the rows before,
 * and those of the bias' gradient of these rows too, since heads and batches wait for it long enough. */
__device__ __forceinline__ void release_before(struct unreleased &unreleased, const struct gpu_backward_params &a,
                                               const struct place &at, int h, int row) {
    release_up_to(unreleased, a, at, plan_walk(a, at), h, row);
    unreleased.added = row;
    h = opaque(h); /* computed here, not kept in a register */
    if (ORDERED_DBIAS && threadIdx.x == 0)
        release_semaphore(dbias_semaphore_of(a, at, h, row), my_dbias_turn(a, at, h));
}
__device__ __forceinline__ void release_rest(struct unreleased &unreleased, const struct gpu_backward_params &a,
                                             const struct place &at, const struct walk &w, int h) {
    release_up_to(unreleased, a, at, w, h, ORDERED_DBIAS && UNEVEN ? a.in.seqlen_q : w.last);
}

#endif
