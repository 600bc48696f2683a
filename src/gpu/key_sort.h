/* key_sort.h: the contract of key_sort.cu. */
#ifndef FDM_KEY_SORT_H
#define FDM_KEY_SORT_H

#include "gpu/forward_params.h"

#define KEY_SORT_KEYS    1024 /* neighbouring keys that are put in order */
#define KEY_SORT_THREADS (KEY_SORT_KEYS / 2)

struct key_sort_params {
    struct gpu_intervals intervals;
    int32_t *order; /* [batches, heads, keys rounded up to KEY_SORT_KEYS]: numbers of keys; from seqlen_k on: no key */
    int64_t stride; /* from head to head */
    int32_t seqlen_q, seqlen_k, num_heads;
    int32_t window_left, window_right; /* as in forward_params.h */
    int32_t num_groups;                /* of KEY_SORT_KEYS keys, of one head */
    int64_t num_sorts;                 /* groups of all heads and batches of the intervals */
    const int32_t *scattered;          /* 0: no kernel reads the order; or NULL */
};

#endif
