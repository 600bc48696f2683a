/* blackwell_forward.c: the tcgen05 forward on the host: how many query tiles a block and which order for which problem,
 * tensor maps, launch. Nothing here was measured: no such device was at hand. */
#include "families/blackwell/forward/blackwell_forward.h"

#include <stdio.h>

#include "families/blackwell/blackwell_family.h"
#include "gpu/tile_maps.h"

PLAN_PARAMETER_STRUCT(BLACKWELL_FORWARD_PARAMETERS);
enum { PAIR = 2, BOX_KEYS = 64, FEW_ROWS = 16, NUM_SCHEDULERS = 3 };

/* A way to run a problem: query tiles of a block, who hands out items, and how many of exp2's results are made on the
 * FMA pipe. */
struct variant {
    int32_t q_tiles, scheduler, share, exp2_degree; /* share: of exp2_shares */
};
/* The shares of exponentials on the FMA pipe; a residue of 0 is none. By the model of docs/lab/blackwell_emulated.md a
 * step's exponentials take half of the time of its products at Dv of 256, and all of it at 128. Beside masks, biases
 * and softcap, registers do not hold the polynomial's constants: they have none; nor has 10.3, whose special function
 * unit is twice as wide (FlashAttention-4's rule). */
static const struct {
    int32_t frequency, residue; /* `residue` of `frequency` exponentials */
} exp2_shares[] = {{.frequency = 4, .residue = 1},
                   {.frequency = 1, .residue = 0},
                   {.frequency = 8, .residue = 1},
                   {.frequency = 8, .residue = 3}};
enum { QUARTER, NONE, NUM_EXP2 = sizeof exp2_shares / sizeof exp2_shares[0] }; /* of them the first two */

static int32_t padded(int64_t head_dim) { return (int32_t)gpu_round_up(head_dim, 64); }
static int32_t padded_v(int64_t head_dim_v) { return head_dim_v > 128 ? 256 : 128; }
static int scored(const fdm_problem *p) { return p->has_mask || p->has_bias; }
/* Scores are the products, but for the scale and for windows. */
static int is_plain(const fdm_problem *p) { return !scored(p) && !(p->softcap > 0) && (float)p->softmax_scale > 0; }

static int32_t shared_bytes(int32_t q_tiles, const fdm_problem *p) {
    return blackwell_forward_shared_bytes(q_tiles, padded(p->head_dim));
}
static int32_t rows_of_pair(int32_t q_tiles) { return PAIR * BLACKWELL_TILE * q_tiles; }

/* Two query tiles of a block read each step of K and V once. Their sums fit beside the scores up to Dv of 128, two
 * steps of K and V beside them up to D of 192, and registers hold their rows where scores stay as the products are. */
static int can_have(int32_t q_tiles, const fdm_problem *p) {
    return q_tiles == 1 ||
           (q_tiles == 2 && padded_v(p->head_dim_v) == 128 && padded(p->head_dim) <= 192 && is_plain(p));
}
static int fits(int32_t q_tiles, const fdm_device *device, const fdm_problem *p) {
    return can_have(q_tiles, p) && shared_bytes(q_tiles, p) <= device->shared_bytes;
}

/* Workspace: the block mask. */
static int64_t workspace_bytes(int32_t q_tiles, const fdm_problem *p) {
    return p->has_mask ? block_mask_bytes(p, rows_of_pair(q_tiles), BLACKWELL_TILE) : 0;
}

/* ---- choice ---- */

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = blackwell_refusal(device, p, text, size);
    if (clause)
        return clause;
    if (scored(p) && (!p->scores_aligned || p->varlen || (p->has_mask && p->mask_shape[3] != p->seqlen_k) ||
                      (p->has_bias && p->bias_shape[3] != p->seqlen_k)))
        return "rows of mask and bias must be contiguous and begin at multiples of 16 bytes";
    return fits(1, device, p) ? NULL : gpu_no_tile_fits(device, text, size);
}

static const char *passed_over(const fdm_device *device, const fdm_problem *p) {
    (void)device;
    return p->seqlen_q <= FEW_ROWS ? "few query rows leave most of a pair's 256 rows empty" : NULL;
}

/* The cubic's error is small beside the rounding of P to bfloat16, but shows in lse; the quartic's is small beside both
 * (exp2.cuh). */
static int32_t exp2_degree(const fdm_problem *p) { return p->dtype == FDM_FLOAT16 || p->needs_lse ? 4 : 3; }

static struct variant preferred(const fdm_device *device, const fdm_problem *p) {
    const int two = fits(2, device, p) && p->seqlen_q > rows_of_pair(1);
    return (struct variant){two ? 2 : 1, gpu_bounded(p) ? SCHEDULER_DYNAMIC : SCHEDULER_STATIC,
                            is_plain(p) && device->compute_minor == 0 ? QUARTER : NONE, exp2_degree(p)};
}

/* Variant 0 is the rules'; then the other orders, the other shares of exponentials, and all that with the other number
 * of query tiles. */
static int find_variant(const fdm_device *device, const fdm_problem *p, int32_t number, struct variant *v) {
    const struct variant first = preferred(device, p);
    const int32_t ways = NUM_SCHEDULERS + (is_plain(p) ? NUM_EXP2 - 1 : 0);
    if (number >= 2 * ways)
        return 0;
    *v = first;
    const int32_t way = number % ways;
    if (way < NUM_SCHEDULERS)
        v->scheduler = (first.scheduler + way) % NUM_SCHEDULERS;
    else
        v->share = (first.share + way - NUM_SCHEDULERS + 1) % NUM_EXP2;
    if (number >= ways)
        v->q_tiles = 3 - first.q_tiles;
    return fits(v->q_tiles, device, p);
}

static void name_choice(const struct variant *v, char *code, size_t size) {
    char emulated[24] = "";
    if (v->share != NONE)
        snprintf(emulated, sizeof emulated, "_Exp%dof%d", exp2_shares[v->share].residue,
                 exp2_shares[v->share].frequency);
    snprintf(code, size, "SM100_Pair_%dx%d%s_%s", rows_of_pair(v->q_tiles), BLACKWELL_TILE, emulated,
             items_order_names[v->scheduler]);
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t number, fdm_plan *plan) {
    struct variant v;
    if (!find_variant(device, p, number, &v))
        return 0;
    PLAN_SET_PARAMETERS(plan, .Q_TILES = v.q_tiles, .SCHEDULER = v.scheduler,
                        .EXP2_FREQUENCY = exp2_shares[v.share].frequency, .EXP2_RESIDUE = exp2_shares[v.share].residue,
                        .EXP2_DEGREE = v.exp2_degree, .NUM_SMS = device->num_sms);
    plan->block_m = rows_of_pair(v.q_tiles);
    plan->block_n = BLACKWELL_TILE;
    plan->stages = blackwell_forward_slots(v.q_tiles, padded(p->head_dim));
    plan->shared_bytes = shared_bytes(v.q_tiles, p);
    plan->workspace_bytes = workspace_bytes(v.q_tiles, p);
    name_choice(&v, plan->choice, sizeof plan->choice);
    snprintf(plan->reason, sizeof plan->reason,
             "head dim %lld on compute capability %d.%d: a pair of blocks has %d query rows, %d keys a step, %d of 512 "
             "columns of tensor memory, %d slots of 16 KB for K and V (%lld KB), registers %d softmax, %d correction, "
             "%d others; %d of %d exponentials on the FMA pipe; %s order; by a model, not measured; "
             "key intervals, float32 and wider heads go to mma",
             (long long)(p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v), device->compute_major,
             device->compute_minor, plan->block_m, plan->block_n,
             2 * BLACKWELL_TILE + v.q_tiles * padded_v(p->head_dim_v), plan->stages,
             (long long)(plan->shared_bytes + 1023) >> 10, BLACKWELL_SOFTMAX_REGISTERS(v.q_tiles),
             BLACKWELL_CORRECTION_REGISTERS(v.q_tiles), BLACKWELL_OTHER_REGISTERS(v.q_tiles),
             exp2_shares[v.share].residue, exp2_shares[v.share].frequency, scheduler_names[v.scheduler]);
    return 1;
}

/* ---- launch ---- */

static void make_request(const fdm_plan *plan, const fdm_problem *p, struct cuda_kernel_request *request) {
    const struct parameters x = parameters_of(plan);
    gpu_set_problem_constants(request, p, GPU_ALIKE_MASK_ROWS | GPU_ALIKE_BIAS_ROWS | GPU_ALIKE_SCORES_ALIGNED);
    GPU_ADD_CONSTANTS(request, BLACKWELL_FORWARD_CONSTANTS, .HEAD_DIM = padded(p->head_dim),
                      .HEAD_DIM_V = padded_v(p->head_dim_v), .Q_TILES = x.Q_TILES, .SCHEDULER = x.SCHEDULER,
                      .EXP2_FREQUENCY = x.EXP2_FREQUENCY, .EXP2_RESIDUE = x.EXP2_RESIDUE, .EXP2_DEGREE = x.EXP2_DEGREE,
                      .REDO = gpu_hides_keys(p));
    request->file = "families/blackwell/forward/blackwell_forward.cu";
    request->entry = "blackwell_forward";
    request->shared_bytes = shared_bytes(x.Q_TILES, p);
    request->threads = BLACKWELL_FORWARD_THREADS(x.Q_TILES);
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const struct parameters x = parameters_of(plan);
    return can_have(x.Q_TILES, p) && x.SCHEDULER >= 0 && x.SCHEDULER < NUM_SCHEDULERS && x.NUM_SMS >= PAIR &&
           x.EXP2_FREQUENCY >= 1 && x.EXP2_FREQUENCY <= 16 && x.EXP2_DEGREE >= 3 && x.EXP2_DEGREE <= 4 &&
           x.EXP2_RESIDUE >= 0 && x.EXP2_RESIDUE <= x.EXP2_FREQUENCY && p->head_dim <= 256 && p->head_dim_v <= 256 &&
           plan->block_m == rows_of_pair(x.Q_TILES) && plan->block_n == BLACKWELL_TILE &&
           plan->shared_bytes == shared_bytes(x.Q_TILES, p) && plan->workspace_bytes >= workspace_bytes(x.Q_TILES, p);
}

static fdm_status make_maps(const fdm_plan *plan, const struct attention *attention,
                            struct blackwell_forward_params *params) {
    const fdm_problem *p = attention->problem;
    const int64_t rows_q = p->varlen ? p->total_q : p->seqlen_q, rows_k = p->varlen ? p->total_k : p->seqlen_k;
    const struct cuda_tensor_layout layouts[3] = {
        tile_rows_layout(p, &attention->q, p->head_dim, rows_q, p->heads, BLACKWELL_TILE),
        tile_rows_layout(p, &attention->k, p->head_dim, rows_k, p->heads_kv, BOX_KEYS),
        tile_rows_layout(p, &attention->v, p->head_dim_v, rows_k, p->heads_kv, BOX_KEYS)};
    struct cuda_tensor_map maps[3];
    const fdm_status status = cuda_tensor_maps_make(plan->device.index, layouts, 3, maps);
    if (!status) {
        params->q_map = maps[0];
        params->k_map = maps[1];
        params->v_map = maps[2];
    }
    return status;
}

/* Blocks of a launch: in the static order as many pairs as run at once, else a pair an item. */
static int64_t blocks_of(const fdm_plan *plan, int64_t items) {
    const int64_t pairs = parameters_of(plan).NUM_SMS / PAIR;
    return PAIR * (parameters_of(plan).SCHEDULER == SCHEDULER_STATIC && pairs < items ? pairs : items);
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const int64_t row_blocks = gpu_ceil_div(p->seqlen_q, plan->block_m);
    struct blackwell_forward_params params = {.row_blocks = (int32_t)row_blocks,
                                              .items = (int32_t)(row_blocks * p->heads * p->batch),
                                              .mask_batches = (int32_t)p->mask_shape[0],
                                              .bias_batches = (int32_t)p->bias_shape[0]};
    fdm_status status = FDM_OK;
    if (l->attention) {
        params.mask_group = (int32_t)l->attention->mask.group;
        params.bias_group = (int32_t)l->attention->bias.group;
        gpu_fill_forward(l->attention, &params.in);
        status = make_maps(plan, l->attention, &params);
    }
    if (p->has_mask)
        block_mask_add(l, plan->block_m, plan->block_n, l->workspace, &params.in);
    make_request(plan, p, gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){.grid = {blocks_of(plan, params.items)},
                                          .cluster = PAIR,
                                          .params = &params,
                                          .params_bytes = sizeof params});
    return status;
}

static int32_t scheduler(const fdm_plan *plan) { return parameters_of(plan).SCHEDULER; }

const struct gpu_algorithm blackwell_forward_algorithm = {
    .info = {"blackwell.forward", "FlashAttention-4's plan on tcgen05 by pairs of blocks; never run on hardware",
             FDM_FORWARD},
    .parameters = PLAN_PARAMETERS(BLACKWELL_FORWARD_PARAMETERS),
    .features = GPU_FEATURE_CAUSAL | GPU_FEATURE_WINDOW | GPU_FEATURE_MASK_ROWS | GPU_FEATURE_MASK_KEYS |
                GPU_FEATURE_BIAS_ROWS | GPU_FEATURE_BIAS_KEYS | GPU_FEATURE_VARLEN | GPU_SCORE_FEATURES,
    .chosen_freely = 1,
    .writes_lse_low = 1,
    .refusal = refusal,
    .passed_over = passed_over,
    .fill = fill,
    .scheduler = scheduler,
    .valid = valid,
    .launch = launch,
};
