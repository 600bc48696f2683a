/* mma_backward_d1024.c: the backward for head dims to 1024 on the host: its tiles, its three launches. */
#include "families/mma/backward_d1024/mma_backward_d1024.h"

#include <stdio.h>

#include "families/mma/mma_family.h"
#include "gpu/gpu_backward.h"

enum { HEAD_DIM_MAX = 1024 };

/* The first that fits head dims and shared memory is chosen, with as many stages as there is room for. Head dims are
 * the larger of D and Dv. A slice of 128 columns asks that padding to them costs nothing. */
struct tile {
    struct {
        int32_t head_dim_max;
        int32_t extras_max; /* of mask, bias, intervals of both kinds, softcap and packed sequences */
    } takes;
    struct {
        int32_t own, slice, kept, stages_min, stages_max;
    } shape;
    const char *reason;
};
static const struct tile tiles[] = {
    {.takes = {.head_dim_max = 512, .extras_max = 0},
     .shape = {.own = 64, .slice = 128, .kept = 2, .stages_min = 3, .stages_max = 4},
     .reason = "slices of 128 columns cost half as many barriers as of 64"},
    {.takes = {.head_dim_max = 512, .extras_max = 6},
     .shape = {.own = 64, .slice = 64, .kept = 2, .stages_min = 3, .stages_max = 6},
     .reason = "what is owned stays in shared memory"},
    {.takes = {.head_dim_max = 512, .extras_max = 6},
     .shape = {.own = 64, .slice = 64, .kept = 1, .stages_min = 3, .stages_max = 6},
     .reason = "one own matrix stays in shared memory"},
    {.takes = {.head_dim_max = 512, .extras_max = 6},
     .shape = {.own = 64, .slice = 64, .kept = 0, .stages_min = 3, .stages_max = 4},
     .reason = "fits 99 KB"},
    {.takes = {.head_dim_max = 1024, .extras_max = 6},
     .shape = {.own = 32, .slice = 64, .kept = 2, .stages_min = 3, .stages_max = 4},
     .reason = "the sums of 32 rows or keys fill the registers"},
    {.takes = {.head_dim_max = 1024, .extras_max = 6},
     .shape = {.own = 32, .slice = 64, .kept = 1, .stages_min = 3, .stages_max = 4},
     .reason = "fits 163 KB"},
    {.takes = {.head_dim_max = 1024, .extras_max = 6},
     .shape = {.own = 32, .slice = 64, .kept = 0, .stages_min = 3, .stages_max = 3},
     .reason = "fits 99 KB"},
};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0] };
PLAN_PARAMETER_STRUCT(MMA_BACKWARD_D1024_PARAMETERS);

static int32_t padded(const struct tile *t, int64_t head_dim) {
    return mma_d1024_padded((int32_t)head_dim, t->shape.own, t->shape.slice);
}
static int32_t shared_bytes(const struct tile *t, const fdm_problem *p, int32_t stages) {
    return mma_d1024_shared_bytes(t->shape.own, t->shape.slice, t->shape.kept, stages, padded(t, p->head_dim),
                                  padded(t, p->head_dim_v));
}

/* No more stages than the fewest slices of a step and one, which are those of dV: slices are loaded of one step ahead.
 */
static int32_t stages_max(const struct tile *t, const fdm_problem *p) {
    const int32_t sums = mma_d1024_others(t->shape.own) / 64 *
                         (padded(t, p->head_dim_v) / mma_d1024_sum_columns(t->shape.own, t->shape.slice));
    const int32_t slices = padded(t, p->head_dim) / t->shape.slice + sums;
    return slices + 1 < t->shape.stages_max ? slices + 1 : t->shape.stages_max;
}
/* Stages that the device has room for. */
static int32_t stages_of(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    int32_t stages = stages_max(t, p);
    while (stages > 0 && shared_bytes(t, p, stages) > device->shared_bytes)
        stages--;
    return stages;
}

/* Head dims that the tile's sums have room for, and features for which there are registers beside them. */
static int takes(const struct tile *t, const fdm_problem *p) {
    const int32_t extras =
        p->has_mask + p->has_bias + p->has_intervals + gpu_row_runs(p) + (p->softcap > 0) + p->varlen;
    return gpu_widest(p) <= t->takes.head_dim_max && extras <= t->takes.extras_max &&
           (t->shape.slice == 64 ||
            (gpu_round_up(p->head_dim, 64) % 128 == 0 && gpu_round_up(p->head_dim_v, 64) % 128 == 0));
}
static int fits(int32_t tile, const fdm_device *device, const fdm_problem *p) {
    const struct tile *t = &tiles[tile];
    return takes(t, p) && stages_of(t, device, p) >= t->shape.stages_min;
}

/* The block mask's tiles: of rows and of keys alike, whoever owns what. */
static int32_t mask_block(const struct tile *t) {
    return t->shape.own < mma_d1024_others(t->shape.own) ? t->shape.own : mma_d1024_others(t->shape.own);
}

static struct gpu_backward_needs needs_of(const struct tile *t, const fdm_problem *p) {
    const int64_t turns = gpu_ceil_div(p->seqlen_k, MMA_D1024_TURN_KEYS);
    return (struct gpu_backward_needs){.block_m = mask_block(t),
                                       .block_n = mask_block(t),
                                       .row_step = MMA_D1024_ROW_STEP,
                                       .head_dim = padded(t, p->head_dim),
                                       .head_dim_v = padded(t, p->head_dim_v),
                                       .dbias_blocks = gpu_dbias_in_turns(p) ? (int32_t)turns : 0,
                                       .dbias_shares = mma_d1024_shares(t->shape.own),
                                       .seeks_keys = 1,
                                       .lse_factor = 1};
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = gpu_shape_refusal(p, 0, HEAD_DIM_MAX, text, size);
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
    plan->block_m = t->shape.own;
    plan->block_n = mma_d1024_others(t->shape.own);
    plan->stages = stages_of(t, device, p);
    plan->shared_bytes = shared_bytes(t, p, plan->stages);
    plan->workspace_bytes = gpu_backward_workspace_bytes(p, &needs);
    snprintf(plan->choice, sizeof plan->choice, "MMA_Backward_%dx%d_D%d_Kept%d_S%d", plan->block_m, plan->block_n,
             t->shape.slice, t->shape.kept, plan->stages);
    gpu_give_tile_reason(plan, device, p, t->reason);
    return 1;
}

/* ---- execution ---- */

/* The family's launches, MMA_D1024_*, in this order. */
enum { NUM_KERNELS = MMA_D1024_DV + 1 };

/* Whether a launch makes something that is wanted. */
static int makes(const fdm_problem *p, int32_t kernel) {
    switch (kernel) {
    case MMA_D1024_DQ: return gpu_makes_dq(p);
    case MMA_D1024_DK: return gpu_makes_dk(p);
    default: return p->needs_dv;
    }
}
static int32_t dbias_of(const fdm_problem *p, int32_t kernel) {
    const int32_t kind = gpu_dbias_constant(p);
    return kernel == (kind == GPU_DBIAS_KEYS ? MMA_D1024_DK : MMA_D1024_DQ) ? kind : GPU_DBIAS_NONE;
}

static void main_request(const fdm_plan *plan, const fdm_problem *p, int32_t kernel,
                         struct cuda_kernel_request *request) {
    const struct tile *t = &tiles[parameters_of(plan).TILE];
    gpu_set_problem_constants(request, p, GPU_ALIKE_POSITIVE_SCALE | GPU_ALIKE_SCORES_ALIGNED);
    GPU_ADD_CONSTANTS(request, MMA_BACKWARD_D1024_CONSTANTS, .HEAD_DIM = padded(t, p->head_dim),
                      .HEAD_DIM_V = padded(t, p->head_dim_v), .OWN = t->shape.own, .SLICE = t->shape.slice,
                      .KEPT = t->shape.kept, .STAGES = plan->stages, .MAKES = kernel, .DBIAS = dbias_of(p, kernel),
                      .REDO = kernel == MMA_D1024_DQ ? gpu_hides_keys(p) : p->has_bias,
                      .DETERMINISTIC = dbias_of(p, kernel) == GPU_DBIAS_SUMS && gpu_dbias_in_turns(p),
                      .FOLDED = gpu_folds_grids(p));
    request->file = "families/mma/backward_d1024/mma_backward_d1024.cu";
    request->entry = "mma_backward_d1024";
    request->shared_bytes = shared_bytes(t, p, plan->stages);
    request->threads = 32 * MMA_D1024_WARPS;
    /* Beside the sums of dQ, scores and the addresses of a mask, a bias and its gradient do not all fit. A mask and a
     * bias with rows spill up to 60 bytes at other head dims and in other kernels. */
    const int widest_dq = kernel == MMA_D1024_DQ && dbias_of(p, kernel) != GPU_DBIAS_NONE && gpu_widest(p) > 512;
    request->spill_bytes_max = widest_dq ? 128 : gpu_mask_rows(p) && gpu_bias_rows(p) ? 60 : 0;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t number = parameters_of(plan).TILE;
    if (number < 0 || number >= NUM_TILES || !takes(&tiles[number], p))
        return 0;
    const struct tile *t = &tiles[number];
    const struct gpu_backward_needs needs = needs_of(t, p);
    return plan->block_m == t->shape.own && plan->block_n == mma_d1024_others(t->shape.own) &&
           plan->stages >= t->shape.stages_min && plan->stages <= stages_max(t, p) &&
           plan->shared_bytes == shared_bytes(t, p, plan->stages) &&
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
        const int of_rows = kernel == MMA_D1024_DQ;
        if (!makes(p, kernel))
            continue;
        main_request(plan, p, kernel, gpu_add_kernel(l));
        gpu_backward_add_grid(l, gpu_ceil_div(of_rows ? p->seqlen_q : p->seqlen_k, t->shape.own),
                              of_rows ? p->heads : p->heads_kv, p->batch, &params, sizeof params);
    }
    gpu_backward_add(l, GPU_BACKWARD_AFTER, &needs, &params);
    return FDM_OK;
}

const struct gpu_algorithm mma_backward_d1024_algorithm = {
    .info = {"mma.backward_d1024", "head dims to 1024: a launch for each of dQ, dK and dV, every feature",
             FDM_BACKWARD},
    .parameters = PLAN_PARAMETERS(MMA_BACKWARD_D1024_PARAMETERS),
    .features = GPU_EVERY_FEATURE | GPU_ROW_RUN_FEATURES,
    .chosen_freely = 1,
    .refusal = refusal,
    .fill = fill,
    .valid = valid,
    .launch = launch,
};
