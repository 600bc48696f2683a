/* merge.h: two partial results over disjoint keys into one. The contract of merge.cu; for C and CUDA C. */
#ifndef FDM_GPU_MERGE_H
#define FDM_GPU_MERGE_H

#include "cuda/constants.h"
#include "gpu/forward_params.h"

#define MERGE_CONSTANTS(X)                                   \
    X(DTYPE)  /* GPU_FLOAT32, GPU_FLOAT16 or GPU_BFLOAT16 */ \
    X(VECTOR) /* 1: rows are contiguous and aligned */

#define MERGE_THREADS 256

/* Strides in elements, 0 where the extent is 1. */
struct merge_out {
    char *data; /* [B, S, H, D] */
    int64_t batch, row, head, element;
};
struct merge_params {
    struct merge_out out1, out2, out;            /* out may be out1 or out2 */
    struct gpu_rows lse1, lse2, lse;             /* [B, H, S]; lse may be lse1 or lse2 */
    struct gpu_rows lse_low1, lse_low2, lse_low; /* what those round away; likewise, or data NULL */
    uint32_t num_rows, seqlen, heads;            /* num_rows = B * S * H */
    uint32_t chunks, rows_per_block; /* threads of a row; rows of a block, that many times chunks <= threads, or 1 */
    uint32_t pieces;                 /* of a row, each a thread's; = chunks, but 0 where rows have no elements */
};

#endif
