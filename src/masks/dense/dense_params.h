/* dense_params.h: the contract of intervals_to_mask.cu, create_mask.cu and blocks_from_lists.cu; for C and CUDA C. */
#ifndef FDM_DENSE_PARAMS_H
#define FDM_DENSE_PARAMS_H

#include "masks/topk/topk_params.h"

/* intervals_to_mask.cu: a thread takes neighbouring keys, a block as many rows. */
#define TO_MASK_THREADS 256
#define TO_MASK_KEYS    4
#define TO_MASK_ROWS    64

struct dense_mask { /* [B, h, Sq, Sk]; strides in bytes */
    uint8_t *data;
    int64_t batch, head, row, key;
};

struct to_mask_params {
    struct topk_tensor start, end;
    struct dense_mask mask;
    int64_t num_items; /* of TO_MASK_ROWS rows and TO_MASK_THREADS * TO_MASK_KEYS keys, of all heads and batches */
    int32_t seqlen_q, num_keys, num_heads, row_groups, key_groups;
    int32_t words; /* rows are words of TO_MASK_KEYS bytes at multiples of their size */
};

/* create_mask.cu. Constants: TOPK_CONSTANTS, CHUNK the threads of a block. */
#define CREATE_STAGED_KEYS 8192 /* of a row that are kept in shared memory */

struct create_mask_params {
    const char *bias; /* strides in elements, 0 where the extent is 1 */
    int64_t bias_batch, bias_head, bias_row, bias_key;
    const uint8_t *shown; /* of the keys from first_shown on, not zero = shown; those before it are; NULL: all are */
    int64_t shown_batch, shown_head, shown_row, shown_key;
    struct dense_mask mask;
    int64_t num_rows;   /* of all heads and batches */
    uint32_t hidden;    /* the place of the bias that hides, in the order of topk_order.cuh */
    int32_t window;     /* W; 0: biases above 0 */
    int32_t block_size; /* of keys kept or dropped together; 1: none */
    int32_t seqlen_q, num_keys, num_heads, first_shown, index_bits;
};

/* blocks_from_lists.cu: a warp for each list. */
#define LISTS_THREADS 128

struct list_params {
    struct dense_mask blocks;  /* [B, h, Q, K] */
    struct topk_tensor counts; /* [B, h, Q] */
    const int32_t *indices;    /* [B, h, Q, room]; strides in elements */
    int64_t index_batch, index_head, index_row, index_entry;
    int64_t num_lists, num_groups; /* groups: of a block's lists */
    int32_t num_heads, num_rows, num_keys, room;
};

#endif
