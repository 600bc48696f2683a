/* hopper_backward.c: the wgmma backward on the host: which tile for which problem, tensor maps, launches. */
#include "families/hopper/backward/hopper_backward.h"

#include <math.h>
#include <stdio.h>

#include "families/hopper/backward/hopper_backward_common.h"
#include "families/hopper/backward/hopper_dq_order.h"
#include "families/hopper/hopper_family.h"
#include "gpu/key_sort.h"
#include "gpu/tile_plan_launch.h"

/* ---- tiles ---- */

/* The first whose head dims and shared memory fit is chosen. Registers of dK, dV, of S and dP, which follow each other,
 * and of P are head_dim + 48 of 208 (two warpgroups of keys) or 144 (three). */
enum { NO_MASK_OR_BIAS, MASK_OR_BIAS }; /* MASK_OR_BIAS: leaves room for masks, biases and intervals */
struct tile {
    struct {
        int32_t kind, head_dim_max;
    } takes;
    struct {
        int32_t warpgroups, stages, dout_stages, ds_stages, ds_registers;
    } shape;
    const char *reason;
};
static const struct tile tiles[] = {
    {.takes = {.kind = NO_MASK_OR_BIAS, .head_dim_max = 64},
     .shape = {.warpgroups = 3, .stages = 3, .dout_stages = 3, .ds_stages = 2, .ds_registers = 1},
     .reason = "192 keys a block add less to dQ than 128: 9 to 24 % faster from 2048 rows on"},
    {.takes = {.kind = NO_MASK_OR_BIAS, .head_dim_max = 128},
     .shape = {.warpgroups = 2, .stages = 3, .dout_stages = 3, .ds_stages = 2},
     .reason = "dK and dV of 64 keys fill a warpgroup's registers; dS is made under dV's product"},
    {.takes = {.kind = NO_MASK_OR_BIAS, .head_dim_max = 64},
     .shape = {.warpgroups = 3, .stages = 3, .dout_stages = 3, .ds_stages = 2},
     .reason = "dK from shared memory"},
    {.takes = {.kind = NO_MASK_OR_BIAS, .head_dim_max = 128},
     .shape = {.warpgroups = 2, .stages = 3, .dout_stages = 3, .ds_stages = 1, .ds_registers = 1},
     .reason = "dK from registers; to head dims of 64 blocks of 128 keys fill the device sooner"},
    {.takes = {.kind = MASK_OR_BIAS, .head_dim_max = 128},
     .shape = {.warpgroups = 2, .stages = 3, .dout_stages = 3, .ds_stages = 2},
     .reason = "few rows are seen by some of 128 keys alone, and what is known of each key fits"},
    {.takes = {.kind = MASK_OR_BIAS, .head_dim_max = 128},
     .shape = {.warpgroups = 2, .stages = 3, .dout_stages = 2, .ds_stages = 2},
     .reason = "two stages of dO leave room for masks and biases"},
    {.takes = {.kind = MASK_OR_BIAS, .head_dim_max = 128},
     .shape = {.warpgroups = 2, .stages = 2, .dout_stages = 2, .ds_stages = 2},
     .reason = "two stages leave room for masks beside biases"},
};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0], BLOCK_M = 64 };
enum { WIDE_TILE = 0, NARROW_TILE = 3 }; /* of 192 and 128 keys, to head dims of 64 */

PLAN_PARAMETER_STRUCT(HOPPER_BACKWARD_PARAMETERS);

static int32_t shared_bytes(const struct tile *t, const fdm_problem *p) {
    const struct hopper_score_inputs inputs = {gpu_lists_keys(p), gpu_mask_rows(p), p->has_bias, gpu_bias_rows(p),
                                               gpu_row_runs(p)};
    return hopper_backward_shared_bytes(t->shape.warpgroups, t->shape.stages, t->shape.dout_stages, t->shape.ds_stages,
                                        hopper_backward_padded(p->head_dim), hopper_backward_padded(p->head_dim_v),
                                        inputs);
}

/* dS is made of P in float32: where the gradient of a bias or the slope of a cap is found from it; and where few rows
 * are summed, of which the rounding of P would show. */
enum { FEW_ROWS = 64 };
static int must_take_f32_p(const fdm_problem *p) { return gpu_dbias_constant(p) != GPU_DBIAS_NONE || p->softcap > 0; }
static int takes_f32_p(const struct tile *t, const fdm_problem *p) {
    return t->shape.ds_stages > 1 && (must_take_f32_p(p) || p->seqlen_q <= FEW_ROWS);
}

/* Blocks add to dQ in a fixed order. */
static int orders_dq(const fdm_problem *p) { return p->deterministic && p->needs_dq; }
static int is_wide(const fdm_problem *p) { return hopper_backward_padded(p->head_dim) == 128; }

static int suits(const struct tile *t, const fdm_problem *p) {
    return (t->takes.kind == MASK_OR_BIAS) == (p->has_intervals || gpu_row_runs(p) || p->has_mask || p->has_bias) &&
           (t->shape.ds_stages > 1 || !must_take_f32_p(p)) &&
           hopper_backward_padded(p->head_dim) <= t->takes.head_dim_max &&
           hopper_backward_padded(p->head_dim_v) <= t->takes.head_dim_max;
}

static int fits(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    return suits(t, p) && shared_bytes(t, p) <= device->shared_bytes;
}

/* Time of all blocks, of one of 128 keys 1; few waves are counted whole. Under a causal mask the first block of keys
 * walks over all rows, and a mean one over half of them; sequences of a packed batch have their mean length. Query
 * heads that share keys can be divided over blocks. */
static double time_of_blocks(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    enum { FEW_WAVES = 4 };
    const double item = t->shape.warpgroups == 3 ? 1.2 : 1; /* H200: 1.09 to 1.21 of a few hundred rows and of many */
    const double keys = p->varlen ? (double)p->total_k : (double)(p->batch * p->seqlen_k);
    const double share = p->varlen ? keys / (double)(p->batch * p->seqlen_k) : 1;
    const double waves = keys / (64 * t->shape.warpgroups) * (double)p->heads / device->num_sms * share;
    if (p->causal && p->window_left < 0)
        return item * fmax(1, waves / 2);
    return item * (waves <= FEW_WAVES ? ceil(waves) : waves);
}

/* 192 keys a block add less to dQ, 128 are more blocks. Few rows ask for dS by P in float32. */
static int is_narrow(const fdm_device *device, const fdm_problem *p) {
    return fits(&tiles[WIDE_TILE], device, p) && fits(&tiles[NARROW_TILE], device, p) && p->seqlen_q > FEW_ROWS &&
           time_of_blocks(&tiles[NARROW_TILE], device, p) < time_of_blocks(&tiles[WIDE_TILE], device, p);
}

/* The rules' first, then the others in order. */
static const struct tile *find_tile(const fdm_device *device, const fdm_problem *p, int32_t number) {
    const int32_t first = is_narrow(device, p) ? NARROW_TILE : 0;
    if (first && number-- == 0)
        return &tiles[first];
    for (int32_t i = 0; i < NUM_TILES; i++)
        if ((!first || i != first) && fits(&tiles[i], device, p) && number-- == 0)
            return &tiles[i];
    return NULL;
}

/* Whether scattered keys are sorted: fewer are few blocks, and tiles of masks and biases are of neighbours. */
enum { GATHER_KEYS_MIN = 512 };
static int gathers(const fdm_problem *p) {
    return p->has_intervals && !p->varlen && !gpu_masks_blocks(p) && !gpu_bias_rows(p) &&
           p->seqlen_k >= GATHER_KEYS_MIN;
}

/* Blocks add anything in a fixed order. */
static int is_ordered(const fdm_problem *p) { return orders_dq(p) || gpu_dbias_in_turns(p); }

/* Keys that lie in runs are taken by another launch: of the tile of dense attention to head dims of 64, and of blocks
 * in the order of their walks. The device knows whether keys are scattered; blocks of the other launch end at once. */
enum { RUNS_TILE = 0, RUNS_HEAD_DIM_MAX = 64 };
static int launches_runs(const fdm_problem *p) { return gathers(p) && !is_ordered(p); }
static const struct tile *launched_tile(const fdm_plan *plan, const fdm_problem *p, int runs) {
    const int narrow = hopper_backward_padded(p->head_dim) <= RUNS_HEAD_DIM_MAX &&
                       hopper_backward_padded(p->head_dim_v) <= RUNS_HEAD_DIM_MAX;
    const int alone = !p->has_mask && !p->has_bias && !must_take_f32_p(p) && p->seqlen_q > FEW_ROWS; /* registers */
    return &tiles[runs && narrow && alone ? RUNS_TILE : parameters_of(plan).TILE];
}
static int32_t block_n_of(const fdm_plan *plan, const fdm_problem *p, int runs) {
    return 64 * launched_tile(plan, p, runs)->shape.warpgroups;
}

static struct hopper_division division_of(const fdm_plan *plan) {
    return (struct hopper_division){.parts = parameters_of(plan).PARTS, .in_turn = parameters_of(plan).IN_TURN};
}

/* One warpgroup more adds to dQ, and keeps the fixed order there: where registers are left beside three others, and no
 * fixed order of a bias' gradient is to be kept too. Without a fixed order it gains up to 5 % at D 128, nothing below,
 * and loses as much where keys are sorted (measured). */
static int has_dq_adder(const struct tile *t, const fdm_problem *p, int runs) {
    const int alone = !gpu_masks_blocks(p) && !p->has_bias && (!gathers(p) || runs);
    const int fits =
        !(takes_f32_p(t, p) && gpu_lists_keys(p) && gpu_hides_pairs(p)); /* what warps keep for themselves */
    return p->needs_dq && fits && (orders_dq(p) || (is_wide(p) && alone)) && t->shape.warpgroups == 2 &&
           !gpu_dbias_in_turns(p);
}
static int32_t block_threads(const struct tile *t, const fdm_problem *p, int runs) {
    return 128 * (t->shape.warpgroups + 1 + has_dq_adder(t, p, runs));
}

/* Masks or intervals decide which blocks add to a tile of rows, so that a kernel before this one finds their order. */
static int finds_dq_order(const fdm_problem *p) { return is_ordered(p) && (gpu_lists_keys(p) || gpu_masks_blocks(p)); }
enum { BLOCK_N_LISTED = 128 };
static int64_t key_blocks_of(const fdm_problem *p) { return gpu_ceil_div(p->seqlen_k, BLOCK_N_LISTED); }
static int64_t row_tiles(const fdm_problem *p) { return gpu_ceil_div(p->seqlen_q, BLOCK_M); }
static int64_t dq_order_words(const fdm_problem *p) {
    const int64_t keys = gathers(p) ? gpu_round_up(p->seqlen_k, KEY_SORT_KEYS) : p->seqlen_k;
    return gpu_ceil_div(keys, BLOCK_N_LISTED * HOPPER_DQ_ORDER_BLOCKS);
}
static int64_t dq_order_bytes(const fdm_problem *p) {
    return finds_dq_order(p) ? p->batch * p->heads_kv * row_tiles(p) * dq_order_words(p) * 8 : 0;
}

static int empty_rows(const fdm_problem *p) {
    return gpu_empty_rows(p) || p->varlen || p->has_mask || p->has_bias || p->has_intervals || gpu_row_runs(p);
}
/* In a fixed order the first block that reaches rows of dQ stores, where some block reaches every row. Later
 * additions must be ordered by an acquire, for which the dQ warpgroup has no time. */
static int stores_first(const struct tile *t, const fdm_problem *p) {
    return orders_dq(p) && has_dq_adder(t, p, 0) && !empty_rows(p);
}

static struct gpu_backward_needs needs_of(const fdm_plan *plan, const fdm_problem *p) {
    struct gpu_backward_needs needs = hopper_backward_needs(p, BLOCK_M, p->needs_dq, parameters_of(plan).PARTS);
    needs.semaphores = orders_dq(p);
    needs.stores_first = stores_first(&tiles[parameters_of(plan).TILE], p);
    needs.early = 1;
    needs.notes_empty = empty_rows(p) && !p->varlen;
    needs.may_order_keys = needs.orders_keys = gathers(p);
    needs.order_block_n = launches_runs(p) ? block_n_of(plan, p, 1) : 0;
    needs.block_m = BLOCK_M;
    needs.block_n = BLOCK_N_LISTED;
    needs.plans_rows = gpu_row_runs(p);
    needs.dbias_shares = 1;
    needs.dbias_blocks = gpu_dbias_in_turns(p) ? (int32_t)key_blocks_of(p) : 0;
    needs.lse_factor = p->has_bias || p->softcap > 0 ? 1.0f : needs.lse_factor;
    return needs;
}

/* The visits and the tile plan of row intervals lie behind the rest. */
static int64_t plan_offset(const fdm_problem *p, const struct gpu_backward_needs *needs) {
    return gpu_round_up(gpu_backward_workspace_bytes(p, needs) + dq_order_bytes(p), 256);
}
static int64_t workspace_bytes(const fdm_plan *plan, const fdm_problem *p) {
    const struct gpu_backward_needs needs = needs_of(plan, p);
    return plan_offset(p, &needs) + (gpu_row_runs(p) ? tile_plan_bytes(p) : 0);
}

/* ---- choice ---- */

/* Of intervals, masks and biases. */
static const char *refusal_of_scores(const fdm_problem *p, char *text, size_t size) {
    const int mask_rows = gpu_mask_rows(p), bias_rows = gpu_bias_rows(p);
    if ((p->has_intervals && p->interval_heads > p->heads_kv) ||
        (p->has_row_intervals && p->row_interval_heads > p->heads_kv) ||
        (p->block_mask_size && p->block_mask_heads > p->heads_kv) || (p->has_mask && p->mask_shape[1] > p->heads_kv) ||
        (p->has_bias && !bias_rows && p->bias_shape[1] > p->heads_kv))
        return "query heads that share keys have intervals, masks or biases of keys of their own";
    if ((mask_rows || bias_rows) &&
        (!p->scores_mappable || p->varlen || (mask_rows && p->mask_shape[3] != p->seqlen_k) ||
         (bias_rows && p->bias_shape[3] != p->seqlen_k)))
        return "rows of mask and bias must be contiguous and begin at multiples of 16 bytes, for TMA";
    if (bias_rows && p->bias_dtype != p->dtype)
        return "a bias with query rows has q's dtype";
    if (p->has_bias && p->softcap > 0)
        return "there is no softcap beside a bias";
    if (gpu_dbias_in_turns(p) && p->bias_shape[1] < p->heads && p->heads > p->heads_kv)
        return "in a fixed order, query heads that share keys do not share the gradient of a bias";
    if (gpu_row_runs(p) && !tile_plan_possible(p))
        return "row intervals or blocks are of too many rows, keys and heads";
    if ((gpu_lists_keys(p) || gpu_masks_blocks(p)) && p->seqlen_q > BLOCK_M * HOPPER_BACKWARD_TILES_MAX) {
        snprintf(text, size, "beside intervals, masks or biases of keys there are at most %d query rows",
                 BLOCK_M * HOPPER_BACKWARD_TILES_MAX);
        return text;
    }
    return NULL;
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = hopper_backward_refusal(p, 128, text, size);
    if (!clause)
        clause = refusal_of_scores(p, text, size);
    return clause || find_tile(device, p, 0) ? clause : gpu_no_tile_fits(device, text, size);
}

static const char *passed_over(const fdm_device *device, const fdm_problem *p) {
    const int32_t block_n = 64 * find_tile(device, p, 0)->shape.warpgroups;
    const int64_t blocks = gpu_ceil_div(p->seqlen_k, block_n) * p->heads_kv * p->batch;
    return p->varlen && (gpu_lists_keys(p) || gpu_row_runs(p)) && p->heads > p->heads_kv && 2 * blocks < device->num_sms
               ? "blocks of keys are few, and of packed sequences it does not divide the query heads that share them"
               : NULL;
}

/* Where blocks add in a fixed order, enough heads (or parts of groups) are interleaved that few blocks of one run at
 * once. Each reaches a tile of rows after the one before it: a step and a third after it, where the dQ warpgroup
 * waits for semaphores too. Under a causal mask or window walks differ there, and more blocks begin anew. Heads are
 * split into rounds of equal size. */
static int32_t heads_in_order(const fdm_device *device, const fdm_problem *p, int32_t parts, const struct tile *t) {
    const int32_t together = gpu_bounded(p) && !has_dq_adder(t, p, 0) ? 4 : 8;
    const int64_t heads = p->heads_kv * p->batch * parts, least = (device->num_sms + together - 1) / together;
    const int64_t rounds = least < heads ? heads / least : 1;
    return (int32_t)((heads + rounds - 1) / rounds);
}

/* First the tiles, then the other divisions of the first tile's heads. */
static int fill(const fdm_device *device, const fdm_problem *p, int32_t number, fdm_plan *plan) {
    const double flops = (double)(6 * p->head_dim + 4 * p->head_dim_v);
    const struct tile *t = find_tile(device, p, number);
    struct hopper_division division;
    int32_t other = 0;
    if (!t && (t = find_tile(device, p, 0)))
        for (other = number + 1; find_tile(device, p, number + 1 - other); other--)
            ;
    if (!t || !hopper_backward_divide(device, p, 64 * t->shape.warpgroups, flops, other, &division))
        return 0;
    PLAN_SET_PARAMETERS(plan, .TILE = (int32_t)(t - tiles), .PARTS = division.parts,
                        .IN_TURN = is_ordered(p) ? heads_in_order(device, p, division.parts, t) : division.in_turn);
    plan->block_m = BLOCK_M;
    plan->block_n = 64 * t->shape.warpgroups;
    plan->stages = t->shape.stages;
    plan->shared_bytes = shared_bytes(t, p);
    plan->workspace_bytes = workspace_bytes(plan, p);
    snprintf(plan->choice, sizeof plan->choice, "SM90_Wgmma_%dx%d_R%d%s_DS%d%s%s", plan->block_m, plan->block_n,
             t->shape.stages, t->shape.dout_stages < t->shape.stages ? "_DO2" : "", t->shape.ds_stages,
             t->shape.ds_registers ? "_RS" : "", t->takes.kind == MASK_OR_BIAS ? "_Spacious" : "");
    const int apart = has_dq_adder(t, p, 0), wide = is_wide(p);
    char adder[64] = "";
    if (apart)
        snprintf(adder, sizeof adder, ", one that adds it%s (%d)", orders_dq(p) ? " in order" : "",
                 HOPPER_BACKWARD_DQ_ADDER_REGISTERS(wide));
    snprintf(plan->reason, sizeof plan->reason,
             "head dim %lld on compute capability 9.0: %d warpgroups of 64 keys (%d registers a thread) and one that "
             "loads and makes dQ (%d)%s, %d rows a step, %d stages of Q, %d of dO, %d of dS (%lld KB): %s%s%s",
             (long long)(p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v), t->shape.warpgroups,
             HOPPER_BACKWARD_KEY_REGISTERS(t->shape.warpgroups, apart, wide),
             HOPPER_BACKWARD_DQ_REGISTERS(t->shape.warpgroups, apart, wide), adder, BLOCK_M, t->shape.stages,
             t->shape.dout_stages, t->shape.ds_stages, (long long)(plan->shared_bytes + 1023) >> 10, t->reason,
             launches_runs(p) ? "; scattered keys in the order of the last row that sees them, others by another launch"
             : gathers(p)     ? "; keys in the order of the last row that sees them"
                              : "",
             orders_dq(p)    ? "; blocks add to a row's dQ in the order of their keys"
             : is_ordered(p) ? "; blocks add to the bias' gradient in the order of their heads"
                             : "");
    hopper_backward_name_parts(p, division, plan);
    return 1;
}

/* ---- launch ---- */

static int32_t hopper_scrub(const fdm_problem *p) {
    return gpu_hides_pairs(p) ? HOPPER_SCRUB_NUMBERS : gpu_lists_keys(p) ? HOPPER_SCRUB_HIDDEN : HOPPER_SCRUB_NONE;
}

static int32_t keys_of(const fdm_problem *p, int runs) {
    return runs               ? HOPPER_KEYS_RUNS
           : launches_runs(p) ? HOPPER_KEYS_SCATTERED
           : gathers(p)       ? HOPPER_KEYS_SORTED
                              : HOPPER_KEYS_PLACED;
}

static void main_request(const fdm_plan *plan, const fdm_problem *p, int runs, struct cuda_kernel_request *request) {
    const struct tile *t = launched_tile(plan, p, runs);
    gpu_set_problem_constants(request, p, GPU_ALIKE_SCORES_ALIGNED | GPU_ALIKE_POSITIVE_SCALE);
    GPU_ADD_CONSTANTS(request, HOPPER_BACKWARD_CONSTANTS, .HEAD_DIM = hopper_backward_padded(p->head_dim),
                      .HEAD_DIM_V = hopper_backward_padded(p->head_dim_v), .WARPGROUPS = t->shape.warpgroups,
                      .STAGES = t->shape.stages, .DOUT_STAGES = t->shape.dout_stages, .DS_STAGES = t->shape.ds_stages,
                      .DS_REGISTERS = t->shape.ds_registers, .DBIAS = gpu_dbias_constant(p), .KEYS = keys_of(p, runs),
                      .ROWS_DESCENDING = (gathers(p) && !runs) || is_ordered(p), .DS_FROM_F32_P = takes_f32_p(t, p),
                      .EMPTY_ROWS = empty_rows(p), .SCRUB = hopper_scrub(p), .FIRST_STORES = stores_first(t, p),
                      .PARTS = gpu_backward_leaves_sums(p, parameters_of(plan).PARTS), .NEEDS_DQ = p->needs_dq,
                      .DQ_ADDER = has_dq_adder(t, p, runs), .DETERMINISTIC = is_ordered(p));
    request->file = "families/hopper/backward/hopper_backward.cu";
    request->entry = "hopper_backward";
    request->shared_bytes = shared_bytes(t, p);
    request->threads = block_threads(t, p, runs);
    /* Compiled for head dim 128, runs of rows spill up to 308 bytes, lists of keys 204 and dbias 64. */
    if (gpu_widest(p) > 64)
        request->spill_bytes_max = gpu_row_runs(p) ? 308 : gpu_lists_keys(p) ? 204 : gpu_dbias_constant(p) ? 64 : 0;
}

static void dq_order_request(const fdm_problem *p, struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p, GPU_ALIKE_SOFTCAP | GPU_ALIKE_SCORES_ALIGNED | GPU_ALIKE_POSITIVE_SCALE);
    GPU_ADD_CONSTANTS(request, HOPPER_DQ_ORDER_CONSTANTS, .KEYS = keys_of(p, 0));
    request->file = "families/hopper/backward/hopper_dq_order.cu";
    request->entry = "hopper_dq_order";
    request->shared_bytes = 0;
    request->threads = 32 * HOPPER_DQ_ORDER_BLOCKS;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t tile = parameters_of(plan).TILE;
    if (tile < 0 || tile >= NUM_TILES || !hopper_backward_divides(p, division_of(plan)))
        return 0;
    const struct tile *t = &tiles[tile];
    return suits(t, p) && plan->block_m == BLOCK_M && plan->block_n == 64 * t->shape.warpgroups &&
           plan->shared_bytes == shared_bytes(t, p) && plan->workspace_bytes >= workspace_bytes(plan, p);
}

static void add_dq_order(struct gpu_launches *l, const struct hopper_backward_params *params) {
    const fdm_problem *p = l->problem;
    dq_order_request(p, gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){.grid = {gpu_grid(p->batch * p->heads_kv * gpu_ceil_div(row_tiles(p), 32))},
                                          .params = params,
                                          .params_bytes = sizeof *params});
}

/* The launch of the blocks that own keys, behind that of the visits. */
static fdm_status add_main(const fdm_plan *plan, struct gpu_launches *l, int runs,
                           struct hopper_backward_params *params) {
    const fdm_problem *p = l->problem;
    const int32_t block_n = block_n_of(plan, p, runs);
    const int sorted = gathers(p) && !runs;
    struct hopper_division division = division_of(plan);
    if (sorted && !is_ordered(p)) /* the longest walks of all heads first, from the last rows, which stay together */
        division.in_turn = (int32_t)(p->heads_kv * p->batch * division.parts);
    const int64_t blocks = hopper_backward_order(p, block_n, division, sorted, params);
    fdm_status status = FDM_OK;
    if (l->attention && (!runs || block_n != plan->block_n)) /* else they are those of the first launch */
        status = hopper_backward_maps(plan, l->attention, block_n, params);
    if (finds_dq_order(p))
        add_dq_order(l, params);
    main_request(plan, p, runs, gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){
                          .grid = {gpu_grid(blocks)}, .early = 1, .params = params, .params_bytes = sizeof *params});
    return status;
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct gpu_backward_needs needs = needs_of(plan, p);
    struct hopper_backward_params params = {
        .dq_order = (uint64_t *)(void *)(l->workspace + gpu_backward_workspace_bytes(p, &needs)),
        .row_tiles = (int32_t)row_tiles(p),
        .dq_order_words = (int32_t)dq_order_words(p)};
    gpu_backward_fill(l, &needs, &params.in);
    gpu_backward_add(l, GPU_BACKWARD_BEFORE, &needs, &params.in);
    if (gpu_row_runs(p))
        tile_plan_add(l, &params.in.in, (struct tile_plan_order){0}, l->workspace + plan_offset(p, &needs),
                      &params.plan);
    fdm_status status = FDM_OK;
    for (int runs = 0; runs <= launches_runs(p) && !status; runs++)
        status = add_main(plan, l, runs, &params);
    gpu_backward_add(l, GPU_BACKWARD_AFTER, &needs, &params.in);
    return status;
}

const struct gpu_algorithm hopper_backward_algorithm = {
    .info = {"hopper.backward", "FlashAttention-2's backward on wgmma and TMA, a warpgroup for dQ", FDM_BACKWARD},
    .parameters = PLAN_PARAMETERS(HOPPER_BACKWARD_PARAMETERS),
    .features = GPU_FEATURE_CAUSAL | GPU_FEATURE_WINDOW | GPU_FEATURE_MASK_ROWS | GPU_FEATURE_MASK_KEYS |
                GPU_FEATURE_BIAS_ROWS | GPU_FEATURE_BIAS_KEYS | GPU_FEATURE_INTERVALS | GPU_ROW_RUN_FEATURES |
                GPU_FEATURE_VARLEN | GPU_SCORE_FEATURES | GPU_FEATURE_DBIAS | GPU_FEATURE_DLSE |
                GPU_FEATURE_EMPTY_ROWS | GPU_FEATURE_DETERMINISTIC,
    .chosen_freely = 1,
    .refusal = refusal,
    .passed_over = passed_over,
    .fill = fill,
    .valid = valid,
    .launch = launch,
};
