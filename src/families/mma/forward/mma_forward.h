/* mma_forward.h: the contract of mma_forward.cu: its constants, arguments and shared memory; for C and CUDA C. */
#ifndef FDM_MMA_FORWARD_H
#define FDM_MMA_FORWARD_H

#include "cuda/constants.h"
#include "gpu/block_mask.h"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

/* The constants that specialise the kernel, in the order of the plan's and the cache's listing. */
#define MMA_FORWARD_CONSTANTS(X)                                                                                      \
    X(HEAD_DIM)   /* D rounded up to 16 */                                                                            \
    X(HEAD_DIM_V) /* Dv rounded up to 16 */                                                                           \
    X(WARPS)                                                                                                          \
    X(ROW_TILES)      /* 16-row tiles of a warp: 1 or 2 */                                                            \
    X(BLOCK_N)        /* keys of a step */                                                                            \
    X(STAGES)         /* tiles of K and V in flight: 2 or more */                                                     \
    X(MIN_BLOCKS)     /* blocks that must fit on a multiprocessor: bounds the registers */                            \
    X(Q_IN_REGISTERS) /* 1: fragments of Q are loaded once */                                                         \
    X(OPTIMISTIC) /* 1: P is made with the maxima of earlier tiles, and again where a row of the warp exceeds them */ \
    X(REDO)       /* 1: rows whose sums are NaN are recomputed from the keys that they see (gpu/redo.cuh) */

/* What a plan holds for it (contract/family.h). */
#define MMA_FORWARD_PARAMETERS(X) X(TILE) /* of the list in mma_forward.c */

/* Entries of the list of visible keys, and keys that are tested in one step. */
#define MMA_FORWARD_LIST      1024
#define MMA_FORWARD_LIST_STEP 512
/* Tiles listed at a time where a mask has rows; one more entry holds their number. */
#define MMA_FORWARD_TILES 1022
/* Bytes of the lists: two or (with a bias) three words for a key and one for each warp; half a word for a tile. */
#define MMA_FORWARD_LIST_BYTES(has_bias) (((has_bias) ? 12 : 8) * MMA_FORWARD_LIST + 64)
#define MMA_FORWARD_TILE_BYTES           2048

/* Bytes of the entries of four tiles' keys in a cache, 12 for each key, and of the facts of the sequence. */
#define MMA_FORWARD_SEQUENCE_BYTES      128
#define MMA_FORWARD_PAGE_BYTES(block_n) (4 * (block_n)*12 + MMA_FORWARD_SEQUENCE_BYTES)

/* Bytes of dynamic shared memory; head dims are rounded up to 16; staged_bytes are those of a mask's and a bias'
 * element where they are staged. */
static inline int32_t mma_forward_shared_bytes(int32_t block_m, int32_t block_n, int32_t stages, int32_t head_dim,
                                               int32_t head_dim_v, int32_t list_bytes, int32_t staged_bytes,
                                               int32_t paged) {
    int32_t widest = head_dim > head_dim_v ? head_dim : head_dim_v;
    return block_m * widest * 2 + stages * block_n * (head_dim + head_dim_v) * 2 + list_bytes +
           staged_bytes * block_m * block_n + (paged ? MMA_FORWARD_PAGE_BYTES(block_n) : 0);
}

#ifdef __CUDACC__
#    define MMA_FORWARD_Q_BYTES      (16 * ROW_TILES * WARPS * (HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V) * 2)
#    define MMA_FORWARD_PAGES_OFFSET (MMA_FORWARD_Q_BYTES + STAGES * BLOCK_N * (HEAD_DIM + HEAD_DIM_V) * 2)
#    define MMA_FORWARD_LIST_OFFSET \
        (MMA_FORWARD_PAGES_OFFSET + (CACHE == GPU_CACHE_PAGES ? MMA_FORWARD_PAGE_BYTES(BLOCK_N) : 0))
#endif

#endif
