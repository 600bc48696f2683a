/* hopper_items.h: the number of items (work tiles) of a problem, and their launch, for the family's kernels. */
#ifndef FDM_HOPPER_ITEMS_H
#define FDM_HOPPER_ITEMS_H

#include "gpu/gpu_family.h"
#include "gpu/items.h"

/* The number of blocks of block_m rows of a head, or of `packed` heads that share a tile of rows; and that of all
 * heads. */
int64_t hopper_row_blocks(const fdm_problem *problem, int32_t packed, int32_t block_m);
int64_t hopper_all_blocks(const fdm_problem *problem, int32_t packed, int32_t block_m);

/* The (row, key) pairs of all heads that causal and window leave: half of them, or all. */
double hopper_pairs(const fdm_problem *problem);

/* Workspace of the counter of the dynamic scheduler. */
enum { HOPPER_COUNT_BYTES = 64 };
int64_t hopper_count_bytes(int32_t order);

/* Adds a launch of the last kernel over `items` in an order, by at most num_sms blocks where blocks take several.
 * items_begun is the counter of the dynamic scheduler, which is set to 0 before the launch; `params`, of `bytes`
 * bytes, hold its address. NULL: the kernel ahead in the stream leaves it 0, and this one may begin before that one
 * ends. */
void hopper_add_items(struct gpu_launches *launches, int32_t order, int32_t num_sms, int32_t items, void *items_begun,
                      const void *params, size_t bytes);

#endif
