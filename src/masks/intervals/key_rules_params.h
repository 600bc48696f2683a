/* key_rules_params.h: the contract of key_rules.cu; for C and CUDA C. */
#ifndef FDM_KEY_RULES_PARAMS_H
#define FDM_KEY_RULES_PARAMS_H

#include "masks/topk/topk_params.h"

#define KEY_RULES_THREADS 256 /* a key of a head each */

struct key_rule { /* strides in elements; data NULL: no such rule */
    const int32_t *data;
    int64_t batch, head, key;
    int32_t group; /* heads of start that share one of the rule's */
};

struct key_rules_params {
    struct key_rule ids, prefixes, windows, given_start, given_end; /* as in struct key_rules */
    const int32_t *cu_seqlens_q, *cu_seqlens_k;                     /* [batch + 1]; NULL where keys are not packed */
    struct topk_tensor start, end;                                  /* batch 0 where they are */
    int32_t seqlen_q, batch, heads, keys, rows;                     /* rows: heads of start, of all batches */
};

#endif
