/* mma_backward.c: the backward on the host: its tile, by the rules of mma_rules.c, its workspace and its launches. */
#include "families/mma/backward/mma_backward.h"

#include <stdio.h>
#include <string.h>

#include "families/mma/backward/mma_rules.h"
#include "families/mma/mma_family.h"
#include "gpu/gpu_backward.h"
#include "gpu/numbers.h"

PLAN_PARAMETER_STRUCT(MMA_BACKWARD_PARAMETERS);

/* Whether keys may be sorted: key intervals alone say what sees them, the same for the query heads of a KV head. */
static int may_gather(const fdm_problem *p) {
    return p->has_intervals && !p->varlen && !gpu_used_constant(p) && !gpu_masks_blocks(p) && !gpu_bias_rows(p) &&
           p->interval_heads <= p->heads_kv;
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    (void)device;
    const char *clause = gpu_shape_refusal(p, 0, 256, text, size);
    return clause ? clause : gpu_backward_refusal(p, 1);
}

/* ---- workspace ---- */

static int64_t tiles_of(int64_t length, int32_t tile) { return (length + tile - 1) / tile; }

/* Blocks add in a fixed order: to dQ, or to the gradient of a shared bias. */
static int in_order(const fdm_problem *p) { return (p->deterministic && p->needs_dq) || gpu_dbias_in_turns(p); }

static struct gpu_backward_needs needs_of(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t widest = mma_backward_widest((int32_t)p->head_dim, (int32_t)p->head_dim_v);
    const int32_t block_m = plan->block_m, block_n = plan->block_n;
    return (struct gpu_backward_needs){
        .block_m = block_m,
        .block_n = block_n,
        .row_step = MMA_BACKWARD_ROW_STEP,
        .head_dim = mma_backward_padded((int32_t)p->head_dim, block_n, widest),
        .head_dim_v = mma_backward_padded((int32_t)p->head_dim_v, block_n, widest),
        .sums_dq = p->needs_dq,
        .semaphores = p->needs_dq && p->deterministic,
        .dbias_blocks = gpu_dbias_in_turns(p) ? (int32_t)tiles_of(p->seqlen_k, block_n) : 0,
        .group_parts = parameters_of(plan).GROUP_PARTS,
        .dbias_shares = block_n == 128 ? 2 : 4, /* warps that may share keys, paired or not; the others leave 0 */
        .may_order_keys = may_gather(p),
        .orders_keys = parameters_of(plan).GATHER,
        .lse_factor = p->has_bias || p->softcap > 0 ? 1.0f : LOG2_E,
    };
}

static int64_t workspace_bytes(const fdm_plan *plan, const fdm_problem *p) {
    const struct gpu_backward_needs needs = needs_of(plan, p);
    return gpu_backward_workspace_bytes(p, &needs);
}

static int32_t threads_of(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t widest = mma_backward_widest((int32_t)p->head_dim, (int32_t)p->head_dim_v);
    return 32 * mma_backward_warps(plan->block_n, widest, plan->v_in_registers);
}

/* ---- plan ---- */

static int32_t bytes_with(const fdm_plan *plan, const fdm_problem *p, struct mma_backward_extras with) {
    const int32_t rows = with.ring ? MMA_BACKWARD_STAGE_ROWS * with.ring : plan->block_m;
    const int32_t widest = mma_backward_widest((int32_t)p->head_dim, (int32_t)p->head_dim_v);
    return mma_backward_bytes_with(plan->block_m, plan->block_n, plan->stages, plan->v_in_registers,
                                   (int32_t)p->head_dim, (int32_t)p->head_dim_v, with) +
           mma_backward_keys_bytes(plan->block_n, gpu_key_words(p)) +
           (p->has_bias && mma_backward_stages_low(with.ring, widest, gpu_key_words(p)) ? 4 * rows : 0);
}

static int may_pair(const fdm_plan *plan, const fdm_problem *p) {
    return mma_backward_can_pair(plan->block_n, (int32_t)p->head_dim, (int32_t)p->head_dim_v, plan->v_in_registers);
}

/* Half the warps, two blocks a multiprocessor. */
static int is_half(const fdm_plan *plan, const fdm_problem *p) { return threads_of(plan, p) < 32 * MMA_BACKWARD_WARPS; }

/* Whether TMA may bring the stages of a ring: not those of packed sequences or beside seqused, where rows
 * behind the last one do not count, nor where no tensor map can say how the rows lie. */
static int may_use_tma(int32_t ring, const fdm_problem *p) {
    return ring && p->aligned && p->q_mappable && !p->varlen && !gpu_used_constant(p);
}

/* What the shared memory that a tile leaves is spent on: the first of these that fits. */
static const struct {
    struct mma_backward_extras with;
    const char *words;
} extras[] = {
    {.with = {.paired = 1, .buffers = 2, .ring = 3},
     .words = "paired warps, dS twice and a ring of three times 64 rows"},
    {.with = {.paired = 1, .buffers = 2, .ring = 2}, .words = "paired warps, dS twice and a ring of two times 64 rows"},
    {.with = {.paired = 1, .buffers = 2, .ring = 0}, .words = "paired warps and dS twice"},
    {.with = {.paired = 1, .buffers = 1, .ring = 0}, .words = "paired warps"},
    {.with = {.paired = 0, .buffers = 2, .ring = 3}, .words = "dS twice and a ring of three times 64 rows"},
    {.with = {.paired = 0, .buffers = 2, .ring = 2}, .words = "dS twice and a ring of two times 64 rows"},
    {.with = {.paired = 0, .buffers = 2, .ring = 0}, .words = "dS twice"},
};

static void spend_more(const fdm_device *device, const fdm_problem *p, fdm_plan *plan, struct parameters *x) {
    for (size_t i = 0; i < sizeof extras / sizeof extras[0]; i++) {
        const struct mma_backward_extras with = extras[i].with;
        const int32_t bytes = bytes_with(plan, p, with);
        if ((with.paired ? !may_pair(plan, p) : x->OVERLAY) || bytes > device->shared_bytes)
            continue;
        if (with.ring && !with.paired && (!is_half(plan, p) || 2 * (bytes + 1024) > device->shared_bytes + 1024))
            continue; /* two blocks, and what the driver takes of each, share a multiprocessor */
        const size_t used = strlen(plan->reason);
        x->PAIRED = with.paired;
        x->DS_BUFFERS = with.buffers;
        x->RING = with.ring;
        x->OVERLAY = with.paired ? 0 : x->OVERLAY;
        x->TMA = device->compute_major >= 9 && may_use_tma(with.ring, p);
        plan->shared_bytes = bytes;
        snprintf(plan->reason + used, sizeof plan->reason - used, "; %.4g KB with %s%s", (double)bytes / 1024,
                 extras[i].words, x->TMA ? " by TMA" : "");
        return;
    }
}

enum { GATHER_KEYS_MIN = 512 }; /* fewer are few tiles */

/* Where a block takes all heads of a group, few keys and a small batch are few blocks. The group is split into equal
 * parts where the last block would then end sooner, by this estimate: blocks run in waves, causal ones, unlike in
 * length, in any order; the sums of each part are written and read once. */
static double seconds_with(const fdm_device *device, const fdm_problem *p, const fdm_plan *plan, int64_t parts) {
    const double speed = 2.5e12; /* FLOP/s of a multiprocessor: as measured on 9.0; others are within a factor of two */
    const double bandwidth = device->bandwidth > 0 ? (double)device->bandwidth : 1e12, launch = 3e-6;
    const int64_t at_once = is_half(plan, p) ? 2 : 1, slots = (device->num_sms > 0 ? device->num_sms : 1) * at_once;
    const int64_t keys = p->varlen ? p->total_k + p->batch * plan->block_n / 2 : p->batch * p->seqlen_k;
    const int64_t blocks = tiles_of(keys, plan->block_n) * p->heads_kv, group = p->heads / p->heads_kv;
    const double columns = (double)(p->head_dim + p->head_dim_v), share = (double)group / (double)parts;
    const double rows = p->varlen ? (double)p->total_q / (double)(p->batch ? p->batch : 1) : (double)p->seqlen_q;
    const double walk =
        rows * plan->block_n * (6.0 * (double)p->head_dim + 4.0 * (double)p->head_dim_v) * (double)at_once / speed;
    double walks = (double)tiles_of(blocks * parts, (int32_t)slots) * share;
    if (p->causal && blocks * parts > slots)
        walks = 0.5 * (double)(blocks * group) / (double)slots + 0.6 * share;
    if (p->causal && walks < share)
        walks = share;
    return walks * walk + (parts > 1 ? launch + (double)(blocks * parts) * plan->block_n * columns * 8 / bandwidth : 0);
}

static int32_t group_parts_of(const fdm_device *device, const fdm_problem *p, fdm_plan *plan) {
    const int64_t group = p->heads / p->heads_kv;
    const double whole = seconds_with(device, p, plan, 1);
    double least = 0.9 * whole; /* an estimate: less is not worth another launch */
    int32_t least_parts = 1;
    if (!p->needs_dk && !p->needs_dv)
        return 1;
    for (int64_t parts = 2; parts <= group; parts++) {
        const double seconds = group % parts ? whole : seconds_with(device, p, plan, parts);
        if (seconds < least) {
            least = seconds;
            least_parts = (int32_t)parts;
        }
    }
    if (least_parts == 1)
        return 1;
    const size_t used = strlen(plan->reason);
    snprintf(plan->reason + used, sizeof plan->reason - used,
             "; groups of %lld heads in %d parts, whose sums are added: few blocks for %d multiprocessors (%.2g of the "
             "time)",
             (long long)group, (int)least_parts, (int)device->num_sms, least / whole);
    return least_parts;
}

/* Heads whose key blocks are interleaved, where blocks add to dQ in order and all walk from the first row on. Eight
 * blocks of a head then run at a time: they wait for each other little and find rows of Q and dO in the second-level
 * cache. Heads that queue for the gradient of a bias too are not interleaved. */
enum { BLOCKS_OF_A_HEAD = 8 };

static int32_t heads_in_turn(const fdm_device *device, const fdm_problem *p, const fdm_plan *plan,
                             int32_t group_parts) {
    const int64_t heads = p->batch * p->heads_kv * group_parts;
    const int64_t at_once = (int64_t)device->num_sms * (is_half(plan, p) ? 2 : 1);
    const int64_t most = (at_once + BLOCKS_OF_A_HEAD - 1) / BLOCKS_OF_A_HEAD;
    if (!p->deterministic || !p->needs_dq || gpu_bounded(p) || gpu_dbias_in_turns(p) || most < 1 || heads < 1)
        return 0;
    const int64_t times = (heads + most - 1) / most;
    return (int32_t)((heads + times - 1) / times);
}

static int fill_code(const fdm_device *device, const fdm_problem *p, const char *code, fdm_plan *plan) {
    struct mma_backward_choice choice;
    if (!mma_backward_choose(device, p, code, &choice, plan->reason, sizeof plan->reason))
        return 0;
    snprintf(plan->choice, sizeof plan->choice, "%s", choice.code);
    plan->block_m = choice.block_m;
    plan->block_n = choice.block_n;
    plan->stages = choice.stages;
    plan->v_in_registers = choice.v_in_registers;
    plan->shared_bytes = choice.shared_bytes;
    struct parameters x = {.STAGED_ROWS = choice.staged_rows, .OVERLAY = choice.overlay, .DS_BUFFERS = 1};
    spend_more(device, p, plan, &x);
    x.GATHER = may_gather(p) && p->seqlen_k >= GATHER_KEYS_MIN;
    if (x.GATHER) {
        const size_t used = strlen(plan->reason);
        snprintf(plan->reason + used, sizeof plan->reason - used, "; keys in the order of the last row that sees them");
    }
    x.GROUP_PARTS = group_parts_of(device, p, plan);
    x.IN_TURN = heads_in_turn(device, p, plan, x.GROUP_PARTS);
    write_parameters(plan, x);
    plan->workspace_bytes = workspace_bytes(plan, p);
    return 1;
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    if (variant == 0)
        return fill_code(device, p, NULL, plan);
    const char *code = mma_backward_variant(device, p, variant);
    return code && fill_code(device, p, code, plan);
}

static int has_code(const char *code) {
    for (int32_t i = 0; i < mma_backward_code_count; i++)
        if (strcmp(mma_backward_codes[i].code, code) == 0)
            return 1;
    return 0;
}

/* ---- execution ---- */

/* Whether rows of mask, bias and dbias pass 16 bytes at a time. Registers do not allow it beside turns at a shared
 * bias, where blocks of half the warps meet a float32 bias, intervals and softcap, and for packed sequences above head
 * dim 64. */
static int wide_scores(const fdm_problem *p) {
    const int crowded = mma_backward_widest((int32_t)p->head_dim, (int32_t)p->head_dim_v) > 64
                            ? p->varlen || gpu_used_constant(p)
                            : gpu_bias_constant(p) == GPU_BIAS_FLOAT32 && p->has_intervals && p->softcap > 0;
    return p->scores_aligned && !gpu_dbias_in_turns(p) && !crowded && (gpu_mask_rows(p) || gpu_bias_rows(p));
}

static void main_request(const fdm_plan *plan, const fdm_problem *p, const struct gpu_backward_needs *needs,
                         struct cuda_kernel_request *request) {
    const struct parameters x = parameters_of(plan);
    gpu_set_problem_constants(request, p, GPU_ALIKE_SCORES_ALIGNED | GPU_ALIKE_POSITIVE_SCALE);
    GPU_ADD_CONSTANTS(request, MMA_BACKWARD_CONSTANTS, .HEAD_DIM = needs->head_dim, .HEAD_DIM_V = needs->head_dim_v,
                      .BLOCK_M = plan->block_m, .BLOCK_N = plan->block_n, .STAGES = plan->stages,
                      .V_IN_REGISTERS = plan->v_in_registers, .OVERLAY = x.OVERLAY, .DS_BUFFERS = x.DS_BUFFERS,
                      .PAIRED = x.PAIRED != 0, .RING = x.RING, .TMA = x.TMA, .WIDE_SCORES = wide_scores(p),
                      .DBIAS = gpu_dbias_constant(p), .GATHER = x.GATHER, .SCRUB = gpu_hides_keys(p),
                      .NEEDS_DQ = p->needs_dq, .DETERMINISTIC = in_order(p),
                      .SPLIT = gpu_backward_leaves_sums(p, x.GROUP_PARTS), .FOLDED = gpu_folds_grids(p));
    request->file = "families/mma/backward/mma_backward.cu";
    request->entry = "mma_backward";
    request->shared_bytes = plan->shared_bytes;
    request->threads = threads_of(plan, p);
    request->spill_bytes_max = MMA_BACKWARD_SPILL_BYTES_MAX;
    /* Both kinds of intervals with the gradient of a bias spill up to 264 bytes. */
    if (p->has_intervals && gpu_row_runs(p) && gpu_dbias_constant(p))
        request->spill_bytes_max = 264;
}

static int overlays(const fdm_plan *plan, const fdm_problem *p) {
    return mma_backward_overlays(plan->block_m, plan->block_n, plan->stages, plan->v_in_registers, (int32_t)p->head_dim,
                                 (int32_t)p->head_dim_v);
}

/* A plan may come from a file: its tile must be its code's, and its workspace what the kernel takes. */
static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t v_in_registers = plan->v_in_registers;
    const struct parameters x = parameters_of(plan);
    const struct mma_backward_extras with = {.paired = x.PAIRED != 0, .buffers = x.DS_BUFFERS, .ring = x.RING};
    for (int32_t i = 0; i < mma_backward_code_count; i++) {
        const struct mma_backward_code *code = &mma_backward_codes[i];
        if (strcmp(code->code, plan->choice) == 0)
            return plan->block_m == code->block_m && plan->block_n == code->block_n &&
                   v_in_registers == code->v_in_registers && (plan->stages == 1 || plan->stages == 2) &&
                   x.PAIRED == with.paired && (!with.paired || may_pair(plan, p)) &&
                   (with.buffers == 1 || with.buffers == 2) &&
                   (!with.ring ||
                    ((with.paired || is_half(plan, p)) && with.buffers == 2 && (with.ring == 2 || with.ring == 3))) &&
                   (!x.TMA || (x.TMA == 1 && may_use_tma(x.RING, p))) &&
                   x.OVERLAY == (!with.paired && with.buffers == 1 && overlays(plan, p)) &&
                   (!x.GATHER || (x.GATHER == 1 && may_gather(p))) && x.IN_TURN >= 0 &&
                   x.IN_TURN <= p->batch * p->heads && x.GROUP_PARTS >= 1 &&
                   p->heads / p->heads_kv % x.GROUP_PARTS == 0 && plan->shared_bytes == bytes_with(plan, p, with) &&
                   plan->workspace_bytes >= workspace_bytes(plan, p);
    }
    return 0;
}

/* What TMA knows of q or dout: panels of a stage's rows. */
static struct cuda_tensor_layout layout_of(const struct matrix_view *x, const fdm_problem *p, int32_t columns,
                                           int32_t padded) {
    const int32_t panel = mma_backward_panel(padded);
    return (struct cuda_tensor_layout){.type = p->dtype == FDM_FLOAT16 ? CUDA_MAP_FLOAT16 : CUDA_MAP_BFLOAT16,
                                       .rank = 4,
                                       .address = x->data,
                                       .extents = {columns, p->seqlen_q, p->heads, p->batch},
                                       .stride_bytes = {0, 2 * x->row, 2 * x->head, 2 * x->batch},
                                       .box = {panel, MMA_BACKWARD_STAGE_ROWS, 1, 1},
                                       .swizzle_bytes = 2 * panel,
                                       .l2_bytes = 128};
}

static fdm_status make_maps(int32_t device, const struct attention *attention, const struct gpu_backward_needs *needs,
                            struct mma_backward_params *params) {
    const fdm_problem *p = attention->problem;
    const struct cuda_tensor_layout layouts[2] = {
        layout_of(&attention->q, p, (int32_t)p->head_dim, needs->head_dim),
        layout_of(&attention->dout, p, (int32_t)p->head_dim_v, needs->head_dim_v)};
    struct cuda_tensor_map maps[2];
    const fdm_status status = cuda_tensor_maps_make(device, layouts, 2, maps);
    if (!status) {
        params->q_map = maps[0];
        params->dout_map = maps[1];
    }
    return status;
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct gpu_backward_needs needs = needs_of(plan, p);
    const int32_t in_turn = parameters_of(plan).IN_TURN;
    struct mma_backward_params params = {.heads_in_turn = in_turn > 1 ? (uint32_t)in_turn : 1};
    fdm_status status = FDM_OK;
    gpu_backward_fill(l, &needs, &params.shared);
    if (l->attention && parameters_of(plan).TMA && p->batch * p->seqlen_q > 0)
        status = make_maps(l->device, l->attention, &needs, &params);
    gpu_backward_add(l, GPU_BACKWARD_BEFORE, &needs, &params.shared);
    main_request(plan, p, &needs, gpu_add_kernel(l));
    gpu_backward_add_grid(l, tiles_of(p->seqlen_k, plan->block_n), p->heads_kv * parameters_of(plan).GROUP_PARTS,
                          p->batch, &params.shared, sizeof params);
    gpu_backward_add(l, GPU_BACKWARD_AFTER, &needs, &params.shared);
    return status;
}

const struct gpu_algorithm mma_backward_algorithm = {
    .info = {"mma.backward", "FlashAttention-2's backward on mma.sync, every feature", FDM_BACKWARD},
    .parameters = PLAN_PARAMETERS(MMA_BACKWARD_PARAMETERS),
    .features = GPU_EVERY_FEATURE | GPU_ROW_RUN_FEATURES | GPU_FEATURE_SEQUSED,
    .chosen_freely = 1,
    .refusal = refusal,
    .fill = fill,
    .has_code = has_code,
    .fill_code = fill_code,
    .valid = valid,
    .launch = launch,
};
