/* ranks_ulysses.c: every rank gets all rows of its own heads for its rows of all heads, and computes one call. */
#include "base/error.h"
#include "parallel/ranks_call.h"

enum { SWAPPED_MAX = 12 };

/* A tensor that changes from rows to heads: its part, its buffer [all rows][batches][own heads][width]. */
struct swapped {
    const struct routes *sends, *receives;
    struct part parts[SWAPPED_MAX];
    char *buffers[SWAPPED_MAX];
    int32_t count;
};

struct ulysses {
    struct ranks_call *call;
    struct heads heads;
    struct swapped rows, keys; /* what comes */
    struct swapped rows_back, keys_back;
    char *staging;
};

static char *take(struct ulysses *u, struct swapped *s, const struct part *part, int64_t all) {
    s->parts[s->count] = *part;
    s->buffers[s->count] = call_take(u->call, all * part_row_bytes(u->call->plan, part, u->heads));
    return s->buffers[s->count++];
}

static struct travel travel_of(const struct ulysses *u, const struct swapped *s) {
    return (struct travel){s->sends, s->receives, s->parts, s->buffers, s->count, u->heads};
}

/* The tensors of the one call: views of buffers. */
struct all_views {
    struct view q, k, v, out, lse, lse_low, dout, dlse, dq, dk, dv, mask, bias, sink, intervals[2];
};

static fdm_tensor *matrix(struct ulysses *u, struct swapped *s, struct view *view, const fdm_tensor *t, int64_t all) {
    if (!t)
        return NULL;
    const struct part part = part_of_matrix(t);
    const fdm_range heads = part_heads(u->call->plan, &part, u->heads, u->call->plan->rank);
    return view_buffer(view, take(u, s, &part, all), fdm_dtype_of(t), u->call, t->shape[0], (fdm_range){0, all},
                       heads.end - heads.first, t->shape[3]);
}

static fdm_tensor *numbers(struct ulysses *u, struct swapped *s, struct view *view, const fdm_tensor *t, int64_t all) {
    if (!t)
        return NULL;
    const struct part part = part_of_rows(t);
    const fdm_range heads = part_heads(u->call->plan, &part, u->heads, u->call->plan->rank);
    return view_buffer_rows(view, take(u, s, &part, all), fdm_dtype_of(t), u->call, t->shape[0], (fdm_range){0, all},
                            heads.end - heads.first);
}

static fdm_tensor *of_keys(struct ulysses *u, struct view *view, const fdm_tensor *t, enum scores_kind kind,
                           int64_t all, fdm_range heads_kv) {
    const fdm_ranks_plan *plan = u->call->plan;
    const fdm_range none = {0, 1};
    if (kind == SCORES_NONE)
        return NULL;
    if (kind == SCORES_CONSTANT)
        return view_scores(view, t, heads_of(t->shape[1], heads_kv, plan->problem.heads_kv), none, none);
    const struct part part = part_of_keys(t);
    const fdm_range heads = part_heads(plan, &part, u->heads, plan->rank);
    return view_buffer_keys(view, take(u, &u->keys, &part, all), fdm_dtype_of(t), u->call, t->shape[0],
                            (fdm_range){0, all}, heads.end - heads.first);
}

static void fill(struct ulysses *u, struct all_views *v, fdm_tensors *made) {
    const fdm_ranks_plan *plan = u->call->plan;
    const fdm_tensors *t = u->call->tensors;
    const fdm_problem *p = &plan->problem;
    const fdm_range heads_kv = {plan->rank * u->heads.count, (plan->rank + 1) * u->heads.count};
    const int backward = p->pass == FDM_BACKWARD;
    struct swapped *results = backward ? &u->rows : &u->rows_back;
    *made = (fdm_tensors){.struct_bytes = sizeof *made};
    made->q = matrix(u, &u->rows, &v->q, t->q, p->seqlen_q);
    made->k = matrix(u, &u->keys, &v->k, t->k, p->seqlen_k);
    made->v = matrix(u, &u->keys, &v->v, t->v, p->seqlen_k);
    made->mask = of_keys(u, &v->mask, t->mask, plan->mask_kind, p->seqlen_k, heads_kv);
    made->bias = of_keys(u, &v->bias, t->bias, plan->bias_kind, p->seqlen_k, heads_kv);
    made->sink = view_sink(&v->sink, t->sink, heads_of(p->heads, heads_kv, p->heads_kv));
    view_intervals(v->intervals, u->call, &plan->pieces[0], heads_kv, made);
    made->out = matrix(u, results, &v->out, t->out, p->seqlen_q);
    made->lse = numbers(u, results, &v->lse, t->lse, p->seqlen_q);
    made->lse_low = numbers(u, results, &v->lse_low, t->lse_low, p->seqlen_q);
    if (!backward)
        return;
    made->dout = matrix(u, &u->rows, &v->dout, t->dout, p->seqlen_q);
    made->dlse = numbers(u, &u->rows, &v->dlse, t->dlse, p->seqlen_q);
    made->dq = matrix(u, &u->rows_back, &v->dq, t->dq, p->seqlen_q);
    made->dk = matrix(u, &u->keys_back, &v->dk, t->dk, p->seqlen_k);
    made->dv = matrix(u, &u->keys_back, &v->dv, t->dv, p->seqlen_k);
}

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static fdm_status bring_back(struct ulysses *u, const struct swapped *s) {
    const struct travel t = travel_of(u, s);
    if (!s->count)
        return FDM_OK;
    const fdm_status status = travel_back(u->call, &t, u->staging);
    if (!status)
        travel_place(u->call, &t, u->staging);
    return status;
}

fdm_status ulysses_run(struct ranks_call *call) {
    const fdm_ranks_plan *plan = call->plan;
    struct ulysses u = {.call = call,
                        .heads = {0, plan->problem.heads_kv / plan->ranks, 1},
                        .rows = {.sends = &plan->row_sends, .receives = &plan->row_receives},
                        .keys = {.sends = &plan->sends, .receives = &plan->receives}};
    struct all_views views;
    fdm_tensors tensors;
    u.rows_back = u.rows;
    u.keys_back = u.keys;
    fill(&u, &views, &tensors);
    const struct swapped *all[] = {&u.rows, &u.keys, &u.rows_back, &u.keys_back};
    int64_t staged = 0;
    for (int i = 0; i < 4; i++) {
        const struct travel t = travel_of(&u, all[i]);
        staged = most(staged, travel_bytes(call, &t));
    }
    u.staging = call_take(call, staged);
    call->call_memory = call_take(call, (int64_t)plan->call_bytes);
    const struct travel rows = travel_of(&u, &u.rows), keys = travel_of(&u, &u.keys);
    fdm_status status = travel_there(call, &rows, u.staging);
    if (!status)
        status = travel_there(call, &keys, u.staging);
    if (!status)
        status = call_attention(call, &tensors, &plan->pieces[0], 0);
    if (!status)
        status = bring_back(&u, &u.rows_back);
    return status ? status : bring_back(&u, &u.keys_back);
}
