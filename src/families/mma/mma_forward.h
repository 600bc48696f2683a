/* mma_forward.h: the contract of mma_forward.cu: its constants, arguments and shared memory; for C and CUDA C. */
#ifndef FDM_MMA_FORWARD_H
#define FDM_MMA_FORWARD_H

#include "families/mma/mma_arguments.h"

/* BIAS */
#define MMA_BIAS_NONE    0
#define MMA_BIAS_SAME    1 /* the dtype of q */
#define MMA_BIAS_FLOAT32 2

/* The constants that specialise the kernel, in the order of the plan's and the cache's listing. */
#define MMA_FORWARD_CONSTANTS(X)                                                                                       \
    X(DTYPE)          /* MMA_FLOAT16 or MMA_BFLOAT16 */                                                                \
    X(HEAD_DIM)       /* D rounded up to 16 */                                                                         \
    X(HEAD_DIM_V)     /* Dv rounded up to 16 */                                                                        \
    X(WARPS)                                                                                                           \
    X(ROW_TILES)      /* 16-row tiles of a warp: 1 or 2 */                                                             \
    X(BLOCK_N)        /* keys of a step */                                                                             \
    X(STAGES)         /* tiles of K and V in flight: 2 or more */                                                      \
    X(MIN_BLOCKS)     /* blocks that must fit on a multiprocessor: bounds the registers */                             \
    X(Q_IN_REGISTERS) /* 1: fragments of Q are loaded once */                                                          \
    X(OPTIMISTIC)     /* 1: weights are made with the maxima of the tiles before, and made again if they grew */        \
    X(ALIGNED)        /* 1: addresses and strides are multiples of 16 bytes */                                         \
    X(WINDOW)         /* causal or window */                                                                           \
    X(MASK)                                                                                                            \
    X(MASK_ROWS)      /* 0: the mask is the same for all rows */                                                       \
    X(BIAS)           /* MMA_BIAS_* */                                                                                 \
    X(BIAS_ROWS)      /* 0: the bias is the same for all rows */                                                       \
    X(INTERVALS)                                                                                                       \
    X(VARLEN)                                                                                                          \
    X(SOFTCAP)                                                                                                         \
    X(POSITIVE_SCALE) /* 1: softmax_scale > 0, so the maximum may be taken of the bare products */

/* Tiles listed at a time where there is a mask or intervals; one more entry holds their number. */
#define MMA_FORWARD_LIST 1022

#define MMA_FORWARD_COUNT(name) +1
enum { MMA_FORWARD_NUM_CONSTANTS = MMA_FORWARD_CONSTANTS(MMA_FORWARD_COUNT) };

/* Bytes of dynamic shared memory; head dims are rounded up to 16. */
static inline int32_t mma_forward_shared_bytes(int32_t block_m, int32_t block_n, int32_t stages, int32_t head_dim,
                                               int32_t head_dim_v, int32_t listed) {
    int32_t widest = head_dim > head_dim_v ? head_dim : head_dim_v;
    return block_m * widest * 2 + stages * block_n * (head_dim + head_dim_v) * 2 +
           (listed ? 2 * (MMA_FORWARD_LIST + 2) : 0);
}

#ifdef __CUDACC__
#    define BIAS_BYTES (BIAS == MMA_BIAS_FLOAT32 ? 4 : 2)
#    define MMA_FORWARD_Q_BYTES                                                                                        \
        (16 * ROW_TILES * WARPS * (HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V) * 2)
#    define MMA_FORWARD_LIST_OFFSET (MMA_FORWARD_Q_BYTES + STAGES * BLOCK_N * (HEAD_DIM + HEAD_DIM_V) * 2)
#endif

#endif
