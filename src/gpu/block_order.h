/* block_order.h: in which order the blocks of keys of a backward begin, where key intervals say which rows see a key;
 * and whether these lie scattered. The contract of block_order.cu; for C and CUDA C. */
#ifndef FDM_BLOCK_ORDER_H
#define FDM_BLOCK_ORDER_H

#include "gpu/forward_params.h"

#define BLOCK_ORDER_THREADS 1024
/* Blocks of a head that are ranked by their walks; of more, each begins at its place. */
#define BLOCK_ORDER_RANKED 2048

struct block_order_params {
    struct gpu_forward_params in;
    int32_t *order; /* of each head and batch of the intervals: 1 where the keys lie scattered, then the blocks in the
                       order in which they begin where they are not sorted */
    int32_t num_heads, blocks, block_n, group; /* heads of a batch; blocks of a head; query heads of a head */
};

#endif
