/* reference.c: the slow truth: attention and its gradients in float64, straight from the definition. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/elements.h"
#include "base/error.h"
#include "families/families.h"
#include "problem/block_views.h"
#include "problem/interval_views.h"
#include "problem/kv_cache.h"
#include "problem/sinks.h"
#include "problem/tree.h"

/* One sequence and query head of a call. */
struct head {
    const struct attention *attention;
    const fdm_problem *problem;
    struct sequence sequence;
    int64_t b, h;
};

/* Index of element (i, h, 0) of a tensor whose rows are counted within the sequence, which starts at row `begin`. */
static int64_t row_of(const struct matrix_view *view, int64_t b, int64_t i, int64_t h) {
    return b * view->batch + i * view->row + h * view->head;
}

static int64_t kv_head(const struct head *x) { return x->h / (x->problem->heads / x->problem->heads_kv); }
static int64_t q_row(const struct head *x, const struct matrix_view *view, int64_t i) {
    return row_of(view, x->b, x->sequence.q_begin + i, x->h);
}
/* Where the row of key j begins, in K or in V. */
static const char *key_row(const struct head *x, int of_values, int64_t j) {
    const struct key_place place = attention_key_place(x->attention, &x->sequence, x->b, j);
    const struct matrix_view *view = of_values ? place.v : place.k;
    return view->data + row_of(view, place.batch, place.row, kv_head(x)) * fdm_dtype_bytes(x->problem->dtype);
}
static const char *k_row(const struct head *x, int64_t j) { return key_row(x, 0, j); }
static const char *v_row(const struct head *x, int64_t j) { return key_row(x, 1, j); }
static int64_t lse_index(const struct head *x, const struct row_view *view, int64_t i) {
    return x->b * view->batch + x->h * view->head + (x->sequence.q_begin + i) * view->row;
}
static int64_t score_index(const struct head *x, const struct score_view *view, int64_t i, int64_t j) {
    return x->b * view->batch + x->h / view->group * view->head + i * view->row + j * view->key;
}

/* Of float64, what tests compare everything with, by four sums: three times as fast. */
static double dot_float64(const double *a, const double *b, int64_t length) {
    double sum[4] = {0, 0, 0, 0};
    int64_t d = 0;
    for (; d + 4 <= length; d += 4)
        for (int n = 0; n < 4; n++)
            sum[n] += a[d + n] * b[d + n];
    for (; d < length; d++)
        sum[0] += a[d] * b[d];
    return sum[0] + sum[1] + (sum[2] + sum[3]);
}

static double dot(const struct head *x, const char *a, int64_t a_row, const char *b, int64_t length) {
    double sum = 0;
    if (x->problem->dtype == FDM_FLOAT64)
        return dot_float64((const double *)(const void *)a + a_row, (const double *)(const void *)b, length);
    for (int64_t d = 0; d < length; d++)
        sum += element_load(a, a_row + d, x->problem->dtype) * element_load(b, d, x->problem->dtype);
    return sum;
}

static double bias_of(const struct head *x, int64_t i, int64_t j) {
    const struct score_view *bias = &x->attention->bias;
    return x->problem->has_bias ? element_load(bias->data, score_index(x, bias, i, j), x->problem->bias_dtype) : 0;
}

static int in_interval(const struct head *x, int64_t i, int64_t j) {
    const struct interval_view *view = &x->attention->intervals;
    int64_t h = x->h / view->group, key = x->sequence.k_begin + j;
    int32_t start = view->start[x->b * view->start_batch + h * view->start_head + key * view->start_item];
    int32_t end = view->end[x->b * view->end_batch + h * view->end_head + key * view->end_item];
    return start <= i && i < end;
}

static int in_row_interval(const struct head *x, int64_t i, int64_t j) {
    const struct row_ranges ranges = row_ranges_of(x->attention, &x->sequence, x->b, x->h, i);
    return !ranges.start || row_ranges_hold(&ranges, j);
}

static int in_tree(const struct head *x, int64_t i, int64_t j) {
    const uint32_t *row = tree_row(x->attention, &x->sequence, x->b, i);
    return !row || tree_holds(x->attention, &x->sequence, row, j);
}

static int visible(const struct head *x, int64_t i, int64_t j) {
    struct key_range range = problem_key_range(x->problem, &x->sequence, i);
    const struct score_view *mask = &x->attention->mask;
    return j >= range.first && j < range.last && (!x->problem->has_mask || mask->data[score_index(x, mask, i, j)]) &&
           (!x->problem->has_intervals || in_interval(x, i, j)) && in_row_interval(x, i, j) && in_tree(x, i, j) &&
           block_mask_holds(x->attention, x->b, x->h, i, j) && bias_of(x, i, j) != -INFINITY;
}

/* The score before bias, and the derivative of the softcap at it. */
static double capped_score(const struct head *x, int64_t i, int64_t j, double *slope) {
    const struct attention *a = x->attention;
    double score = x->problem->softmax_scale * dot(x, a->q.data, q_row(x, &a->q, i), k_row(x, j), x->problem->head_dim);
    double cap = x->problem->softcap, t = cap > 0 ? tanh(score / cap) : 0;
    *slope = 1 - t * t;
    return cap > 0 ? cap * t : score;
}

/* log sum exp of a row, +inf when it sees no key: the largest score and the logarithm of the sum of exp(score -
 * largest), which beside a bias of -1e308 has no digits left in their sum. */
struct logarithm {
    double largest, rest;
    double growth; /* what sinks add to the logarithm of the visible keys' sum: logs are without */
    double weight; /* of the sinks among them and the keys: 0 where there are none */
};
static double sum_of(struct logarithm lse) { return lse.largest + lse.rest; }

/* The row's sum with its head's sinks. */
static struct logarithm with_sinks(const struct head *x, struct logarithm lse) {
    const double sink = sinks_logit(x->attention, x->h);
    struct logarithm sunk = lse;
    if (sink == -INFINITY)
        return lse;
    if (lse.largest == INFINITY) /* the row sees no key */
        return x->problem->lse_without_sink ? lse : (struct logarithm){sink, 0, 0, isnan(sink) ? sink : 1};
    sunk.growth = sinks_growth(lse.rest, sink - lse.largest); /* lse itself may have lost the digits of rest */
    sunk.weight = sink == INFINITY ? 1 : exp(sink - lse.largest - lse.rest - sunk.growth);
    if (!x->problem->lse_without_sink) {
        sunk.largest = sink > lse.largest ? sink : lse.largest;
        sunk.rest = sink == INFINITY     ? 0
                    : sink > lse.largest ? sinks_growth(sink - lse.largest, lse.rest)
                                         : lse.rest + sunk.growth;
    }
    return sunk;
}

/* logs[j] of row i: the logarithm of its probability among the visible keys, -inf where not visible. */
static struct logarithm score_row(const struct head *x, int64_t i, double *logs) {
    double largest = -INFINITY, sum = 0, slope;
    for (int64_t j = 0; j < x->sequence.seqlen_k; j++) {
        logs[j] = visible(x, i, j) ? capped_score(x, i, j, &slope) + bias_of(x, i, j) : -INFINITY;
        largest = logs[j] > largest || isnan(logs[j]) ? logs[j] : largest;
    }
    if (largest == -INFINITY)
        return with_sinks(x, (struct logarithm){INFINITY, 0, 0, 0});
    for (int64_t j = 0; j < x->sequence.seqlen_k; j++)
        sum += exp(logs[j] - largest);
    for (int64_t j = 0; j < x->sequence.seqlen_k; j++)
        if (logs[j] != -INFINITY) /* hidden keys stay hidden beside a NaN */
            logs[j] = logs[j] - largest - log(sum);
    return with_sinks(x, (struct logarithm){largest, log(sum), 0, 0});
}

/* lse as it is stored, and what that has rounded away. */
static void store_lse(const struct head *x, int64_t i, struct logarithm lse) {
    const struct attention *a = x->attention;
    const fdm_dtype dtype = x->problem->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    const double stored = dtype == FDM_FLOAT64 ? sum_of(lse) : (double)(float)sum_of(lse);
    if (x->problem->needs_lse)
        element_store(a->lse.data, lse_index(x, &a->lse, i), dtype, stored);
    if (x->problem->has_lse_low)
        element_store(a->lse_low.data, lse_index(x, &a->lse_low, i), dtype,
                      isinf(stored) ? 0 : lse.largest - stored + lse.rest);
}

static void forward_row(const struct head *x, int64_t i, double *logs) {
    const struct attention *a = x->attention;
    const fdm_problem *p = x->problem;
    const struct logarithm lse = score_row(x, i, logs);
    double *weights = logs; /* -1: not visible */
    for (int64_t j = 0; j < x->sequence.seqlen_k; j++)
        weights[j] = logs[j] == -INFINITY ? -1 : exp(logs[j] - lse.growth);
    for (int64_t d = 0; d < p->head_dim_v; d++) {
        double sum = 0;
        for (int64_t j = 0; j < x->sequence.seqlen_k; j++)
            if (weights[j] != -1)
                sum += weights[j] * element_load(v_row(x, j), d, p->dtype);
        element_store(a->out.data, q_row(x, &a->out, i) + d, p->dtype, sum);
    }
    store_lse(x, i, lse);
}

static void for_each_head(const struct attention *attention, void *context,
                          void (*visit)(const struct head *head, void *context)) {
    for (int64_t b = 0; b < attention->problem->batch; b++)
        for (int64_t h = 0; h < attention->problem->heads; h++) {
            struct head head = {attention, attention->problem, attention_sequence(attention, b), b, h};
            visit(&head, context);
        }
}

static void forward_head(const struct head *x, void *context) {
    for (int64_t i = 0; i < x->sequence.seqlen_q; i++)
        forward_row(x, i, context);
}

/* Float64 sums of the gradients, in workspace: dk and dv of every key and KV head, dbias of every bias element, dq of
 * one row. */
struct gradients {
    double *dk, *dv; /* [B * Sk or total_k][Hkv][D or Dv] */
    double *dbias;   /* [bias_shape] */
    double *dq;      /* [D] */
    double *dsink;   /* [H], of the logarithm of a head's sinks */
    double *logs;    /* [Sk] */
};

static int64_t bias_elements(const fdm_problem *p) {
    return p->needs_dbias ? p->bias_shape[0] * p->bias_shape[1] * p->bias_shape[2] * p->bias_shape[3] : 0;
}

static int64_t key_rows(const fdm_problem *p) {
    return (p->varlen ? p->total_k : p->batch * p->seqlen_k) * p->heads_kv;
}

static double *dbias_sum(const struct head *x, const struct gradients *g, int64_t i, int64_t j) {
    const int64_t *shape = x->problem->bias_shape;
    int64_t b = shape[0] == 1 ? 0 : x->b, h = x->h / (x->problem->heads / shape[1]);
    return g->dbias + ((b * shape[1] + h) * shape[2] + (shape[2] == 1 ? 0 : i)) * shape[3] + (shape[3] == 1 ? 0 : j);
}

static int64_t key_row_index(const struct head *x, int64_t j) {
    int64_t row = x->problem->varlen ? x->sequence.k_begin + j : x->b * x->problem->seqlen_k + j;
    return row * x->problem->heads_kv + kv_head(x);
}

/* to += factor * row. */
static void add_row(double *to, double factor, const void *data, int64_t row, int64_t length, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT64)
        for (int64_t d = 0; d < length; d++)
            to[d] += factor * ((const double *)data)[row + d];
    else
        for (int64_t d = 0; d < length; d++)
            to[d] += factor * element_load(data, row + d, dtype);
}

/* What the gradients of a row's pairs have in common: delta = sum_d dO O, and the gradient that flows into lse. */
struct row_gradient {
    double delta, dlse, growth;
};

/* Adds what the pair (i, j) contributes to every gradient. */
static void backward_pair(const struct head *x, const struct gradients *g, int64_t i, int64_t j,
                          const struct row_gradient *row) {
    const struct attention *a = x->attention;
    const fdm_problem *p = x->problem;
    double slope = 1, probability = exp(g->logs[j] - row->growth);
    if (p->softcap > 0)
        capped_score(x, i, j, &slope);
    double dp = dot(x, a->dout.data, q_row(x, &a->dout, i), v_row(x, j), p->head_dim_v);
    double ds = probability * (dp - row->delta) + (p->lse_without_sink ? exp(g->logs[j]) : probability) * row->dlse;
    if (p->needs_dbias)
        *dbias_sum(x, g, i, j) += ds;
    ds *= slope * p->softmax_scale;
    const int64_t key = key_row_index(x, j);
    add_row(g->dq, ds, k_row(x, j), 0, p->head_dim, p->dtype);
    add_row(g->dk + key * p->head_dim, ds, a->q.data, q_row(x, &a->q, i), p->head_dim, p->dtype);
    add_row(g->dv + key * p->head_dim_v, probability, a->dout.data, q_row(x, &a->dout, i), p->head_dim_v, p->dtype);
}

/* O and lse are computed anew: the truth does not depend on how the forward rounded them. */
static struct row_gradient row_gradient(const struct head *x, int64_t i, const double *logs, double growth) {
    const struct attention *a = x->attention;
    const fdm_problem *p = x->problem;
    struct row_gradient row = {0, 0, growth};
    for (int64_t j = 0; j < x->sequence.seqlen_k; j++)
        if (logs[j] != -INFINITY)
            row.delta +=
                exp(logs[j] - growth) * dot(x, a->dout.data, q_row(x, &a->dout, i), v_row(x, j), p->head_dim_v);
    if (p->has_dlse)
        row.dlse =
            element_load(a->dlse.data, lse_index(x, &a->dlse, i), p->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32);
    return row;
}

static void backward_head(const struct head *x, void *context) {
    const struct gradients *g = context;
    const struct attention *a = x->attention;
    const fdm_problem *p = x->problem;
    for (int64_t i = 0; i < x->sequence.seqlen_q; i++) {
        memset(g->dq, 0, (size_t)p->head_dim * sizeof *g->dq);
        const struct logarithm lse = score_row(x, i, g->logs);
        const struct row_gradient row = row_gradient(x, i, g->logs, lse.growth);
        for (int64_t j = 0; j < x->sequence.seqlen_k; j++)
            if (g->logs[j] != -INFINITY)
                backward_pair(x, g, i, j, &row);
        if (p->needs_dsink && lse.growth != INFINITY && lse.weight != 0)
            g->dsink[x->h] += lse.weight * ((p->lse_without_sink ? 0 : row.dlse) - row.delta);
        for (int64_t d = 0; d < p->head_dim && p->needs_dq; d++)
            element_store(a->dq.data, q_row(x, &a->dq, i) + d, p->dtype, g->dq[d]);
    }
}

/* A row of dk or dv, or what is added to it. */
static void store_key_row(const fdm_problem *p, void *data, int64_t at, const double *sums, int64_t columns) {
    const fdm_dtype dtype = problem_dkv_dtype(p);
    for (int64_t d = 0; d < columns; d++)
        element_store(data, at + d, dtype, sums[d] + (p->add_dkv ? element_load(data, at + d, dtype) : 0));
}

static void store_key_gradients(const struct attention *a, const struct gradients *g) {
    const fdm_problem *p = a->problem;
    int64_t batch = p->varlen ? 1 : p->batch, rows = p->varlen ? p->total_k : p->seqlen_k;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t j = 0; j < rows; j++)
            for (int64_t h = 0; h < p->heads_kv; h++) {
                int64_t row = (b * rows + j) * p->heads_kv + h;
                if (p->needs_dk)
                    store_key_row(p, a->dk.data, row_of(&a->dk, b, j, h), g->dk + row * p->head_dim, p->head_dim);
                if (p->needs_dv)
                    store_key_row(p, a->dv.data, row_of(&a->dv, b, j, h), g->dv + row * p->head_dim_v, p->head_dim_v);
            }
}

static void store_dbias(const struct attention *a, const struct gradients *g) {
    const int64_t *shape = a->problem->bias_shape;
    const struct score_view *view = &a->dbias;
    for (int64_t index = 0; index < bias_elements(a->problem); index++) {
        int64_t j = index % shape[3], i = index / shape[3] % shape[2], h = index / shape[3] / shape[2] % shape[1];
        int64_t b = index / shape[3] / shape[2] / shape[1];
        element_store(view->data, b * view->batch + h * view->head + i * view->row + j * view->key,
                      a->problem->bias_dtype, g->dbias[index]);
    }
}

/* Of the scores of a row, before what a cache needs. */
static int64_t forward_bytes(const fdm_problem *p) { return (p->seqlen_k * (int64_t)sizeof(double) + 63) / 64 * 64; }

static int64_t workspace_doubles(const fdm_problem *p) {
    int64_t row = p->seqlen_k;
    if (p->has_cache)
        return (forward_bytes(p) + cache_workspace(p) + (int64_t)sizeof(double) - 1) / (int64_t)sizeof(double);
    if (p->pass == FDM_FORWARD)
        return row;
    return row + p->head_dim + key_rows(p) * (p->head_dim + p->head_dim_v) + bias_elements(p) + p->heads;
}

static fdm_status execute(const struct family *family, const fdm_plan *plan, const struct attention *attention,
                          void *workspace, const fdm_launch *launch) {
    (void)family;
    (void)launch;
    const fdm_problem *p = attention->problem;
    if (workspace_doubles(p) * (int64_t)sizeof(double) > plan->workspace_bytes)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's workspace is smaller than its kernel's");
    if (p->pass == FDM_FORWARD) {
        struct attention turned = *attention;
        const int64_t items = p->has_cache ? cache_begin(&turned, (char *)workspace + forward_bytes(p)) : 0;
        for (int64_t item = 0; item < items; item++)
            cache_run_item(attention, &turned, item);
        for_each_head(&turned, workspace, forward_head);
        return FDM_OK;
    }
    struct gradients g = {.logs = workspace};
    g.dq = g.logs + p->seqlen_k;
    g.dk = g.dq + p->head_dim;
    g.dv = g.dk + key_rows(p) * p->head_dim;
    g.dbias = g.dv + key_rows(p) * p->head_dim_v;
    g.dsink = g.dbias + bias_elements(p);
    if (workspace)
        memset(workspace, 0, (size_t)plan->workspace_bytes);
    for_each_head(attention, &g, backward_head);
    store_key_gradients(attention, &g);
    store_dbias(attention, &g);
    for (int64_t h = 0; h < p->heads && p->needs_dsink; h++)
        sinks_store_gradient(attention, h, g.dsink[h]);
    return FDM_OK;
}

static const struct kernel_info infos[] = {
    {"reference.forward", "float64 loops from the definition", FDM_FORWARD},
    {"reference.backward", "float64 loops from the definition", FDM_BACKWARD},
};

static int available(const struct family *family, int32_t index) {
    (void)family;
    (void)index;
    return 1;
}

static int choose(const struct family *family, const struct plan_request *request, fdm_plan *plan,
                  struct refusals *refusals) {
    (void)family;
    const fdm_problem *p = request->problem;
    const struct kernel_info *info = &infos[p->pass == FDM_BACKWARD];
    int named =
        request->kernel && (strcmp(request->kernel, info->name) == 0 || strcmp(request->kernel, "REFERENCE") == 0);
    if (request->device->id.type != FDM_CPU)
        return family_refuse(refusals, NULL, "runs on the CPU only");
    if (request->kernel && !named) {
        char clause[100];
        snprintf(clause, sizeof clause, "has no %s kernel '%.60s'", p->pass ? "backward" : "forward", request->kernel);
        return family_refuse(refusals, NULL, clause);
    }
    if (!named && !request->family_forced && p->dtype != FDM_FLOAT64)
        return family_refuse(refusals, NULL, "chosen only when asked for, and for float64");
    plan->kernel_index = (int32_t)(info - infos);
    snprintf(plan->kernel, sizeof plan->kernel, "%s", info->name);
    snprintf(plan->choice, sizeof plan->choice, "REFERENCE");
    plan->num_threads = 1;
    plan->workspace_bytes = workspace_doubles(p) * (int64_t)sizeof(double);
    snprintf(plan->reason, sizeof plan->reason, "%s: plain loops on one thread, all arithmetic in float64",
             p->dtype == FDM_FLOAT64 ? "float64 runs on the reference only" : "asked for by name");
    return 1;
}

static const struct kernel_info *kernel(const struct family *family, int32_t index) {
    (void)family;
    return &infos[index];
}

const struct family family_reference = {.name = "reference",
                                        .device_type = FDM_CPU,
                                        .num_kernels = 2,
                                        .kernel = kernel,
                                        .available = available,
                                        .choose = choose,
                                        .execute = execute};
