/* truth.c: what the outputs should be: the float64 reference, and the straightforward float32 computation whose errors
 * set the limits. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "checks.h"
#include "problem/problem.h"
#include "problem/sinks.h"

static fdm_tensor *present(struct guarded *g) { return g->map ? &g->tensor : NULL; }

fdm_tensors trial_tensors(struct trial *t, fdm_pass pass) {
    struct guarded *g = t->g;
    fdm_tensors s = {.struct_bytes = sizeof s,
                     .q = &g[Q].tensor,
                     .k = &g[K].tensor,
                     .v = &g[V].tensor,
                     .mask = present(&g[MASK]),
                     .bias = present(&g[BIAS]),
                     .interval_start = present(&g[START]),
                     .interval_end = present(&g[END]),
                     .row_start = present(&g[ROW_START]),
                     .row_end = present(&g[ROW_END]),
                     .block_mask = present(&g[BLOCKS]),
                     .tree = present(&g[TREE]),
                     .cu_seqlens_q = present(&g[CU_Q]),
                     .cu_seqlens_k = present(&g[CU_K]),
                     .out = &g[OUT].tensor,
                     .lse = &g[LSE].tensor,
                     .lse_low = present(&g[LSE_LOW]),
                     .sink = present(&g[SINK]),
                     .seqused_q = present(&g[USED_Q]),
                     .seqused_k = present(&g[USED_K])};
    if (pass == FDM_BACKWARD) {
        s.dout = &g[DOUT].tensor;
        s.dlse = present(&g[DLSE]);
        s.dq = present(&g[DQ]);
        s.dk = present(&g[DK]);
        s.dv = present(&g[DV]);
        s.dbias = present(&g[DBIAS]);
        s.dsink = present(&g[DSINK]);
    }
    return s;
}

/* ---- the reference, in float64 throughout ---- */

static void widen(struct guarded *wide, const struct guarded *g) {
    int32_t ndim = g->tensor.ndim;
    fdm_dtype dtype = fdm_dtype_of(&g->tensor);
    int is_float = dtype != FDM_BOOL && dtype != FDM_INT32 && dtype != FDM_INT64 && dtype != FDM_UINT32;
    *wide = *g;
    wide->tensor.shape = wide->shape;
    wide->tensor.strides = wide->strides;
    if (!is_float)
        return;
    int64_t span = 1, elements = guarded_elements(g);
    for (int32_t i = ndim - 1; i >= 0; span *= g->shape[i--])
        wide->strides[i] = span;
    wide->tensor.dtype = fdm_data_type_of(FDM_FLOAT64);
    wide->tensor.data = wide->data = calloc((size_t)elements + 1, sizeof(double));
    for (int64_t n = 0; n < elements; n++)
        ((double *)(void *)wide->data)[n] = guarded_get(g, n);
}

static void fail(const struct trial *t, const char *what) {
    fprintf(stderr, "fdm-checks: seed %llu: %s: %s\n  %s\n", (unsigned long long)t->seed, what, fdm_last_error(),
            t->text);
    exit(2);
}

void trial_reference(struct trial *t, int backward) {
    struct trial wide = *t;
    fdm_options options = t->options;
    options.family = "reference";
    for (int i = 0; i < NUM_ROLES; i++)
        if (t->g[i].map)
            widen(&wide.g[i], &t->g[i]);
    fdm_tensors tensors = trial_tensors(&wide, FDM_FORWARD);
    if (fdm_attention_forward(&tensors, &options, NULL))
        fail(t, "reference forward");
    tensors = trial_tensors(&wide, FDM_BACKWARD);
    if (backward && fdm_attention_backward(&tensors, &options, NULL))
        fail(t, "reference backward");
    for (int i = 0; i < NUM_ROLES; i++) {
        if (!t->g[i].map || wide.g[i].data == t->g[i].data)
            continue;
        if ((i >= OUT && i <= LSE_LOW) || i >= DQ)
            t->truth[i] = (double *)(void *)wide.g[i].data;
        else
            free(wide.g[i].data);
    }
}

void trial_free_truth(struct trial *t) {
    for (int i = 0; i < NUM_ROLES; i++) {
        free(t->truth[i]);
        free(t->baseline[i]);
        free(t->magnitude[i]);
        t->truth[i] = t->baseline[i] = t->magnitude[i] = NULL;
    }
}

/* ---- the baseline: float32 arithmetic, P and dS rounded to the dtype before they are multiplied again ---- */

static float round_to(fdm_dtype dtype, float x) {
    if (dtype == FDM_BFLOAT16)
        return bfloat16_to_float(float_to_bfloat16(x));
    return dtype == FDM_FLOAT16 ? float16_to_float(float_to_float16(x)) : x;
}

struct head {
    struct trial *t;
    const struct attention *a;
    struct sequence s;
    int64_t b, h;
    int backward; /* gradients are wanted, too */
};

static float value(const struct head *x, const struct matrix_view *view, int64_t row, int64_t h, int64_t d) {
    const char *at =
        view->data + (x->b * view->batch + row * view->row + h * view->head + d) * fdm_dtype_bytes(x->t->dtype);
    switch (x->t->dtype) {
    case FDM_FLOAT16: return float16_to_float(*(const uint16_t *)(const void *)at);
    case FDM_BFLOAT16: return bfloat16_to_float(*(const uint16_t *)(const void *)at);
    default: return *(const float *)(const void *)at;
    }
}

/* Row `row` of a tensor as floats, decoded once. */
static void decode(const struct head *x, const struct matrix_view *view, int64_t row, int64_t h, int64_t depth,
                   float *out) {
    for (int64_t d = 0; d < depth; d++)
        out[d] = value(x, view, row, h, d);
}

static float bias_value(const struct head *x, int64_t i, int64_t j) {
    const struct score_view *view = &x->a->bias;
    if (!x->t->g[BIAS].map)
        return 0;
    int64_t at = x->b * view->batch + x->h / view->group * view->head + i * view->row + j * view->key;
    switch (fdm_dtype_of(&x->t->g[BIAS].tensor)) {
    case FDM_FLOAT16: return float16_to_float(((const uint16_t *)(const void *)view->data)[at]);
    case FDM_BFLOAT16: return bfloat16_to_float(((const uint16_t *)(const void *)view->data)[at]);
    default: return ((const float *)(const void *)view->data)[at];
    }
}

/* Whether some range of row i holds key j: read from the tensors anew, by their own strides. */
static int in_row_ranges(const struct head *x, int64_t i, int64_t j) {
    const struct guarded *start = &x->t->g[ROW_START], *end = &x->t->g[ROW_END];
    const int packed = x->t->varlen, axis = 1 - packed;
    const int64_t h = x->h / (x->a->problem->heads / start->shape[axis]), row = x->s.q_begin + i;
    for (int64_t n = 0; n < start->shape[axis + 1]; n++) {
        const int64_t index[4] = {start->shape[0] == 1 ? 0 : x->b, h, n, row};
        int64_t at[2] = {0, 0};
        for (int32_t d = 0; d < start->tensor.ndim; d++) {
            at[0] += index[d + packed] * start->tensor.strides[d];
            at[1] += index[d + packed] * end->tensor.strides[d];
        }
        if (((const int32_t *)start->tensor.data)[at[0]] <= j && j < ((const int32_t *)end->tensor.data)[at[1]])
            return 1;
    }
    return 0;
}

/* Whether the block of row i and key j is shown: the size of a block from the extents anew. */
static int in_block(const struct head *x, int64_t i, int64_t j) {
    const struct guarded *blocks = &x->t->g[BLOCKS];
    const fdm_problem *p = x->a->problem;
    const int64_t size = blocks->shape[2] * 64 >= p->seqlen_q && blocks->shape[3] * 64 >= p->seqlen_k ? 64 : 128;
    const int64_t h = x->h / (p->heads / blocks->shape[1]), index[4] = {x->b, h, i / size, j / size};
    int64_t at = 0;
    for (int32_t d = 0; d < 4; d++)
        at += blocks->shape[d] == 1 ? 0 : index[d] * blocks->tensor.strides[d];
    return ((const char *)blocks->tensor.data)[at] != 0;
}

/* Whether row i sees key j by its tree: the bit read anew, a byte of a word. */
static int in_tree(const struct head *x, int64_t i, int64_t j) {
    const fdm_tensor *tree = &x->t->g[TREE].tensor;
    const int64_t t = j - x->s.seqlen_k + x->s.seqlen_q, index[3] = {x->b, x->s.q_begin + i, t / 32};
    int64_t at = 0;
    for (int32_t d = 0; d < tree->ndim; d++)
        at += index[d + x->t->varlen] * tree->strides[d];
    return t < 0 || (((const unsigned char *)tree->data)[4 * at + t % 32 / 8] & 1 << t % 8) != 0;
}

static int visible(const struct head *x, int64_t i, int64_t j) {
    struct key_range range = problem_key_range(x->a->problem, &x->s, i);
    const struct score_view *m = &x->a->mask;
    const struct interval_view *v = &x->a->intervals;
    if (j < range.first || j >= range.last || bias_value(x, i, j) == -INFINITY)
        return 0;
    if (x->t->g[MASK].map && !m->data[x->b * m->batch + x->h / m->group * m->head + i * m->row + j * m->key])
        return 0;
    if (x->t->g[ROW_START].map && !in_row_ranges(x, i, j))
        return 0;
    if (x->t->g[BLOCKS].map && !in_block(x, i, j))
        return 0;
    if (x->t->g[TREE].map && !in_tree(x, i, j))
        return 0;
    if (!x->t->g[START].map)
        return 1;
    int64_t h = x->h / v->group, key = x->s.k_begin + j;
    return v->start[x->b * v->start_batch + h * v->start_head + key * v->start_item] <= i &&
           i < v->end[x->b * v->end_batch + h * v->end_head + key * v->end_item];
}

int trial_visible(const struct trial *t, const struct attention *a, int64_t b, int64_t h, int64_t i, int64_t j) {
    const struct head head = {(struct trial *)t, a, attention_sequence(a, b), b, h, 0};
    return visible(&head, i, j);
}

static float dot(const float *a, const float *b, int64_t n) {
    float sum = 0;
    for (int64_t d = 0; d < n; d++)
        sum += a[d] * b[d];
    return sum;
}

/* Where the dense output element (b, h, row, 0) lies: [B, S, H, D] or [total, H, D]. */
static int64_t dense_row(const struct head *x, int64_t heads, int64_t rows, int64_t row, int64_t h, int64_t depth) {
    int64_t b = x->t->varlen ? 0 : x->b;
    return ((b * rows + row) * heads + h) * depth;
}

struct buffers {
    float *q, *k, *v, *dout, *out, *s, *slope, *error, *sums[NUM_ROLES], *sizes[NUM_ROLES];
};

/* How far from the exact sum of score and bias a float32 may be: a few steps where both count; where the bias is so
 * large that nothing of the score is left, all kernels round alike, and that is known. */
static float bias_error(float score, float bias) {
    const float sum = score + bias;
    if (!isfinite(sum) || bias == 0)
        return 0;
    return fabsf(score) < 0x1p-27f * fabsf(sum) ? 2 * (float)fabs((double)sum - ((double)score + (double)bias))
                                                : 4 * 0x1p-24f * fabsf(sum);
}

/* What rounding a score can amount to is measured by the sizes of its terms. */
static float score_size(const float *q, const float *k, int64_t d, float scale) {
    float sum = 0;
    for (int64_t e = 0; e < d; e++)
        sum += fabsf(q[e] * k[e]);
    return sum * fabsf(scale);
}

static const float doubt = 4 * 0x1p-24f; /* float32 steps of its terms by which a score may be off */

/* Tensor cores cut a sum off after each 16 terms instead of rounding it: half of a step for so many, seen at head dims
 * above 128. */
static float sum_doubt(int64_t d) { return fmaxf(doubt, (float)d / 32 * 0x1p-24f); }

/* Scores of the row that w->q holds, the slope of the cap at each and how far off each may be; returns the largest. */
static float baseline_scores(const struct head *x, struct buffers *w, int64_t i) {
    const int64_t d = x->t->head_dim;
    const float scale = (float)x->a->problem->softmax_scale, cap = (float)x->t->options.softcap;
    float largest = -INFINITY;
    for (int64_t j = 0; j < x->s.seqlen_k; j++) {
        float raw = dot(w->q, w->k + j * d, d) * scale, bend = cap > 0 ? tanhf(raw / cap) : 0;
        w->slope[j] = 1 - bend * bend;
        const float score = cap > 0 ? cap * bend : raw, bias = bias_value(x, i, j);
        w->s[j] = -INFINITY;
        w->error[j] = 0;
        if (!visible(x, i, j))
            continue; /* it may hold NaN */
        w->s[j] = score + bias;
        w->error[j] =
            sum_doubt(d) * score_size(w->q, w->k + j * d, d, scale) + doubt * fabsf(score) + bias_error(score, bias);
        largest = w->s[j] > largest ? w->s[j] : largest;
    }
    return largest;
}

/* What the gradients of a row's pairs have in common. lse, low: of the sum of keys and sinks; keys_lse, keys_low: of
 * that of keys, whose error is `error`; sink: that of the sinks' alone; sink_weight: their share. */
struct baseline_row {
    float lse, low, error, delta, delta_size, sink_weight, dlse;
    float keys_lse, keys_low, sink;
};

/* delta is summed from the rounded out: half an ulp of every term may be left where dS cancels. */
static float cancelled_of(const struct trial *t) {
    return t->dtype == FDM_FLOAT32 ? 8 * 0x1p-24f : t->dtype == FDM_FLOAT16 ? 0x1p-12f : 0x1p-9f;
}

/* The logarithms of a row whose sum of exp(score - largest) is `sum`; returns what the sums of P V are to be multiplied
 * by. */
static float end_baseline_row(const struct head *x, struct baseline_row *y, float largest, float sum) {
    const int has_low = x->t->g[LSE_LOW].map != NULL, empty = largest == -INFINITY;
    const float sink = y->sink = (float)sinks_logit(x->a, x->h), rest = logf(sum);
    y->keys_lse = empty ? INFINITY : largest + rest;
    y->keys_low = has_low && isfinite(y->keys_lse) ? largest - y->keys_lse + rest : 0;
    y->lse = y->keys_lse;
    y->low = y->keys_low;
    if (sink == -INFINITY)
        return empty ? 0 : 1 / sum;
    const float top = empty || sink > largest ? sink : largest, kept = empty ? 0 : expf(largest - top);
    const float of_sink = sink == top ? 1 : expf(sink - top), total = sum * kept + of_sink;
    y->lse = top + logf(total);
    y->low = has_low && isfinite(y->lse) ? top - y->lse + logf(total) : 0;
    y->sink_weight = sink == INFINITY || (empty && x->t->options.lse_without_sink) ? 0 : of_sink / total;
    return empty ? 0 : kept / total;
}

/* What the row adds to the gradient of its head's sinks. */
static void add_to_dsink(const struct head *x, struct buffers *w, const struct baseline_row *y) {
    const struct trial *t = x->t;
    const float uncertain = y->error + 2 * doubt * (1 + fabsf(y->lse) + fabsf(y->sink));
    const float delta = t->options.lse_without_sink ? y->delta : y->delta - y->dlse;
    if (!t->g[DSINK].map || y->sink_weight == 0)
        return;
    for (int64_t n = 0; n < guarded_elements(&t->g[SINK]); n++)
        if (n % t->heads == x->h) {
            const float share = expf((float)guarded_get(&t->g[SINK], n) - y->sink) * y->sink_weight;
            w->sums[DSINK][n] -= share * delta;
            w->sizes[DSINK][n] += share * (y->delta_size + fabsf(y->dlse)) * (cancelled_of(t) + uncertain);
        }
}

static void baseline_gradients(const struct head *x, struct buffers *w, int64_t i, const struct baseline_row *y) {
    struct trial *t = x->t;
    const int64_t d = t->head_dim, dv = t->head_dim_v, rows = t->varlen ? t->total_q : t->seqlen_q;
    const int64_t group = t->heads / t->heads_kv, row = x->s.q_begin + i;
    /* A score is off by a few float32 ulps of its terms, and P by as much of itself. */
    const float cancelled = cancelled_of(t);
    const int without = t->options.lse_without_sink;
    for (int64_t j = 0; j < x->s.seqlen_k; j++) {
        if (w->s[j] == -INFINITY)
            continue;
        float dp = dot(w->dout, w->v + j * dv, dv), p = expf(w->s[j] - y->lse - y->low);
        float of_keys = without ? expf(w->s[j] - y->keys_lse - y->keys_low) : 0;
        float ds = without ? p * (dp - y->delta) + of_keys * y->dlse : p * (dp - (y->delta - y->dlse));
        /* Weights below 1e-30 are none. */
        float uncertain = w->error[j] + y->error + doubt * fminf(fabsf(w->s[j] - y->lse), 70);
        if (!t->g[LSE_LOW].map)
            uncertain += doubt * (fabsf(y->lse) + fabsf(w->s[j]));
        uncertain = expm1f(fminf(uncertain, 70));
        float size = p * (fabsf(dp) + y->delta_size) * (cancelled + uncertain) + of_keys * fabsf(y->dlse) * uncertain;
        /* Beside sinks without whose weight lse is, kernels hold weights above this. */
        const float held = of_keys * 0x1p-86f;
        if (p < 1e-30f && isnan(ds))
            ds = size = 0; /* a kernel may leave the pair out, or make NaN of it */
        int64_t key = (t->varlen ? x->s.k_begin + j : x->b * t->seqlen_k + j) * t->heads_kv + x->h / group;
        if (t->g[DBIAS].map) {
            const int64_t *shape = t->g[BIAS].shape;
            int64_t b = shape[0] == 1 ? 0 : x->b, h = x->h / (t->heads / shape[1]);
            int64_t at = ((b * shape[1] + h) * shape[2] + (shape[2] == 1 ? 0 : i)) * shape[3] + (shape[3] == 1 ? 0 : j);
            w->sums[DBIAS][at] += ds;
            w->sizes[DBIAS][at] += size;
        }
        float p_rounded = round_to(t->dtype, p), ds_rounded = round_to(t->dtype, ds * w->slope[j]);
        float *dq = w->sums[DQ] + dense_row(x, t->heads, rows, row, x->h, d), *dk = w->sums[DK] + key * d;
        float *dq_size = w->sizes[DQ] + dense_row(x, t->heads, rows, row, x->h, d), *dk_size = w->sizes[DK] + key * d;
        for (int64_t e = 0; e < d; e++) {
            dq[e] += ds_rounded * w->k[j * d + e];
            dk[e] += ds_rounded * w->q[e];
            dq_size[e] += size * fabsf(w->k[j * d + e]);
            dk_size[e] += size * fabsf(w->q[e]);
        }
        for (int64_t e = 0; e < dv; e++) {
            w->sums[DV][key * dv + e] += p_rounded * w->dout[e];
            w->sizes[DV][key * dv + e] += (p * uncertain + held) * fabsf(w->dout[e]);
        }
    }
}

static void baseline_row(const struct head *x, struct buffers *w, int64_t i) {
    struct trial *t = x->t;
    const int64_t d = t->head_dim, dv = t->head_dim_v, sk = x->s.seqlen_k, rows = t->varlen ? t->total_q : t->seqlen_q;
    const int64_t row = x->s.q_begin + i;
    struct baseline_row y = {0};
    float sum = 0;
    decode(x, &x->a->q, row, x->h, d, w->q);
    decode(x, &x->a->dout, row, x->h, dv, w->dout);
    const float largest = baseline_scores(x, w, i);
    memset(w->out, 0, (size_t)dv * sizeof *w->out);
    for (int64_t j = 0; j < sk && largest > -INFINITY; j++) {
        if (w->s[j] == -INFINITY)
            continue; /* its value may be NaN */
        float p = expf(w->s[j] - largest), rounded = round_to(t->dtype, p);
        y.error = p > 1e-6f && w->error[j] > y.error ? w->error[j] : y.error;
        sum += p;
        for (int64_t e = 0; e < dv; e++)
            w->out[e] += rounded * w->v[j * dv + e];
    }
    float factor = end_baseline_row(x, &y, largest, sum);
    const int64_t lse_at = t->varlen ? x->h * rows + row : (x->b * t->heads + x->h) * rows + row;
    const int without = t->options.lse_without_sink;
    t->baseline[LSE][lse_at] = without ? y.keys_lse : y.lse;
    t->baseline[LSE_LOW][lse_at] = without ? y.keys_low : y.low;
    t->magnitude[LSE_LOW][lse_at] = y.error;
    t->magnitude[LSE][lse_at] = sum > 0 ? fmaxf(factor, FLT_MIN) : 0;
    for (int64_t e = 0; e < dv; e++) {
        w->out[e] = round_to(t->dtype, sum > 0 ? w->out[e] * factor : 0);
        t->baseline[OUT][dense_row(x, t->heads, rows, row, x->h, dv) + e] = w->out[e];
        y.delta += w->out[e] * w->dout[e];
        y.delta_size += fabsf(w->out[e] * w->dout[e]);
    }
    if (largest == -INFINITY)
        y.delta = y.delta_size = 0;
    y.dlse = t->g[DLSE].map ? (float)guarded_get(&t->g[DLSE], lse_at) : 0;
    if (x->backward && largest > -INFINITY)
        baseline_gradients(x, w, i, &y);
    if (x->backward)
        add_to_dsink(x, w, &y);
}

static void baseline_head(const struct head *x, struct buffers *w) {
    for (int64_t j = 0; j < x->s.seqlen_k; j++) {
        int64_t h = x->h / (x->t->heads / x->t->heads_kv);
        decode(x, &x->a->k, x->s.k_begin + j, h, x->t->head_dim, w->k + j * x->t->head_dim);
        decode(x, &x->a->v, x->s.k_begin + j, h, x->t->head_dim_v, w->v + j * x->t->head_dim_v);
    }
    for (int64_t i = 0; i < x->s.seqlen_q; i++)
        baseline_row(x, w, i);
}

static void baseline_finish(struct trial *t, struct buffers *w) {
    const float scale =
        (float)(t->options.has_softmax_scale ? t->options.softmax_scale : 1 / sqrt((double)t->head_dim));
    for (int role = DQ; role < NUM_ROLES; role++) {
        if (!t->g[role].map)
            continue;
        int64_t elements = guarded_elements(&t->g[role]);
        float factor = role == DQ || role == DK ? scale : 1;
        fdm_dtype dtype = fdm_dtype_of(&t->g[role].tensor);
        for (int64_t n = 0; n < elements; n++) {
            t->baseline[role][n] = round_to(dtype, w->sums[role][n] * factor);
            t->magnitude[role][n] = fabsf(w->sizes[role][n] * factor);
        }
    }
}

void trial_baseline(struct trial *t, int backward) {
    fdm_problem problem;
    struct attention attention;
    fdm_tensors tensors = trial_tensors(t, FDM_BACKWARD);
    tensors.tree = NULL; /* a backward takes none, and visible() reads the trial's */
    if (problem_from_tensors(FDM_BACKWARD, &tensors, &t->options, &problem, &attention))
        fail(t, "describe");
    int64_t q_rows = t->varlen ? t->total_q : t->batch * t->seqlen_q,
            k_rows = t->varlen ? t->total_k : t->batch * t->seqlen_k;
    int64_t sizes[NUM_ROLES] = {[OUT] = q_rows * t->heads * t->head_dim_v,
                                [LSE] = q_rows * t->heads,
                                [LSE_LOW] = q_rows * t->heads,
                                [DQ] = q_rows * t->heads * t->head_dim,
                                [DK] = k_rows * t->heads_kv * t->head_dim,
                                [DV] = k_rows * t->heads_kv * t->head_dim_v,
                                [DBIAS] = t->g[BIAS].map ? guarded_elements(&t->g[BIAS]) : 0,
                                [DSINK] = t->g[SINK].map ? guarded_elements(&t->g[SINK]) : 0};
    struct buffers w = {0};
    for (int role = OUT; role < NUM_ROLES; role++) {
        t->baseline[role] = calloc((size_t)sizes[role] + 1, sizeof(double));
        t->magnitude[role] = calloc((size_t)sizes[role] + 1, sizeof(double));
        w.sums[role] = calloc((size_t)sizes[role] + 1, sizeof(float));
        for (int64_t n = 0; role == LSE && n < sizes[role]; n++)
            t->baseline[LSE][n] = INFINITY; /* of rows of no sequence it stays */
        w.sizes[role] = calloc((size_t)sizes[role] + 1, sizeof(float));
    }
    size_t floats = (size_t)((t->seqlen_k + 2) * (t->head_dim + t->head_dim_v + 4) + 2 * (t->head_dim + t->head_dim_v));
    float *memory = calloc(floats, sizeof(float));
    w.q = memory;
    w.dout = w.q + t->head_dim;
    w.out = w.dout + t->head_dim_v;
    w.s = w.out + t->head_dim_v;
    w.slope = w.s + t->seqlen_k;
    w.error = w.slope + t->seqlen_k;
    w.k = w.error + t->seqlen_k;
    w.v = w.k + t->seqlen_k * t->head_dim;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < t->heads; h++) {
            struct head head = {t, &attention, attention_sequence(&attention, b), b, h, backward};
            baseline_head(&head, &w);
        }
    baseline_finish(t, &w);
    for (int role = OUT; role < NUM_ROLES; role++)
        free(w.sums[role]), free(w.sizes[role]);
    free(memory);
}

void trial_set_forward_results(struct trial *t) {
    for (int role = OUT; role <= LSE_LOW; role++) {
        const int64_t elements = t->g[role].map ? guarded_elements(&t->g[role]) : 0;
        guarded_poison(&t->g[role]);
        for (int64_t n = 0; n < elements; n++) {
            const double *from = t->huge ? t->baseline[role] : t->truth[role];
            const double rounded_away = role == LSE_LOW && !t->huge && !isinf(t->truth[LSE][n])
                                            ? t->truth[LSE][n] - (double)(float)t->truth[LSE][n]
                                            : 0;
            guarded_set(&t->g[role], n, from[n] + rounded_away);
        }
    }
}
