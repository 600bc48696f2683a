/* mma_backward32.h: the contract of mma_backward32.cu: its constants and shared memory; for C and CUDA C. Its
 * parameters are gpu/backward_params.h. */
#ifndef FDM_MMA_BACKWARD32_H
#define FDM_MMA_BACKWARD32_H

#include "families/mma/backward/mma_backward.h"
#include "families/mma/float32/mma_forward32.h"
#include "gpu/problem_constants.h"

/* GRADIENTS: a sum of these. */
#define MMA_GRADIENT_OF_SCORES 1 /* dQ of own rows, dK of own keys: dS is made */
#define MMA_GRADIENT_OF_VALUES 2 /* dV of own keys */

#define MMA_BACKWARD32_CONSTANTS(X)                                                                            \
    X(HEAD_DIM)   /* as mma_padded32() gives it */                                                             \
    X(HEAD_DIM_V) /* of v and out */                                                                           \
    X(WARPS)                                                                                                   \
    X(SHARE)     /* warps with the same own rows or keys: each sums its part of the columns */                 \
    X(BLOCK)     /* others of a step */                                                                        \
    X(OWNS_KEYS) /* 0: a block owns query rows and walks the keys; 1: it owns keys and walks the rows */       \
    X(GRADIENTS)                                                                                               \
    X(DBIAS)         /* GPU_DBIAS_*: KEYS where keys are owned, DIRECT and SUMS where rows are */              \
    X(REDO)          /* 1: what a hidden key made NaN is mended at the end: rows of dQ, own keys' gradients */ \
    X(DETERMINISTIC) /* DBIAS SUMS: blocks that share a bias add to its gradient in order */                   \
    X(FOLDED)        /* the grid has one dimension: there are more heads or batches than 65535 */

/* What a plan holds for it (contract/family.h). */
#define MMA_BACKWARD32_PARAMETERS(X) X(TILE) /* of the list in mma_backward32.c */

/* Keys at whose gradient of a bias a block takes its turn at a time; a multiple of every tile's BLOCK. */
#define MMA_BACKWARD32_TURN_KEYS 128

/* Bytes of dynamic shared memory; head dims as mma_padded32() gives them. Of two steps there is kept what depends on
 * the key alone, or lse and delta of rows. */
static inline int32_t mma_backward32_shared_bytes(int32_t own, int32_t block, int32_t head_dim, int32_t head_dim_v) {
    return (own + block) * (head_dim + head_dim_v) * 4 + 2 * block * MMA_KEY_BOUNDS_BYTES;
}

#endif
