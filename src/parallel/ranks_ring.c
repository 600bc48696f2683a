/* ranks_ring.c: attention by keys of one rank at a time. Each fold gives a part of the result of every row, in float32
 * or float64, and parts are merged in the order of steps. */
#include "base/error.h"
#include "parallel/ranks_call.h"
#include "problem/tensor.h"

/* Buffers [rows][batches][heads][width] of the rank's rows, in the dtype of parts. */
struct row_buffers {
    char *q, *out, *dout, *lse, *lse_low; /* q, out and dout: NULL where the caller's are of that dtype */
    char *part_out, *part_lse, *part_low; /* forward: of a fold */
    char *dq, *part_dq;                   /* backward */
};

struct ring {
    struct ranks_call *call;
    fdm_dtype wide, lse;
    struct heads heads;  /* all */
    struct part keys[4]; /* k, v, and a mask and a bias of keys */
    char *buffers[RANKS_SLOTS_MAX][4], *wide_keys[2];
    int32_t num_keys, mask, bias; /* which part; -1: none */
    struct row_buffers rows;
    struct part back[2];
    char *parts[RANKS_SLOTS_MAX][2], *sums[2]; /* of dk and dv, of a step and of all */
    char *own[2];                              /* of a call, where it cannot add: those of its keys */
    fdm_tensor *outputs[2];
    int32_t num_back, dk, dv;
    char *staging;
};

static int widens(const struct ring *r) { return r->wide != r->call->plan->problem.dtype; }
/* Kernels of CUDA devices do not add to dk and dv of float32 tensors. */
static int adds_itself(const struct ring *r) { return r->call->plan->device.id.type == FDM_CUDA; }
static int32_t slot_of(const struct ring *r, int32_t step) { return step % r->call->plan->slots; }

/* ---- buffers ---- */

static char *take_rows(struct ring *r, int64_t heads, int64_t width, fdm_dtype dtype) {
    const fdm_ranks_plan *plan = r->call->plan;
    return call_take(r->call, plan->rows * plan->problem.batch * heads * width * fdm_dtype_bytes(dtype));
}

static void add_keys(struct ring *r, struct part part) {
    const fdm_ranks_plan *plan = r->call->plan;
    r->keys[r->num_keys] = part;
    for (int32_t slot = 0; slot < plan->slots; slot++)
        r->buffers[slot][r->num_keys] = call_take(r->call, plan->buffer_rows * part_row_bytes(plan, &part, r->heads));
    r->num_keys++;
}

static void take_keys(struct ring *r) {
    const fdm_ranks_plan *plan = r->call->plan;
    const fdm_problem *p = &plan->problem;
    const fdm_tensors *t = r->call->tensors;
    r->mask = r->bias = -1;
    add_keys(r, part_of_matrix(t->k));
    add_keys(r, part_of_matrix(t->v));
    if (plan->mask_kind == SCORES_OF_KEYS)
        r->mask = r->num_keys, add_keys(r, part_of_keys(t->mask));
    if (plan->bias_kind == SCORES_OF_KEYS)
        r->bias = r->num_keys, add_keys(r, part_of_keys(t->bias));
    for (int n = 0; widens(r) && n < 2; n++)
        r->wide_keys[n] = call_take(r->call, plan->buffer_rows * p->batch * p->heads_kv *
                                                 (n ? p->head_dim_v : p->head_dim) * fdm_dtype_bytes(r->wide));
}

static void take_row_buffers(struct ring *r) {
    const fdm_problem *p = &r->call->plan->problem;
    struct row_buffers *b = &r->rows;
    const int backward = p->pass == FDM_BACKWARD;
    if (widens(r))
        b->q = take_rows(r, p->heads, p->head_dim, r->wide);
    if (!backward || widens(r))
        b->out = take_rows(r, p->heads, p->head_dim_v, r->wide);
    if (backward) {
        if (widens(r))
            b->dout = take_rows(r, p->heads, p->head_dim_v, r->wide);
        if (p->needs_dq) {
            b->dq = take_rows(r, p->heads, p->head_dim, r->wide);
            b->part_dq = take_rows(r, p->heads, p->head_dim, r->wide);
        }
        return;
    }
    b->part_out = take_rows(r, p->heads, p->head_dim_v, r->wide);
    char **const numbers[] = {&b->lse, &b->lse_low, &b->part_lse, &b->part_low};
    for (int n = 0; n < 4; n++)
        *numbers[n] = take_rows(r, p->heads, 1, r->lse);
}

static int32_t want(struct ring *r, int which, fdm_tensor *output) {
    const fdm_ranks_plan *plan = r->call->plan;
    struct part part = r->keys[which];
    if (!output)
        return -1;
    part.width = output->shape[3] * fdm_dtype_bytes(r->wide);
    r->back[r->num_back] = part;
    r->outputs[r->num_back] = output;
    const int64_t row = part_row_bytes(plan, &part, r->heads);
    for (int32_t slot = 0; slot < plan->slots; slot++)
        r->parts[slot][r->num_back] = call_take(r->call, plan->buffer_rows * row);
    if (adds_itself(r))
        r->own[r->num_back] = call_take(r->call, plan->buffer_rows * row);
    r->sums[r->num_back] = call_take(r->call, plan->keys * row);
    return r->num_back++;
}

static struct travel travel_there_of(const struct ring *r, int32_t n) {
    const struct ring_step *step = &r->call->plan->steps[n];
    return (struct travel){&step->sends, &step->receives, r->keys, r->buffers[slot_of(r, n)], r->num_keys, r->heads};
}
static struct travel travel_back_of(const struct ring *r, int32_t n) {
    const struct ring_step *step = &r->call->plan->steps[n];
    return (struct travel){&step->sends, &step->receives, r->back, r->parts[slot_of(r, n)], r->num_back, r->heads};
}

static void take_staging(struct ring *r) {
    const fdm_ranks_plan *plan = r->call->plan;
    int64_t most = 0;
    for (int32_t t = 0; t < plan->ranks; t++) {
        const struct travel there = travel_there_of(r, t), back = travel_back_of(r, t);
        const int64_t bytes[] = {travel_bytes(r->call, &there), travel_bytes(r->call, &back)};
        for (int n = 0; n < 2; n++)
            most = bytes[n] > most ? bytes[n] : most;
    }
    r->staging = call_take(r->call, most);
}

/* ---- wide copies ---- */

static void widen_rows(const struct ring *r, const fdm_tensor *t, char *to) {
    const struct part part = part_of_matrix(t);
    part_widen(r->call, &part, fdm_dtype_of(t), t->shape[1], to);
}

static void widen_keys(const struct ring *r, int32_t step) {
    const fdm_problem *p = &r->call->plan->problem;
    for (int n = 0; widens(r) && n < 2; n++) {
        const int64_t width = (n ? p->head_dim_v : p->head_dim) * fdm_dtype_bytes(p->dtype);
        const struct part packed = {.data = r->buffers[slot_of(r, step)][n],
                                    .batch = p->heads_kv * width,
                                    .row = p->batch * p->heads_kv * width,
                                    .head = width,
                                    .batches = p->batch,
                                    .heads = p->heads_kv,
                                    .width = width};
        part_widen(r->call, &packed, p->dtype, r->call->plan->steps[step].buffer_rows, r->wide_keys[n]);
    }
}

/* ---- one call ---- */

struct ring_views {
    struct view q, k, v, mask, bias, intervals[2], out, lse, lse_low, dout, dlse, dq, dk, dv;
};

/* Rows of the caller's tensor, or of its wide copy. */
static fdm_tensor *rows_view(const struct ring *r, struct view *view, char *buffer, const fdm_tensor *t,
                             fdm_range rows) {
    const fdm_range heads = {0, r->call->plan->problem.heads};
    return buffer ? view_buffer(view, buffer, r->wide, r->call, t->shape[0], rows, heads.end, t->shape[3])
                  : view_matrix(view, t, rows, heads);
}

static fdm_tensor *scores_view(const struct ring *r, struct view *view, const fdm_tensor *t, enum scores_kind kind,
                               int32_t part, const struct piece *piece, int32_t slot) {
    if (kind == SCORES_NONE)
        return NULL;
    if (kind != SCORES_OF_KEYS)
        return view_scores(view, t, (fdm_range){0, t->shape[1]}, piece->rows, piece->columns);
    return view_buffer_keys(view, r->buffers[slot][part], fdm_dtype_of(t), r->call, t->shape[0], piece->keys,
                            t->shape[1]);
}

static void fill_inputs(const struct ring *r, struct ring_views *v, const struct piece *piece, int32_t slot,
                        fdm_tensors *made) {
    const struct ranks_call *call = r->call;
    const fdm_problem *p = &call->plan->problem;
    const fdm_tensors *t = call->tensors;
    const fdm_range all_kv = {0, p->heads_kv};
    char *const *keys = widens(r) ? r->wide_keys : r->buffers[slot];
    *made = (fdm_tensors){.struct_bytes = sizeof *made};
    made->q = rows_view(r, &v->q, r->rows.q, t->q, piece->rows);
    made->k = view_buffer(&v->k, keys[0], r->wide, call, p->batch, piece->keys, p->heads_kv, p->head_dim);
    made->v = view_buffer(&v->v, keys[1], r->wide, call, p->batch, piece->keys, p->heads_kv, p->head_dim_v);
    made->mask = scores_view(r, &v->mask, t->mask, call->plan->mask_kind, r->mask, piece, slot);
    made->bias = scores_view(r, &v->bias, t->bias, call->plan->bias_kind, r->bias, piece, slot);
    view_intervals(v->intervals, call, piece, all_kv, made);
}

static fdm_tensor *numbers_view(const struct ring *r, struct view *view, char *buffer, fdm_range rows) {
    const fdm_problem *p = &r->call->plan->problem;
    return view_buffer_rows(view, buffer, r->lse, r->call, p->batch, rows, p->heads);
}

/* ---- forward ---- */

static fdm_status merge_part(const struct ring *r, int has_low) {
    const fdm_problem *p = &r->call->plan->problem;
    const struct row_buffers *b = &r->rows;
    const fdm_range rows = {0, r->call->plan->rows};
    struct view v[6];
    fdm_merge_tensors m = {.struct_bytes = sizeof m};
    m.out1 = m.out = view_buffer(&v[0], b->out, r->wide, r->call, p->batch, rows, p->heads, p->head_dim_v);
    m.out2 = view_buffer(&v[1], b->part_out, r->wide, r->call, p->batch, rows, p->heads, p->head_dim_v);
    m.lse1 = m.lse = numbers_view(r, &v[2], b->lse, rows);
    m.lse_low1 = m.lse_low = numbers_view(r, &v[3], b->lse_low, rows);
    m.lse2 = numbers_view(r, &v[4], b->part_lse, rows);
    m.lse_low2 = has_low ? numbers_view(r, &v[5], b->part_low, rows) : NULL;
    return r->call->counting ? FDM_OK : fdm_merge(&m, r->call->stream);
}

static void clear(const struct ring *r, char *buffer, int64_t heads, int64_t width, fdm_dtype dtype) {
    const fdm_ranks_plan *plan = r->call->plan;
    if (buffer)
        call_clear(r->call, buffer, plan->rows * plan->problem.batch * heads * width * fdm_dtype_bytes(dtype));
}

/* The output of a call on rows: the result, of the first fold, or a part. */
static void fill_outputs(const struct ring *r, struct ring_views *v, fdm_range rows, int is_first, fdm_tensors *t) {
    const fdm_problem *p = &r->call->plan->problem;
    const struct row_buffers *b = &r->rows;
    t->out = view_buffer(&v->out, is_first ? b->out : b->part_out, r->wide, r->call, p->batch, rows, p->heads,
                         p->head_dim_v);
    t->lse = numbers_view(r, &v->lse, is_first ? b->lse : b->part_lse, rows);
    t->lse_low = p->has_bias ? numbers_view(r, &v->lse_low, is_first ? b->lse_low : b->part_low, rows) : NULL;
}

static fdm_status forward_step(void *context, int32_t step) {
    struct ring *r = context;
    const fdm_ranks_plan *plan = r->call->plan;
    fdm_status status = FDM_OK;
    widen_keys(r, step);
    for (int64_t n = 0; !status && n < plan->steps[step].num_folds; n++) {
        const struct pieces *fold = &plan->steps[step].folds[n];
        const int is_first = step == 0 && n == 0;
        for (int64_t i = 0; !status && i < fold->count; i++) {
            struct ring_views v;
            fdm_tensors t;
            fill_inputs(r, &v, &fold->data[i], slot_of(r, step), &t);
            fill_outputs(r, &v, fold->data[i].rows, is_first, &t);
            status = call_attention(r->call, &t, &fold->data[i], 0);
        }
        if (!status && !is_first)
            status = merge_part(r, plan->problem.has_bias);
    }
    return status;
}

static fdm_status send_step(void *context, int32_t step) {
    const struct ring *r = context;
    const struct travel there = travel_there_of(r, step);
    return travel_there(r->call, &there, r->staging);
}

static void store_numbers(struct ring *r) {
    const fdm_tensors *t = r->call->tensors;
    const fdm_range heads = {0, r->call->plan->problem.heads};
    for (int n = 0; n < 2; n++) {
        const fdm_tensor *to = n ? t->lse_low : t->lse;
        if (!to)
            continue;
        const struct part part = part_of_rows(to);
        part_store(r->call, &part, r->lse, heads, r->call->plan->rows, n ? r->rows.lse_low : r->rows.lse, r->lse);
    }
}

/* Sinks are keys without a value that every row sees: one more part, of a call without other keys. */
static fdm_status merge_sinks(struct ring *r) {
    const struct ranks_call *call = r->call;
    const fdm_problem *p = &call->plan->problem;
    const struct piece piece = {.rows = {0, call->plan->rows}, .left = -1, .right = -1, .sinks_alone = 1};
    struct ring_views v;
    fdm_tensors t;
    fill_inputs(r, &v, &piece, 0, &t);
    t.mask = t.bias = NULL;
    t.sink = call->tensors->sink;
    fill_outputs(r, &v, piece.rows, 0, &t);
    t.lse_low = NULL;
    if (p->batch * call->plan->rows == 0)
        return FDM_OK;
    const fdm_status status = call_attention(r->call, &t, &piece, 0);
    return status ? status : merge_part(r, 0);
}

static fdm_status forward(struct ring *r) {
    const fdm_ranks_plan *plan = r->call->plan;
    const fdm_problem *p = &plan->problem;
    const struct stages stages = {r, plan->ranks, send_step, forward_step, NULL};
    clear(r, r->rows.lse_low, p->heads, 1, r->lse);
    fdm_status status = stages_run(r->call, &stages);
    if (status)
        return status;
    if (p->lse_without_sink)
        store_numbers(r);
    if (p->has_sink && (status = merge_sinks(r)))
        return status;
    if (!p->lse_without_sink)
        store_numbers(r);
    const struct part out = part_of_matrix(r->call->tensors->out);
    part_store(r->call, &out, p->dtype, (fdm_range){0, p->heads}, plan->rows, r->rows.out, r->wide);
    return FDM_OK;
}

/* ---- backward ---- */

/* dk or dv of a call's keys: in the step's part, or beside it. */
static fdm_tensor *gradient_view(const struct ring *r, struct view *view, int32_t which, fdm_range keys, int32_t slot,
                                 int64_t width) {
    const fdm_problem *p = &r->call->plan->problem;
    return which < 0 ? NULL
                     : view_buffer(view, adds_itself(r) ? r->own[which] : r->parts[slot][which], r->wide, r->call,
                                   p->batch, keys, p->heads_kv, width);
}

static fdm_status run_backward_piece(struct ring *r, const struct piece *piece, int32_t slot) {
    struct ranks_call *call = r->call;
    const fdm_problem *p = &call->plan->problem;
    const fdm_tensors *own = call->tensors;
    const fdm_range heads = {0, p->heads};
    const struct row_buffers *b = &r->rows;
    struct ring_views v;
    fdm_tensors t;
    fill_inputs(r, &v, piece, slot, &t);
    t.sink = own->sink;
    t.out = rows_view(r, &v.out, b->out, own->out, piece->rows);
    t.dout = rows_view(r, &v.dout, b->dout, own->dout, piece->rows);
    t.lse = view_rows(&v.lse, own->lse, piece->rows, heads);
    t.lse_low = view_rows(&v.lse_low, own->lse_low, piece->rows, heads);
    t.dlse = view_rows(&v.dlse, own->dlse, piece->rows, heads);
    if (b->dq)
        t.dq = view_buffer(&v.dq, b->part_dq, r->wide, call, p->batch, piece->rows, p->heads, p->head_dim);
    t.dk = gradient_view(r, &v.dk, r->dk, piece->keys, slot, p->head_dim);
    t.dv = gradient_view(r, &v.dv, r->dv, piece->keys, slot, p->head_dim_v);
    const fdm_status status = call_attention(call, &t, piece, r->num_back > 0 && !adds_itself(r));
    if (status)
        return status;
    if (b->dq)
        packed_add(call, b->dq, b->part_dq, piece->rows, p->batch * p->heads * p->head_dim * fdm_dtype_bytes(r->wide),
                   r->wide);
    for (int32_t n = 0; adds_itself(r) && n < r->num_back; n++)
        packed_add(call, r->parts[slot][n], r->own[n], piece->keys, part_row_bytes(call->plan, &r->back[n], r->heads),
                   r->wide);
    return FDM_OK;
}

static void clear_keys(const struct ring *r, char *const *buffers, int64_t rows) {
    for (int32_t n = 0; n < r->num_back; n++)
        call_clear(r->call, buffers[n], rows * part_row_bytes(r->call->plan, &r->back[n], r->heads));
}

static fdm_status backward_step(void *context, int32_t number) {
    struct ring *r = context;
    const struct ring_step *step = &r->call->plan->steps[number];
    const int32_t slot = slot_of(r, number);
    fdm_status status = FDM_OK;
    widen_keys(r, number);
    clear_keys(r, r->parts[slot], step->buffer_rows);
    for (int64_t n = 0; !status && n < step->num_folds; n++)
        for (int64_t i = 0; !status && i < step->folds[n].count; i++)
            status = run_backward_piece(r, &step->folds[n].data[i], slot);
    return status;
}

static fdm_status return_step(void *context, int32_t step) {
    struct ring *r = context;
    const struct travel back = travel_back_of(r, step);
    const fdm_status status = travel_back(r->call, &back, r->staging);
    if (!status)
        travel_add(r->call, &back, r->staging, r->sums);
    return status;
}

static fdm_status backward(struct ring *r) {
    const fdm_ranks_plan *plan = r->call->plan;
    const fdm_problem *p = &plan->problem;
    const fdm_tensors *t = r->call->tensors;
    const struct stages stages = {r, plan->ranks, send_step, backward_step, r->num_back ? return_step : NULL};
    if (widens(r)) {
        widen_rows(r, t->out, r->rows.out);
        widen_rows(r, t->dout, r->rows.dout);
    }
    clear(r, r->rows.dq, p->heads, p->head_dim, r->wide);
    clear_keys(r, r->sums, plan->keys);
    const fdm_status status = stages_run(r->call, &stages);
    if (status)
        return status;
    for (int32_t n = 0; n < r->num_back; n++) {
        const struct part to = part_of_matrix(r->outputs[n]);
        part_store(r->call, &to, p->dtype, (fdm_range){0, p->heads_kv}, plan->keys, r->sums[n], r->wide);
    }
    if (p->needs_dq) {
        const struct part to = part_of_matrix(t->dq);
        part_store(r->call, &to, p->dtype, (fdm_range){0, p->heads}, plan->rows, r->rows.dq, r->wide);
    }
    return FDM_OK;
}

fdm_status ring_run(struct ranks_call *call) {
    const fdm_problem *p = &call->plan->problem;
    const fdm_dtype wide = p->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    struct ring r = {.call = call, .wide = wide, .lse = wide, .heads = {.count = p->heads_kv}, .dk = -1, .dv = -1};
    take_keys(&r);
    take_row_buffers(&r);
    if (p->pass == FDM_BACKWARD) {
        r.dk = want(&r, 0, call->tensors->dk);
        r.dv = want(&r, 1, call->tensors->dv);
    }
    take_staging(&r);
    call->call_memory = call_take(call, (int64_t)call->plan->call_bytes);
    if (r.rows.q)
        widen_rows(&r, call->tensors->q, r.rows.q);
    return p->pass == FDM_FORWARD ? forward(&r) : backward(&r);
}
