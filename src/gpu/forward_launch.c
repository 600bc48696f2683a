/* forward_launch.c: how forward kernels that are one launch, or one after their block mask, end: refusal and launches.
 */
#include <stdio.h>

#include "gpu/gpu_family.h"

const char *gpu_no_tile_fits(const fdm_device *device, char *text, size_t size) {
    snprintf(text, size, "no tile fits the device's %lld KB of shared memory", (long long)device->shared_bytes >> 10);
    return text;
}

void gpu_add_forward(struct gpu_launches *l, const fdm_plan *plan, const struct cuda_kernel_request *request,
                     int masked, int64_t blocks, int32_t cluster) {
    struct gpu_forward_params params = {0};
    if (l->attention)
        gpu_fill_forward(l->attention, &params);
    if (masked)
        gpu_block_mask_add(l, plan->block_m, plan->block_n, l->workspace, &params);
    *gpu_add_kernel(l) = *request;
    gpu_add_launch(
        l, (struct gpu_launch){.grid = {blocks}, .cluster = cluster, .params = &params, .params_bytes = sizeof params});
}
