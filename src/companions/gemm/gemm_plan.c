/* gemm_plan.c: the gemm kernels by name, best first, and what a plan launches. */
#include "companions/gemm/gemm_plan.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"

static const char *float16_refusal(const fdm_device *device, const void *problem) {
    const fdm_gemm_problem *p = problem;
    return p->accumulate_float16 && p->dtype != FDM_FLOAT16 ? "sums in float16 are for float16 operands" : NULL;
}
static void naive_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    snprintf(choice->choice, sizeof choice->choice, "a thread an element");
}

/* ---- gemm.mma ---- */

static void mma_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    enum { STAGES = 4, ALIGNMENT = 128 };
    const fdm_gemm_problem *p = problem;
    choice->parameters[P_STAGES] = STAGES;
    choice->shared_bytes = STAGES * GEMM_MMA_STAGE_BYTES + ALIGNMENT;
    snprintf(choice->choice, sizeof choice->choice, "%dx%d, %d stages, %s", GEMM_MMA_BLOCK, GEMM_MMA_BLOCK, STAGES,
             p->mappable ? "16-byte copies" : "copies of elements");
}

static void mma_request(const fdm_gemm_plan *plan, struct cuda_kernel_request *request) {
    static const char *const names[] = {GEMM_MMA_CONSTANTS(GPU_CONSTANT_NAME)};
    enum { COUNT = sizeof names / sizeof names[0] };
    const fdm_gemm_problem *p = &plan->problem;
    const int64_t values[COUNT] = {p->dtype,
                                   !p->a_rows_contiguous,
                                   p->b_rows_contiguous,
                                   p->has_c,
                                   p->accumulate_float16,
                                   p->mappable,
                                   plan->choice.parameters[P_STAGES]};
    *request = (struct cuda_kernel_request){.file = "companions/gemm/gemm_mma.cu",
                                            .entry = "gemm_mma",
                                            .num_constants = COUNT,
                                            .shared_bytes = (int32_t)plan->choice.shared_bytes,
                                            .threads = GEMM_MMA_THREADS};
    for (int32_t i = 0; i < COUNT; i++)
        request->constants[i] = (struct cuda_constant){names[i], values[i]};
}

static fdm_status mma_launch(const fdm_gemm_problem *p, const struct cuda_kernel *kernel,
                             const struct gemm_params *params, void *stream) {
    const int64_t rows = (p->m + GEMM_MMA_BLOCK - 1) / GEMM_MMA_BLOCK;
    const int64_t columns = (p->n + GEMM_MMA_BLOCK - 1) / GEMM_MMA_BLOCK;
    const struct cuda_launch launch = {.kernel = kernel,
                                       .grid = {(uint32_t)(rows * columns * p->batch), 1, 1},
                                       .threads = GEMM_MMA_THREADS,
                                       .stream = stream,
                                       .arguments = params,
                                       .arguments_bytes = sizeof *params};
    return cuda_launch(&launch);
}

/* ---- the list ---- */

enum { HOPPER, MMA, NAIVE, NUM_KERNELS };
static const struct companion_kernel kernels[NUM_KERNELS] = {
    [HOPPER] = {"gemm.hopper", "wgmma and TMA, persistent, specialised warpgroups, clusters, k split over blocks", 1,
                gemm_hopper_refusal, NULL, gemm_hopper_fill},
    [MMA] = {"gemm.mma", "mma.sync, a ring of stages by cp.async, swizzled shared memory", 1, float16_refusal, NULL,
             mma_fill},
    [NAIVE] = {"gemm.naive", "the definition, a thread an element", 0, float16_refusal, NULL, naive_fill},
};
const struct companion_operation gemm_operation = {"gemm", NUM_KERNELS, kernels};

static void element_request(const fdm_gemm_problem *p, const char *entry, int32_t accumulate16,
                            struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){
        .file = "companions/gemm/gemm_naive.cu",
        .entry = entry,
        .num_constants = 3,
        .constants = {{"DTYPE", p->dtype}, {"HAS_C", p->has_c}, {"ACCUMULATE16", accumulate16}},
        .threads = GEMM_ELEMENT_THREADS};
}

int32_t gemm_requests(const fdm_gemm_plan *plan, struct cuda_kernel_request *requests) {
    const fdm_companion_choice *c = &plan->choice;
    if (c->kernel_index < 0 || c->kernel_index >= NUM_KERNELS || strcmp(c->kernel, kernels[c->kernel_index].name) != 0)
        return 0;
    if (c->kernel_index == MMA && c->parameters[P_STAGES] > 1 &&
        c->shared_bytes >= c->parameters[P_STAGES] * GEMM_MMA_STAGE_BYTES + 128) {
        mma_request(plan, &requests[0]);
        return 1;
    }
    if (c->kernel_index == NAIVE) {
        element_request(&plan->problem, "gemm_naive", plan->problem.accumulate_float16, &requests[0]);
        return 1;
    }
    if (c->kernel_index != HOPPER || !gemm_hopper_request(plan, &requests[0]))
        return 0;
    if (c->parameters[P_SPLITS] == 1)
        return 1;
    element_request(&plan->problem, "gemm_combine", 0, &requests[1]);
    return 2;
}

/* A thread for each element of C. */
static fdm_status launch_elements(const fdm_gemm_problem *p, const struct cuda_kernel *kernel,
                                  const struct gemm_params *params, void *stream) {
    const int64_t blocks = (p->batch * p->m * p->n + GEMM_ELEMENT_THREADS - 1) / GEMM_ELEMENT_THREADS;
    const struct cuda_launch launch = {.kernel = kernel,
                                       .grid = {(uint32_t)blocks, 1, 1},
                                       .threads = GEMM_ELEMENT_THREADS,
                                       .stream = stream,
                                       .arguments = params,
                                       .arguments_bytes = sizeof *params};
    return cuda_launch(&launch);
}

fdm_status gemm_launch(const fdm_gemm_plan *plan, struct gemm_params *params, void *workspace, void *stream) {
    struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
    const struct cuda_kernel *loaded[COMPANION_REQUESTS_MAX];
    const int32_t count = gemm_requests(plan, requests), hopper = plan->choice.kernel_index == HOPPER;
    if (count == 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's tile is not its kernel's");
    params->partials = workspace;
    params->splits = hopper ? plan->choice.parameters[P_SPLITS] : 1;
    fdm_status status = cuda_kernels_get(plan->choice.device.index, requests, count, loaded);
    if (!status && hopper)
        status = gemm_hopper_launch(plan, loaded[0], params, stream);
    if (!status && plan->choice.kernel_index == MMA)
        return mma_launch(&plan->problem, loaded[0], params, stream);
    if (!status && (!hopper || count > 1))
        status = launch_elements(&plan->problem, loaded[count - 1], params, stream);
    return status;
}
