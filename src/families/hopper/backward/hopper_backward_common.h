/* hopper_backward_common.h: what the family's backwards share on the host: head dims, refusals, the division of heads
 * among key blocks, workspace, tensor maps. */
#ifndef FDM_HOPPER_BACKWARD_COMMON_H
#define FDM_HOPPER_BACKWARD_COMMON_H

#include "families/hopper/backward/hopper_backward.h"
#include "gpu/gpu_backward.h"

int32_t hopper_backward_padded(int64_t head_dim);
/* NULL, or a clause that says why neither takes the problem, or not this one, for head dims up to head_dim_max. */
const char *hopper_backward_refusal(const fdm_problem *problem, int32_t head_dim_max, char *text, size_t size);

/* A block owns keys for the query heads that share them, or for one of `parts` equal parts of these: another kernel
 * then adds their sums of dK and dV. Under a causal mask or window, or where keys are sorted, blocks of `in_turn`
 * such parts are interleaved. */
struct hopper_division {
    int32_t parts, in_turn;
};
/* The number-th division for blocks of block_n keys with `flops` to do for each row and key: 0 is the best by an
 * estimate, the others are the other numbers of parts; returns 0 past the last. */
enum { HOPPER_BACKWARD_L2_MB = 24 }; /* of L2, in which rows and sums of dQ of interleaved parts should stay */
int hopper_backward_divide(const fdm_device *device, const fdm_problem *problem, int32_t block_n, double flops,
                           int32_t number, struct hopper_division *division);
/* 1 when a plan may hold it. */
int hopper_backward_divides(const fdm_problem *problem, struct hopper_division division);
/* Says in choice and reason what it is, where there are parts. */
void hopper_backward_name_parts(const fdm_problem *problem, struct hopper_division division, fdm_plan *plan);

struct gpu_backward_needs hopper_backward_needs(const fdm_problem *problem, int32_t row_step, int32_t sums_dq,
                                                int32_t parts);

/* The maps of a backward's parameters: q, dout and what there is of masks and biases with rows in boxes of 64 rows, k
 * and v in boxes of block_n keys. */
fdm_status hopper_backward_maps(const fdm_plan *plan, const struct attention *attention, int32_t block_n,
                                struct hopper_backward_params *params);
/* The order of the blocks that own keys, block_n each; returns how many they are. sorted: by key_sort.h, in
 * whole groups of keys. */
int64_t hopper_backward_order(const fdm_problem *problem, int32_t block_n, struct hopper_division division, int sorted,
                              struct hopper_backward_params *params);

#endif
