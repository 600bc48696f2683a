/* hopper_items.h: what the family's forwards share on the host: the launch of items. */
#ifndef FDM_HOPPER_ITEMS_H
#define FDM_HOPPER_ITEMS_H

#include "gpu/gpu_family.h"
#include "gpu/items.h"

/* Workspace of the count of items that were begun. */
enum { HOPPER_COUNT_BYTES = 64 };
int64_t hopper_count_bytes(int32_t order);

/* One launch over `items` in an order, by at most num_sms blocks where blocks take several. items_begun: the
 * workspace's start, where `params`, of `bytes` bytes, say that it is. */
fdm_status hopper_launch_items(const fdm_plan *plan, const struct cuda_kernel *kernel, int32_t threads, int32_t order,
                               int32_t num_sms, int32_t items, void *items_begun, const void *params, size_t bytes,
                               void *stream);

#endif
