/* mma_forward.c: the production forward on the host: which tile for which problem, its constants and its launch. */
#include "families/mma/forward/mma_forward.h"

#include <stdio.h>

#include "families/mma/mma_family.h"
#include "gpu/block_mask.h"

/* ---- tiles ---- */

/* What the scores need besides Q K^T decides how many registers are left. */
enum scoring {
    BARE,   /* causal or window at most */
    LISTED, /* intervals, mask or bias of the key alone: visible keys are listed and gathered */
    ROWS,   /* a mask or a bias with rows, copied to shared memory beside the keys */
    MIXED /* everything else: softcap, a scale that is not positive, both kinds, rows or tensors that are not aligned */
};

/* A row is taken when head dims, scoring, length and device fit it; the first that fits is chosen. Registers of O and S
 * are (head_dim_v + block_n) / 2 * row_tiles, and the assembler needs some 60 for the rest; which features still fit is
 * what fdm-checks compile finds. Times are of one H200, bfloat16, 16384 tokens (bench/results/nvidia-h200). */
struct tile {
    int32_t head_dim_max;
    enum scoring scoring;
    int32_t exact;      /* head dims, rounded up to 16: 1 both head_dim_max, 2 equal, 0 any */
    int32_t windowed;   /* 0: only without causal and window, 2: only with */
    int32_t extras_max; /* how many of intervals, mask, bias (counted twice) and varlen there may be */
    int32_t seqlen_k_min;
    int32_t arch_max;       /* compute capability, 90 = 9.0, beyond which the assembler spills; 0: none */
    int32_t cache_arch_max; /* the same beside a cache; -1: it spills on all */
    int32_t warps, row_tiles, block_n, stages, blocks; /* blocks: wanted on a multiprocessor at a time */
    int32_t q_in_registers, optimistic;
    const char *reason;
};
static const struct tile tiles[] = {
    {64, BARE, 1, 0, 1, 0, 90, -1, 4, 2, 128, 2, 2, 1, 1, "the longest step without a spill; 5 % faster than 64 keys"},
    {64, BARE, 1, 2, 0, 2048, 90, -1, 4, 2, 96, 2, 2, 1, 1,
     "the longest step without a spill; 5 % faster than 64 keys"},
    {64, BARE, 0, 1, 1, 0, 0, 0, 4, 2, 64, 2, 2, 1, 1,
     "short rows waste less of the diagonal; 6 % faster than 96 keys"},
    {128, BARE, 0, 1, 0, 0, 90, 0, 4, 2, 64, 2, 2, 0, 1, "32 rows a warp: a fragment of K or V feeds two products"},
    {128, BARE, 0, 1, 1, 0, 90, 0, 4, 2, 48, 2, 2, 0, 1, "32 rows a warp, and registers for packed sequences"},
    {128, BARE, 0, 1, 1, 0, 0, 0, 4, 2, 32, 2, 1, 0, 1, "fits 99 KB"},
    {256, BARE, 0, 1, 1, 0, 90, 0, 8, 1, 64, 2, 1, 0, 0, "32 rows a warp would need 256 registers for O alone"},
    {256, BARE, 0, 1, 1, 0, 0, 0, 8, 1, 32, 2, 1, 0, 0, "fits 163 KB, and 10.0 has no spill"},
    {256, BARE, 0, 1, 1, 0, 90, 0, 4, 1, 32, 2, 1, 0, 0, "fits 99 KB"},
    {256, BARE, 0, 1, 1, 0, 0, 0, 4, 1, 16, 2, 1, 0, 0, "fits 99 KB, and 12.0 has no spill"},
    {64, LISTED, 0, 1, 5, 0, 0, 0, 4, 2, 64, 2, 2, 0, 1, "the longest step without a spill"},
    {128, LISTED, 2, 1, 1, 0, 90, 0, 4, 2, 32, 2, 2, 0, 0, "the longest step without a spill"},
    {128, LISTED, 0, 1, 5, 0, 0, 0, 4, 2, 16, 2, 2, 0, 0, "the longest step without a spill"},
    {64, ROWS, 0, 1, 3, 0, 90, -1, 4, 2, 64, 2, 2, 0, 1, "the longest step without a spill"},
    {64, ROWS, 0, 1, 3, 0, 0, 0, 4, 2, 32, 2, 2, 0, 1, "the longest step without a spill"},
    {128, ROWS, 0, 0, 3, 0, 0, 0, 4, 2, 32, 2, 2, 0, 0, "the longest step without a spill"},
    {128, MIXED, 0, 1, 5, 0, 90, 0, 4, 1, 64, 2, 2, 0, 0, "16 rows a warp leave registers for mask, bias and softcap"},
    {128, MIXED, 0, 1, 5, 0, 90, 0, 4, 1, 32, 2, 2, 0, 0, "fits 99 KB"},
    {128, MIXED, 0, 1, 5, 0, 0, 0, 4, 1, 16, 2, 2, 0, 0, "fits 99 KB"},
    {256, MIXED, 0, 1, 5, 0, 90, 0, 8, 1, 16, 2, 1, 0, 0, "the longest step without a spill"},
    {256, MIXED, 0, 1, 5, 0, 0, 0, 4, 1, 16, 2, 1, 0, 0, "fits 99 KB"},
};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0] };
enum { MMA_FORWARD_PARAMETERS(PLAN_PARAMETER) };

/* The kernel's head dim: columns beyond the tensor's are zero. Between 192 and 256 the swizzle of a row would need more
 * registers than there are. */
static int32_t padded(int64_t head_dim) { return head_dim > 192 ? 256 : (int32_t)gpu_round_up(head_dim, 16); }
static int32_t block_m(const struct tile *t) { return 16 * t->row_tiles * t->warps; }
static int lists_tiles(const fdm_problem *p) { return gpu_masks_blocks(p) && !gpu_lists_keys(p); }
/* Beside a list of keys, a mask with rows is read pair by pair alone. */
static int has_block_mask(const fdm_problem *p) { return lists_tiles(p) || p->has_row_intervals; }

static enum scoring scoring_of(const fdm_problem *p) {
    const int rows = gpu_mask_rows(p) + gpu_bias_rows(p);
    if (p->softcap > 0 || p->has_row_intervals || (float)p->softmax_scale <= 0 || !p->aligned || rows > 1 ||
        (rows && (gpu_lists_keys(p) || !p->scores_aligned)))
        return MIXED;
    return rows ? ROWS : gpu_lists_keys(p) ? LISTED : BARE;
}

/* A problem whose bits are to be those of others has the tile of the one that asks most: a packed one on a cache in
 * pages. */
static int is_cached(const fdm_problem *p) { return p->has_cache || p->invariance; }
static int is_paged(const fdm_problem *p) { return gpu_cache_constant(p) == GPU_CACHE_PAGES || p->invariance; }

/* A bias in a list takes the registers of two. */
static int32_t extras_of(const fdm_problem *p) {
    return p->has_intervals + p->has_mask + 2 * p->has_bias + (p->varlen || is_cached(p));
}

/* Mask and bias rows are copied to shared memory beside the keys. */
static int stages_scores(const fdm_problem *p) {
    return p->scores_aligned && (gpu_mask_rows(p) || gpu_bias_rows(p)) && !gpu_lists_keys(p);
}

static int32_t shared_bytes(const struct tile *t, const fdm_problem *p) {
    int32_t lists = gpu_lists_keys(p) ? MMA_FORWARD_LIST_BYTES(p->has_bias && !gpu_bias_rows(p))
                    : lists_tiles(p)  ? MMA_FORWARD_TILE_BYTES
                                      : 0;
    int32_t staged = !stages_scores(p) || t->block_n % 32
                         ? 0
                         : gpu_mask_rows(p) + (gpu_bias_rows(p) ? (int32_t)fdm_dtype_bytes(p->bias_dtype) : 0);
    return mma_forward_shared_bytes(block_m(t), t->block_n, t->stages, padded(p->head_dim), padded(p->head_dim_v),
                                    lists, staged, is_paged(p));
}

static int fits(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    const int32_t d = padded(p->head_dim), dv = padded(p->head_dim_v);
    const int dims =
        t->exact ? d == t->head_dim_max && dv == t->head_dim_max : d <= t->head_dim_max && dv <= t->head_dim_max;
    /* a tile for everything takes what a tile for less would take, where that does not fit the device */
    const int scored = t->scoring == scoring_of(p) || t->scoring == MIXED;
    const int32_t own = device->compute_major * 10 + device->compute_minor;
    const int arch =
        (!t->arch_max || own <= t->arch_max) && (!is_cached(p) || !t->cache_arch_max || own <= t->cache_arch_max);
    const int64_t seqlen_k = p->invariance ? 0 : p->seqlen_k; /* a bound of others may be shorter */
    return dims && scored && arch && (gpu_bounded(p) ? t->windowed != 0 : t->windowed != 2) &&
           extras_of(p) <= t->extras_max && seqlen_k >= t->seqlen_k_min && shared_bytes(t, p) <= device->shared_bytes;
}

static int64_t mask_bytes(const struct tile *t, const fdm_problem *p) {
    return has_block_mask(p) ? gpu_block_mask_bytes(p, block_m(t), t->block_n) : 0;
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    if (!gpu_16_bits(p->dtype))
        return "it takes float16 and bfloat16";
    if (p->head_dim > 256 || p->head_dim_v > 256)
        return "head dims are at most 256";
    if (p->num_splits > 1 || p->split_keys)
        return "it does not split keys";
    if (p->invariance == FDM_INVARIANCE_SCHEDULE &&
        (p->has_mask || p->has_bias || p->has_intervals || p->has_row_intervals || p->block_mask_size))
        return "keys that masks, biases or intervals hide are left out by blocks of rows, which invariance 2 does not "
               "allow";
    for (int32_t i = 0; i < NUM_TILES; i++)
        if (fits(&tiles[i], device, p))
            return NULL;
    return gpu_no_tile_fits(device, text, size);
}

static int same_shape(const struct tile *a, const struct tile *b) {
    return block_m(a) == block_m(b) && a->block_n == b->block_n && a->stages == b->stages &&
           a->q_in_registers == b->q_in_registers;
}
static int same_kernel(const struct tile *a, const struct tile *b) {
    return same_shape(a, b) && a->warps == b->warps && a->blocks == b->blocks && a->optimistic == b->optimistic;
}

/* Of the tiles before the i-th that fit: whether one is the same kernel; else how many have the same shape. */
static int is_repeated(const fdm_device *device, const fdm_problem *p, int32_t i, int32_t *alike) {
    *alike = 0;
    for (int32_t j = 0; j < i; j++) {
        if (!fits(&tiles[j], device, p))
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
        if (!fits(t, device, p) || is_repeated(device, p, i, &alike) || variant-- > 0)
            continue;
        plan->parameters[TILE] = i;
        plan->block_m = block_m(t);
        plan->block_n = t->block_n;
        plan->stages = t->stages;
        plan->shared_bytes = shared_bytes(t, p);
        plan->workspace_bytes = mask_bytes(t, p);
        char other[24] = "";
        if (alike > 0)
            snprintf(other, sizeof other, "_W%d_B%d", t->warps, t->blocks);
        snprintf(plan->choice, sizeof plan->choice, "MMA_Forward_%dx%d_S%d%s%s", plan->block_m, plan->block_n,
                 plan->stages, t->q_in_registers ? "_QRegs" : "", other);
        snprintf(
            plan->reason, sizeof plan->reason,
            "head dim %lld: the first tile that fits %lld KB of shared memory is %dx%d with %d stages (%lld KB): %s",
            (long long)gpu_widest(p), (long long)device->shared_bytes >> 10, plan->block_m, plan->block_n, plan->stages,
            (long long)(plan->shared_bytes + 1023) >> 10, t->reason);
        return 1;
    }
    return 0;
}

/* ---- execution ---- */

static void forward_request(const struct tile *t, const fdm_problem *p, struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p,
                              (gpu_lists_keys(p) ? GPU_ALIKE_WINDOW : 0) |
                                  (stages_scores(p) && t->block_n % 32 == 0 ? 0 : GPU_ALIKE_SCORES_ALIGNED));
    GPU_ADD_CONSTANTS(
        request, MMA_FORWARD_CONSTANTS, .HEAD_DIM = padded(p->head_dim), .HEAD_DIM_V = padded(p->head_dim_v),
        .WARPS = t->warps, .ROW_TILES = t->row_tiles, .BLOCK_N = t->block_n, .STAGES = t->stages,
        .MIN_BLOCKS = t->blocks, .Q_IN_REGISTERS = t->q_in_registers,
        .OPTIMISTIC = t->optimistic && p->invariance < FDM_INVARIANCE_SCHEDULE, .REDO = gpu_hides_pairs(p));
    request->file = "families/mma/forward/mma_forward.cu";
    request->entry = "mma_forward";
    request->shared_bytes = shared_bytes(t, p);
    request->threads = 32 * t->warps;
    /* Compiled for 10.0, steps of 32 keys with causal or window put up to 76 bytes aside. Another family takes these
     * problems there first (docs/blackwell.md). */
    request->spill_bytes_max = t->scoring == BARE && t->block_n == 32 && gpu_bounded(p) ? 80 : 0;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t tile = plan->parameters[TILE];
    return tile >= 0 && tile < NUM_TILES && plan->block_m == block_m(&tiles[tile]) &&
           plan->block_n == tiles[tile].block_n && plan->shared_bytes == shared_bytes(&tiles[tile], p) &&
           mask_bytes(&tiles[tile], p) <= plan->workspace_bytes;
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct tile *t = &tiles[plan->parameters[TILE]];
    struct cuda_kernel_request request;
    forward_request(t, p, &request);
    gpu_add_forward(l, plan, &request, has_block_mask(p), gpu_ceil_div(p->seqlen_q, block_m(t)) * p->batch * p->heads,
                    1);
    return FDM_OK;
}

const struct gpu_algorithm mma_forward_algorithm = {
    .info = {"mma.forward", "FlashAttention-2 on mma.sync, every feature", FDM_FORWARD},
    .parameters = PLAN_PARAMETERS(MMA_FORWARD_PARAMETERS),
    .features =
        GPU_EVERY_FEATURE | GPU_FEATURE_ROW_INTERVALS | GPU_FEATURE_SEQUSED | GPU_FEATURE_CACHE | GPU_FEATURE_SPLITS,
    .chosen_freely = 1,
    .writes_lse_low = 1,
    .refusal = refusal,
    .fill = fill,
    .valid = valid,
    .launch = launch,
};
