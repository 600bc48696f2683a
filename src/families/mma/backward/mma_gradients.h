/* mma_gradients.h: what the family's backward kernels share on the host: workspace, arguments, and the kernels that run
 * before and after them (mma_backward_rows.cu, mma_dbias.cu). */
#ifndef FDM_MMA_GRADIENTS_H
#define FDM_MMA_GRADIENTS_H

#include "families/mma/backward/mma_backward.h"
#include "families/mma/mma_family.h"

/* What of the workspace and arguments depends on the kernel. */
struct mma_workspace_needs {
    int32_t block_m, block_n; /* of the block mask */
    int32_t dq_columns;       /* of the sums of dQ; 0: none */
    int32_t semaphores;       /* 1: blocks add to dQ in order */
    int32_t dbias_blocks;     /* blocks of keys that add to the bias' gradient in order; 0: in any */
    int32_t group_parts;      /* of a group of heads, each with its own sums of dK and dV; below 2: none */
    int32_t dk_columns, dv_columns;
    int32_t dbias_shares; /* partial sums of each key's bias */
    int32_t ordered_keys; /* 1: keys may be put in order */
    float lse_factor;     /* lse is kept times this */
};

/* How the bias' gradient is made: MMA_DBIAS_*; the same for the main kernel, which leaves some to mma_dbias.cu; and
 * whether that runs. */
int32_t mma_dbias_kind(const fdm_problem *problem);
int32_t mma_dbias_constant(const fdm_problem *problem);
int mma_dbias_runs(const fdm_problem *problem);
/* Blocks add to the gradient of a bias that heads or batches share in a fixed order. */
int mma_dbias_in_turns(const fdm_problem *problem);
int64_t mma_bias_bytes(const fdm_problem *problem); /* of one element, 0 where there is none */

/* NULL when every launch around a backward has less than 2^31 blocks; else a clause for the plan. */
const char *mma_gradients_refusal(const fdm_problem *problem);

int64_t mma_workspace_bytes(const fdm_problem *problem, const struct mma_workspace_needs *needs);
void mma_fill_gradients(const struct attention *attention, const struct mma_workspace_needs *needs, char *workspace,
                        struct mma_backward_arguments *arguments);

/* `entry`: of mma_backward_rows.cu or mma_dbias.cu; head dims as the main kernel pads them. */
void mma_rows_request(const fdm_problem *problem, const char *entry, int32_t head_dim, int32_t head_dim_v,
                      int32_t needs_dq, struct cuda_kernel_request *request);
/* Whether y or z of a grid would leave what a device takes. Then grids have one dimension (FOLDED), and a block keeps
 * its place in registers, which are scarce. */
int mma_folds_grids(const fdm_problem *problem);

/* x y z blocks, x fastest. No launch where an extent is 0. */
fdm_status mma_launch_gradients(const struct cuda_kernel *kernel, int64_t x, int64_t y, int64_t z, uint32_t threads,
                                struct mma_backward_arguments *arguments, void *stream);
fdm_status mma_launch_prepare(const struct cuda_kernel *kernel, const fdm_problem *problem,
                              struct mma_backward_arguments *arguments, void *stream);
fdm_status mma_launch_dbias(const struct cuda_kernel *kernel, struct mma_backward_arguments *arguments, void *stream);

#endif
