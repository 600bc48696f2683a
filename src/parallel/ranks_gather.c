/* ranks_gather.c: attention by fetching keys, a few KV heads at a time. A rank has every key that its rows see, so that
 * each row is finished by one call, and nothing is merged. */
#include "base/error.h"
#include "parallel/ranks_call.h"

enum { PARTS_MAX = 4 }; /* k, v, and a mask and a bias of keys */

/* What travels of a set of heads, and what it is called here. */
struct keys {
    struct part parts[PARTS_MAX];
    char *buffers[RANKS_SLOTS_MAX][PARTS_MAX];
    fdm_dtype dtypes[PARTS_MAX];
    int32_t count;
    int32_t mask, bias; /* which part; -1: none */
};

/* Parts of gradients of a set, in order of the forward's parts: k, v, bias. */
struct parts {
    struct part parts[3];
    char *buffers[RANKS_SLOTS_MAX][3], *sums[3];
    fdm_tensor *outputs[3];
    int32_t count, k, v, bias; /* -1: not wanted */
};

struct gather {
    struct ranks_call *call;
    struct keys keys;
    struct parts back;
    char *staging, *returned;
    char *own_bias; /* a bias of keys: its gradient by one call */
    fdm_dtype wide; /* of sums */
};

static struct heads most_heads(const fdm_ranks_plan *plan) {
    return (struct heads){.count = head_sets_most(&plan->sets, 1, 0)};
}

/* A set of heads, and which buffers it has. */
struct set {
    struct heads heads;
    fdm_range heads_kv;
    int32_t slot;
};
static struct set set_of(const fdm_ranks_plan *plan, int32_t n) {
    const int64_t first = head_sets_before(&plan->sets, n), count = plan->sets.heads[n];
    return (struct set){{.first = first, .count = count}, {first, first + count}, n % plan->slots};
}

static int32_t add_part(struct gather *g, struct part part, fdm_dtype dtype) {
    struct keys *k = &g->keys;
    const fdm_ranks_plan *plan = g->call->plan;
    k->parts[k->count] = part;
    k->dtypes[k->count] = dtype;
    for (int32_t slot = 0; slot < plan->slots; slot++)
        k->buffers[slot][k->count] = call_take_slot(g->call, &part, (struct heads){0}, plan->buffer_rows, slot);
    return k->count++;
}

static void take_keys(struct gather *g) {
    const fdm_ranks_plan *plan = g->call->plan;
    const fdm_tensors *t = g->call->tensors;
    g->keys.mask = g->keys.bias = -1;
    add_part(g, part_of_matrix(t->k), plan->problem.dtype);
    add_part(g, part_of_matrix(t->v), plan->problem.dtype);
    if (plan->mask_kind == SCORES_OF_KEYS)
        g->keys.mask = add_part(g, part_of_keys(t->mask), FDM_BOOL);
    if (plan->bias_kind == SCORES_OF_KEYS)
        g->keys.bias = add_part(g, part_of_keys(t->bias), plan->problem.bias_dtype);
    const struct travel all = {&plan->sends,       &plan->receives, g->keys.parts,
                               g->keys.buffers[0], g->keys.count,   most_heads(plan)};
    g->staging = call_take(g->call, travel_bytes(g->call, &all));
}

/* ---- one call ---- */

/* The inputs of a piece and the rank's results, as views. */
struct views {
    struct view q, k, v, mask, bias, intervals[2], sink, out, lse, lse_low, dout, dlse, dq, dk, dv, dbias;
};

static fdm_tensor *scores_view(struct gather *g, struct view *view, const fdm_tensor *tensor, enum scores_kind kind,
                               int32_t part, const struct piece *piece, const struct set *set) {
    if (kind == SCORES_NONE)
        return NULL;
    const fdm_range own = heads_of(tensor->shape[1], set->heads_kv, g->call->plan->problem.heads_kv);
    if (kind != SCORES_OF_KEYS)
        return view_scores(view, tensor, own, piece->rows, piece->columns);
    return view_buffer_keys(view, g->keys.buffers[set->slot][part], g->keys.dtypes[part], g->call, tensor->shape[0],
                            piece->keys, own.end - own.first);
}

static void fill_inputs(struct gather *g, struct views *v, const struct piece *piece, const struct set *set,
                        fdm_tensors *tensors) {
    const struct ranks_call *call = g->call;
    const fdm_problem *p = &call->plan->problem;
    const fdm_tensors *t = call->tensors;
    const fdm_range heads_kv = set->heads_kv, heads = heads_of(p->heads, heads_kv, p->heads_kv);
    const int64_t count = heads_kv.end - heads_kv.first;
    char *const *buffers = g->keys.buffers[set->slot];
    *tensors = (fdm_tensors){.struct_bytes = sizeof *tensors};
    tensors->q = view_matrix(&v->q, t->q, piece->rows, heads);
    tensors->k = view_buffer(&v->k, buffers[0], p->dtype, call, p->batch, piece->keys, count, p->head_dim);
    tensors->v = view_buffer(&v->v, buffers[1], p->dtype, call, p->batch, piece->keys, count, p->head_dim_v);
    tensors->mask = scores_view(g, &v->mask, t->mask, call->plan->mask_kind, g->keys.mask, piece, set);
    tensors->bias = scores_view(g, &v->bias, t->bias, call->plan->bias_kind, g->keys.bias, piece, set);
    view_intervals(v->intervals, call, piece, heads_kv, tensors);
    tensors->sink = view_sink(&v->sink, t->sink, heads);
    tensors->out = view_matrix(&v->out, t->out, piece->rows, heads);
    tensors->lse = view_rows(&v->lse, t->lse, piece->rows, heads);
    tensors->lse_low = view_rows(&v->lse_low, t->lse_low, piece->rows, heads);
}

static void fill_gradients(struct gather *g, struct views *v, const struct piece *piece, const struct set *set,
                           fdm_tensors *tensors) {
    const struct ranks_call *call = g->call;
    const fdm_problem *p = &call->plan->problem;
    const fdm_tensors *t = call->tensors;
    const fdm_range heads_kv = set->heads_kv, heads = heads_of(p->heads, heads_kv, p->heads_kv);
    const int64_t count = heads_kv.end - heads_kv.first;
    const struct parts *back = &g->back;
    char *const *buffers = back->buffers[set->slot];
    tensors->dout = view_matrix(&v->dout, t->dout, piece->rows, heads);
    tensors->dlse = view_rows(&v->dlse, t->dlse, piece->rows, heads);
    tensors->dq = view_matrix(&v->dq, t->dq, piece->rows, heads);
    if (back->k >= 0)
        tensors->dk = view_buffer(&v->dk, buffers[back->k], g->wide, call, p->batch, piece->keys, count, p->head_dim);
    if (back->v >= 0)
        tensors->dv = view_buffer(&v->dv, buffers[back->v], g->wide, call, p->batch, piece->keys, count, p->head_dim_v);
    if (call->plan->bias_kind == SCORES_OF_ROWS && t->dbias)
        tensors->dbias = view_scores(&v->dbias, t->dbias, heads_of(t->dbias->shape[1], heads_kv, p->heads_kv),
                                     piece->rows, piece->columns);
}

/* dbias of keys is written by a call, and added to what other calls gave. */
static fdm_status run_backward(struct gather *g, struct views *v, const struct piece *piece, const struct set *set,
                               fdm_tensors *tensors) {
    struct ranks_call *call = g->call;
    const struct parts *back = &g->back;
    if (back->bias < 0)
        return call_attention(call, tensors, piece, back->k >= 0 || back->v >= 0);
    const struct part *part = &back->parts[back->bias];
    const fdm_range own = heads_of(part->heads, set->heads_kv, call->plan->problem.heads_kv);
    const int64_t row = part->batches * (own.end - own.first), unit = fdm_dtype_bytes(g->wide);
    const int64_t keys = piece->keys.end - piece->keys.first;
    tensors->dbias = view_buffer_keys(&v->dbias, g->own_bias, g->wide, call, part->batches, (fdm_range){0, keys},
                                      own.end - own.first);
    const fdm_status status = call_attention(call, tensors, piece, back->k >= 0 || back->v >= 0);
    const struct move move = {
        .action = MOVE_ADD,
        .dtype = g->wide,
        .from = {.data = g->own_bias, .row = row * unit},
        .to = {.data = back->buffers[set->slot][back->bias] + piece->keys.first * row * unit, .row = row * unit},
        .rows = keys,
        .batches = 1,
        .heads = 1,
        .width = row * unit};
    if (!status)
        call_move(call, &move);
    return status;
}

/* ---- forward ---- */

static fdm_status send_set(void *context, int32_t n) {
    const struct gather *g = context;
    const fdm_ranks_plan *plan = g->call->plan;
    const struct set set = set_of(plan, n);
    const struct travel there = {&plan->sends,  &plan->receives, g->keys.parts, g->keys.buffers[set.slot],
                                 g->keys.count, set.heads};
    return travel_there(g->call, &there, g->staging);
}

static fdm_status forward_set(void *context, int32_t n) {
    struct gather *g = context;
    const fdm_ranks_plan *plan = g->call->plan;
    const struct set set = set_of(plan, n);
    fdm_status status = FDM_OK;
    for (int64_t i = 0; !status && i < plan->pieces.count; i++) {
        struct views views;
        fdm_tensors tensors;
        fill_inputs(g, &views, &plan->pieces.data[i], &set, &tensors);
        status = call_attention(g->call, &tensors, &plan->pieces.data[i], 0);
    }
    return status;
}

/* ---- backward ---- */

static int32_t want(struct gather *g, const struct part *like, fdm_dtype dtype, fdm_tensor *output) {
    struct parts *b = &g->back;
    const fdm_ranks_plan *plan = g->call->plan;
    struct part part = *like;
    if (!output)
        return -1;
    part.width = like->width / fdm_dtype_bytes(dtype) * fdm_dtype_bytes(g->wide);
    b->parts[b->count] = part;
    b->outputs[b->count] = output;
    for (int32_t slot = 0; slot < plan->slots; slot++)
        b->buffers[slot][b->count] = call_take_slot(g->call, &part, (struct heads){0}, plan->buffer_rows, slot);
    b->sums[b->count] = call_take(g->call, plan->keys * part_row_bytes(plan, &part, most_heads(plan)));
    return b->count++;
}

static void take_parts(struct gather *g) {
    const fdm_ranks_plan *plan = g->call->plan;
    const fdm_tensors *t = g->call->tensors;
    struct parts *b = &g->back;
    b->k = want(g, &g->keys.parts[0], plan->problem.dtype, t->dk);
    b->v = want(g, &g->keys.parts[1], plan->problem.dtype, t->dv);
    b->bias = plan->bias_kind == SCORES_OF_KEYS
                  ? want(g, &g->keys.parts[g->keys.bias], plan->problem.bias_dtype, t->dbias)
                  : -1;
    const struct travel all = {&plan->sends, &plan->receives, b->parts, b->buffers[0], b->count, most_heads(plan)};
    g->returned = call_take(g->call, travel_bytes(g->call, &all));
}

/* Parts go to the keys' owners, who add them in the order of ranks. A bias that sets share gets the sum of theirs. */
static fdm_status return_set(void *context, int32_t set_number) {
    struct gather *g = context;
    struct ranks_call *call = g->call;
    const fdm_ranks_plan *plan = call->plan;
    const struct set set = set_of(plan, set_number);
    struct parts *b = &g->back;
    const struct travel back = {&plan->sends, &plan->receives, b->parts, b->buffers[set.slot], b->count, set.heads};
    const fdm_status status = travel_back(call, &back, g->returned);
    if (status)
        return status;
    for (int32_t n = 0; n < b->count; n++)
        call_clear(call, b->sums[n], plan->keys * part_row_bytes(plan, &b->parts[n], set.heads));
    travel_add(call, &back, g->returned, b->sums);
    for (int32_t n = 0; n < b->count; n++) {
        const fdm_tensor *out = b->outputs[n];
        const struct part to = n == b->bias ? part_of_keys(out) : part_of_matrix(out);
        const fdm_range own = part_heads(plan, &to, set.heads, plan->rank);
        if (n == b->bias && to.heads == 1 && set_number > 0) /* what is there, too */
            part_add(call, &to, own, plan->keys, b->sums[n], g->wide);
        part_store(call, &to, fdm_dtype_of(out), own, plan->keys, b->sums[n], g->wide);
    }
    return FDM_OK;
}

static fdm_status backward_set(void *context, int32_t set_number) {
    struct gather *g = context;
    const fdm_ranks_plan *plan = g->call->plan;
    const struct set set = set_of(plan, set_number);
    fdm_status status = FDM_OK;
    for (int32_t n = 0; n < g->back.count; n++)
        call_clear(g->call, g->back.buffers[set.slot][n],
                   plan->buffer_rows * part_row_bytes(plan, &g->back.parts[n], set.heads));
    for (int64_t i = 0; !status && i < plan->pieces.count; i++) {
        struct views views;
        fdm_tensors tensors;
        fill_inputs(g, &views, &plan->pieces.data[i], &set, &tensors);
        fill_gradients(g, &views, &plan->pieces.data[i], &set, &tensors);
        status = run_backward(g, &views, &plan->pieces.data[i], &set, &tensors);
    }
    return status;
}

fdm_status gather_run(struct ranks_call *call) {
    const fdm_ranks_plan *plan = call->plan;
    struct gather g = {.call = call,
                       .wide = plan->problem.dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32,
                       .back = {.k = -1, .v = -1, .bias = -1}};
    struct stages stages = {&g, plan->sets.count, send_set, forward_set, NULL};
    take_keys(&g);
    if (plan->problem.pass == FDM_BACKWARD) {
        take_parts(&g);
        stages.compute = backward_set;
        stages.back = g.back.count ? return_set : NULL;
    }
    if (g.back.bias >= 0)
        g.own_bias =
            call_take(call, plan->buffer_rows * part_row_bytes(plan, &g.back.parts[g.back.bias], most_heads(plan)));
    call->call_memory = call_take(call, (int64_t)plan->call_bytes);
    return stages_run(call, &stages);
}
