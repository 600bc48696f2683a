/* interval_params.h: the contract of interval_rules.cu and intervals_from_mask.cu; for C and CUDA C. */
#ifndef FDM_INTERVAL_PARAMS_H
#define FDM_INTERVAL_PARAMS_H

#include "masks/topk/topk_params.h"

#define INTERVAL_THREADS 256 /* interval_rules.cu: a key each */
#define RUN_KEYS         32  /* intervals_from_mask.cu: keys of a block, a lane each */
#define RUN_SLICES       32  /* of a mask's rows, a warp each */

struct interval_params {
    struct topk_tensor start, end;
    const int32_t *cu_seqlens; /* [num_documents + 1]: documents; NULL: a window or prefix */
    int64_t cu_stride, num_documents;
    int64_t row_shift, prefix, left, right; /* as in struct interval_rule */
    int32_t causal;                         /* of documents */
    int32_t num_keys, num_heads, num_rows;  /* rows: of all batches and heads */
};

struct run_params {
    const uint8_t *mask; /* [B, h, Sq, Sk]; strides in bytes */
    int64_t mask_batch, mask_head, mask_row, mask_key;
    struct topk_tensor start, end;
    int32_t *exact;                                /* becomes 0 when some key's rows are not one run */
    int32_t seqlen_q, num_keys, num_heads, groups; /* groups of RUN_KEYS keys, of a head */
};

#endif
