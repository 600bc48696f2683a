/* hopper_items.h: what the family shares on the host: how many items a problem has, and their launch. */
#ifndef FDM_HOPPER_ITEMS_H
#define FDM_HOPPER_ITEMS_H

#include "gpu/gpu_family.h"
#include "gpu/items.h"

/* Blocks of block_m rows of a head, or of `packed` heads whose rows take turns; and of all heads. */
int64_t hopper_row_blocks(const fdm_problem *problem, int32_t packed, int32_t block_m);
int64_t hopper_all_blocks(const fdm_problem *problem, int32_t packed, int32_t block_m);

/* Pairs of all heads that causal and window leave: half, or all. */
double hopper_pairs(const fdm_problem *problem);

/* Workspace of the count of items that were begun. */
enum { HOPPER_COUNT_BYTES = 64 };
int64_t hopper_count_bytes(int32_t order);

/* One launch of the kernel that was added last over `items` in an order, by at most num_sms blocks where blocks take
 * several. items_begun: where `params`, of `bytes` bytes, say that it is, and is set to 0; NULL: it is 0 when the
 * kernel ahead in the stream has ended, and this one may begin before that. */
void hopper_add_items(struct gpu_launches *launches, int32_t order, int32_t num_sms, int32_t items, void *items_begun,
                      const void *params, size_t bytes);

#endif
