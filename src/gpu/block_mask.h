/* block_mask.h: the block mask of a dense mask, of row intervals and of the caller's blocks: one byte for each tile of
 * block_m x block_n says whether they show all of it, some or none. The contract of block_mask.cu and
 * row_block_mask.cu; for C and CUDA C. */
#ifndef FDM_BLOCK_MASK_H
#define FDM_BLOCK_MASK_H

#include "gpu/forward_params.h"

#define BLOCK_MASK_WARPS     4
#define BLOCK_MASK_ALIGNMENT 16 /* bytes of which a row of the block mask is a multiple */

/* What a mask does to a tile. Of two the lesser is what both leave. */
#define GPU_BLOCK_HIDDEN  0
#define GPU_BLOCK_PARTIAL 1
#define GPU_BLOCK_FULL    2

struct block_mask_params {
    struct gpu_scores mask;
    uint8_t *block_mask; /* [mask batch, mask heads, row blocks, num_tiles] in rows of row_bytes */
    int64_t row_bytes;
    int64_t num_groups; /* of BLOCK_MASK_WARPS tiles, in all row blocks, heads and batches */
    int32_t seqlen_q, seqlen_k, num_heads, num_tiles, num_row_blocks, block_m, block_n;
    int32_t aligned; /* keys are contiguous, rows start at multiples of 16 bytes, block_n is a multiple of 16 */
};

struct row_block_mask_params {
    struct gpu_forward_params in; /* its block mask is that of the dense mask, where there is one */
    uint8_t *block_mask;          /* [batch, num_heads, row blocks, num_tiles] in rows of row_bytes */
    int64_t row_bytes;
    int32_t num_blocks; /* of rows, of all heads and batches: fewer than 2^30, which rows of q fill a device by far */
    int32_t num_heads, num_tiles, num_row_blocks, block_m, block_n;
    int32_t beside_mask; /* there is a dense mask with rows */
};

#endif
