/* mma_forward_d1024.c: the forward for large head dims on the host: its tiles, what it refuses, its constants and
 * its launch. */
#include "families/mma/forward_d1024/mma_forward_d1024.h"

#include <stdio.h>

#include "families/mma/mma_family.h"

enum { HEAD_DIM_MAX = 1024, SUITS_ABOVE = 256, SUITS_PLAIN_ABOVE = 160 };

/* ---- tiles ---- */

/* Tiles in order of preference: the first that fits head dims, features and device is chosen. Head dims are the larger
 * of D and Dv. Slices as large as listed cost the fewest meetings of the warps; the ring takes the memory that is left.
 * Features are counted (mask, bias, intervals, softcap, varlen): more than listed would spill registers. */
struct tile {
    struct {
        int32_t head_dim_min, head_dim_max, features_max;
        int32_t bounded_rows_max; /* 0, or: only with causal or window, to this number of query rows */
    } takes;
    struct {
        int32_t warps, block_m, block_n, cluster;
    } shape;
    struct {
        int32_t slice_d_max, slice_keys;
        int32_t slice_units_max; /* 16-column units of a warp in a slice of V */
        int32_t stages_min, stages_max;
    } slices;
    const char *reason;
};
static const struct tile tiles[] = {
    {.takes = {.head_dim_min = 1, .head_dim_max = 256, .features_max = 2, .bounded_rows_max = 1024},
     .shape = {.warps = 4, .block_m = 64, .block_n = 64, .cluster = 1},
     .slices = {.slice_d_max = 256, .slice_keys = 64, .slice_units_max = 8, .stages_min = 2, .stages_max = 2},
     .reason = "two blocks at a time: 1.14 x the speed of one at 512 causal rows"},
    {.takes = {.head_dim_min = 1, .head_dim_max = 256, .features_max = 2},
     .shape = {.warps = 8, .block_m = 128, .block_n = 64, .cluster = 1},
     .slices = {.slice_d_max = 256, .slice_keys = 64, .slice_units_max = 8, .stages_min = 2, .stages_max = 3},
     .reason = "128 rows share each slice: 1.2 x FlashAttention-2 on H200"},
    {.takes = {.head_dim_min = 1, .head_dim_max = 256, .features_max = 5},
     .shape = {.warps = 8, .block_m = 128, .block_n = 32, .cluster = 1},
     .slices = {.slice_d_max = 256, .slice_keys = 32, .slice_units_max = 8, .stages_min = 2, .stages_max = 4},
     .reason = "fewer scores a warp: registers for the features"},
    {.takes = {.head_dim_min = 257, .head_dim_max = 320, .features_max = 2},
     .shape = {.warps = 8, .block_m = 64, .block_n = 128, .cluster = 1},
     .slices = {.slice_d_max = 320, .slice_keys = 64, .slice_units_max = 8, .stages_min = 2, .stages_max = 2},
     .reason = "slices of the whole head dim: 1.09 x the speed of slices of 64"},
    {.takes = {.head_dim_min = 321, .head_dim_max = 384, .features_max = 1},
     .shape = {.warps = 8, .block_m = 64, .block_n = 128, .cluster = 1},
     .slices = {.slice_d_max = 192, .slice_keys = 64, .slice_units_max = 8, .stages_min = 2, .stages_max = 3},
     .reason = "slices of half of the head dim: 1.13 x the speed of slices of 128"},
    {.takes = {.head_dim_min = 257, .head_dim_max = 512, .features_max = 1},
     .shape = {.warps = 8, .block_m = 64, .block_n = 128, .cluster = 1},
     .slices = {.slice_d_max = 128, .slice_keys = 32, .slice_units_max = 8, .stages_min = 2, .stages_max = 4},
     .reason = "128 registers of O a thread"},
    {.takes = {.head_dim_min = 257, .head_dim_max = 512, .features_max = 5},
     .shape = {.warps = 8, .block_m = 64, .block_n = 64, .cluster = 1},
     .slices = {.slice_d_max = 128, .slice_keys = 32, .slice_units_max = 8, .stages_min = 2, .stages_max = 4},
     .reason = "fewer scores a warp: registers for the features"},
    {.takes = {.head_dim_min = 513, .head_dim_max = 1024, .features_max = 1},
     .shape = {.warps = 8, .block_m = 32, .block_n = 256, .cluster = 1},
     .slices = {.slice_d_max = 64, .slice_keys = 16, .slice_units_max = 8, .stages_min = 3, .stages_max = 4},
     .reason = "128 registers of O a thread; two blocks that share rows are slower"},
    {.takes = {.head_dim_min = 513, .head_dim_max = 1024, .features_max = 2},
     .shape = {.warps = 8, .block_m = 64, .block_n = 256, .cluster = 2},
     .slices = {.slice_d_max = 64, .slice_keys = 16, .slice_units_max = 8, .stages_min = 3, .stages_max = 4},
     .reason = "two blocks share 64 rows"},
    {.takes = {.head_dim_min = 513, .head_dim_max = 1024, .features_max = 5},
     .shape = {.warps = 8, .block_m = 32, .block_n = 128, .cluster = 1},
     .slices = {.slice_d_max = 64, .slice_keys = 16, .slice_units_max = 4, .stages_min = 3, .stages_max = 5},
     .reason = "fits 163 KB"},
    {.takes = {.head_dim_min = 1, .head_dim_max = 512, .features_max = 5},
     .shape = {.warps = 8, .block_m = 32, .block_n = 128, .cluster = 1},
     .slices = {.slice_d_max = 64, .slice_keys = 16, .slice_units_max = 8, .stages_min = 2, .stages_max = 5},
     .reason = "fits 99 KB"},
    {.takes = {.head_dim_min = 513, .head_dim_max = 1024, .features_max = 5},
     .shape = {.warps = 8, .block_m = 32, .block_n = 64, .cluster = 1},
     .slices = {.slice_d_max = 64, .slice_keys = 16, .slice_units_max = 2, .stages_min = 2, .stages_max = 5},
     .reason = "fits 99 KB"},
};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0] };
PLAN_PARAMETER_STRUCT(MMA_FORWARD_D1024_PARAMETERS);

static int32_t features_of(const fdm_problem *p) {
    return (p->has_mask != 0) + (p->has_bias != 0) + (p->has_intervals != 0) + (p->softcap > 0) +
           (p->varlen || p->has_cache);
}

/* What a tile becomes for a problem: head dims padded to what its slices take. */
struct fitted {
    int32_t head_dim, head_dim_v, slice_d, slice_parts;
};

/* The largest step of which `whole` is a multiple, at most `most`. */
static int32_t largest_part(int32_t whole, int32_t most) {
    int32_t part = most < whole ? most : whole;
    while (whole % part != 0)
        part--;
    return part;
}

static struct fitted fit(const struct tile *t, const fdm_problem *p) {
    struct fitted f;
    f.head_dim = (int32_t)gpu_round_up(p->head_dim, 64);
    f.slice_d = 64 * largest_part(f.head_dim / 64, t->slices.slice_d_max / 64);
    if (f.slice_d == 64 && t->slices.slice_d_max == 128) { /* padding costs less than slices of 64: 1.26 x at D 448 */
        f.head_dim = (int32_t)gpu_round_up(p->head_dim, 128);
        f.slice_d = 128;
    }
    /* Every warp holds whole units of 16 columns, and a row of a V slice is a multiple of 128 bytes. */
    const int32_t unit_columns =
        16 * MMA_FORWARD_D1024_COLUMN_GROUPS(t->shape.warps, t->shape.block_m) * t->shape.cluster;
    const int32_t step = unit_columns > 64 * t->shape.cluster ? unit_columns : 64 * t->shape.cluster;
    f.head_dim_v = (int32_t)gpu_round_up(p->head_dim_v, step);
    const int32_t units = f.head_dim_v / step, most = t->slices.slice_units_max * unit_columns / step;
    f.slice_parts = units / largest_part(units, most);
    return f;
}

static int32_t shared_bytes(const struct tile *t, const struct fitted *f, int32_t stages, const fdm_problem *p) {
    return MMA_FORWARD_D1024_SHARED_BYTES(f->head_dim, f->head_dim_v, t->shape.warps, t->shape.block_m,
                                          t->shape.block_n, f->slice_d, t->slices.slice_keys, f->slice_parts, stages,
                                          t->shape.cluster, gpu_cache_constant(p) == GPU_CACHE_PAGES);
}

/* Stages that the device's shared memory has room for; 1 may be too many. */
static int32_t stages_of(const struct tile *t, const struct fitted *f, const fdm_device *device, const fdm_problem *p) {
    int32_t stages = t->slices.stages_max;
    while (stages > 1 && shared_bytes(t, f, stages, p) > device->shared_bytes)
        stages--;
    return stages;
}

static int64_t grid_of(const struct tile *t, const fdm_problem *p) {
    return (p->seqlen_q + t->shape.block_m - 1) / t->shape.block_m * t->shape.cluster * p->heads * p->batch;
}

static int fits(int32_t tile, const fdm_device *device, const fdm_problem *p) {
    const struct tile *t = &tiles[tile];
    const int64_t widest = gpu_widest(p);
    const int has_clusters = device->compute_major == 9 || device->compute_major == 10;
    if (widest < t->takes.head_dim_min || widest > t->takes.head_dim_max || features_of(p) > t->takes.features_max)
        return 0;
    /* Intervals would spill registers in a cluster. */
    if (t->shape.cluster > 1 && (!has_clusters || p->has_intervals || p->has_cache))
        return 0;
    if (t->takes.bounded_rows_max > 0 && (!gpu_bounded(p) || p->seqlen_q > t->takes.bounded_rows_max))
        return 0;
    if (grid_of(t, p) > INT32_MAX)
        return 0;
    const struct fitted f = fit(t, p);
    if (t->shape.warps == 4 && 2 * shared_bytes(t, &f, t->slices.stages_max, p) > device->shared_bytes)
        return 0;
    return stages_of(t, &f, device, p) >= t->slices.stages_min;
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = gpu_shape_refusal(p, 0, HEAD_DIM_MAX, text, size);
    if (clause)
        return clause;
    if (p->head_dim % 8 != 0 || p->head_dim_v % 8 != 0)
        return "head dims must be multiples of 8";
    if (p->seqlen_q > INT32_MAX / 2 || p->seqlen_k > INT32_MAX / 2)
        return "sequences are at most 2^30 long";
    return gpu_tile_refusal(NUM_TILES, fits, device, p, text, size);
}

/* Up to 256, mma.forward skips the tiles that mask and intervals leave empty, which this kernel does not, and this
 * kernel is ahead with blocks of 128 rows. */
static const char *passed_over(const fdm_device *device, const fdm_problem *p) {
    const int64_t widest = gpu_widest(p);
    if (widest <= SUITS_ABOVE && p->has_cache)
        return "mma.forward finds the pages of a cache once a tile, this kernel once a slice";
    if (widest > SUITS_ABOVE ||
        (widest > SUITS_PLAIN_ABOVE && !p->has_mask && !p->has_intervals && (fits(1, device, p) || fits(2, device, p))))
        return NULL;
    return "mma.forward is faster up to head dim 160, and up to 256 with a mask or key intervals";
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    const int32_t i = gpu_find_tile(NUM_TILES, fits, device, p, variant);
    if (i < 0)
        return 0;
    const struct tile *t = &tiles[i];
    const struct fitted f = fit(t, p);
    PLAN_SET_PARAMETERS(plan, .TILE = i);
    plan->block_m = t->shape.block_m;
    plan->block_n = t->shape.block_n;
    plan->stages = stages_of(t, &f, device, p);
    plan->shared_bytes = shared_bytes(t, &f, plan->stages, p);
    plan->workspace_bytes = 0;
    snprintf(plan->choice, sizeof plan->choice, "MMA_Wide_%dx%d_K%d_V%d_S%d%s", t->shape.block_m, t->shape.block_n,
             f.slice_d, t->slices.slice_keys, plan->stages, t->shape.cluster == 2 ? "_Cluster2" : "");
    gpu_give_tile_reason(plan, device, p, t->reason);
    return 1;
}

/* ---- execution ---- */

static void request_of(const fdm_plan *plan, const fdm_problem *p, struct cuda_kernel_request *request) {
    const struct tile *t = &tiles[parameters_of(plan).TILE];
    const struct fitted f = fit(t, p);
    gpu_set_problem_constants(request, p,
                              GPU_ALIKE_WINDOW | GPU_ALIKE_MASK_ROWS | GPU_ALIKE_BIAS_ROWS | GPU_ALIKE_SCORES_ALIGNED |
                                  GPU_ALIKE_POSITIVE_SCALE);
    GPU_ADD_CONSTANTS(request, MMA_FORWARD_D1024_CONSTANTS, .HEAD_DIM = f.head_dim, .HEAD_DIM_V = f.head_dim_v,
                      .WARPS = t->shape.warps, .BLOCK_M = t->shape.block_m, .BLOCK_N = t->shape.block_n,
                      .SLICE_D = f.slice_d, .SLICE_KEYS = t->slices.slice_keys, .SLICE_PARTS = f.slice_parts,
                      .STAGES = plan->stages, .CLUSTER = t->shape.cluster, .REDO = gpu_hides_keys(p));
    request->file = "families/mma/forward_d1024/mma_forward_d1024.cu";
    request->entry = "mma_forward_d1024";
    request->shared_bytes = shared_bytes(t, &f, plan->stages, p);
    request->threads = 32 * t->shape.warps;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    if (parameters_of(plan).TILE < 0 || parameters_of(plan).TILE >= NUM_TILES)
        return 0;
    const struct tile *t = &tiles[parameters_of(plan).TILE];
    const struct fitted f = fit(t, p);
    return p->head_dim <= t->takes.head_dim_max && p->head_dim_v <= t->takes.head_dim_max &&
           features_of(p) <= t->takes.features_max && plan->stages >= t->slices.stages_min &&
           plan->stages <= t->slices.stages_max && plan->block_m == t->shape.block_m &&
           plan->block_n == t->shape.block_n && plan->shared_bytes == shared_bytes(t, &f, plan->stages, p);
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const struct tile *t = &tiles[parameters_of(plan).TILE];
    struct cuda_kernel_request request;
    request_of(plan, l->problem, &request);
    gpu_add_forward(l, plan, &request, GPU_TILES_OF_NOTHING, grid_of(t, l->problem), t->shape.cluster);
    return FDM_OK;
}

const struct gpu_algorithm mma_forward_d1024_algorithm = {
    .info = {"mma.forward_d1024", "head dims up to 1024: O spread over the warps of a block or of two", FDM_FORWARD},
    .parameters = PLAN_PARAMETERS(MMA_FORWARD_D1024_PARAMETERS),
    .features = (GPU_EVERY_FEATURE & ~GPU_FEATURE_UNALIGNED) | GPU_FEATURE_SEQUSED | GPU_FEATURE_CACHE,
    .chosen_freely = 1,
    .writes_lse_low = 1,
    .refusal = refusal,
    .passed_over = passed_over,
    .fill = fill,
    .valid = valid,
    .launch = launch,
};
