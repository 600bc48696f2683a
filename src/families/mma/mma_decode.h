/* mma_decode.h: the contract of mma_decode.cu and mma_combine.cu; for C and CUDA C. */
#ifndef FDM_MMA_DECODE_H
#define FDM_MMA_DECODE_H

#include "gpu/forward_params.h"

#define MMA_DECODE_CONSTANTS(X)                                  \
    X(DTYPE)      /* GPU_FLOAT16 or GPU_BFLOAT16 */              \
    X(HEAD_DIM)   /* D rounded up to 16 */                       \
    X(HEAD_DIM_V) /* Dv rounded up to 16 */                      \
    X(STAGES)     /* tiles of K and V in flight */               \
    X(MIN_BLOCKS) /* blocks that must fit on a multiprocessor */ \
    X(WINDOW)     /* causal or window */                         \
    X(VARLEN)                                                    \
    X(MERGE) /* MMA_MERGE_*: what becomes of the splits' results */

#define MMA_DECODE_COUNT(name) +1
enum { MMA_DECODE_NUM_CONSTANTS = MMA_DECODE_CONSTANTS(MMA_DECODE_COUNT) };

/* How the results of splits are merged. */
#define MMA_MERGE_NONE        0 /* there is one split */
#define MMA_MERGE_WORKSPACE   1 /* by mma_combine.cu */
#define MMA_MERGE_CLUSTER     2 /* the splits are a cluster, and its blocks read each other's shared memory */
#define MMA_MERGE_CLUSTER_MAX 8 /* blocks of a cluster */

#define MMA_DECODE_ROWS  16 /* query rows of a KV head: Sq times the heads of a group */
#define MMA_DECODE_WARPS 4
#define MMA_DECODE_KEYS  64 /* of a tile: 16 for each warp */

/* Dynamic shared memory: Q, then the ring of K and V; the ring later holds each warp's output, maxima and sums, and
 * the lse of the block's rows. */
static inline int32_t mma_decode_shared_bytes(int32_t head_dim, int32_t head_dim_v, int32_t stages) {
    int32_t ring = stages * MMA_DECODE_KEYS * (head_dim + head_dim_v) * 2;
    int32_t merge = MMA_DECODE_WARPS * MMA_DECODE_ROWS * (head_dim_v + 2) * 4 + MMA_DECODE_ROWS * 4;
    return MMA_DECODE_ROWS * head_dim * 2 + (ring > merge ? ring : merge);
}

#endif
