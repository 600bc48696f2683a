/* kept_plan_launch.h: the mask plan that a caller keeps, on the host: how it is made, and how kernels get it. */
#ifndef FDM_KEPT_PLAN_LAUNCH_H
#define FDM_KEPT_PLAN_LAUNCH_H

#include "gpu/gpu_family.h"
#include "gpu/kept_plan.h"

/* Bytes of the plan's memory, and the plan there: seen, full and what tile_plan.h says. */
int64_t kept_plan_bytes(const fdm_problem *problem);
struct tile_plan kept_plan_at(const fdm_problem *problem, void *memory);

/* Makes the plan of a call in `memory`. Kernels that read it are made ready, too. */
fdm_status kept_plan_make(const struct attention *attention, int32_t device, void *memory, void *stream);

/* Whether the call has a plan of `batches` and `heads`: then adds the launch that makes a block mask of its bits,
 * of rows of row_bytes. */
int kept_plan_add_blocks(struct gpu_launches *launches, int32_t block_m, int32_t block_n, int64_t batches,
                         int64_t heads, uint8_t *block_mask, int64_t row_bytes);

#endif
