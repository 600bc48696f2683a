/* mma_backward_d1024.h: the contract of mma_backward_d1024.cu: its constants and shared memory; for C and CUDA C. Its
 * parameters are gpu/backward_params.h. */
#ifndef FDM_MMA_BACKWARD_D1024_H
#define FDM_MMA_BACKWARD_D1024_H

#include "gpu/backward_params.h"
#include "gpu/problem_constants.h"

/* MAKES: the gradient of a launch. */
#define MMA_D1024_DQ 0
#define MMA_D1024_DK 1
#define MMA_D1024_DV 2

#define MMA_BACKWARD_D1024_CONSTANTS(X)                                                                       \
    X(HEAD_DIM)      /* of q and k, as mma_d1024_padded() gives it */                                         \
    X(HEAD_DIM_V)    /* of v, out and dout */                                                                 \
    X(OWN)           /* rows or keys that a block owns: 64 or 32 */                                           \
    X(SLICE)         /* columns of a slice of both operands of a score */                                     \
    X(KEPT)          /* of the two own matrices: 2: both stay in shared memory; 1: the first; 0: none does */ \
    X(STAGES)        /* slices in the ring */                                                                 \
    X(MAKES)         /* MMA_D1024_* */                                                                        \
    X(DBIAS)         /* GPU_DBIAS_*: KEYS where dK is made, DIRECT and SUMS where dQ is */                    \
    X(REDO)          /* 1: what a hidden key made NaN is mended at the end */                                 \
    X(DETERMINISTIC) /* DBIAS SUMS: blocks that share a bias add to its gradient in order */                  \
    X(FOLDED)        /* the grid has one dimension: there are more heads or batches than 65535 */

/* What a plan holds for it (contract/family.h). */
#define MMA_BACKWARD_D1024_PARAMETERS(X) X(TILE) /* of the list in mma_backward_d1024.c */

#define MMA_D1024_WARPS 8

/* Rows that tiles of rows divide, in the workspace's arrays. */
#define MMA_D1024_ROW_STEP 128

/* Keys at a time that blocks which share the gradient of a bias add to it in order. */
#define MMA_D1024_TURN_KEYS 128

/* Others of a step: the block makes 4096 scores, 16 a thread. */
GPU_INLINE int32_t mma_d1024_others(int32_t own) { return 4096 / own; }

/* The number of warps that share 32 own. Each makes the scores of 16 others, and sums one of as many units of 16
 * columns. */
GPU_INLINE int32_t mma_d1024_shares(int32_t own) { return MMA_D1024_WARPS * 32 / own; }

/* A slice of sums has 64 others, and 16 or 32 columns of each warp that shares the own rows or keys. */
GPU_INLINE int32_t mma_d1024_sum_columns(int32_t own, int32_t slice) { return own == 32 ? 128 : slice; }

GPU_INLINE int32_t mma_d1024_padded(int32_t head_dim, int32_t own, int32_t slice) {
    const int32_t step = mma_d1024_sum_columns(own, slice);
    return (head_dim + step - 1) / step * step;
}

/* Shared memory, bytes, in this order: the own that is kept; the ring, whose stages hold a slice of the others and,
 * where not all of the own is kept, the same columns of the own; P or dS; the halves of scores that warps exchange;
 * three words of each own, and of each other of two steps. */
GPU_INLINE int32_t mma_d1024_kept_bytes(int32_t own, int32_t kept, int32_t head_dim, int32_t head_dim_v) {
    return 2 * own * ((kept > 0 ? head_dim : 0) + (kept > 1 ? head_dim_v : 0));
}
GPU_INLINE int32_t mma_d1024_stage_bytes(int32_t own, int32_t slice, int32_t kept) {
    return 2 * slice * (mma_d1024_others(own) + (kept < 2 ? own : 0));
}
#define MMA_D1024_SCORES_BYTES   (4096 * 2)
#define MMA_D1024_EXCHANGE_BYTES (4096 * 4)
GPU_INLINE int32_t mma_d1024_shared_bytes(int32_t own, int32_t slice, int32_t kept, int32_t stages, int32_t head_dim,
                                          int32_t head_dim_v) {
    return mma_d1024_kept_bytes(own, kept, head_dim, head_dim_v) + stages * mma_d1024_stage_bytes(own, slice, kept) +
           MMA_D1024_SCORES_BYTES + MMA_D1024_EXCHANGE_BYTES + 12 * (own + 2 * mma_d1024_others(own));
}

#endif
