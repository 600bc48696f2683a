/* gpu_launches.c: a list of launches: how it is filled, and how it is run. */
#include "gpu/gpu_launches.h"

#include <string.h>

#include "base/error.h"
#include "cuda/loaded_kernels.h"

_Static_assert((int)FAMILY_LAUNCHES_MAX <= (int)CUDA_KERNELS_MAX, "the kernels of a plan are got in one call");

void gpu_launches_begin(struct gpu_launches *l, int32_t device, const fdm_problem *problem,
                        const struct attention *attention, void *workspace) {
    l->problem = problem;
    l->attention = attention;
    l->workspace = attention ? workspace : l->params; /* else any address: nothing reads it */
    l->device = device;
    l->num_kernels = l->count = 0;
    l->zero_bytes = l->params_used = 0;
}

struct cuda_kernel_request *gpu_add_kernel(struct gpu_launches *l) {
    return &l->requests[l->num_kernels++];
}

void gpu_add_launch_of(struct gpu_launches *l, int32_t kernel, struct gpu_launch launch) {
    if (!l->attention || launch.grid[0] <= 0)
        return;
    launch.kernel = kernel;
    if (l->zero_bytes) { /* not before what is ahead has ended */
        launch.zeros = l->zeros;
        launch.zero_bytes = l->zero_bytes;
        launch.early = 0;
        l->zero_bytes = 0;
    }
    if (l->params_used + launch.params_bytes <= sizeof l->params) /* else running them says so */
        launch.params = memcpy(l->params + l->params_used, launch.params, launch.params_bytes);
    l->params_used += (launch.params_bytes + 63) / 64 * 64;
    l->list[l->count++] = launch;
}

void gpu_add_launch(struct gpu_launches *l, struct gpu_launch launch) {
    gpu_add_launch_of(l, l->num_kernels - 1, launch);
    if (l->attention && launch.grid[0] <= 0)
        l->num_kernels--;
}

static fdm_status run(const struct gpu_launches *l, const struct gpu_launch *launch, const struct cuda_kernel *kernel,
                      void *stream) {
    const fdm_status status =
        launch->zero_bytes ? cuda_memory_fill_async(l->device, launch->zeros, 0, launch->zero_bytes, stream) : FDM_OK;
    const struct cuda_launch own = {.kernel = kernel,
                                    .grid = {(uint32_t)launch->grid[0], launch->grid[1] ? (uint32_t)launch->grid[1] : 1,
                                             launch->grid[2] ? (uint32_t)launch->grid[2] : 1},
                                    .threads = (uint32_t)l->requests[launch->kernel].threads,
                                    .cluster = (uint32_t)launch->cluster,
                                    .programmatic_launch = launch->early,
                                    .stream = stream,
                                    .arguments = launch->params,
                                    .arguments_bytes = launch->params_bytes};
    return status ? status : cuda_launch(&own);
}

void gpu_add_zeros(struct gpu_launches *l, void *zeros, size_t bytes) {
    l->zeros = zeros;
    l->zero_bytes = bytes;
}

fdm_status gpu_launches_run(const struct gpu_launches *l, void *stream) {
    const struct cuda_kernel *kernels[FAMILY_LAUNCHES_MAX];
    if (l->params_used > sizeof l->params)
        return error_set(FDM_ERROR_INTERNAL, "the parameters of %d launches take %zu bytes", l->count, l->params_used);
    fdm_status status = cuda_kernels_get(l->device, l->requests, l->num_kernels, kernels);
    for (int32_t i = 0; i < l->count && !status; i++)
        status = run(l, &l->list[i], kernels[l->list[i].kernel], stream);
    return status;
}
