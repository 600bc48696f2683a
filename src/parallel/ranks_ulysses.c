/* ranks_ulysses.c: every rank gets rows of its own heads for its rows of all heads. By ulysses it has all rows then. By
 * both it has the rows of the ranks that it exchanges heads with, and the keys that these rows see. */

#include "base/error.h"
#include "parallel/ranks_call.h"

enum { SWAPPED_MAX = 12 };

/* Tensors that change from rows to heads: parts, and buffers [rows][batches][own heads][width]. */
struct swapped {
    const struct routes *sends, *receives;
    struct part parts[SWAPPED_MAX];
    char *buffers[SWAPPED_MAX];
    int32_t count;
};

struct ulysses {
    struct ranks_call *call;
    struct heads heads;
    fdm_range heads_kv;        /* of this rank */
    struct swapped rows, keys; /* what comes */
    struct swapped rows_back, keys_back;
    char *q, *k, *v, *mask, *bias, *out, *lse, *lse_low, *dout, *dlse, *dq, *dk, *dv; /* buffers */
    fdm_dtype dkv;        /* both: dk and dv are parts of sums, float32 or float64 */
    char *sums[2];        /* both: of dk and dv, [keys of the shard][batches][all KV heads][width] */
    fdm_tensor *added[2]; /* where they go */
    char *staging;
};

static int adds(const struct ulysses *u) { return u->call->plan->algorithm == FDM_RANKS_BOTH; }

/* ---- buffers ---- */

static char *take(struct ulysses *u, struct swapped *s, const fdm_tensor *t, struct part part) {
    const fdm_ranks_plan *plan = u->call->plan;
    const int64_t rows = s == &u->rows || s == &u->rows_back ? plan->query_rows : plan->buffer_rows;
    if (!t)
        return NULL;
    s->parts[s->count] = part;
    s->buffers[s->count] = call_take(u->call, rows * part_row_bytes(plan, &part, u->heads));
    return s->buffers[s->count++];
}

static char *take_matrix(struct ulysses *u, struct swapped *s, const fdm_tensor *t) {
    return t ? take(u, s, t, part_of_matrix(t)) : NULL;
}
static char *take_rows(struct ulysses *u, struct swapped *s, const fdm_tensor *t) {
    return t ? take(u, s, t, part_of_rows(t)) : NULL;
}

/* Where parts of several ranks are added, a wider element, and the sums. */
static char *take_gradient(struct ulysses *u, fdm_tensor *t) {
    const fdm_ranks_plan *plan = u->call->plan;
    if (!t || !adds(u))
        return take_matrix(u, &u->keys_back, t);
    struct part part = part_of_matrix(t);
    part.width = t->shape[3] * fdm_dtype_bytes(u->dkv);
    u->added[u->keys_back.count] = t;
    u->sums[u->keys_back.count] = call_take(u->call, plan->keys * part.batches * part.heads * part.width);
    return take(u, &u->keys_back, t, part);
}

static void take_all(struct ulysses *u) {
    const fdm_ranks_plan *plan = u->call->plan;
    const fdm_tensors *t = u->call->tensors;
    const int backward = plan->problem.pass == FDM_BACKWARD;
    struct swapped *results = backward ? &u->rows : &u->rows_back;
    u->q = take_matrix(u, &u->rows, t->q);
    u->k = take_matrix(u, &u->keys, t->k);
    u->v = take_matrix(u, &u->keys, t->v);
    if (plan->mask_kind == SCORES_OF_KEYS)
        u->mask = take(u, &u->keys, t->mask, part_of_keys(t->mask));
    if (plan->bias_kind == SCORES_OF_KEYS)
        u->bias = take(u, &u->keys, t->bias, part_of_keys(t->bias));
    u->out = take_matrix(u, results, t->out);
    u->lse = take_rows(u, results, t->lse);
    u->lse_low = take_rows(u, results, t->lse_low);
    if (!backward)
        return;
    u->dout = take_matrix(u, &u->rows, t->dout);
    u->dlse = take_rows(u, &u->rows, t->dlse);
    u->dq = take_matrix(u, &u->rows_back, t->dq);
    u->dk = take_gradient(u, t->dk);
    u->dv = take_gradient(u, t->dv);
}

/* ---- a call ---- */

/* Views of buffers. */
struct all_views {
    struct view q, k, v, out, lse, lse_low, dout, dlse, dq, dk, dv, mask, bias, sink, intervals[2];
};

static fdm_tensor *matrix(struct ulysses *u, struct view *view, char *buffer, const fdm_tensor *t, fdm_dtype dtype,
                          fdm_range rows) {
    if (!t)
        return NULL;
    const struct part part = part_of_matrix(t);
    const fdm_range heads = part_heads(u->call->plan, &part, u->heads, u->call->plan->rank);
    return view_buffer(view, buffer, dtype, u->call, t->shape[0], rows, heads.end - heads.first, t->shape[3]);
}

static fdm_tensor *numbers(struct ulysses *u, struct view *view, char *buffer, const fdm_tensor *t, fdm_range rows) {
    if (!t)
        return NULL;
    const struct part part = part_of_rows(t);
    const fdm_range heads = part_heads(u->call->plan, &part, u->heads, u->call->plan->rank);
    return view_buffer_rows(view, buffer, fdm_dtype_of(t), u->call, t->shape[0], rows, heads.end - heads.first);
}

static fdm_tensor *of_keys(struct ulysses *u, struct view *view, char *buffer, const fdm_tensor *t,
                           enum scores_kind kind, fdm_range keys) {
    const fdm_ranks_plan *plan = u->call->plan;
    const fdm_range none = {0, 1};
    if (kind == SCORES_NONE)
        return NULL;
    if (kind == SCORES_CONSTANT)
        return view_scores(view, t, heads_of(t->shape[1], u->heads_kv, plan->problem.heads_kv), none, none);
    const struct part part = part_of_keys(t);
    const fdm_range heads = part_heads(plan, &part, u->heads, plan->rank);
    return view_buffer_keys(view, buffer, fdm_dtype_of(t), u->call, t->shape[0], keys, heads.end - heads.first);
}

static void fill(struct ulysses *u, struct all_views *v, const struct piece *piece, fdm_tensors *made) {
    const fdm_ranks_plan *plan = u->call->plan;
    const fdm_tensors *t = u->call->tensors;
    const fdm_problem *p = &plan->problem;
    const fdm_range rows = piece->rows, keys = piece->keys;
    *made = (fdm_tensors){.struct_bytes = sizeof *made};
    made->q = matrix(u, &v->q, u->q, t->q, p->dtype, rows);
    made->k = matrix(u, &v->k, u->k, t->k, p->dtype, keys);
    made->v = matrix(u, &v->v, u->v, t->v, p->dtype, keys);
    made->mask = of_keys(u, &v->mask, u->mask, t->mask, plan->mask_kind, keys);
    made->bias = of_keys(u, &v->bias, u->bias, t->bias, plan->bias_kind, keys);
    made->sink = view_sink(&v->sink, t->sink, heads_of(p->heads, u->heads_kv, p->heads_kv));
    view_intervals(v->intervals, u->call, piece, u->heads_kv, made);
    made->out = matrix(u, &v->out, u->out, t->out, p->dtype, rows);
    made->lse = numbers(u, &v->lse, u->lse, t->lse, rows);
    made->lse_low = numbers(u, &v->lse_low, u->lse_low, t->lse_low, rows);
    if (p->pass == FDM_FORWARD)
        return;
    made->dout = matrix(u, &v->dout, u->dout, t->dout, p->dtype, rows);
    made->dlse = numbers(u, &v->dlse, u->dlse, t->dlse, rows);
    made->dq = matrix(u, &v->dq, u->dq, t->dq, p->dtype, rows);
    made->dk = matrix(u, &v->dk, u->dk, t->dk, u->dkv, keys);
    made->dv = matrix(u, &v->dv, u->dv, t->dv, u->dkv, keys);
}

static fdm_status attend(struct ulysses *u) {
    const fdm_ranks_plan *plan = u->call->plan;
    fdm_status status = FDM_OK;
    for (int64_t i = 0; !status && i < plan->pieces.count; i++) {
        struct all_views views;
        fdm_tensors tensors;
        fill(u, &views, &plan->pieces.data[i], &tensors);
        status = call_attention(u->call, &tensors, &plan->pieces.data[i], adds(u) && u->keys_back.count);
    }
    return status;
}

/* ---- the way back ---- */

static struct travel travel_of(const struct ulysses *u, const struct swapped *s) {
    return (struct travel){s->sends, s->receives, s->parts, s->buffers, s->count, u->heads};
}

static void clear_sums(const struct ulysses *u) {
    const fdm_ranks_plan *plan = u->call->plan;
    for (int32_t n = 0; adds(u) && n < u->keys_back.count; n++) {
        const struct part *part = &u->keys_back.parts[n];
        call_clear(u->call, u->keys_back.buffers[n], plan->buffer_rows * part_row_bytes(plan, part, u->heads));
        call_clear(u->call, u->sums[n], plan->keys * part->batches * part->heads * part->width);
    }
}

static fdm_status bring_back(struct ulysses *u, const struct swapped *s, int are_parts) {
    const fdm_ranks_plan *plan = u->call->plan;
    const struct travel t = travel_of(u, s);
    if (!s->count)
        return FDM_OK;
    const fdm_status status = travel_back(u->call, &t, u->staging);
    if (status)
        return status;
    if (!are_parts) {
        travel_place(u->call, &t, u->staging);
        return FDM_OK;
    }
    travel_add(u->call, &t, u->staging, u->sums);
    for (int32_t n = 0; n < s->count; n++) {
        const struct part to = part_of_matrix(u->added[n]);
        part_store(u->call, &to, fdm_dtype_of(u->added[n]), (fdm_range){0, to.heads}, plan->keys, u->sums[n], u->dkv);
    }
    return FDM_OK;
}

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

fdm_status ulysses_run(struct ranks_call *call) {
    const fdm_ranks_plan *plan = call->plan;
    const int64_t count = plan->problem.heads_kv / plan->head_ranks, own = plan->rank % plan->head_ranks;
    struct ulysses u = {.call = call,
                        .heads = {0, count, plan->head_ranks},
                        .heads_kv = {own * count, (own + 1) * count},
                        .rows = {.sends = &plan->row_sends, .receives = &plan->row_receives},
                        .keys = {.sends = &plan->sends, .receives = &plan->receives},
                        .dkv = plan->problem.dtype};
    u.rows_back = u.rows;
    u.keys_back = u.keys;
    if (adds(&u))
        u.dkv = plan->problem.dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    take_all(&u);
    const struct swapped *all[] = {&u.rows, &u.keys, &u.rows_back, &u.keys_back};
    int64_t staged = 0;
    for (int i = 0; i < 4; i++) {
        const struct travel t = travel_of(&u, all[i]);
        staged = most(staged, travel_bytes(call, &t));
    }
    u.staging = call_take(call, staged);
    call->call_memory = call_take(call, (int64_t)plan->call_bytes);
    const struct travel rows = travel_of(&u, &u.rows), keys = travel_of(&u, &u.keys);
    clear_sums(&u);
    fdm_status status = travel_there(call, &rows, u.staging);
    if (!status)
        status = travel_there(call, &keys, u.staging);
    if (!status)
        status = attend(&u);
    if (!status)
        status = bring_back(&u, &u.rows_back, 0);
    return status ? status : bring_back(&u, &u.keys_back, adds(&u));
}
