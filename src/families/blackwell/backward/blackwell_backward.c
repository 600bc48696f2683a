/* blackwell_backward.c: the tcgen05 backward on the host: which launches for which gradients, and in which order pairs
 * of blocks take items. */
#include "families/blackwell/backward/blackwell_backward.h"

#include <stdio.h>

#include "families/blackwell/blackwell_family.h"
#include "gpu/gpu_backward.h"
#include "gpu/items.h"
#include "gpu/numbers.h"
#include "gpu/tile_maps.h"

PLAN_PARAMETER_STRUCT(BLACKWELL_BACKWARD_PARAMETERS);
enum { TILE = BLACKWELL_BACKWARD_TILE, PAIR_ROWS = 2 * TILE, BOX_ROWS = 64 };

/* The head dim of the kernels: D and Dv are filled up with zeros by TMA. */
static int32_t padded(const fdm_problem *p) { return p->head_dim > 128 || p->head_dim_v > 128 ? 256 : 128; }

/* ---- launches ---- */

/* What a launch owns and makes. Sums of dK and dV both fit beside scores where they have 128 columns each. */
struct launch {
    int32_t own_keys, makes_ds, makes_dv;
};
enum { LAUNCHES_MAX = 3 };
static int32_t launches_of(const fdm_problem *p, struct launch *list) {
    int32_t count = 0;
    if (p->needs_dq)
        list[count++] = (struct launch){0, 1, 0};
    if (padded(p) == 128 && p->needs_dk && p->needs_dv)
        list[count++] = (struct launch){1, 1, 1};
    else {
        if (p->needs_dk)
            list[count++] = (struct launch){1, 1, 0};
        if (p->needs_dv)
            list[count++] = (struct launch){1, 0, 1};
    }
    return count;
}

static struct gpu_backward_needs needs_of(const fdm_plan *plan, const fdm_problem *p) {
    return (struct gpu_backward_needs){.row_step = TILE,
                                       .head_dim = padded(p),
                                       .head_dim_v = padded(p),
                                       .group_parts = parameters_of(plan).PARTS,
                                       .lse_factor = LOG2_E};
}

static int64_t pairs_of(int64_t length) { return (length + PAIR_ROWS - 1) / PAIR_ROWS; }

/* Parts that a group of heads is divided in where keys are few: as few as give every pair of multiprocessors an item.
 * Another kernel adds their sums. */
static int32_t parts_of(const fdm_device *device, const fdm_problem *p) {
    const int64_t group = p->varlen ? 1 : p->heads / p->heads_kv,
                  items = pairs_of(p->seqlen_k) * p->heads_kv * p->batch;
    int64_t parts = 1;
    while ((p->needs_dk || p->needs_dv) && parts < group && (group % parts || 2 * items * parts < device->num_sms))
        parts++; /* ends at the group itself */
    return (int32_t)parts;
}

/* Of the launch that takes most. */
static int32_t shared_bytes(const fdm_problem *p) {
    const int32_t with = blackwell_backward_shared_bytes(padded(p), 1);
    const int32_t without = blackwell_backward_shared_bytes(padded(p), 0);
    return with > without ? with : without;
}

/* ---- choice ---- */

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = blackwell_refusal(device, p, text, size);
    if (!clause)
        clause = gpu_backward_refusal(p, 0);
    return clause || shared_bytes(p) <= device->shared_bytes ? clause : gpu_no_tile_fits(device, text, size);
}

static const char *passed_over(const fdm_device *device, const fdm_problem *p) {
    (void)device;
    return p->head_dim <= 64 && p->head_dim_v <= 64 ? "head dims of at most 64 leave half of its tiles empty" : NULL;
}

/* Variant 0 has the order for the problem: under a causal mask or window, and in packed sequences, walks differ in
 * length, and a pair that is done takes the next item. The others have the other orders. */
static int fill(const fdm_device *device, const fdm_problem *p, int32_t number, fdm_plan *plan) {
    const int32_t first = gpu_bounded(p) || p->varlen ? ITEMS_DYNAMIC : ITEMS_STATIC;
    const int32_t order = number == 0 ? first : number - (number <= first), parts = parts_of(device, p);
    const int32_t d = padded(p);
    char divided[64] = "";
    if (number >= SCHEDULER_COUNT)
        return 0;
    PLAN_SET_PARAMETERS(plan, .SCHEDULER = order, .NUM_SMS = device->num_sms, .PARTS = parts);
    const struct gpu_backward_needs needs = needs_of(plan, p);
    if (parts > 1)
        snprintf(divided, sizeof divided, "; groups of %lld heads in %d parts, whose sums are added",
                 (long long)(p->heads / p->heads_kv), parts);
    plan->block_m = PAIR_ROWS;
    plan->block_n = TILE;
    plan->stages = blackwell_backward_slots(d, 1);
    plan->shared_bytes = shared_bytes(p);
    plan->workspace_bytes = gpu_backward_workspace_bytes(p, &needs);
    snprintf(plan->choice, sizeof plan->choice, "SM100_Pair_256x128_D%d_%s", d, items_order_names[order]);
    snprintf(plan->reason, sizeof plan->reason,
             "head dim %lld on compute capability %d.%d: pairs of blocks own 256 rows or keys and walk 128 a step, %s; "
             "P and dS stay in tensor memory (%d columns), %d slots of 16 KB beside the own operands (%lld KB), %d "
             "registers a thread; no additions in global memory, the same bits every time; %s order%s; by a "
             "model, not measured",
             (long long)(p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v), device->compute_major,
             device->compute_minor, d == 256 ? "a kernel each for dQ, dK and dV" : "a kernel for dQ, one for dK and dV",
             BLACKWELL_BACKWARD_COLUMNS, plan->stages, (long long)(plan->shared_bytes + 1023) >> 10,
             BLACKWELL_BACKWARD_REGISTERS, scheduler_names[order], divided);
    return 1;
}

/* ---- launch ---- */

static void make_request(const fdm_plan *plan, const fdm_problem *p, const struct launch *l,
                         struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p, GPU_ALIKE_SCORES_ALIGNED | GPU_ALIKE_POSITIVE_SCALE);
    GPU_ADD_CONSTANTS(request, BLACKWELL_BACKWARD_CONSTANTS, .HEAD_DIM = padded(p), .OWN_KEYS = l->own_keys,
                      .MAKES_DS = l->makes_ds, .MAKES_DV = l->makes_dv, .SCHEDULER = parameters_of(plan).SCHEDULER,
                      .EMPTY_ROWS = gpu_empty_rows(p) || gpu_hides_pairs(p) || p->varlen,
                      .PARTS = l->own_keys && parameters_of(plan).PARTS > 1);
    request->file = "families/blackwell/backward/blackwell_backward.cu";
    request->entry = "blackwell_backward";
    request->shared_bytes = blackwell_backward_shared_bytes(padded(p), l->makes_ds);
    request->threads = BLACKWELL_BACKWARD_THREADS;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t order = parameters_of(plan).SCHEDULER, parts = parameters_of(plan).PARTS;
    if (parts < 1 || p->heads / p->heads_kv % parts || (parts > 1 && p->varlen))
        return 0;
    const struct gpu_backward_needs needs = needs_of(plan, p);
    return order >= 0 && order < SCHEDULER_COUNT && parameters_of(plan).NUM_SMS >= 2 && plan->block_m == PAIR_ROWS &&
           plan->block_n == TILE && p->head_dim <= 256 && p->head_dim_v <= 256 &&
           plan->shared_bytes == shared_bytes(p) && plan->workspace_bytes >= gpu_backward_workspace_bytes(p, &needs);
}

static fdm_status make_maps(const fdm_plan *plan, const struct attention *attention,
                            struct blackwell_backward_params *params) {
    const fdm_problem *p = attention->problem;
    const int64_t rows_q = p->varlen ? p->total_q : p->seqlen_q, rows_k = p->varlen ? p->total_k : p->seqlen_k;
    const struct cuda_tensor_layout layouts[4] = {
        tile_rows_layout(p, &attention->q, p->head_dim, rows_q, p->heads, BOX_ROWS),
        tile_rows_layout(p, &attention->k, p->head_dim, rows_k, p->heads_kv, BOX_ROWS),
        tile_rows_layout(p, &attention->v, p->head_dim_v, rows_k, p->heads_kv, BOX_ROWS),
        tile_rows_layout(p, &attention->dout, p->head_dim_v, rows_q, p->heads, BOX_ROWS)};
    struct cuda_tensor_map maps[4];
    const fdm_status status = cuda_tensor_maps_make(plan->device.index, layouts, 4, maps);
    if (status)
        return status;
    params->q_map = maps[0];
    params->k_map = maps[1];
    params->v_map = maps[2];
    params->dout_map = maps[3];
    return FDM_OK;
}

/* Heads of an L2 group are interleaved; so are as many parts of groups as have their query heads. */
static void add_items(const fdm_plan *plan, struct gpu_launches *l, const struct launch *own,
                      struct blackwell_backward_params *params) {
    const fdm_problem *p = l->problem;
    const int64_t heads = own->own_keys ? p->heads_kv * parameters_of(plan).PARTS : p->heads;
    const int32_t parted = own->own_keys && params->in.part_heads > 1 ? params->in.part_heads : 1;
    const int32_t near = params->in.in.heads_per_l2_group / parted, at_once = parameters_of(plan).NUM_SMS / 2;
    params->pairs = (int32_t)pairs_of(own->own_keys ? p->seqlen_k : p->seqlen_q);
    params->items = (int32_t)(params->pairs * heads * p->batch);
    params->heads_in_turn = near > 1 ? near : 1;
    const int32_t pairs =
        parameters_of(plan).SCHEDULER == ITEMS_STATIC && at_once < params->items ? at_once : params->items;
    make_request(plan, p, own, gpu_add_kernel(l));
    gpu_add_launch(
        l, (struct gpu_launch){.grid = {2 * pairs}, .cluster = 2, .params = params, .params_bytes = sizeof *params});
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct gpu_backward_needs needs = needs_of(plan, p);
    struct launch launches[LAUNCHES_MAX];
    const int32_t own = launches_of(p, launches);
    struct blackwell_backward_params params = {0};
    gpu_backward_fill(l, &needs, &params.in);
    const fdm_status status = l->attention ? make_maps(plan, l->attention, &params) : FDM_OK;
    gpu_backward_add(l, GPU_BACKWARD_BEFORE, &needs, &params.in);
    for (int32_t i = 0; i < own; i++)
        add_items(plan, l, &launches[i], &params);
    gpu_backward_add(l, GPU_BACKWARD_AFTER, &needs, &params.in);
    return status;
}

static int32_t scheduler(const fdm_plan *plan) { return parameters_of(plan).SCHEDULER; }

const struct gpu_algorithm blackwell_backward_algorithm = {
    .info = {"blackwell.backward", "the backward on tcgen05 by pairs of blocks, without additions in global memory",
             FDM_BACKWARD},
    .parameters = PLAN_PARAMETERS(BLACKWELL_BACKWARD_PARAMETERS),
    .features = GPU_FEATURE_CAUSAL | GPU_FEATURE_WINDOW | GPU_FEATURE_VARLEN | GPU_SCORE_FEATURES |
                GPU_FEATURE_DETERMINISTIC | GPU_FEATURE_DLSE | GPU_FEATURE_EMPTY_ROWS,
    .chosen_freely = 1,
    .refusal = refusal,
    .passed_over = passed_over,
    .fill = fill,
    .scheduler = scheduler,
    .valid = valid,
    .launch = launch,
};
