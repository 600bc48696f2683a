/* ranks_ring.c: attention by keys of one rank at a time. Each fold gives a part of the result of every row, in float32
 * or float64, and parts are merged in the order of steps. */
#include <math.h>

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
    char *buffers[4], *wide_keys[2];
    int32_t num_keys, mask, bias; /* which part; -1: none */
    struct row_buffers rows;
    char *sink; /* [sinks][heads], wide */
    struct part back[2];
    char *parts[2], *sums[2]; /* of dk and dv, of a step and of all */
    fdm_tensor *outputs[2];
    int32_t num_back, dk, dv;
    char *staging;
    struct view sink_view;
};

static int widens(const struct ring *r) { return r->wide != r->call->plan->problem.dtype; }

/* ---- buffers ---- */

static char *take_rows(struct ring *r, int64_t heads, int64_t width, fdm_dtype dtype) {
    const fdm_ranks_plan *plan = r->call->plan;
    return call_take(r->call, plan->rows * plan->problem.batch * heads * width * fdm_dtype_bytes(dtype));
}

static void add_keys(struct ring *r, struct part part) {
    r->keys[r->num_keys] = part;
    r->buffers[r->num_keys++] =
        call_take(r->call, r->call->plan->buffer_rows * part_row_bytes(r->call->plan, &part, r->heads));
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
    if (p->has_sink)
        r->sink = call_take(r->call, p->num_sinks * p->heads * fdm_dtype_bytes(r->wide));
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
    r->parts[r->num_back] = call_take(r->call, plan->buffer_rows * part_row_bytes(plan, &part, r->heads));
    r->sums[r->num_back] = call_take(r->call, plan->keys * part_row_bytes(plan, &part, r->heads));
    return r->num_back++;
}

static struct travel travel_there_of(const struct ring *r, const struct ring_step *step) {
    return (struct travel){&step->sends, &step->receives, r->keys, r->buffers, r->num_keys, r->heads};
}
static struct travel travel_back_of(const struct ring *r, const struct ring_step *step) {
    return (struct travel){&step->sends, &step->receives, r->back, r->parts, r->num_back, r->heads};
}

static void take_staging(struct ring *r) {
    const fdm_ranks_plan *plan = r->call->plan;
    int64_t most = 0;
    for (int32_t t = 0; t < plan->ranks; t++) {
        const struct travel there = travel_there_of(r, &plan->steps[t]), back = travel_back_of(r, &plan->steps[t]);
        const int64_t bytes[] = {travel_bytes(r->call, &there), travel_bytes(r->call, &back)};
        for (int n = 0; n < 2; n++)
            most = bytes[n] > most ? bytes[n] : most;
    }
    r->staging = call_take(r->call, most);
}

/* ---- wide copies ---- */

static void widen_rows(const struct ring *r, const fdm_tensor *t, char *to) {
    const struct part part = part_of_matrix(t);
    if (!r->call->counting)
        part_widen(&part, fdm_dtype_of(t), t->shape[1], (float *)(void *)to);
}

static void widen_keys(const struct ring *r, const struct ring_step *step) {
    const fdm_problem *p = &r->call->plan->problem;
    for (int n = 0; !r->call->counting && widens(r) && n < 2; n++) {
        const int64_t width = n ? p->head_dim_v : p->head_dim, unit = fdm_dtype_bytes(p->dtype);
        const struct part packed = {.data = r->buffers[n],
                                    .batch = p->heads_kv * width * unit,
                                    .row = p->batch * p->heads_kv * width * unit,
                                    .head = width * unit,
                                    .batches = p->batch,
                                    .heads = p->heads_kv,
                                    .width = width * unit};
        part_widen(&packed, p->dtype, step->buffer_rows, (float *)(void *)r->wide_keys[n]);
    }
}

/* Of [H] or [n, H], into [n][H]. */
static fdm_tensor *widen_sink(struct ring *r) {
    const fdm_tensor *t = r->call->tensors->sink;
    const fdm_problem *p = &r->call->plan->problem;
    if (!t)
        return NULL;
    for (int64_t n = 0; !r->call->counting && n < p->num_sinks; n++)
        for (int64_t h = 0; h < p->heads; h++) {
            const int64_t at = n * (t->ndim > 1 ? tensor_stride(t, 0) : 0) + h * tensor_stride(t, t->ndim - 1);
            const double value = element_value(tensor_data(t) + at * fdm_dtype_bytes(fdm_dtype_of(t)), fdm_dtype_of(t));
            if (r->wide == FDM_FLOAT64)
                ((double *)(void *)r->sink)[n * p->heads + h] = value;
            else
                ((float *)(void *)r->sink)[n * p->heads + h] = (float)value;
        }
    r->sink_view = (struct view){.shape = {p->num_sinks, p->heads}, .strides = {p->heads, 1}};
    r->sink_view.tensor = (fdm_tensor){
        r->sink, r->call->plan->device.id, 2, fdm_data_type_of(r->wide), r->sink_view.shape, r->sink_view.strides, 0};
    return &r->sink_view.tensor;
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
                               int32_t part, const struct piece *piece) {
    if (kind == SCORES_NONE)
        return NULL;
    if (kind != SCORES_OF_KEYS)
        return view_scores(view, t, (fdm_range){0, t->shape[1]}, piece->rows, piece->columns);
    return view_buffer_keys(view, r->buffers[part], fdm_dtype_of(t), r->call, t->shape[0], piece->keys, t->shape[1]);
}

static void fill_inputs(const struct ring *r, struct ring_views *v, const struct piece *piece, fdm_tensors *made) {
    const struct ranks_call *call = r->call;
    const fdm_problem *p = &call->plan->problem;
    const fdm_tensors *t = call->tensors;
    const fdm_range all_kv = {0, p->heads_kv};
    char *const k = widens(r) ? r->wide_keys[0] : r->buffers[0], *const value =
                                                                     widens(r) ? r->wide_keys[1] : r->buffers[1];
    *made = (fdm_tensors){.struct_bytes = sizeof *made};
    made->q = rows_view(r, &v->q, r->rows.q, t->q, piece->rows);
    made->k = view_buffer(&v->k, k, r->wide, call, p->batch, piece->keys, p->heads_kv, p->head_dim);
    made->v = view_buffer(&v->v, value, r->wide, call, p->batch, piece->keys, p->heads_kv, p->head_dim_v);
    made->mask = scores_view(r, &v->mask, t->mask, call->plan->mask_kind, r->mask, piece);
    made->bias = scores_view(r, &v->bias, t->bias, call->plan->bias_kind, r->bias, piece);
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
    return r->call->counting ? FDM_OK : fdm_merge(&m, NULL);
}

static void clear(const struct ring *r, char *buffer, int64_t heads, int64_t width, fdm_dtype dtype) {
    const fdm_ranks_plan *plan = r->call->plan;
    if (buffer)
        call_clear(r->call, buffer, plan->rows * plan->problem.batch * heads * width * fdm_dtype_bytes(dtype));
}

static fdm_status run_fold(struct ring *r, const struct pieces *fold, int is_first) {
    const fdm_problem *p = &r->call->plan->problem;
    const struct row_buffers *b = &r->rows;
    const int has_low = p->has_bias;
    fdm_status status = FDM_OK;
    for (int64_t i = 0; !status && i < fold->count; i++) {
        const struct piece *piece = &fold->data[i];
        struct ring_views v;
        fdm_tensors t;
        fill_inputs(r, &v, piece, &t);
        t.out = view_buffer(&v.out, is_first ? b->out : b->part_out, r->wide, r->call, p->batch, piece->rows, p->heads,
                            p->head_dim_v);
        t.lse = numbers_view(r, &v.lse, is_first ? b->lse : b->part_lse, piece->rows);
        t.lse_low = has_low ? numbers_view(r, &v.lse_low, is_first ? b->lse_low : b->part_low, piece->rows) : NULL;
        status = call_attention(r->call, &t, piece, 0);
    }
    return status || is_first ? status : merge_part(r, has_low);
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

static double sink_value(const struct ring *r, int64_t n, int64_t h) {
    const int64_t at = n * r->call->plan->problem.heads + h;
    return element_value(r->sink + at * fdm_dtype_bytes(r->wide), r->wide);
}

/* Sinks are keys without a value that every row sees: one more part. */
static fdm_status merge_sinks(struct ring *r) {
    const fdm_problem *p = &r->call->plan->problem;
    const int64_t rows = r->call->plan->rows * p->batch;
    clear(r, r->rows.part_out, p->heads, p->head_dim_v, r->wide);
    widen_sink(r);
    for (int64_t h = 0; !r->call->counting && h < p->heads; h++) {
        double largest = -INFINITY, sum = 0;
        for (int64_t n = 0; n < p->num_sinks; n++)
            largest = fmax(largest, sink_value(r, n, h));
        for (int64_t n = 0; n < p->num_sinks; n++)
            sum += exp(sink_value(r, n, h) - largest);
        for (int64_t i = 0; i < rows; i++)
            if (r->lse == FDM_FLOAT64)
                ((double *)(void *)r->rows.part_lse)[i * p->heads + h] = largest + log(sum);
            else
                ((float *)(void *)r->rows.part_lse)[i * p->heads + h] = (float)(largest + log(sum));
    }
    return merge_part(r, 0);
}

static fdm_status forward(struct ring *r) {
    const fdm_ranks_plan *plan = r->call->plan;
    const fdm_problem *p = &plan->problem;
    fdm_status status = FDM_OK;
    clear(r, r->rows.lse_low, p->heads, 1, r->lse);
    for (int32_t t = 0; !status && t < plan->ranks; t++) {
        const struct ring_step *step = &plan->steps[t];
        const struct travel there = travel_there_of(r, step);
        status = travel_there(r->call, &there, r->staging);
        if (!status)
            widen_keys(r, step);
        for (int64_t n = 0; !status && n < step->num_folds; n++)
            status = run_fold(r, &step->folds[n], t == 0 && n == 0);
    }
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

static fdm_status run_backward_piece(struct ring *r, const struct piece *piece, fdm_tensor *sink) {
    const struct ranks_call *call = r->call;
    const fdm_problem *p = &call->plan->problem;
    const fdm_tensors *own = call->tensors;
    const fdm_range heads = {0, p->heads};
    const struct row_buffers *b = &r->rows;
    struct ring_views v;
    fdm_tensors t;
    fill_inputs(r, &v, piece, &t);
    t.sink = sink;
    t.out = rows_view(r, &v.out, b->out, own->out, piece->rows);
    t.dout = rows_view(r, &v.dout, b->dout, own->dout, piece->rows);
    t.lse = view_rows(&v.lse, own->lse, piece->rows, heads);
    t.lse_low = view_rows(&v.lse_low, own->lse_low, piece->rows, heads);
    t.dlse = view_rows(&v.dlse, own->dlse, piece->rows, heads);
    if (b->dq)
        t.dq = view_buffer(&v.dq, b->part_dq, r->wide, call, p->batch, piece->rows, p->heads, p->head_dim);
    if (r->dk >= 0)
        t.dk = view_buffer(&v.dk, r->parts[r->dk], r->wide, call, p->batch, piece->keys, p->heads_kv, p->head_dim);
    if (r->dv >= 0)
        t.dv = view_buffer(&v.dv, r->parts[r->dv], r->wide, call, p->batch, piece->keys, p->heads_kv, p->head_dim_v);
    const fdm_status status = call_attention(r->call, &t, piece, r->num_back > 0);
    const int64_t row = p->batch * p->heads * p->head_dim * fdm_dtype_bytes(r->wide);
    if (!status && b->dq && !call->counting)
        add_floats(b->dq + piece->rows.first * row, b->part_dq + piece->rows.first * row,
                   (piece->rows.end - piece->rows.first) * row, r->wide);
    return status;
}

static void clear_keys(const struct ring *r, char *const *buffers, int64_t rows) {
    for (int32_t n = 0; n < r->num_back; n++)
        call_clear(r->call, buffers[n], rows * part_row_bytes(r->call->plan, &r->back[n], r->heads));
}

static fdm_status backward_step(struct ring *r, const struct ring_step *step, fdm_tensor *sink) {
    const struct travel there = travel_there_of(r, step), back = travel_back_of(r, step);
    fdm_status status = travel_there(r->call, &there, r->staging);
    if (!status)
        widen_keys(r, step);
    clear_keys(r, r->parts, step->buffer_rows);
    for (int64_t n = 0; !status && n < step->num_folds; n++)
        for (int64_t i = 0; !status && i < step->folds[n].count; i++)
            status = run_backward_piece(r, &step->folds[n].data[i], sink);
    if (!status && r->num_back && !(status = travel_back(r->call, &back, r->staging)))
        travel_add(r->call, &back, r->staging, r->sums);
    return status;
}

static fdm_status backward(struct ring *r) {
    const fdm_ranks_plan *plan = r->call->plan;
    const fdm_problem *p = &plan->problem;
    const fdm_tensors *t = r->call->tensors;
    fdm_tensor *sink = widen_sink(r);
    fdm_status status = FDM_OK;
    if (widens(r)) {
        widen_rows(r, t->out, r->rows.out);
        widen_rows(r, t->dout, r->rows.dout);
    }
    clear(r, r->rows.dq, p->heads, p->head_dim, r->wide);
    clear_keys(r, r->sums, plan->keys);
    for (int32_t n = 0; !status && n < plan->ranks; n++)
        status = backward_step(r, &plan->steps[n], sink);
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
    struct ring r = {.call = call, .wide = wide, .lse = wide, .heads = {0, p->heads_kv, 0}, .dk = -1, .dv = -1};
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
