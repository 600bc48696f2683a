/* mma_backward32.c: the float32 backward on the host: its tile, its passes and their launches. */
#include "families/mma/float32/mma_backward32.h"

#include <stdio.h>

#include "families/mma/mma_family.h"
#include "gpu/gpu_backward.h"

/* The first row whose head dims and shared memory fit is chosen. A block owns 16 * warps / share rows or keys and walks
 * the others `block` at a time. */
struct tile {
    struct {
        int32_t head_dim_min, head_dim_max; /* of the smaller and of the larger of D and Dv */
        int32_t extras_max;                 /* of mask, bias, intervals of both kinds and softcap */
    } takes;
    struct {
        int32_t warps, share, block;
    } shape;
    const char *reason;
};
static const struct tile tiles[] = {
    {.takes = {.head_dim_min = 33, .head_dim_max = 128, .extras_max = 3},
     .shape = {.warps = 4, .share = 1, .block = 32},
     .reason = "the longest step without a spill"},
    {.takes = {.head_dim_max = 128, .extras_max = 5},
     .shape = {.warps = 4, .share = 1, .block = 16},
     .reason = "the longest step without a spill for head dims up to 32, and for every feature at a time"},
    {.takes = {.head_dim_max = 256, .extras_max = 5},
     .shape = {.warps = 8, .share = 2, .block = 16},
     .reason = "two warps share the columns of 16 rows or keys, whose sums one could not hold"},
    {.takes = {.head_dim_max = 256, .extras_max = 5},
     .shape = {.warps = 4, .share = 2, .block = 16},
     .reason = "fits 99 KB"},
};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0] };
PLAN_PARAMETER_STRUCT(MMA_BACKWARD32_PARAMETERS);

/* Sums a thread may hold; beyond, dK and dV are made by launches of their own. */
enum { SUMS_MAX = 64 };

static int32_t own_of(const struct tile *t) { return 16 * t->shape.warps / t->shape.share; }

static int32_t shared_bytes(const struct tile *t, const fdm_problem *p) {
    return mma_backward32_shared_bytes(own_of(t), t->shape.block, mma_padded32(p->head_dim, p->head_dim_v),
                                       mma_padded32(p->head_dim_v, p->head_dim));
}

static int fits(int32_t tile, const fdm_device *device, const fdm_problem *p) {
    const struct tile *t = &tiles[tile];
    const int32_t extras = p->has_mask + p->has_bias + p->has_intervals + gpu_row_runs(p) + (p->softcap > 0);
    const int64_t widest = gpu_widest(p);
    return extras <= t->takes.extras_max && (t->shape.share == 1 || widest > 128) && widest <= t->takes.head_dim_max &&
           p->head_dim >= t->takes.head_dim_min && p->head_dim_v >= t->takes.head_dim_min &&
           shared_bytes(t, p) <= device->shared_bytes;
}

static struct gpu_backward_needs needs_of(const struct tile *t, const fdm_problem *p) {
    const int64_t blocks = (p->seqlen_k + MMA_BACKWARD32_TURN_KEYS - 1) / MMA_BACKWARD32_TURN_KEYS;
    return (struct gpu_backward_needs){.block_m = t->shape.block,
                                       .block_n = t->shape.block,
                                       .row_step = MMA_BACKWARD_ROW_STEP,
                                       .head_dim = mma_padded32(p->head_dim, p->head_dim_v),
                                       .head_dim_v = mma_padded32(p->head_dim_v, p->head_dim),
                                       .dbias_blocks = gpu_dbias_in_turns(p) ? (int32_t)blocks : 0,
                                       .dbias_shares = 1,
                                       .seeks_keys = 1,
                                       .lse_factor = 1};
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = gpu_shape_refusal(p, 1, 256, text, size);
    if (!clause)
        clause = gpu_backward_refusal(p, 0);
    return clause ? clause : gpu_tile_refusal(NUM_TILES, fits, device, p, text, size);
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    const int32_t i = gpu_find_tile(NUM_TILES, fits, device, p, variant);
    if (i < 0)
        return 0;
    const struct tile *t = &tiles[i];
    const struct gpu_backward_needs needs = needs_of(t, p);
    PLAN_SET_PARAMETERS(plan, .TILE = i);
    plan->block_m = own_of(t);
    plan->block_n = t->shape.block;
    plan->stages = 1;
    plan->shared_bytes = shared_bytes(t, p);
    plan->workspace_bytes = gpu_backward_workspace_bytes(p, &needs);
    snprintf(plan->choice, sizeof plan->choice, "MMA_Backward_TF32x3_%dx%d", plan->block_m, plan->block_n);
    gpu_give_tile_reason(plan, device, p, t->reason);
    return 1;
}

/* ---- execution ---- */

/* The family's launches, in this order. */
enum { OWN_ROWS, OWN_KEYS, OWN_KEYS_VALUES, NUM_KERNELS };

/* The gradients that a launch makes; 0: there is no such launch. dK and dV share one where their sums fit. */
static int32_t gradients_of(const fdm_problem *p, int32_t kernel) {
    const int32_t of_keys = (gpu_makes_dk(p) ? MMA_GRADIENT_OF_SCORES : 0) | (p->needs_dv ? MMA_GRADIENT_OF_VALUES : 0);
    const int32_t sums = (mma_padded32(p->head_dim, p->head_dim_v) + mma_padded32(p->head_dim_v, p->head_dim)) / 2;
    const int both = of_keys == (MMA_GRADIENT_OF_SCORES | MMA_GRADIENT_OF_VALUES) && sums <= SUMS_MAX;
    switch (kernel) {
    case OWN_ROWS: return gpu_makes_dq(p) ? MMA_GRADIENT_OF_SCORES : 0;
    case OWN_KEYS: return both ? of_keys : of_keys & MMA_GRADIENT_OF_SCORES;
    case OWN_KEYS_VALUES: return both ? 0 : of_keys & MMA_GRADIENT_OF_VALUES;
    default: return 0;
    }
}

/* The bias' gradient is made with the gradient of the scores, of keys or of rows. */
static int32_t dbias_of(const fdm_problem *p, int32_t kernel) {
    const int32_t kind = gpu_dbias_constant(p);
    if (!(gradients_of(p, kernel) & MMA_GRADIENT_OF_SCORES))
        return GPU_DBIAS_NONE;
    return (kernel == OWN_KEYS) == (kind == GPU_DBIAS_KEYS) ? kind : GPU_DBIAS_NONE;
}

static void main_request(const struct tile *t, const fdm_problem *p, int32_t kernel,
                         struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p,
                              GPU_ALIKE_POSITIVE_SCALE | (kernel == OWN_ROWS ? 0 : GPU_ALIKE_SCORES_ALIGNED));
    GPU_ADD_CONSTANTS(
        request, MMA_BACKWARD32_CONSTANTS, .HEAD_DIM = mma_padded32(p->head_dim, p->head_dim_v),
        .HEAD_DIM_V = mma_padded32(p->head_dim_v, p->head_dim), .WARPS = t->shape.warps, .SHARE = t->shape.share,
        .BLOCK = t->shape.block, .OWNS_KEYS = kernel != OWN_ROWS, .GRADIENTS = gradients_of(p, kernel),
        .DBIAS = dbias_of(p, kernel), .REDO = kernel == OWN_ROWS ? gpu_hides_keys(p) : p->has_bias,
        .DETERMINISTIC = dbias_of(p, kernel) == GPU_DBIAS_SUMS && gpu_dbias_in_turns(p), .FOLDED = gpu_folds_grids(p));
    request->file = "families/mma/float32/mma_backward32.cu";
    request->entry = "mma_backward32";
    request->shared_bytes = shared_bytes(t, p);
    request->threads = 32 * t->shape.warps;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t tile = parameters_of(plan).TILE;
    if (tile < 0 || tile >= NUM_TILES || p->head_dim > tiles[tile].takes.head_dim_max ||
        p->head_dim_v > tiles[tile].takes.head_dim_max)
        return 0;
    const struct gpu_backward_needs needs = needs_of(&tiles[tile], p);
    return plan->block_m == own_of(&tiles[tile]) && plan->block_n == tiles[tile].shape.block &&
           plan->shared_bytes == shared_bytes(&tiles[tile], p) &&
           plan->workspace_bytes >= gpu_backward_workspace_bytes(p, &needs);
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct tile *t = &tiles[parameters_of(plan).TILE];
    const struct gpu_backward_needs needs = needs_of(t, p);
    struct gpu_backward_params params;
    gpu_backward_fill(l, &needs, &params);
    gpu_backward_add(l, GPU_BACKWARD_BEFORE, &needs, &params);
    for (int32_t kernel = 0; kernel < NUM_KERNELS; kernel++) {
        if (!gradients_of(p, kernel))
            continue;
        main_request(t, p, kernel, gpu_add_kernel(l));
        gpu_backward_add_grid(l, gpu_ceil_div(kernel == OWN_ROWS ? p->seqlen_q : p->seqlen_k, own_of(t)),
                              kernel == OWN_ROWS ? p->heads : p->heads_kv, p->batch, &params, sizeof params);
    }
    gpu_backward_add(l, GPU_BACKWARD_AFTER, &needs, &params);
    return FDM_OK;
}

const struct gpu_algorithm mma_backward32_algorithm = {
    .info = {"mma.backward32", "a pass over rows and one over keys on mma.sync for float32 by 3xTF32, every feature",
             FDM_BACKWARD},
    .parameters = PLAN_PARAMETERS(MMA_BACKWARD32_PARAMETERS),
    .features = GPU_EVERY_FEATURE | GPU_ROW_RUN_FEATURES | GPU_FEATURE_SEQUSED,
    .chosen_freely = 1,
    .refusal = refusal,
    .fill = fill,
    .valid = valid,
    .launch = launch,
};
