/* forward_launch.c: what kernels do alike: refuse shapes, find a tile and say why, and launch a forward behind its
 * block mask. */
#include <stdio.h>

#include "gpu/tile_plan_launch.h"

const char *gpu_shape_refusal(const fdm_problem *p, int is_float32, int32_t head_dim_max, char *text, size_t size) {
    if (is_float32 ? p->dtype != FDM_FLOAT32 : !gpu_16_bits(p->dtype))
        return is_float32 ? "it takes float32" : "it takes float16 and bfloat16";
    if (p->head_dim <= head_dim_max && p->head_dim_v <= head_dim_max)
        return NULL;
    snprintf(text, size, "head dims are at most %d", head_dim_max);
    return text;
}

const char *gpu_no_tile_fits(const fdm_device *device, char *text, size_t size) {
    snprintf(text, size, "no tile fits the device's %lld KB of shared memory", (long long)device->shared_bytes >> 10);
    return text;
}

int32_t gpu_find_tile(int32_t count, gpu_fits fits, const fdm_device *device, const fdm_problem *p, int32_t number) {
    for (int32_t i = 0; i < count; i++)
        if (fits(i, device, p) && number-- == 0)
            return i;
    return -1;
}

const char *gpu_tile_refusal(int32_t count, gpu_fits fits, const fdm_device *device, const fdm_problem *p, char *text,
                             size_t size) {
    return gpu_find_tile(count, fits, device, p, 0) < 0 ? gpu_no_tile_fits(device, text, size) : NULL;
}

void gpu_give_tile_reason(fdm_plan *plan, const fdm_device *device, const fdm_problem *p, const char *reason) {
    char stages[32] = "";
    if (plan->stages > 1)
        snprintf(stages, sizeof stages, " with %d stages", plan->stages);
    snprintf(plan->reason, sizeof plan->reason,
             "%shead dim %lld: the first tile that fits %lld KB of shared memory is %dx%d%s (%lld KB): %s",
             p->dtype == FDM_FLOAT32 ? "float32 at " : "", (long long)gpu_widest(p),
             (long long)device->shared_bytes >> 10, plan->block_m, plan->block_n, stages,
             (long long)(plan->shared_bytes + 1023) >> 10, reason);
}

void gpu_add_forward(struct gpu_launches *l, const fdm_plan *plan, const struct cuda_kernel_request *request,
                     enum gpu_forward_tiles tiles, int64_t blocks, int32_t cluster) {
    struct gpu_forward_params params = {0};
    if (l->attention)
        gpu_fill_forward(l->attention, &params);
    if (tiles == GPU_TILES_OF_MASK)
        gpu_block_mask_add(l, plan->block_m, plan->block_n, l->workspace, &params);
    if (tiles == GPU_TILES_OF_KEYS)
        tile_plan_add_of_keys(l, l->workspace, &params);
    *gpu_add_kernel(l) = *request;
    gpu_add_launch(
        l, (struct gpu_launch){.grid = {blocks}, .cluster = cluster, .params = &params, .params_bytes = sizeof params});
}
