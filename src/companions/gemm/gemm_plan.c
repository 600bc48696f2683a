/* gemm_plan.c: the gemm kernels by name, best first, and what a plan launches. */
#include "companions/gemm/gemm_plan.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"

static const char *naive_refusal(const fdm_device *device, const void *problem) {
    const fdm_gemm_problem *p = problem;
    return p->accumulate_float16 && p->dtype != FDM_FLOAT16 ? "sums in float16 are for float16 operands" : NULL;
}
static void naive_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    snprintf(choice->choice, sizeof choice->choice, "a thread an element");
}

enum { HOPPER, NAIVE, NUM_KERNELS };
static const struct companion_kernel kernels[NUM_KERNELS] = {
    [HOPPER] = {"gemm.hopper", "wgmma and TMA, persistent, specialised warpgroups, clusters, k split over blocks", 1,
                gemm_hopper_refusal, NULL, gemm_hopper_fill},
    [NAIVE] = {"gemm.naive", "the definition, a thread an element", 1, naive_refusal, NULL, naive_fill},
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
    if (c->kernel_index == NAIVE) {
        element_request(&plan->problem, "gemm_naive", plan->problem.accumulate_float16, &requests[0]);
        return 1;
    }
    if (!gemm_hopper_request(plan, &requests[0]))
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
    struct cuda_kernel_request requests[GEMM_REQUESTS_MAX];
    const struct cuda_kernel *loaded[GEMM_REQUESTS_MAX];
    const int32_t count = gemm_requests(plan, requests), hopper = plan->choice.kernel_index == HOPPER;
    if (count == 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's tile is not its kernel's");
    params->partials = workspace;
    params->splits = hopper ? plan->choice.parameters[P_SPLITS] : 1;
    fdm_status status = cuda_kernels_get(plan->choice.device.index, requests, count, loaded);
    if (!status && hopper)
        status = gemm_hopper_launch(plan, loaded[0], params, stream);
    if (!status && (!hopper || count > 1))
        status = launch_elements(&plan->problem, loaded[count - 1], params, stream);
    return status;
}
