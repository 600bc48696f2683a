/* ranks_gather.c: attention by fetching keys, a few KV heads at a time. A rank has every key that its rows see, so that
 * each row is finished by one call, and nothing is merged. */
#include "base/error.h"
#include "parallel/ranks_call.h"

enum { PARTS_MAX = 4 }; /* k, v, and a mask and a bias of keys */

/* What travels of a set of heads, and what it is called here. */
struct keys {
    struct part parts[PARTS_MAX];
    char *buffers[PARTS_MAX];
    fdm_dtype dtypes[PARTS_MAX];
    int32_t count;
    int32_t mask, bias; /* which part; -1: none */
};

/* Parts of gradients of a set, in order of the forward's parts: k, v, bias. */
struct parts {
    struct part parts[3];
    char *buffers[3], *sums[3];
    fdm_tensor *outputs[3];
    int32_t count, k, v, bias; /* -1: not wanted */
};

struct gather {
    struct ranks_call *call;
    struct keys keys;
    struct parts back;
    char *staging, *returned;
    fdm_dtype wide; /* of sums */
};

static int64_t most_heads(const fdm_ranks_plan *plan) {
    int64_t most = 0;
    for (int32_t n = 0; n < plan->sets.count; n++)
        most = plan->sets.heads[n] > most ? plan->sets.heads[n] : most;
    return most;
}

static int32_t add_part(struct gather *g, struct part part, fdm_dtype dtype) {
    struct keys *k = &g->keys;
    const struct heads heads = {0, most_heads(g->call->plan), 0};
    k->parts[k->count] = part;
    k->dtypes[k->count] = dtype;
    k->buffers[k->count] = call_take(g->call, g->call->plan->buffer_rows * part_row_bytes(g->call->plan, &part, heads));
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
    const struct travel all = {&plan->sends,    &plan->receives, g->keys.parts,
                               g->keys.buffers, g->keys.count,   {0, most_heads(plan), 0}};
    g->staging = call_take(g->call, travel_bytes(g->call, &all));
}

/* ---- one call ---- */

/* The inputs of a piece and the rank's results, as views. */
struct views {
    struct view q, k, v, mask, bias, intervals[2], sink, out, lse, lse_low, dout, dlse, dq, dk, dv, dbias;
};

static fdm_tensor *scores_view(struct gather *g, struct view *view, const fdm_tensor *tensor, enum scores_kind kind,
                               int32_t part, const struct piece *piece, fdm_range heads_kv) {
    if (kind == SCORES_NONE)
        return NULL;
    const fdm_range own = heads_of(tensor->shape[1], heads_kv, g->call->plan->problem.heads_kv);
    if (kind != SCORES_OF_KEYS)
        return view_scores(view, tensor, own, piece->rows, piece->columns);
    return view_buffer_keys(view, g->keys.buffers[part], g->keys.dtypes[part], g->call, tensor->shape[0], piece->keys,
                            own.end - own.first);
}

static void fill_inputs(struct gather *g, struct views *v, const struct piece *piece, fdm_range heads_kv,
                        fdm_tensors *tensors) {
    const struct ranks_call *call = g->call;
    const fdm_problem *p = &call->plan->problem;
    const fdm_tensors *t = call->tensors;
    const fdm_range heads = heads_of(p->heads, heads_kv, p->heads_kv);
    const int64_t count = heads_kv.end - heads_kv.first;
    *tensors = (fdm_tensors){.struct_bytes = sizeof *tensors};
    tensors->q = view_matrix(&v->q, t->q, piece->rows, heads);
    tensors->k = view_buffer(&v->k, g->keys.buffers[0], p->dtype, call, p->batch, piece->keys, count, p->head_dim);
    tensors->v = view_buffer(&v->v, g->keys.buffers[1], p->dtype, call, p->batch, piece->keys, count, p->head_dim_v);
    tensors->mask = scores_view(g, &v->mask, t->mask, call->plan->mask_kind, g->keys.mask, piece, heads_kv);
    tensors->bias = scores_view(g, &v->bias, t->bias, call->plan->bias_kind, g->keys.bias, piece, heads_kv);
    view_intervals(v->intervals, call, piece, heads_kv, tensors);
    tensors->sink = view_sink(&v->sink, t->sink, heads);
    tensors->out = view_matrix(&v->out, t->out, piece->rows, heads);
    tensors->lse = view_rows(&v->lse, t->lse, piece->rows, heads);
    tensors->lse_low = view_rows(&v->lse_low, t->lse_low, piece->rows, heads);
}

static void fill_gradients(struct gather *g, struct views *v, const struct piece *piece, fdm_range heads_kv,
                           fdm_tensors *tensors) {
    const struct ranks_call *call = g->call;
    const fdm_problem *p = &call->plan->problem;
    const fdm_tensors *t = call->tensors;
    const fdm_range heads = heads_of(p->heads, heads_kv, p->heads_kv);
    const int64_t count = heads_kv.end - heads_kv.first;
    const struct parts *back = &g->back;
    tensors->dout = view_matrix(&v->dout, t->dout, piece->rows, heads);
    tensors->dlse = view_rows(&v->dlse, t->dlse, piece->rows, heads);
    tensors->dq = view_matrix(&v->dq, t->dq, piece->rows, heads);
    if (back->k >= 0)
        tensors->dk =
            view_buffer(&v->dk, back->buffers[back->k], g->wide, call, p->batch, piece->keys, count, p->head_dim);
    if (back->v >= 0)
        tensors->dv =
            view_buffer(&v->dv, back->buffers[back->v], g->wide, call, p->batch, piece->keys, count, p->head_dim_v);
    if (call->plan->bias_kind == SCORES_OF_ROWS && t->dbias)
        tensors->dbias = view_scores(&v->dbias, t->dbias, heads_of(t->dbias->shape[1], heads_kv, p->heads_kv),
                                     piece->rows, piece->columns);
}

/* dbias of keys is written by a call, and added to what other calls gave. */
static fdm_status run_backward(struct gather *g, struct views *v, const struct piece *piece, fdm_range heads_kv,
                               fdm_tensors *tensors, char *own_bias) {
    struct ranks_call *call = g->call;
    const struct parts *back = &g->back;
    if (back->bias < 0)
        return call_attention(call, tensors, piece, back->k >= 0 || back->v >= 0);
    const struct part *part = &back->parts[back->bias];
    const fdm_range own = heads_of(part->heads, heads_kv, call->plan->problem.heads_kv);
    const int64_t row = part->batches * (own.end - own.first), unit = fdm_dtype_bytes(g->wide);
    const int64_t keys = piece->keys.end - piece->keys.first;
    tensors->dbias =
        view_buffer_keys(&v->dbias, own_bias, g->wide, call, part->batches, (fdm_range){0, keys}, own.end - own.first);
    const fdm_status status = call_attention(call, tensors, piece, back->k >= 0 || back->v >= 0);
    const struct move move = {
        .action = MOVE_ADD,
        .dtype = g->wide,
        .from = {.data = own_bias, .row = row * unit},
        .to = {.data = back->buffers[back->bias] + piece->keys.first * row * unit, .row = row * unit},
        .rows = keys,
        .batches = 1,
        .heads = 1,
        .width = row * unit};
    if (!status)
        call_move(call, &move);
    return status;
}

/* ---- forward ---- */

static struct travel travel_of_set(struct gather *g, struct heads heads) {
    const fdm_ranks_plan *plan = g->call->plan;
    return (struct travel){&plan->sends, &plan->receives, g->keys.parts, g->keys.buffers, g->keys.count, heads};
}

static fdm_status forward(struct gather *g) {
    const fdm_ranks_plan *plan = g->call->plan;
    fdm_status status = FDM_OK;
    int64_t first = 0;
    for (int32_t n = 0; !status && n < plan->sets.count; first += plan->sets.heads[n++]) {
        const struct travel there = travel_of_set(g, (struct heads){first, plan->sets.heads[n], 0});
        status = travel_there(g->call, &there, g->staging);
        for (int64_t i = 0; !status && i < plan->pieces.count; i++) {
            struct views views;
            fdm_tensors tensors;
            fill_inputs(g, &views, &plan->pieces.data[i], (fdm_range){first, first + plan->sets.heads[n]}, &tensors);
            status = call_attention(g->call, &tensors, &plan->pieces.data[i], 0);
        }
    }
    return status;
}

/* ---- backward ---- */

static int32_t want(struct gather *g, const struct part *like, fdm_dtype dtype, fdm_tensor *output) {
    struct parts *b = &g->back;
    const fdm_ranks_plan *plan = g->call->plan;
    const struct heads most = {0, most_heads(plan), 0};
    struct part part = *like;
    if (!output)
        return -1;
    part.width = like->width / fdm_dtype_bytes(dtype) * fdm_dtype_bytes(g->wide);
    b->parts[b->count] = part;
    b->outputs[b->count] = output;
    b->buffers[b->count] = call_take(g->call, plan->buffer_rows * part_row_bytes(plan, &part, most));
    b->sums[b->count] = call_take(g->call, plan->keys * part_row_bytes(plan, &part, most));
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
    const struct travel all = {&plan->sends, &plan->receives, b->parts, b->buffers, b->count, {0, most_heads(plan), 0}};
    g->returned = call_take(g->call, travel_bytes(g->call, &all));
}

static void clear(const struct gather *g, struct heads heads) {
    const fdm_ranks_plan *plan = g->call->plan;
    for (int32_t n = 0; n < g->back.count; n++) {
        const int64_t bytes = part_row_bytes(plan, &g->back.parts[n], heads);
        call_clear(g->call, g->back.buffers[n], plan->buffer_rows * bytes);
        call_clear(g->call, g->back.sums[n], plan->keys * bytes);
    }
}

/* Parts go to the keys' owners, who add them in the order of ranks. A bias that sets share gets the sum of theirs. */
static fdm_status give_back(struct gather *g, struct heads heads, int is_first) {
    struct ranks_call *call = g->call;
    const fdm_ranks_plan *plan = call->plan;
    struct parts *b = &g->back;
    const struct travel back = {&plan->sends, &plan->receives, b->parts, b->buffers, b->count, heads};
    const fdm_status status = travel_back(call, &back, g->returned);
    if (status)
        return status;
    travel_add(call, &back, g->returned, b->sums);
    for (int32_t n = 0; n < b->count; n++) {
        const fdm_tensor *out = b->outputs[n];
        const struct part to = n == b->bias ? part_of_keys(out) : part_of_matrix(out);
        const fdm_range own = part_heads(plan, &to, heads, plan->rank);
        if (n == b->bias && to.heads == 1 && !is_first) /* what is there, too */
            part_add(call, &to, own, plan->keys, b->sums[n], g->wide);
        part_store(call, &to, fdm_dtype_of(out), own, plan->keys, b->sums[n], g->wide);
    }
    return FDM_OK;
}

static fdm_status backward(struct gather *g, char *own_bias) {
    const fdm_ranks_plan *plan = g->call->plan;
    fdm_status status = FDM_OK;
    int64_t first = 0;
    for (int32_t n = 0; !status && n < plan->sets.count; first += plan->sets.heads[n++]) {
        const struct heads heads = {first, plan->sets.heads[n], 0};
        const fdm_range heads_kv = {first, first + plan->sets.heads[n]};
        const struct travel there = travel_of_set(g, heads);
        status = travel_there(g->call, &there, g->staging);
        clear(g, heads);
        for (int64_t i = 0; !status && i < plan->pieces.count; i++) {
            struct views views;
            fdm_tensors tensors;
            fill_inputs(g, &views, &plan->pieces.data[i], heads_kv, &tensors);
            fill_gradients(g, &views, &plan->pieces.data[i], heads_kv, &tensors);
            status = run_backward(g, &views, &plan->pieces.data[i], heads_kv, &tensors, own_bias);
        }
        if (!status && g->back.count)
            status = give_back(g, heads, n == 0);
    }
    return status;
}

fdm_status gather_run(struct ranks_call *call) {
    struct gather g = {.call = call,
                       .wide = call->plan->problem.dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32,
                       .back = {.k = -1, .v = -1, .bias = -1}};
    take_keys(&g);
    if (call->plan->problem.pass == FDM_FORWARD) {
        call->call_memory = call_take(call, (int64_t)call->plan->call_bytes);
        return forward(&g);
    }
    take_parts(&g);
    char *own_bias =
        g.back.bias < 0
            ? NULL
            : call_take(call, call->plan->buffer_rows * part_row_bytes(call->plan, &g.back.parts[g.back.bias],
                                                                       (struct heads){0, most_heads(call->plan), 0}));
    call->call_memory = call_take(call, (int64_t)call->plan->call_bytes);
    return backward(&g, own_bias);
}
