/* mma_forward32.h: the contract of mma_forward32.cu: its constants and shared memory; for C and CUDA C. Its arguments
 * are those of mma_forward.cu. */
#ifndef FDM_MMA_FORWARD32_H
#define FDM_MMA_FORWARD32_H

#include "families/mma/forward/mma_forward.h"
#include "gpu/problem_constants.h"

#define MMA_FORWARD32_CONSTANTS(X)                                                 \
    X(HEAD_DIM)   /* as mma_padded32() gives it */                                 \
    X(HEAD_DIM_V) /* of v and out */                                               \
    X(WARPS)                                                                       \
    X(SHARE)     /* warps with the same rows: each sums its part of the columns */ \
    X(ROW_TILES) /* groups of 16 rows of a warp */                                 \
    X(BLOCK_N)   /* keys of a step */                                              \
    X(MIN_BLOCKS)                                                                  \
    X(REDO) /* 1: rows whose sums are NaN are done again, by what they see (gpu/redo.cuh) */

/* What a plan holds for it (contract/family.h). */
#define MMA_FORWARD32_PARAMETERS(X) X(TILE) /* of the list in mma_forward32.c */

/* The kernel's head dim: columns beyond the tensor's are zero. Between 128 and 256 the assembler has not enough
 * registers for rows whose chunks are no power of two. Beside another head dim that is as wide, warps share columns by
 * halves, which then begin at multiples of 32. */
static inline int32_t mma_padded32(int64_t head_dim, int64_t other) {
    const int32_t padded = head_dim > 128 ? 256 : (int32_t)(head_dim + 31) / 32 * 32;
    return padded == 96 && other > 128 ? 128 : padded;
}

/* What is kept of a key, where something depends on it alone: struct key_bounds. */
#define MMA_KEY_BOUNDS_BYTES 12

/* Where a lane reads its word of a tile whose rows are contracted, the first of eight rows and columns given: of the
 * even rows, or one row on of the odd ones. */
#define MMA_WORD_ROW(lane)   ((lane) % 4 * 2)
#define MMA_WORD_CHUNK(lane) ((lane) / 16)
#define MMA_WORD_BYTE(lane)  ((lane) / 4 % 4 * 4)

/* Bytes of dynamic shared memory; head dims as mma_padded32() gives them. */
static inline int32_t mma_forward32_shared_bytes(int32_t block_m, int32_t block_n, int32_t head_dim, int32_t head_dim_v,
                                                 int32_t keyed) {
    return block_m * head_dim * 4 + block_n * (head_dim + head_dim_v) * 4 +
           (keyed ? 2 * block_n * MMA_KEY_BOUNDS_BYTES : 0);
}

#endif
