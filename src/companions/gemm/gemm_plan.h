/* gemm_plan.h: the list of gemm kernels, and what a plan launches. */
#ifndef FDM_GEMM_PLAN_H
#define FDM_GEMM_PLAN_H

#include <string.h>

#include "companions/companion.h"
#include "companions/gemm/gemm.h"

extern const struct companion_operation gemm_operation;

/* What a choice of each kernel holds in fdm_companion_choice.parameters. early: the launch may begin before the kernel
 * ahead of it has ended. */
union gemm_parameters {
    struct {
        int32_t rows, depth; /* constants */
        int32_t splits;      /* of k */
        int32_t early, reserved[4];
    } skinny;
    struct {
        int32_t warpgroups, block_n, stages, cluster; /* constants */
        int32_t splits, blocks;                       /* of k; of the grid */
        int32_t early, reserved;
    } hopper;
    struct {
        int32_t block_n, stages; /* constants */
        int32_t blocks;          /* of the grid */
        int32_t early, reserved[4];
    } mma_tma;
    struct {
        int32_t block_n, block_k, stages, ahead; /* constants */
        int32_t reserved[4];
    } mma; /* and the rungs below it */
};
_Static_assert(sizeof(union gemm_parameters) == sizeof((fdm_companion_choice *)0)->parameters, "a choice holds them");
static inline union gemm_parameters gemm_parameters_of(const struct fdm_companion_choice *choice) {
    union gemm_parameters parameters;
    memcpy(&parameters, choice->parameters, sizeof parameters);
    return parameters;
}
static inline void gemm_set_parameters(struct fdm_companion_choice *choice, union gemm_parameters parameters) {
    memcpy(choice->parameters, &parameters, sizeof parameters);
}

/* What the sums of `splits` parts of k take. */
static inline int64_t gemm_splits_bytes(const struct fdm_gemm_problem *p, int32_t splits) {
    return splits > 1 ? (p->batch * p->m * p->n * 4 * splits + 63) / 64 * 64 : 0;
}

/* The kernels that the plan launches; 0 for a plan that companion_choose() cannot have made. */
int32_t gemm_requests(const struct fdm_gemm_plan *plan, struct cuda_kernel_request *requests);
/* Fills what of the parameters depends on the plan, and enqueues. */
fdm_status gemm_launch(const struct fdm_gemm_plan *plan, struct gemm_params *params, void *workspace, void *stream);

/* ---- gemm_skinny_plan.c ---- */

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

const char *gemm_hopper_refusal(const fdm_device *device, const void *problem);
void gemm_hopper_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice);
int gemm_hopper_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice);
/* 0: the numbers are none that gemm_hopper_fill() can have made. */
int gemm_hopper_request(const struct fdm_gemm_plan *plan, struct cuda_kernel_request *request);
fdm_status gemm_hopper_launch(const struct fdm_gemm_plan *plan, const struct cuda_kernel *kernel,
                              const struct gemm_params *params, void *stream);

/* ---- gemm_mma_tma_plan.c ---- */

const char *gemm_mma_tma_refusal(const fdm_device *device, const void *problem);
void gemm_mma_tma_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice);
int gemm_mma_tma_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice);
/* 0: the numbers are none that gemm_mma_tma_fill() can have made. */
int gemm_mma_tma_request(const struct fdm_gemm_plan *plan, struct cuda_kernel_request *request);
fdm_status gemm_mma_tma_launch(const struct fdm_gemm_plan *plan, const struct cuda_kernel *kernel,
                               const struct gemm_params *params, void *stream);

#endif
