/* mma_order.h: the contract of mma_order.cu. */
#ifndef FDM_MMA_ORDER_H
#define FDM_MMA_ORDER_H

#include "families/mma/mma_arguments.h"

#define MMA_ORDER_KEYS    1024 /* neighbouring keys that are put in order */
#define MMA_ORDER_THREADS (MMA_ORDER_KEYS / 2)

struct mma_order_arguments {
    struct mma_intervals intervals;
    int32_t *order; /* [batches, heads, keys rounded up to MMA_ORDER_KEYS]: numbers of keys; from seqlen_k on: no key */
    int64_t stride; /* from head to head */
    int32_t seqlen_q, seqlen_k, num_heads;
    int32_t window_left, window_right; /* as in mma_arguments.h */
    int32_t reserved;
};

#endif
