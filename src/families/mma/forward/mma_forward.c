/* mma_forward.c: the production forward on the host: which tile for which problem, its constants and its launch. */
#include "families/mma/forward/mma_forward.h"

#include <stdio.h>
#include <string.h>

#include "families/mma/mma_family.h"
#include "gpu/block_mask.h"
#include "gpu/tile_plan_launch.h"

/* ---- tiles ---- */

/* What the scores need besides Q K^T decides how many registers are left. */
enum scoring {
    NO_MASK_OR_BIAS,   /* causal or window at most */
    LISTED_KEYS,       /* intervals, mask or bias of the key alone: visible keys are listed and gathered */
    MASK_OR_BIAS_ROWS, /* a mask or a bias with rows, copied to shared memory beside the keys */
    ANY_SCORES         /* the rest: softcap, a scale that is not positive, both kinds, unaligned rows or tensors */
};

/* A row is taken when head dims, scoring, length and device fit it; the first that fits is chosen. Registers of O and S
 * are (head_dim_v + block_n) / 2 * row_tiles, and the assembler needs some 60 for the rest; which features still fit is
 * what fdm-checks compile finds. Times are of one H200, bfloat16, 16384 tokens (bench/results/nvidia-h200). */
struct tile {
    struct {
        int32_t head_dim_max;
        enum scoring scoring;
        int32_t exact;      /* head dims, rounded up to 16: 1 both head_dim_max, 2 equal, 0 any */
        int32_t windowed;   /* 0: only without causal and window, 2: only with */
        int32_t extras_max; /* as extras_of() counts them */
        int32_t seqlen_k_min;
        int32_t arch_max;       /* compute capability, 90 = 9.0, beyond which the assembler spills; 0: none */
        int32_t cache_arch_max; /* the same beside a cache; -1: it spills on all */
    } takes;
    struct {
        int32_t warps, row_tiles, block_n, stages;
        int32_t blocks; /* wanted on a multiprocessor at a time */
        int32_t q_in_registers, optimistic;
    } shape;
    const char *reason;
};
static const struct tile tiles[] = {
    {.takes = {.head_dim_max = 64,
               .scoring = NO_MASK_OR_BIAS,
               .exact = 1,
               .windowed = 0,
               .extras_max = 0,
               .arch_max = 90,
               .cache_arch_max = -1},
     .shape =
         {.warps = 4, .row_tiles = 2, .block_n = 128, .stages = 2, .blocks = 2, .q_in_registers = 1, .optimistic = 1},
     .reason = "the longest step without a spill; 5 % faster than 64 keys"},
    {.takes = {.head_dim_max = 64,
               .scoring = NO_MASK_OR_BIAS,
               .exact = 1,
               .windowed = 2,
               .extras_max = 0,
               .seqlen_k_min = 2048,
               .arch_max = 90,
               .cache_arch_max = -1},
     .shape =
         {.warps = 4, .row_tiles = 2, .block_n = 96, .stages = 2, .blocks = 2, .q_in_registers = 1, .optimistic = 1},
     .reason = "the longest step without a spill; 5 % faster than 64 keys"},
    {.takes = {.head_dim_max = 64, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 1},
     .shape =
         {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .blocks = 2, .q_in_registers = 1, .optimistic = 1},
     .reason = "short rows waste less of the diagonal; 6 % faster than 96 keys"},
    {.takes = {.head_dim_max = 128, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 0, .arch_max = 90},
     .shape = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .blocks = 2, .optimistic = 1},
     .reason = "32 rows a warp: a fragment of K or V feeds two products"},
    {.takes = {.head_dim_max = 128, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 1, .arch_max = 90},
     .shape = {.warps = 4, .row_tiles = 2, .block_n = 48, .stages = 2, .blocks = 2, .optimistic = 1},
     .reason = "32 rows a warp, and registers for packed sequences"},
    {.takes = {.head_dim_max = 128, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 1},
     .shape = {.warps = 4, .row_tiles = 2, .block_n = 32, .stages = 2, .blocks = 1, .optimistic = 1},
     .reason = "fits 99 KB"},
    {.takes = {.head_dim_max = 256, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 1, .arch_max = 90},
     .shape = {.warps = 8, .row_tiles = 1, .block_n = 64, .stages = 2, .blocks = 1},
     .reason = "32 rows a warp would need 256 registers for O alone"},
    {.takes = {.head_dim_max = 256, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 1, .arch_max = 90},
     .shape = {.warps = 8, .row_tiles = 1, .block_n = 32, .stages = 2, .blocks = 1},
     .reason = "fits 163 KB"},
    {.takes = {.head_dim_max = 192, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 1},
     .shape = {.warps = 8, .row_tiles = 1, .block_n = 32, .stages = 2, .blocks = 1},
     .reason = "fits 163 KB, and 10.0 has no spill"},
    {.takes = {.head_dim_max = 256, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 0},
     .shape = {.warps = 8, .row_tiles = 1, .block_n = 32, .stages = 2, .blocks = 1},
     .reason = "10.0 has no spill without packed sequences and lengths on the device"},
    {.takes = {.head_dim_max = 256, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 1, .arch_max = 90},
     .shape = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .blocks = 1},
     .reason = "fits 99 KB"},
    {.takes = {.head_dim_max = 256, .scoring = NO_MASK_OR_BIAS, .windowed = 1, .extras_max = 1},
     .shape = {.warps = 4, .row_tiles = 1, .block_n = 16, .stages = 2, .blocks = 1},
     .reason = "fits 99 KB, and 10.0 and 12.0 have no spill"},
    {.takes = {.head_dim_max = 64, .scoring = LISTED_KEYS, .windowed = 1, .extras_max = 5},
     .shape = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .blocks = 2, .optimistic = 1},
     .reason = "the longest step without a spill"},
    {.takes = {.head_dim_max = 128, .scoring = LISTED_KEYS, .exact = 2, .windowed = 1, .extras_max = 1, .arch_max = 90},
     .shape = {.warps = 4, .row_tiles = 2, .block_n = 32, .stages = 2, .blocks = 2},
     .reason = "the longest step without a spill"},
    {.takes = {.head_dim_max = 128, .scoring = LISTED_KEYS, .windowed = 1, .extras_max = 5},
     .shape = {.warps = 4, .row_tiles = 2, .block_n = 16, .stages = 2, .blocks = 2},
     .reason = "the longest step without a spill"},
    {.takes = {.head_dim_max = 64,
               .scoring = MASK_OR_BIAS_ROWS,
               .windowed = 1,
               .extras_max = 3,
               .arch_max = 90,
               .cache_arch_max = -1},
     .shape = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .blocks = 2, .optimistic = 1},
     .reason = "the longest step without a spill"},
    {.takes = {.head_dim_max = 64, .scoring = MASK_OR_BIAS_ROWS, .windowed = 1, .extras_max = 3},
     .shape = {.warps = 4, .row_tiles = 2, .block_n = 32, .stages = 2, .blocks = 2, .optimistic = 1},
     .reason = "the longest step without a spill"},
    {.takes = {.head_dim_max = 128, .scoring = MASK_OR_BIAS_ROWS, .windowed = 0, .extras_max = 3},
     .shape = {.warps = 4, .row_tiles = 2, .block_n = 32, .stages = 2, .blocks = 2},
     .reason = "the longest step without a spill"},
    {.takes = {.head_dim_max = 128, .scoring = ANY_SCORES, .windowed = 1, .extras_max = 5, .arch_max = 90},
     .shape = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 2, .blocks = 2},
     .reason = "16 rows a warp leave registers for mask, bias and softcap"},
    {.takes = {.head_dim_max = 128, .scoring = ANY_SCORES, .windowed = 1, .extras_max = 7, .arch_max = 90},
     .shape = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .blocks = 2},
     .reason = "fits 99 KB"},
    {.takes = {.head_dim_max = 128, .scoring = ANY_SCORES, .windowed = 1, .extras_max = 7},
     .shape = {.warps = 4, .row_tiles = 1, .block_n = 16, .stages = 2, .blocks = 2},
     .reason = "fits 99 KB"},
    {.takes = {.head_dim_max = 256, .scoring = ANY_SCORES, .windowed = 1, .extras_max = 7, .arch_max = 90},
     .shape = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 2, .blocks = 1},
     .reason = "the longest step without a spill"},
    {.takes = {.head_dim_max = 256, .scoring = ANY_SCORES, .windowed = 1, .extras_max = 7},
     .shape = {.warps = 4, .row_tiles = 1, .block_n = 16, .stages = 2, .blocks = 1},
     .reason = "fits 99 KB"},
};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0] };
PLAN_PARAMETER_STRUCT(MMA_FORWARD_PARAMETERS);

/* The kernel's head dim: columns beyond the tensor's are zero. Between 192 and 256 the swizzle of a row would need more
 * registers than there are. */
static int32_t padded(int64_t head_dim) { return head_dim > 192 ? 256 : (int32_t)gpu_round_up(head_dim, 16); }
static int32_t block_m(const struct tile *t) { return 16 * t->shape.row_tiles * t->shape.warps; }
static int lists_tiles(const fdm_problem *p) { return gpu_masks_blocks(p) && !gpu_lists_keys(p); }
/* Beside a list of keys, a mask with rows is read pair by pair alone. */
static int has_block_mask(const fdm_problem *p) { return lists_tiles(p) || gpu_row_runs(p); }

static enum scoring scoring_of(const fdm_problem *p) {
    const int rows = gpu_mask_rows(p) + gpu_bias_rows(p);
    if (p->softcap > 0 || gpu_row_runs(p) || (float)p->softmax_scale <= 0 || !p->aligned || rows > 1 ||
        (rows && (gpu_lists_keys(p) || !p->scores_aligned)))
        return ANY_SCORES;
    return rows ? MASK_OR_BIAS_ROWS : gpu_lists_keys(p) ? LISTED_KEYS : NO_MASK_OR_BIAS;
}

/* Under invariance, every problem takes the tile of the one that needs most: a packed problem on a cache in pages. */
static int is_cached(const fdm_problem *p) { return p->has_cache || p->invariance; }
static int is_paged(const fdm_problem *p) { return gpu_cache_constant(p) == GPU_CACHE_PAGES || p->invariance; }

/* A bias in a list takes the registers of two, and so do runs of rows beside a list. */
static int32_t extras_of(const fdm_problem *p) {
    return p->has_intervals + p->has_mask + 2 * p->has_bias + (p->varlen || p->invariance || gpu_has_lengths(p)) +
           (p->has_intervals && gpu_row_runs(p) ? 2 : 0);
}

/* Mask and bias rows are copied to shared memory beside the keys. */
static int stages_scores(const fdm_problem *p) {
    return p->scores_aligned && (gpu_mask_rows(p) || gpu_bias_rows(p)) && !gpu_lists_keys(p);
}

static int32_t shared_bytes(const struct tile *t, const fdm_problem *p) {
    int32_t lists = gpu_lists_keys(p) ? MMA_FORWARD_LIST_BYTES(p->has_bias && !gpu_bias_rows(p))
                    : lists_tiles(p)  ? MMA_FORWARD_TILE_BYTES
                                      : 0;
    int32_t staged = !stages_scores(p) || t->shape.block_n % 32
                         ? 0
                         : gpu_mask_rows(p) + (gpu_bias_rows(p) ? (int32_t)fdm_dtype_bytes(p->bias_dtype) : 0);
    return mma_forward_shared_bytes(block_m(t), t->shape.block_n, t->shape.stages, padded(p->head_dim),
                                    padded(p->head_dim_v), lists, staged, is_paged(p));
}

static int fits(int32_t tile, const fdm_device *device, const fdm_problem *p) {
    const struct tile *t = &tiles[tile];
    const int32_t d = padded(p->head_dim), dv = padded(p->head_dim_v);
    const int dims = t->takes.exact ? d == t->takes.head_dim_max && dv == t->takes.head_dim_max
                                    : d <= t->takes.head_dim_max && dv <= t->takes.head_dim_max;
    /* a tile for everything takes what a tile for less would take, where that does not fit the device */
    const int scored = t->takes.scoring == scoring_of(p) || t->takes.scoring == ANY_SCORES;
    const int32_t own = device->compute_major * 10 + device->compute_minor;
    const int arch = (!t->takes.arch_max || own <= t->takes.arch_max) &&
                     (!is_cached(p) || !t->takes.cache_arch_max || own <= t->takes.cache_arch_max);
    const int64_t seqlen_k = p->invariance ? 0 : p->seqlen_k; /* a bound of others may be shorter */
    return dims && scored && arch && (gpu_bounded(p) ? t->takes.windowed != 0 : t->takes.windowed != 2) &&
           extras_of(p) <= t->takes.extras_max && seqlen_k >= t->takes.seqlen_k_min &&
           shared_bytes(t, p) <= device->shared_bytes;
}

static int64_t mask_bytes(const struct tile *t, const fdm_problem *p) {
    return has_block_mask(p) ? gpu_block_mask_bytes(p, block_m(t), t->shape.block_n) : tile_plan_bytes_of_keys(p);
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = gpu_shape_refusal(p, 0, 256, text, size);
    if (clause)
        return clause;
    if (p->num_splits > 1 || p->split_keys)
        return "it does not split keys";
    if (p->invariance == FDM_INVARIANCE_SCHEDULE && (p->has_mask || p->has_bias || p->has_intervals || gpu_row_runs(p)))
        return "keys that masks, biases or intervals hide are left out by blocks of rows, which invariance 2 does not "
               "allow";
    return gpu_tile_refusal(NUM_TILES, fits, device, p, text, size);
}

static int same_shape(const struct tile *a, const struct tile *b) {
    return block_m(a) == block_m(b) && a->shape.block_n == b->shape.block_n && a->shape.stages == b->shape.stages &&
           a->shape.q_in_registers == b->shape.q_in_registers;
}
static int same_kernel(const struct tile *a, const struct tile *b) {
    return memcmp(&a->shape, &b->shape, sizeof a->shape) == 0;
}

/* Of the tiles before the i-th that fit: whether one is the same kernel; else how many have the same shape. */
static int is_repeated(const fdm_device *device, const fdm_problem *p, int32_t i, int32_t *alike) {
    *alike = 0;
    for (int32_t j = 0; j < i; j++) {
        if (!fits(j, device, p))
            continue;
        if (same_kernel(&tiles[j], &tiles[i]))
            return 1;
        *alike += same_shape(&tiles[j], &tiles[i]);
    }
    return 0;
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    for (int32_t i = 0; i < NUM_TILES; i++) {
        const struct tile *t = &tiles[i];
        int32_t alike;
        if (!fits(i, device, p) || is_repeated(device, p, i, &alike) || variant-- > 0)
            continue;
        PLAN_SET_PARAMETERS(plan, .TILE = i);
        plan->block_m = block_m(t);
        plan->block_n = t->shape.block_n;
        plan->stages = t->shape.stages;
        plan->shared_bytes = shared_bytes(t, p);
        plan->workspace_bytes = mask_bytes(t, p);
        char other[24] = "";
        if (alike > 0)
            snprintf(other, sizeof other, "_W%d_B%d", t->shape.warps, t->shape.blocks);
        snprintf(plan->choice, sizeof plan->choice, "MMA_Forward_%dx%d_S%d%s%s", plan->block_m, plan->block_n,
                 plan->stages, t->shape.q_in_registers ? "_QRegs" : "", other);
        gpu_give_tile_reason(plan, device, p, t->reason);
        return 1;
    }
    return 0;
}

/* ---- execution ---- */

static void forward_request(const struct tile *t, const fdm_problem *p, struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p,
                              (gpu_lists_keys(p) ? GPU_ALIKE_WINDOW : 0) |
                                  (stages_scores(p) && t->shape.block_n % 32 == 0 ? 0 : GPU_ALIKE_SCORES_ALIGNED));
    GPU_ADD_CONSTANTS(
        request, MMA_FORWARD_CONSTANTS, .HEAD_DIM = padded(p->head_dim), .HEAD_DIM_V = padded(p->head_dim_v),
        .WARPS = t->shape.warps, .ROW_TILES = t->shape.row_tiles, .BLOCK_N = t->shape.block_n,
        .STAGES = t->shape.stages, .MIN_BLOCKS = t->shape.blocks, .Q_IN_REGISTERS = t->shape.q_in_registers,
        .OPTIMISTIC = t->shape.optimistic && p->invariance < FDM_INVARIANCE_SCHEDULE, .REDO = gpu_hides_pairs(p));
    request->file = "families/mma/forward/mma_forward.cu";
    request->entry = "mma_forward";
    request->shared_bytes = shared_bytes(t, p);
    request->threads = 32 * t->shape.warps;
    /* Compiled for 10.0, steps of 32 keys with causal or window put up to 76 bytes aside. Another family takes these
     * problems there first (docs/blackwell.md). */
    if (t->takes.scoring == NO_MASK_OR_BIAS && t->shape.block_n == 32 && gpu_bounded(p))
        request->spill_bytes_max = 80;
    /* Compiled for 8.0 and 9.0, a mask with rows spills up to 168 bytes beside a block mask and 88 beside a sink, and a
     * wider V than Q 20. */
    else if (gpu_mask_rows(p) && p->block_mask_size)
        request->spill_bytes_max = 168;
    else if (gpu_mask_rows(p) && p->has_sink)
        request->spill_bytes_max = 88;
    else if (padded(p->head_dim_v) > padded(p->head_dim))
        request->spill_bytes_max = 20;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t tile = parameters_of(plan).TILE;
    return tile >= 0 && tile < NUM_TILES && plan->block_m == block_m(&tiles[tile]) &&
           plan->block_n == tiles[tile].shape.block_n && plan->shared_bytes == shared_bytes(&tiles[tile], p) &&
           mask_bytes(&tiles[tile], p) <= plan->workspace_bytes;
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct tile *t = &tiles[parameters_of(plan).TILE];
    struct cuda_kernel_request request;
    forward_request(t, p, &request);
    gpu_add_forward(l, plan, &request, has_block_mask(p) ? GPU_TILES_OF_MASK : GPU_TILES_OF_KEYS,
                    gpu_ceil_div(p->seqlen_q, block_m(t)) * p->batch * p->heads, 1);
    return FDM_OK;
}

const struct gpu_algorithm mma_forward_algorithm = {
    .info = {"mma.forward", "FlashAttention-2 on mma.sync, every feature", FDM_FORWARD},
    .parameters = PLAN_PARAMETERS(MMA_FORWARD_PARAMETERS),
    .features = GPU_EVERY_FEATURE | GPU_ROW_RUN_FEATURES | GPU_FEATURE_SEQUSED | GPU_FEATURE_CACHE | GPU_FEATURE_SPLITS,
    .chosen_freely = 1,
    .writes_lse_low = 1,
    .refusal = refusal,
    .fill = fill,
    .valid = valid,
    .launch = launch,
};
