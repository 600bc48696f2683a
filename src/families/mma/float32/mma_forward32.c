/* mma_forward32.c: the float32 forward on the host: which tile for which problem, its constants and its launch. */
#include "families/mma/float32/mma_forward32.h"

#include <stdio.h>

#include "families/mma/mma_family.h"
#include "gpu/tile_plan_launch.h"

/* The first row whose head dims and shared memory fit is chosen. */
struct tile {
    struct {
        int32_t head_dim_max;
        int32_t bare; /* not 0: only for causal and window, on dense tensors; 90: and only on 9.0 */
    } takes;
    struct {
        int32_t warps, share, row_tiles, block_n;
        int32_t blocks; /* wanted on a multiprocessor at a time */
    } shape;
    const char *reason;
};
static const struct tile tiles[] = {
    {.takes = {.head_dim_max = 64, .bare = 1},
     .shape = {.warps = 4, .share = 1, .row_tiles = 2, .block_n = 32, .blocks = 2},
     .reason = "32 rows a warp share the split keys and values: 24 % faster than 16"},
    {.takes = {.head_dim_max = 128},
     .shape = {.warps = 4, .share = 1, .row_tiles = 1, .block_n = 32, .blocks = 2},
     .reason = "the longest step without a spill"},
    {.takes = {.head_dim_max = 256, .bare = 90},
     .shape = {.warps = 4, .share = 1, .row_tiles = 1, .block_n = 16, .blocks = 2},
     .reason = "34 % faster than two warps to the same rows"},
    {.takes = {.head_dim_max = 256},
     .shape = {.warps = 8, .share = 2, .row_tiles = 1, .block_n = 16, .blocks = 1},
     .reason = "two warps share the columns of 16 rows, which would fill the registers of one"},
};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0] };
PLAN_PARAMETER_STRUCT(MMA_FORWARD32_PARAMETERS);

static int32_t block_m(const struct tile *t) { return 16 * t->shape.row_tiles * t->shape.warps / t->shape.share; }

static int32_t shared_bytes(const struct tile *t, const fdm_problem *p) {
    return mma_forward32_shared_bytes(block_m(t), t->shape.block_n, mma_padded32(p->head_dim, p->head_dim_v),
                                      mma_padded32(p->head_dim_v, p->head_dim), gpu_lists_keys(p));
}

static int is_bare(const fdm_problem *p) {
    return !p->has_mask && !p->has_bias && !p->has_intervals && !gpu_row_runs(p) && !p->varlen && !(p->softcap > 0) &&
           p->aligned;
}

static int fits(int32_t tile, const fdm_device *device, const fdm_problem *p) {
    const struct tile *t = &tiles[tile];
    const int on_90 = device->compute_major == 9 && device->compute_minor == 0;
    const int64_t widest = gpu_widest(p);
    return (!t->takes.bare || is_bare(p)) && (t->takes.bare != 90 || on_90) && (t->shape.share == 1 || widest > 128) &&
           p->head_dim <= t->takes.head_dim_max && p->head_dim_v <= t->takes.head_dim_max &&
           shared_bytes(t, p) <= device->shared_bytes;
}

static int64_t mask_bytes(const struct tile *t, const fdm_problem *p) {
    return gpu_masks_blocks(p) ? gpu_block_mask_bytes(p, block_m(t), t->shape.block_n) : tile_plan_bytes_of_keys(p);
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = gpu_shape_refusal(p, 1, 256, text, size);
    return clause ? clause : gpu_tile_refusal(NUM_TILES, fits, device, p, text, size);
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    const int32_t i = gpu_find_tile(NUM_TILES, fits, device, p, variant);
    if (i < 0)
        return 0;
    const struct tile *t = &tiles[i];
    PLAN_SET_PARAMETERS(plan, .TILE = i);
    plan->block_m = block_m(t);
    plan->block_n = t->shape.block_n;
    plan->stages = 1;
    plan->shared_bytes = shared_bytes(t, p);
    plan->workspace_bytes = mask_bytes(t, p);
    snprintf(plan->choice, sizeof plan->choice, "MMA_Forward_TF32x3_%dx%d%s", plan->block_m, plan->block_n,
             t->shape.share > 1 ? "_Shared" : "");
    gpu_give_tile_reason(plan, device, p, t->reason);
    return 1;
}

/* ---- execution ---- */

static void forward_request(const struct tile *t, const fdm_problem *p, struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p, GPU_ALIKE_POSITIVE_SCALE);
    GPU_ADD_CONSTANTS(request, MMA_FORWARD32_CONSTANTS, .HEAD_DIM = mma_padded32(p->head_dim, p->head_dim_v),
                      .HEAD_DIM_V = mma_padded32(p->head_dim_v, p->head_dim), .WARPS = t->shape.warps,
                      .SHARE = t->shape.share, .ROW_TILES = t->shape.row_tiles, .BLOCK_N = t->shape.block_n,
                      .MIN_BLOCKS = t->shape.blocks, .REDO = gpu_hides_keys(p));
    request->file = "families/mma/float32/mma_forward32.cu";
    request->entry = "mma_forward32";
    request->shared_bytes = shared_bytes(t, p);
    request->threads = 32 * t->shape.warps;
    /* Compiled for 10.0, a window, a float32 bias and intervals of packed sequences together put 24 bytes aside; so do,
     * for 9.0, the widest rows of two blocks a multiprocessor. */
    const int most = p->varlen && p->has_bias && p->has_intervals && gpu_bounded(p);
    request->spill_bytes_max = most || (t->shape.blocks > 1 && p->head_dim > 128) ? 24 : 0;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t tile = parameters_of(plan).TILE;
    return tile >= 0 && tile < NUM_TILES && plan->block_m == block_m(&tiles[tile]) &&
           plan->block_n == tiles[tile].shape.block_n && plan->shared_bytes == shared_bytes(&tiles[tile], p) &&
           p->head_dim <= tiles[tile].takes.head_dim_max && p->head_dim_v <= tiles[tile].takes.head_dim_max &&
           mask_bytes(&tiles[tile], p) <= plan->workspace_bytes;
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct tile *t = &tiles[parameters_of(plan).TILE];
    struct cuda_kernel_request request;
    forward_request(t, p, &request);
    gpu_add_forward(l, plan, &request, gpu_masks_blocks(p) ? GPU_TILES_OF_MASK : GPU_TILES_OF_KEYS,
                    gpu_ceil_div(p->seqlen_q, block_m(t)) * p->batch * p->heads, 1);
    return FDM_OK;
}

const struct gpu_algorithm mma_forward32_algorithm = {
    .info = {"mma.forward32", "FlashAttention-2 on mma.sync for float32 by 3xTF32, every feature", FDM_FORWARD},
    .parameters = PLAN_PARAMETERS(MMA_FORWARD32_PARAMETERS),
    .features = GPU_EVERY_FEATURE | GPU_ROW_RUN_FEATURES | GPU_FEATURE_SEQUSED,
    .chosen_freely = 1,
    .writes_lse_low = 1,
    .refusal = refusal,
    .fill = fill,
    .valid = valid,
    .launch = launch,
};
