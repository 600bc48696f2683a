/* items.h: orders in which blocks, or clusters of them, take items of work, an item being the rows of a block tile of
 * one head; for C and CUDA C. */
#ifndef FDM_ITEMS_H
#define FDM_ITEMS_H

/* SCHEDULER of kernels: the numbers of enum scheduler. */
#define ITEMS_STATIC \
    0                   /* as many as run at once; under a causal mask or window an item with many keys, then its \
                           counterpart with few */
#define ITEMS_LONGEST 1 /* one an item, those with many keys first */
#define ITEMS_DYNAMIC 2 /* a block that has finished an item takes the next */

#ifndef __CUDACC__
/* Of a choice code, by ITEMS_*. */
extern const char *const items_order_names[];
#endif

#endif
