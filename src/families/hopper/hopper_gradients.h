/* hopper_gradients.h: what the family's backwards share on the host: head dims, refusals, needs, maps, the order of key
 * blocks. */
#ifndef FDM_HOPPER_GRADIENTS_H
#define FDM_HOPPER_GRADIENTS_H

#include "families/hopper/hopper_backward.h"
#include "gpu/gpu_backward.h"

int32_t hopper_backward_padded(int64_t head_dim);
/* NULL, or a clause that says why neither takes the problem, or not this one, for head dims up to head_dim_max. */
const char *hopper_backward_refusal(const fdm_problem *problem, int32_t head_dim_max, char *text, size_t size);
/* NULL, or a clause: blocks of block_n keys leave the device too empty. */
const char *hopper_backward_passed_over(const fdm_device *device, const fdm_problem *problem, int32_t block_n);
struct gpu_backward_needs hopper_backward_needs(const fdm_problem *problem, int32_t row_step, int32_t sums_dq);

/* The maps of a backward's parameters: q, dout and what there is of masks and biases with rows in boxes of 64 rows, k
 * and v in boxes of the plan's block_n keys. */
fdm_status hopper_backward_maps(const fdm_plan *plan, const struct attention *attention,
                                struct hopper_backward_params *params);
/* The order of the blocks that own keys, block_n each; returns how many they are. sorted: by key_sort.h, in whole
 * groups of keys. */
int64_t hopper_backward_order(const fdm_plan *plan, const fdm_problem *problem, int sorted,
                              struct hopper_backward_params *params);

#endif
