/* ranks_ulysses.c: every rank gets rows of its own heads for its rows of all heads, a few of them at a time. By ulysses
 * it has all rows then. By both it has the rows of the ranks that it exchanges heads with, and the keys that these rows
 * see. */

#include "base/error.h"
#include "parallel/ranks_call.h"

enum { SWAPPED_MAX = 12 };

/* Tensors that change from rows to heads: parts, and buffers [rows][batches][own heads of a set][width]. */
struct swapped {
    const struct routes *sends, *receives;
    struct part parts[SWAPPED_MAX];
    char *buffers[RANKS_SLOTS_MAX][SWAPPED_MAX];
    int32_t count;
};

/* Of a slot: one of a swapped tensor's, which of them. */
struct buffer {
    const struct swapped *of;
    int32_t at;
};

struct ulysses {
    struct ranks_call *call;
    struct heads all;          /* of a rank */
    struct swapped rows, keys; /* what comes */
    struct swapped rows_back, keys_back;
    struct buffer q, k, v, mask, bias, out, lse, lse_low, dout, dlse, dq, dk, dv;
    fdm_dtype dkv;        /* both: dk and dv are parts of sums, float32 or float64 */
    char *sums[2];        /* both: of dk and dv, [keys of the shard][batches][all KV heads][width] */
    fdm_tensor *added[2]; /* where they go */
    char *staging;
};

static int adds(const struct ulysses *u) { return u->call->plan->algorithm == FDM_RANKS_BOTH; }

/* The n-th set of each rank's heads, those of this rank, and which buffers they have. */
struct set {
    struct heads heads;
    fdm_range heads_kv;
    int32_t slot;
};
static struct set set_of(const struct ulysses *u, int32_t n) {
    const fdm_ranks_plan *plan = u->call->plan;
    struct set set = {.heads = u->all, .slot = n % plan->slots};
    set.heads.first = head_sets_before(&plan->sets, n);
    set.heads.count = plan->sets.heads[n];
    set.heads_kv.first = set.heads.first + plan->rank % plan->head_ranks * u->all.share;
    set.heads_kv.end = set.heads_kv.first + set.heads.count;
    return set;
}

/* ---- buffers ---- */

static struct buffer take(struct ulysses *u, struct swapped *s, struct part part) {
    const fdm_ranks_plan *plan = u->call->plan;
    const int64_t rows = s == &u->rows || s == &u->rows_back ? plan->query_rows : plan->buffer_rows;
    s->parts[s->count] = part;
    for (int32_t slot = 0; slot < plan->slots; slot++)
        s->buffers[slot][s->count] = call_take_slot(u->call, &part, u->all, rows, slot);
    return (struct buffer){s, s->count++};
}

static struct buffer take_matrix(struct ulysses *u, struct swapped *s, const fdm_tensor *t) {
    return t ? take(u, s, part_of_matrix(t)) : (struct buffer){0};
}
static struct buffer take_rows(struct ulysses *u, struct swapped *s, const fdm_tensor *t) {
    return t ? take(u, s, part_of_rows(t)) : (struct buffer){0};
}

/* Where parts of several ranks are added, a wider element, and the sums. */
static struct buffer take_gradient(struct ulysses *u, fdm_tensor *t) {
    const fdm_ranks_plan *plan = u->call->plan;
    if (!t || !adds(u))
        return take_matrix(u, &u->keys_back, t);
    struct part part = part_of_matrix(t);
    part.width = t->shape[3] * fdm_dtype_bytes(u->dkv);
    u->added[u->keys_back.count] = t;
    u->sums[u->keys_back.count] = call_take(u->call, plan->keys * part.batches * part.heads * part.width);
    return take(u, &u->keys_back, part);
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
        u->mask = take(u, &u->keys, part_of_keys(t->mask));
    if (plan->bias_kind == SCORES_OF_KEYS)
        u->bias = take(u, &u->keys, part_of_keys(t->bias));
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

static char *buffer_of(const struct set *set, struct buffer buffer) { return buffer.of->buffers[set->slot][buffer.at]; }

/* How many of the set's heads a part has here. */
static int64_t heads_here(const struct ulysses *u, const struct set *set, struct part part) {
    const fdm_range heads = part_heads(u->call->plan, &part, set->heads, u->call->plan->rank);
    return heads.end - heads.first;
}

static fdm_tensor *matrix(const struct ulysses *u, const struct set *set, struct view *view, struct buffer buffer,
                          const fdm_tensor *t, fdm_dtype dtype, fdm_range rows) {
    return t ? view_buffer(view, buffer_of(set, buffer), dtype, u->call, t->shape[0], rows,
                           heads_here(u, set, part_of_matrix(t)), t->shape[3])
             : NULL;
}

static fdm_tensor *numbers(const struct ulysses *u, const struct set *set, struct view *view, struct buffer buffer,
                           const fdm_tensor *t, fdm_range rows) {
    return t ? view_buffer_rows(view, buffer_of(set, buffer), fdm_dtype_of(t), u->call, t->shape[0], rows,
                                heads_here(u, set, part_of_rows(t)))
             : NULL;
}

static fdm_tensor *of_keys(const struct ulysses *u, const struct set *set, struct view *view, struct buffer buffer,
                           const fdm_tensor *t, enum scores_kind kind, fdm_range keys) {
    const fdm_range none = {0, 1};
    if (kind == SCORES_NONE)
        return NULL;
    if (kind == SCORES_CONSTANT)
        return view_scores(view, t, heads_of(t->shape[1], set->heads_kv, u->call->plan->problem.heads_kv), none, none);
    return view_buffer_keys(view, buffer_of(set, buffer), fdm_dtype_of(t), u->call, t->shape[0], keys,
                            heads_here(u, set, part_of_keys(t)));
}

static void fill(const struct ulysses *u, const struct set *set, struct all_views *v, const struct piece *piece,
                 fdm_tensors *made) {
    const fdm_ranks_plan *plan = u->call->plan;
    const fdm_tensors *t = u->call->tensors;
    const fdm_problem *p = &plan->problem;
    const fdm_range rows = piece->rows, keys = piece->keys;
    *made = (fdm_tensors){.struct_bytes = sizeof *made};
    made->q = matrix(u, set, &v->q, u->q, t->q, p->dtype, rows);
    made->k = matrix(u, set, &v->k, u->k, t->k, p->dtype, keys);
    made->v = matrix(u, set, &v->v, u->v, t->v, p->dtype, keys);
    made->mask = of_keys(u, set, &v->mask, u->mask, t->mask, plan->mask_kind, keys);
    made->bias = of_keys(u, set, &v->bias, u->bias, t->bias, plan->bias_kind, keys);
    made->sink = view_sink(&v->sink, t->sink, heads_of(p->heads, set->heads_kv, p->heads_kv));
    view_intervals(v->intervals, u->call, piece, set->heads_kv, made);
    made->out = matrix(u, set, &v->out, u->out, t->out, p->dtype, rows);
    made->lse = numbers(u, set, &v->lse, u->lse, t->lse, rows);
    made->lse_low = numbers(u, set, &v->lse_low, u->lse_low, t->lse_low, rows);
    if (p->pass == FDM_FORWARD)
        return;
    made->dout = matrix(u, set, &v->dout, u->dout, t->dout, p->dtype, rows);
    made->dlse = numbers(u, set, &v->dlse, u->dlse, t->dlse, rows);
    made->dq = matrix(u, set, &v->dq, u->dq, t->dq, p->dtype, rows);
    made->dk = matrix(u, set, &v->dk, u->dk, t->dk, u->dkv, keys);
    made->dv = matrix(u, set, &v->dv, u->dv, t->dv, u->dkv, keys);
}

/* ---- stages ---- */

static struct travel travel_of(const struct swapped *s, struct heads heads, int32_t slot) {
    return (struct travel){s->sends, s->receives, s->parts, s->buffers[slot], s->count, heads};
}

static fdm_status send_set(void *context, int32_t n) {
    const struct ulysses *u = context;
    const struct set set = set_of(u, n);
    const struct travel rows = travel_of(&u->rows, set.heads, set.slot),
                        keys = travel_of(&u->keys, set.heads, set.slot);
    const fdm_status status = travel_there(u->call, &rows, u->staging);
    return status ? status : travel_there(u->call, &keys, u->staging);
}

static fdm_status attend(void *context, int32_t set_number) {
    struct ulysses *u = context;
    const fdm_ranks_plan *plan = u->call->plan;
    const struct set set = set_of(u, set_number);
    fdm_status status = FDM_OK;
    for (int32_t n = 0; adds(u) && n < u->keys_back.count; n++)
        call_clear(u->call, u->keys_back.buffers[set.slot][n],
                   plan->buffer_rows * part_row_bytes(plan, &u->keys_back.parts[n], set.heads));
    for (int64_t i = 0; !status && i < plan->pieces.count; i++) {
        struct all_views views;
        fdm_tensors tensors;
        fill(u, &set, &views, &plan->pieces.data[i], &tensors);
        status = call_attention(u->call, &tensors, &plan->pieces.data[i], adds(u) && u->keys_back.count);
    }
    return status;
}

static fdm_status bring_back(const struct ulysses *u, const struct swapped *s, const struct set *set, int are_parts) {
    const struct travel t = travel_of(s, set->heads, set->slot);
    if (!s->count)
        return FDM_OK;
    const fdm_status status = travel_back(u->call, &t, u->staging);
    if (status)
        return status;
    if (are_parts)
        travel_add(u->call, &t, u->staging, u->sums);
    else
        travel_place(u->call, &t, u->staging);
    return FDM_OK;
}

/* Parts are added to the sums of all heads, which the last set completes. */
static fdm_status return_set(void *context, int32_t set_number) {
    struct ulysses *u = context;
    const fdm_ranks_plan *plan = u->call->plan;
    const struct swapped *s = &u->keys_back;
    const struct set set = set_of(u, set_number);
    for (int32_t n = 0; adds(u) && set_number == 0 && n < s->count; n++)
        call_clear(u->call, u->sums[n], plan->keys * s->parts[n].batches * s->parts[n].heads * s->parts[n].width);
    fdm_status status = bring_back(u, &u->rows_back, &set, 0);
    if (!status)
        status = bring_back(u, s, &set, adds(u));
    for (int32_t n = 0; !status && adds(u) && set_number == plan->sets.count - 1 && n < s->count; n++) {
        const struct part to = part_of_matrix(u->added[n]);
        part_store(u->call, &to, fdm_dtype_of(u->added[n]), (fdm_range){0, to.heads}, plan->keys, u->sums[n], u->dkv);
    }
    return status;
}

/* What the staging area has to hold of any set. */
static int64_t staged_bytes(const struct ulysses *u) {
    const struct swapped *all[] = {&u->rows, &u->keys, &u->rows_back, &u->keys_back};
    struct heads heads = u->all;
    int64_t most = 0;
    heads.count = head_sets_most(&u->call->plan->sets, 1, 0);
    for (int i = 0; i < 4; i++) {
        const struct travel t = travel_of(all[i], heads, 0);
        const int64_t bytes = travel_bytes(u->call, &t);
        most = bytes > most ? bytes : most;
    }
    return most;
}

fdm_status ulysses_run(struct ranks_call *call) {
    const fdm_ranks_plan *plan = call->plan;
    struct ulysses u = {.call = call,
                        .all = {.by_peer = plan->head_ranks, .share = plan->problem.heads_kv / plan->head_ranks},
                        .rows = {.sends = &plan->row_sends, .receives = &plan->row_receives},
                        .keys = {.sends = &plan->sends, .receives = &plan->receives},
                        .dkv = plan->problem.dtype};
    u.rows_back = u.rows;
    u.keys_back = u.keys;
    if (adds(&u))
        u.dkv = plan->problem.dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    take_all(&u);
    u.staging = call_take(call, staged_bytes(&u));
    call->call_memory = call_take(call, (int64_t)plan->call_bytes);
    const struct stages stages = {&u, plan->sets.count, send_set, attend, return_set};
    return stages_run(call, &stages);
}
