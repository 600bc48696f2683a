/* mma_decode.h: the contract of mma_decode.cu; for C and CUDA C. */
#ifndef FDM_MMA_DECODE_H
#define FDM_MMA_DECODE_H

#include "cuda/constants.h"
#include "gpu/append.h"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

#define MMA_DECODE_CONSTANTS(X)                                                                                        \
    X(HEAD_DIM)     /* D rounded up to 16 */                                                                           \
    X(HEAD_DIM_V)   /* Dv rounded up to 16, where warps share columns to 64 */                                         \
    X(BLOCK_N)      /* keys of a tile: 64, or 32 where two warps and more work on the same, or 128 of a single tile */ \
    X(WARPS)        /* 4 or 8 */                                                                                       \
    X(ROW_GROUPS)   /* 1, 2, 4 or 8: warps with 16 rows each that work on the same keys */                             \
    X(STAGES)       /* tiles of K and V in flight; 1: a split is one tile */                                           \
    X(MASK_PER_ROW) /* MMA_DECODE_*: whether rows of a KV head see the same keys */                                    \
    X(INTERVALS_PER_ROW) /* MMA_DECODE_* */                                                                            \
    X(ORDERED)           /* sequences whose masks seem to show more keys come first */                                 \
    X(MERGE)             /* MMA_MERGE_*: how the results of splits are merged */                                       \
    X(SPLIT_RULE)        /* MMA_PARTS_*, or the keys of each split */                                                  \
    X(APPENDS)           /* new keys go to the cache here, not by a launch before */                                   \
    X(ROTARY)            /* where APPENDS, APPEND_*: which dims of q and of new keys are rotated */

/* What a plan holds for it (contract/family.h). */
#define MMA_DECODE_PARAMETERS(X)                                                           \
    X(SPLITS) /* of the keys */                                                            \
    X(STAGES)                                                                              \
    X(MERGE)                                                                               \
    X(EARLY) /* launches may begin before what is ahead of them in the stream has ended */ \
    X(WARPS)                                                                               \
    X(ROW_GROUPS)                                                                          \
    X(ORDERED) /* the constant */                                                          \
    X(APPENDS) /* the constant */

/* MASK_PER_ROW and INTERVALS_PER_ROW. */
#define MMA_DECODE_NONE  0
#define MMA_DECODE_ALIKE 1 /* every row of a KV head sees the same keys: to be listed is to be seen */
#define MMA_DECODE_EACH  2 /* rows differ: each tests the keys listed for any */

#define MMA_DECODE_ORDERED_MAX 32 /* sequences that ORDERED takes */

/* SPLIT_RULE: the keys of a split. */
#define MMA_PARTS_EQUAL     0 /* an equal share of the tiles */
#define MMA_PARTS_BY_LENGTH 1 /* the same over mma_decode_parts() splits of the sequence; further splits have none */

/* The number of splits of the keys that `rows` rows of a KV head see, whatever else is in the call. */
#define MMA_DECODE_PART_KEYS  1024
#define MMA_DECODE_PARTS_MAX  32
#define MMA_DECODE_PARTS_ROWS 64 /* more rows have one */
GPU_INLINE int32_t mma_decode_parts(int64_t keys, int64_t rows) {
    const int64_t parts = (keys + MMA_DECODE_PART_KEYS - 1) / MMA_DECODE_PART_KEYS;
    return rows > MMA_DECODE_PARTS_ROWS || parts < 1 ? 1
           : parts > MMA_DECODE_PARTS_MAX            ? MMA_DECODE_PARTS_MAX
                                                     : (int32_t)parts;
}

/* How the results of splits are merged. */
#define MMA_MERGE_NONE      0 /* there is one split */
#define MMA_MERGE_WORKSPACE 1 /* by combine_splits.cu */
#define MMA_MERGE_CLUSTER   2 /* the splits are a cluster, and its blocks write to each other's shared memory */

/* Blocks of a cluster; 16 of single tiles, of which two fit on a multiprocessor: fewer than 16 may be free side by
 * side. */
#define MMA_DECODE_CLUSTER_MAX(stages) ((stages) == 1 ? 16 : 8)

#define MMA_DECODE_WARPS_MAX 8 /* on a multiprocessor too: eight have 255 registers each */

/* Warps that share the columns of O, whose sums one could not hold beside both parts of tf32 products. */
GPU_INLINE int32_t mma_decode_share(int32_t float32, int32_t head_dim_v) { return float32 && head_dim_v > 128 ? 2 : 1; }

/* Floats between the rows of the warps' outputs, so that eight rows lie in different banks. */
#define MMA_DECODE_PART_PAD 8

/* Where keys are listed: how many are tested together, in units of neighbours that go to one split, and entries of
 * the ring of listed keys. */
#define MMA_DECODE_SCAN       2048
#define MMA_DECODE_LIST       2560
#define MMA_DECODE_LIST_BYTES (MMA_DECODE_LIST * 4 + 64 * 4)
GPU_INLINE int32_t mma_decode_unit(int32_t warps) { return 32 * warps; }

/* Dynamic shared memory: Q, the ring of K and V, the list, scores of warps that share columns, marks of pages; the ring
 * later holds each warp's output, maxima and sums, and what the blocks of a cluster leave for this one to merge.
 * `bytes`: of an element; `outputs`: warps with different rows or keys. */
GPU_INLINE int32_t mma_decode_parts_bytes(int32_t head_dim_v, int32_t outputs) {
    return outputs * 16 * (head_dim_v + MMA_DECODE_PART_PAD + 2) * 4;
}
/* Of 16 rows: four columns, a maximum and a sum from each block; a share of a cluster's blocks is rounded up. */
GPU_INLINE int32_t mma_decode_inbox_bytes(int32_t head_dim_v, int32_t row_groups, int32_t stages) {
    return (16 * row_groups * (head_dim_v / 4) + MMA_DECODE_CLUSTER_MAX(stages)) * 24;
}
GPU_INLINE int32_t mma_decode_ring_bytes(int32_t bytes, int32_t head_dim, int32_t head_dim_v, int32_t block_n,
                                         int32_t row_groups, int32_t outputs, int32_t stages, int32_t merge) {
    const int32_t ring = stages * block_n * (head_dim + head_dim_v) * bytes;
    const int32_t after = mma_decode_parts_bytes(head_dim_v, outputs) +
                          (merge == MMA_MERGE_CLUSTER ? mma_decode_inbox_bytes(head_dim_v, row_groups, stages) : 0);
    return ring > after ? ring : after;
}
GPU_INLINE int32_t mma_decode_shared_bytes(int32_t bytes, int32_t head_dim, int32_t head_dim_v, int32_t block_n,
                                           int32_t row_groups, int32_t warps, int32_t outputs, int32_t stages,
                                           int32_t merge, int32_t listed, int32_t paged) {
    return 16 * row_groups * head_dim * bytes +
           mma_decode_ring_bytes(bytes, head_dim, head_dim_v, block_n, row_groups, outputs, stages, merge) +
           (listed ? MMA_DECODE_LIST_BYTES : 0) + (outputs < warps ? warps * 1024 : 0) +
           (paged ? stages * warps * 4 : 0);
}

#endif
