/* gemm_plan.h: the list of gemm kernels, and what a plan launches. */
#ifndef FDM_GEMM_PLAN_H
#define FDM_GEMM_PLAN_H

#include "companions/companion.h"
#include "companions/gemm/gemm.h"

extern const struct companion_operation gemm_operation;

/* What the sums of `splits` parts of k take. */
static inline int64_t gemm_splits_bytes(const struct fdm_gemm_problem *p, int32_t splits) {
    return splits > 1 ? (p->batch * p->m * p->n * 4 * splits + 63) / 64 * 64 : 0;
}

/* The kernels that the plan launches; 0 for a plan that companion_choose() cannot have made. */
int32_t gemm_requests(const struct fdm_gemm_plan *plan, struct cuda_kernel_request *requests);
/* Fills what of the parameters depends on the plan, and enqueues. */
fdm_status gemm_launch(const struct fdm_gemm_plan *plan, struct gemm_params *params, void *workspace, void *stream);

/* ---- gemm_skinny_plan.c ---- */

/* The numbers of a choice of gemm.skinny. */
enum gemm_skinny_parameter { SKINNY_ROWS, SKINNY_DEPTH, SKINNY_SPLITS, SKINNY_EARLY };
const char *gemm_skinny_refusal(const fdm_device *device, const void *problem);
const char *gemm_skinny_passed_over(const fdm_device *device, const void *problem);
void gemm_skinny_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice);
int gemm_skinny_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice);
/* 0: the numbers are none that gemm_skinny_fill() can have made. */
int gemm_skinny_request(const struct fdm_gemm_plan *plan, struct cuda_kernel_request *request);
int64_t gemm_skinny_blocks(const struct fdm_gemm_plan *plan);

/* ---- gemm_tma.c: what kernels share whose tiles come by TMA ---- */

struct gemm_tma_tile {
    int32_t block_m, block_n, cluster, splits; /* cluster: blocks below each other */
    int32_t a_rows;                            /* of a copy of A whose rows are contiguous */
    int32_t b_columns;                         /* of a copy of B whose columns are contiguous */
    int32_t out_rows, out_columns;             /* of a copy to C */
};
struct gemm_tma_grid {
    int32_t blocks, threads;
    int32_t early; /* it may begin before the kernel ahead of it has ended, for which it waits by itself */
};
int64_t gemm_tma_steps(const struct fdm_gemm_problem *p);                                /* of k */
int64_t gemm_tma_items(const struct fdm_gemm_problem *p, const struct gemm_tma_tile *t); /* tiles, splits, batches */
/* NULL, or why its operands do not come by TMA. */
const char *gemm_tma_refusal(const struct fdm_gemm_problem *p);
fdm_status gemm_tma_launch(const struct fdm_gemm_plan *plan, const struct cuda_kernel *kernel,
                           const struct gemm_tma_tile *t, const struct gemm_tma_grid *grid,
                           const struct gemm_params *params, void *stream);

/* ---- gemm_hopper_plan.c ---- */

/* The numbers of a choice of gemm.hopper. */
enum gemm_hopper_parameter { P_WARPGROUPS, P_BLOCK_N, P_STAGES, P_CLUSTER, P_SPLITS, P_BLOCKS, P_EARLY };
const char *gemm_hopper_refusal(const fdm_device *device, const void *problem);
void gemm_hopper_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice);
int gemm_hopper_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice);
/* 0: the numbers are none that gemm_hopper_fill() can have made. */
int gemm_hopper_request(const struct fdm_gemm_plan *plan, struct cuda_kernel_request *request);
fdm_status gemm_hopper_launch(const struct fdm_gemm_plan *plan, const struct cuda_kernel *kernel,
                              const struct gemm_params *params, void *stream);

/* ---- gemm_mma_tma_plan.c ---- */

/* The numbers of a choice of gemm.mma-tma. */
enum gemm_mma_tma_parameter { TMA_BLOCK_N, TMA_STAGES, TMA_BLOCKS, TMA_EARLY };
const char *gemm_mma_tma_refusal(const fdm_device *device, const void *problem);
void gemm_mma_tma_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice);
int gemm_mma_tma_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice);
/* 0: the numbers are none that gemm_mma_tma_fill() can have made. */
int gemm_mma_tma_request(const struct fdm_gemm_plan *plan, struct cuda_kernel_request *request);
fdm_status gemm_mma_tma_launch(const struct fdm_gemm_plan *plan, const struct cuda_kernel *kernel,
                               const struct gemm_params *params, void *stream);

#endif
