/* gpu_backward.h: what backward kernels share on the host, whatever multiplies: workspace, parameters, and the kernels
 * that run before and after those of a family (backward_rows.cu, block_mask.cu, row_block_mask.cu, block_order.cu,
 * key_sort.cu, backward_dbias.cu, backward_dsink.cu).
 *
 * A family says what it needs (struct gpu_backward_needs). Its launches are gpu_backward_add() BEFORE, its own, and
 * gpu_backward_add() AFTER, on the parameters of gpu_backward_fill(). */
#ifndef FDM_GPU_BACKWARD_H
#define FDM_GPU_BACKWARD_H

#include "gpu/backward_params.h"
#include "gpu/gpu_family.h"

/* What of the workspace, the parameters and the kernels around depends on the family's kernel. */
struct gpu_backward_needs {
    int32_t block_m, block_n; /* of the block mask */
    int32_t row_step;         /* tiles of rows divide it: rows of a sequence that the workspace's arrays round up to */
    int32_t head_dim, head_dim_v; /* as the kernel pads them */
    int32_t sums_dq;              /* 1: dQ is summed in the workspace, and rounded after */
    int32_t semaphores;           /* 1: blocks add to dQ in order */
    int32_t stores_first;         /* 1: and the first stores, of every row */
    int32_t notes_empty;          /* 1: prepare notes which rows see no key, 16 together */
    int32_t dbias_blocks;         /* blocks of keys that add to the bias' gradient in order; 0: in any */
    int32_t dbias_shares;         /* partial sums of each key's bias */
    int32_t group_parts;          /* of a group of heads, each with its own sums of dK and dV; below 2: none */
    int32_t may_order_keys;       /* 1: the workspace has room for the order of the keys */
    int32_t orders_keys;          /* 1: keys are put in order */
    int32_t order_block_n;        /* keys of blocks whose order block_order.h finds; 0: that is not wanted */
    int32_t plans_rows;           /* 1: the family's kernel reads row intervals by a tile plan: the block mask is the
                                     mask's alone */
    int32_t seeks_keys;           /* 1: blocks of rows look at each key, but where a tile plan hides it
                                     (tile_plan_add_of_keys()) */
    int32_t early;                /* 1: the family's kernel and those after use programmatic dependent launch (9.0) */
    float lse_factor;             /* lse is kept times this */
};

/* How the bias' gradient is made: GPU_DBIAS_*; the same for the family's kernels, which leave some to
 * backward_dbias.cu. */
int32_t gpu_dbias_kind(const fdm_problem *problem);
int32_t gpu_dbias_constant(const fdm_problem *problem);
/* Whether a kernel that makes dQ alone has something to do, and one that makes dK: each makes a part of dBias too. */
int gpu_makes_dq(const fdm_problem *problem);
int gpu_makes_dk(const fdm_problem *problem);
/* Blocks add to the gradient of a bias that heads or batches share in a fixed order. */
int gpu_dbias_in_turns(const fdm_problem *problem);

/* Blocks leave sums of dK and dV in float32 in the workspace, which backward_combine brings into place: parts of groups
 * of heads, and gradients that are float32 beside 16 bits. */
int gpu_backward_leaves_sums(const fdm_problem *problem, int32_t group_parts);

/* NULL when every launch around a backward has less than 2^31 blocks; else a clause for the plan. leaves_sums: the
 * family asks gpu_backward_leaves_sums(). */
const char *gpu_backward_refusal(const fdm_problem *problem, int leaves_sums);

int64_t gpu_backward_workspace_bytes(const fdm_problem *problem, const struct gpu_backward_needs *needs);
/* Zeros where kernels alone are asked. */
void gpu_backward_fill(const struct gpu_launches *launches, const struct gpu_backward_needs *needs,
                       struct gpu_backward_params *params);

/* BEFORE: lse and delta of each row and zeros, the block mask, the orders of blocks and keys. AFTER: the sums of parts
 * of groups, of dQ, and of the gradients of bias and sinks. */
enum gpu_backward_side { GPU_BACKWARD_BEFORE, GPU_BACKWARD_AFTER };
/* The launches of one side that the problem takes. BEFORE also tells the parameters where the block mask is. */
void gpu_backward_add(struct gpu_launches *launches, enum gpu_backward_side side,
                      const struct gpu_backward_needs *needs, struct gpu_backward_params *params);

/* Whether y or z of a grid would leave what a device takes. Then grids have one dimension (FOLDED), and a block keeps
 * its place in registers, which are scarce. */
int gpu_folds_grids(const fdm_problem *problem);
/* A launch of the kernel that was added last: x y z blocks, x fastest. `params` is the first member of the `bytes`
 * bytes that the kernel takes. */
void gpu_backward_add_grid(struct gpu_launches *launches, int64_t x, int64_t y, int64_t z,
                           struct gpu_backward_params *params, size_t bytes);

#endif
