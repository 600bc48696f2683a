/* cache_fault.c: cache_fault.cu on the host: its launch. */
#include "gpu/cache_fault.h"

#include "gpu/append_launch.h"
#include "gpu/gpu_family.h"

fdm_status cache_fault_look(int32_t device, const struct attention *attention, void *stream) {
    const fdm_problem *p = attention->problem;
    struct cuda_kernel_request request;
    struct cache_fault_params arguments = {.fault = attention->cache.fault};
    if (!p->has_cache || !arguments.fault || p->batch < 1)
        return FDM_OK;
    gpu_fill_forward(attention, &arguments.in);
    gpu_set_problem_constants(&request, p, GPU_ALIKE_ALL);
    request.file = "gpu/cache_fault.cu";
    request.entry = "cache_fault";
    request.shared_bytes = 0;
    request.threads = CACHE_FAULT_THREADS;
    return cuda_run(device, &request, gpu_grid(p->batch), &arguments, sizeof arguments, stream);
}
