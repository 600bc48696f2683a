/* kept_plan.h: the mask plan that a caller keeps, on a CUDA device. The contract of kept_plan.cu; for C and CUDA C. */
#ifndef FDM_KEPT_PLAN_H
#define FDM_KEPT_PLAN_H

#include "gpu/block_mask.h"
#include "gpu/tile_plan.h"

#define MASK_PLAN_WARPS 4

/* join_mask_plan(): the block mask's strides as in gpu_forward_params. */
struct join_plan_params {
    struct tile_plan plan;
    const uint8_t *block_mask; /* of tiles of 64 rows and 64 keys */
    int64_t block_mask_batch, block_mask_head, block_mask_row;
    int64_t num_words;
    int32_t block_mask_group, heads, num_tiles; /* heads: of a batch of the plan */
};

/* mask_plan_blocks() */
struct plan_blocks_params {
    struct tile_plan plan;
    uint8_t
        *block_mask; /* [batch, heads, row_blocks, num_tiles] in rows of row_bytes, of the plan's batches and heads */
    int64_t row_bytes, num_items; /* items: words of 32 tiles of all rows of blocks */
    int32_t words, row_blocks, num_tiles, block_m, block_n, seqlen_k;
};

#endif
