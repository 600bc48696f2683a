/* hopper_gather.c: the gathering forward on the host: which tile for which problem, the tensor map, launch. */
#include "families/hopper/forward/hopper_gather.h"

#include <stdio.h>

#include "families/hopper/forward/hopper_gather_launch.h"
#include "families/hopper/hopper_family.h"
#include "families/hopper/pipeline/hopper_items.h"
#include "gpu/tile_maps.h"

/* ---- tiles ---- */

/* A row is taken when head dims and shared memory fit it; the first that fits is chosen, with its scheduler, or the one
 * after it where its blocks do not fill the device once. Registers
 * of S, P and O are 3 block_n / 4 + head_dim_v / 2 of consumer_registers; `look` keys are tested in a step. Times are
 * of one H200, top-W intervals of 8192 keys (docs/lab/hopper_gather.md). */
struct tile {
    int32_t head_dim_max;
    struct {
        int32_t warpgroups, block_n, stages, q_stages, look, consumer_registers, ping_pong;
    } shape;
    int32_t scheduler;
    const char *reason;
};
static const struct tile tiles[] = {
    {.shape = {.warpgroups = 3,
               .block_n = 96,
               .stages = 4,
               .q_stages = 2,
               .look = 1024,
               .consumer_registers = 144,
               .ping_pong = 1},
     .head_dim_max = 64,
     .scheduler = ITEMS_DYNAMIC,
     .reason = "192 rows share each gathered key; 64 keys a step take 2 % longer"},
    {.shape = {.warpgroups = 3,
               .block_n = 64,
               .stages = 3,
               .q_stages = 2,
               .look = 1024,
               .consumer_registers = 144,
               .ping_pong = 1},
     .head_dim_max = 128,
     .scheduler = ITEMS_DYNAMIC,
     .reason = "192 rows share each gathered key: 128 take 22 % longer"},
    {.shape = {.warpgroups = 2,
               .block_n = 64,
               .stages = 2,
               .q_stages = 1,
               .look = 512,
               .consumer_registers = 208,
               .ping_pong = 1},
     .head_dim_max = 192,
     .scheduler = ITEMS_DYNAMIC,
     .reason = "O leaves registers for two warpgroups; not measured"},
    {.shape = {.warpgroups = 2, .block_n = 64, .stages = 2, .q_stages = 1, .look = 256, .consumer_registers = 216},
     .head_dim_max = 256,
     .scheduler = ITEMS_DYNAMIC,
     .reason = "O leaves registers for two warpgroups"},
};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0], NUM_SCHEDULERS = 3, FEW_ROWS = 64 };

PLAN_PARAMETER_STRUCT(HOPPER_GATHER_PARAMETERS);

static int32_t padded(int64_t head_dim) { return (int32_t)gpu_round_up(head_dim, 16); }

/* A producer loads what is known of keys a step ahead: fewer of them where there is more of each, and where it would
 * spill: beside softcap, and in packed sequences with wider rows of V than of K. */
static int32_t look_of(const struct tile *t, const fdm_problem *p) {
    const int spills = p->softcap > 0 || (p->varlen && p->head_dim_v > p->head_dim);
    return t->shape.look > 256 && (p->has_mask || p->has_bias || spills) ? t->shape.look / 2 : t->shape.look;
}

static int32_t shared_bytes(const struct tile *t, const fdm_problem *p) {
    return hopper_gather_shared_bytes(t->shape.warpgroups, t->shape.block_n, t->shape.stages, t->shape.q_stages,
                                      look_of(t, p), padded(p->head_dim), padded(p->head_dim_v), p->has_bias);
}

static int fits(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    return padded(p->head_dim) <= t->head_dim_max && padded(p->head_dim_v) <= t->head_dim_max &&
           shared_bytes(t, p) <= device->shared_bytes;
}

static int64_t blocks_of(const struct tile *t, const fdm_problem *p) {
    return hopper_all_blocks(p, 1, 64 * t->shape.warpgroups);
}

/* Of few blocks the longest is what takes the time, and one of 128 rows takes 10 to 14 % less (H200, head dim 128). */
static const struct tile *preferred(const fdm_device *device, const fdm_problem *p) {
    enum { WIDE_ROWS = 1, FEWER_ROWS = 2 };
    for (int32_t i = 0; i < NUM_TILES; i++)
        if (fits(&tiles[i], device, p))
            return i == WIDE_ROWS && blocks_of(&tiles[i], p) <= device->num_sms && fits(&tiles[FEWER_ROWS], device, p)
                       ? &tiles[FEWER_ROWS]
                       : &tiles[i];
    return NULL;
}

/* ---- choice ---- */

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = gpu_shape_refusal(p, 0, 256, text, size);
    if (clause)
        return clause;
    if (!gpu_lists_keys(p))
        return "nothing says key by key what is seen: it gathers keys by intervals, or masks or biases without rows";
    if (!p->q_mappable)
        return "TMA needs strides of q above 0 and below 2^40 bytes";
    if (gpu_loads_nothing(p))
        return "there is nothing to load";
    return preferred(device, p) ? NULL : gpu_no_tile_fits(device, text, size);
}

static const char *passed_over(const fdm_device *device, const fdm_problem *p) {
    (void)device;
    return p->seqlen_q <= FEW_ROWS ? "few query rows leave most of a block tile of 192 rows empty" : NULL;
}

/* A block requests its next item where it begins one. Of two waves at most, a dynamic order therefore gives the
 * second to the block that began first, not to the one that has ended; blocks of one item each begin where there is
 * room. */
static int32_t scheduler_of(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    return blocks_of(t, p) <= 2 * (int64_t)device->num_sms ? ITEMS_LONGEST : t->scheduler;
}

/* Variant 0 is the rules'; then every tile that fits with every scheduler. */
static int find_variant(const fdm_device *device, const fdm_problem *p, int32_t number, const struct tile **tile,
                        int32_t *scheduler) {
    const struct tile *first = preferred(device, p);
    if (!first)
        return 0;
    *tile = first;
    const int32_t rules = *scheduler = scheduler_of(first, device, p);
    for (int32_t i = 0; number > 0 && i < NUM_TILES; i++)
        for (int32_t order = 0; fits(&tiles[i], device, p) && order < NUM_SCHEDULERS; order++)
            if ((&tiles[i] != first || order != rules) && --number == 0) {
                *tile = &tiles[i];
                *scheduler = order;
                return 1;
            }
    return number == 0;
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t number, fdm_plan *plan) {
    const struct tile *t;
    int32_t order;
    if (!find_variant(device, p, number, &t, &order))
        return 0;
    PLAN_SET_PARAMETERS(plan, .TILE = (int32_t)(t - tiles), .SCHEDULER = order, .NUM_SMS = device->num_sms);
    plan->block_m = 64 * t->shape.warpgroups;
    plan->block_n = t->shape.block_n;
    plan->stages = t->shape.stages;
    plan->shared_bytes = shared_bytes(t, p);
    plan->workspace_bytes = hopper_count_bytes(order);
    snprintf(plan->choice, sizeof plan->choice, "SM90_Gather_%dx%d_S%d_Q%d%s_%s", plan->block_m, plan->block_n,
             t->shape.stages, t->shape.q_stages, t->shape.ping_pong ? "_Turns" : "", items_order_names[order]);
    snprintf(plan->reason, sizeof plan->reason,
             "head dim %lld on compute capability 9.0, keys seen or not %s: 4 producer warps list the keys that some "
             "row sees and gather them, %d warpgroups of 64 query rows compute (%d and %d registers a thread), %d keys "
             "a step, %d stages of K and V, %d of Q (%lld KB): %s; %s order",
             (long long)(p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v),
             p->has_intervals ? "by intervals" : "for all rows", t->shape.warpgroups,
             HOPPER_GATHER_PRODUCER_REGISTERS(t->shape.warpgroups, t->shape.consumer_registers),
             t->shape.consumer_registers, t->shape.block_n, t->shape.stages, t->shape.q_stages,
             (long long)(plan->shared_bytes + 1023) >> 10, t->reason, scheduler_names[order]);
    return 1;
}

/* ---- launch ---- */

static void make_request(const fdm_problem *p, int32_t tile, int32_t order, struct cuda_kernel_request *request) {
    const struct tile *t = &tiles[tile];
    gpu_set_problem_constants(request, p, GPU_ALIKE_SCORES_ALIGNED);
    GPU_ADD_CONSTANTS(request, HOPPER_GATHER_CONSTANTS, .HEAD_DIM = padded(p->head_dim),
                      .HEAD_DIM_V = padded(p->head_dim_v), .WARPGROUPS = t->shape.warpgroups,
                      .BLOCK_N = t->shape.block_n, .STAGES = t->shape.stages, .Q_STAGES = t->shape.q_stages,
                      .LOOK = look_of(t, p), .CONSUMER_REGISTERS = t->shape.consumer_registers,
                      .PING_PONG = t->shape.ping_pong, .SCHEDULER = order);
    request->file = "families/hopper/forward/hopper_gather.cu";
    request->entry = "hopper_gather";
    request->shared_bytes = shared_bytes(t, p);
    request->threads = 128 * (t->shape.warpgroups + 1);
    /* Sinks beside the widest rows of V: what a row's end needs. */
    request->spill_bytes_max = p->has_sink && p->head_dim_v > 192 ? 32 : 0;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const struct parameters x = parameters_of(plan);
    if (x.TILE < 0 || x.TILE >= NUM_TILES || x.SCHEDULER < 0 || x.SCHEDULER >= NUM_SCHEDULERS || x.NUM_SMS < 1)
        return 0;
    const struct tile *t = &tiles[x.TILE];
    return padded(p->head_dim) <= t->head_dim_max && padded(p->head_dim_v) <= t->head_dim_max &&
           plan->block_m == 64 * t->shape.warpgroups && plan->block_n == t->shape.block_n &&
           plan->stages == t->shape.stages && plan->shared_bytes == shared_bytes(t, p) &&
           plan->workspace_bytes >= hopper_count_bytes(x.SCHEDULER);
}

/* attention: NULL where kernels alone are asked. heads: NULL: all of them. */
static fdm_status add(struct gpu_launches *l, const struct attention *attention, int32_t tile, int32_t order,
                      int32_t num_sms, const struct tile_plan *heads, int32_t *items_begun) {
    const fdm_problem *p = l->problem;
    const int32_t block_m = 64 * tiles[tile].shape.warpgroups;
    struct hopper_gather_params params = {.items_begun = items_begun,
                                          .row_blocks = (int32_t)hopper_row_blocks(p, 1, block_m),
                                          .items = (int32_t)hopper_all_blocks(p, 1, block_m),
                                          .picks = heads != NULL};
    fdm_status status = FDM_OK;
    if (heads)
        params.plan = *heads;
    if (attention) {
        const struct cuda_tensor_layout layout =
            tile_rows_layout(p, &attention->q, p->head_dim, p->varlen ? p->total_q : p->seqlen_q, p->heads, block_m);
        gpu_fill_forward(attention, &params.in);
        status = cuda_tensor_maps_make(l->device, &layout, 1, &params.q_map);
    }
    make_request(p, tile, order, gpu_add_kernel(l));
    hopper_add_items(l, order, num_sms, params.items, heads ? NULL : items_begun, &params, sizeof params);
    return status;
}

int32_t hopper_gather_tile(const fdm_device *device, const fdm_problem *p) {
    char text[200];
    return refusal(device, p, text, sizeof text) ? 0 : (int32_t)(preferred(device, p) - tiles) + 1;
}
int hopper_gather_takes(const fdm_problem *p, int32_t tile) {
    return tile > 0 && tile <= NUM_TILES && padded(p->head_dim) <= tiles[tile - 1].head_dim_max &&
           padded(p->head_dim_v) <= tiles[tile - 1].head_dim_max;
}
fdm_status hopper_gather_add(struct gpu_launches *l, const struct attention *attention, int32_t tile, int32_t num_sms,
                             const struct tile_plan *heads, int32_t *items_begun) {
    return add(l, attention, tile - 1, tiles[tile - 1].scheduler, num_sms, heads, items_begun);
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const struct parameters x = parameters_of(plan);
    return add(l, l->attention, x.TILE, x.SCHEDULER, x.NUM_SMS, NULL, (int32_t *)(void *)l->workspace);
}

static int32_t scheduler(const fdm_plan *plan) { return parameters_of(plan).SCHEDULER; }

const struct gpu_algorithm hopper_gather_algorithm = {
    .info = {"hopper.gather", "keys that a block of rows sees, gathered into dense tiles for wgmma", FDM_FORWARD},
    .parameters = PLAN_PARAMETERS(HOPPER_GATHER_PARAMETERS),
    .features = GPU_FEATURE_CAUSAL | GPU_FEATURE_WINDOW | GPU_FEATURE_MASK_KEYS | GPU_FEATURE_BIAS_KEYS |
                GPU_FEATURE_INTERVALS | GPU_FEATURE_VARLEN | GPU_SCORE_FEATURES,
    .chosen_freely = 1,
    .writes_lse_low = 1,
    .refusal = refusal,
    .passed_over = passed_over,
    .fill = fill,
    .scheduler = scheduler,
    .valid = valid,
    .launch = launch,
};
