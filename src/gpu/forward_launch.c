/* forward_launch.c: how forward kernels that are one launch, or one after their block mask, end: refusal and launch. */
#include <stdio.h>

#include "gpu/gpu_family.h"

const char *gpu_no_tile_fits(const fdm_device *device, char *text, size_t size) {
    snprintf(text, size, "no tile fits the device's %lld KB of shared memory", (long long)device->shared_bytes >> 10);
    return text;
}

fdm_status gpu_forward_launch(const fdm_plan *plan, const struct attention *attention,
                              const struct cuda_kernel_request *requests, int32_t count, int64_t blocks,
                              int32_t cluster, void *workspace, void *stream) {
    const fdm_problem *p = attention->problem;
    const struct cuda_kernel *kernels[1 + GPU_BLOCK_MASK_KERNELS];
    struct gpu_forward_params params;
    if (blocks == 0)
        return FDM_OK;
    fdm_status status = cuda_kernels_get(plan->device.index, requests, count, kernels);
    gpu_fill_forward(attention, &params);
    if (!status && count > 1 && p->seqlen_k > 0)
        status = gpu_block_mask_launch(kernels + 1, p, plan->block_m, plan->block_n, workspace, stream, &params);
    if (status)
        return status;
    const struct cuda_launch launch = {.kernel = kernels[0],
                                       .grid = {(uint32_t)blocks, 1, 1},
                                       .threads = (uint32_t)requests[0].threads,
                                       .cluster = (uint32_t)cluster,
                                       .stream = stream,
                                       .arguments = &params,
                                       .arguments_bytes = sizeof params};
    return cuda_launch(&launch);
}
