/* spoil.c: NaN and inf in what must not reach a result, and NaN that must.
 *
 * Keys that no row sees and rows of no sequence hold anything: results are as without them. A query row, or a key that
 * some rows see, holds NaN: the reference says where NaN must be; tile.h of a kernel may spread that of a key. */
#include <math.h>

#include "checks.h"
#include "problem/problem.h"

/* Whether elements of several rows, heads or batches are the same memory. */
static int is_shared(const struct guarded *g) {
    for (int32_t axis = 0; axis < g->tensor.ndim; axis++)
        if (g->shape[axis] > 1 && g->strides[axis] == 0)
            return 1;
    return 0;
}

/* The first element of row `row` of a head; a packed row counts from the tensor's beginning. */
static int64_t element_of(const struct guarded *g, int packed, int64_t b, int64_t row, int64_t h) {
    const int64_t *shape = g->shape + (packed ? 0 : 1); /* rows, heads, columns */
    return (((packed ? 0 : b * shape[0]) + row) * shape[1] + h) * shape[2];
}

/* All columns, one, or all but one. */
static void spoil_row(struct trial *t, enum role role, int64_t b, int64_t row, int64_t h, double x) {
    struct guarded *g = &t->g[role];
    const int64_t columns = g->shape[g->tensor.ndim - 1], first = element_of(g, t->varlen, b, row, h);
    const int64_t kind = random_below(t, 4), one = random_below(t, columns);
    for (int64_t c = 0; c < columns; c++)
        if (kind > 1 || (c == one) == (kind == 1))
            guarded_set(g, first + c, x);
}

static double something_bad(struct trial *t) {
    const double bad[] = {NAN, NAN, INFINITY, -INFINITY};
    return bad[random_below(t, 4)];
}

/* No row of any head that reads the key sees it. */
static int is_hidden(const struct trial *t, const struct attention *a, int64_t b, int64_t h_kv, int64_t j) {
    const struct sequence s = attention_sequence(a, b);
    const int64_t group = t->heads / t->heads_kv;
    for (int64_t h = h_kv * group; h < (h_kv + 1) * group; h++)
        for (int64_t i = s.seqlen_q - 1; i >= 0; i--)
            if (trial_visible(t, a, b, h, i, j))
                return 0;
    return 1;
}

/* Rows of a packed tensor that belong to no sequence. */
static void spoil_rest(struct trial *t, enum role role, enum role offsets, int64_t total) {
    const struct guarded *cu = &t->g[offsets];
    if (is_shared(&t->g[role]))
        return;
    for (int64_t row = 0; row < total; row++)
        if (row < guarded_get(cu, 0) || row >= guarded_get(cu, t->batch))
            for (int64_t h = 0; h < t->g[role].shape[1]; h++)
                spoil_row(t, role, 0, row, h, something_bad(t));
}

/* Rows of a sequence that seqused does not count. */
static void spoil_unused(struct trial *t, const struct attention *a, enum role role, int of_keys) {
    const struct guarded *cu = &t->g[of_keys ? CU_K : CU_Q];
    for (int64_t b = 0; b < t->batch && t->g[role].map && !is_shared(&t->g[role]); b++) {
        const struct sequence s = attention_sequence(a, b);
        const int64_t begin = of_keys ? s.k_begin : s.q_begin, used = of_keys ? s.seqlen_k : s.seqlen_q;
        const int64_t all = t->varlen ? (int64_t)(guarded_get(cu, b + 1) - guarded_get(cu, b))
                            : of_keys ? t->seqlen_k
                                      : t->seqlen_q;
        for (int64_t i = used; i < all; i++)
            for (int64_t h = 0; h < t->g[role].shape[t->g[role].tensor.ndim - 2]; h++)
                spoil_row(t, role, b, begin + i, h, something_bad(t));
    }
}

void trial_spoil_hidden(struct trial *t) {
    fdm_problem problem;
    struct attention attention;
    const fdm_tensors tensors = trial_tensors(t, FDM_FORWARD);
    if (!t->spoils || t->many || problem_from_tensors(FDM_FORWARD, &tensors, &t->options, &problem, &attention))
        return;
    if (t->varlen) {
        spoil_rest(t, Q, CU_Q, t->total_q);
        spoil_rest(t, DOUT, CU_Q, t->total_q);
        spoil_rest(t, K, CU_K, t->total_k);
        spoil_rest(t, V, CU_K, t->total_k);
    }
    if (t->g[USED_Q].map || t->g[USED_K].map) {
        spoil_unused(t, &attention, Q, 0);
        spoil_unused(t, &attention, DOUT, 0);
        spoil_unused(t, &attention, K, 1);
        spoil_unused(t, &attention, V, 1);
    }
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < t->heads_kv; h++) {
            const struct sequence s = attention_sequence(&attention, b);
            for (int64_t j = 0; j < s.seqlen_k; j++)
                if (random_below(t, 4) && is_hidden(t, &attention, b, h, j)) {
                    if (!is_shared(&t->g[K]))
                        spoil_row(t, K, b, s.k_begin + j, h, something_bad(t));
                    if (!is_shared(&t->g[V]))
                        spoil_row(t, V, b, s.k_begin + j, h, something_bad(t));
                }
        }
}

/* A row of the sequence that sees no key. */
static int sees_nothing(struct trial *t, int64_t b, int64_t h, int64_t row) {
    fdm_problem problem;
    struct attention attention;
    const fdm_tensors tensors = trial_tensors(t, FDM_FORWARD);
    if (problem_from_tensors(FDM_FORWARD, &tensors, &t->options, &problem, &attention))
        return 0;
    const int64_t keys = attention_sequence(&attention, b).seqlen_k;
    for (int64_t j = 0; j < keys; j++)
        if (trial_visible(t, &attention, b, h, row, j))
            return 0;
    return 1;
}

static int wants_nan_key(const struct trial *t) { return !t->named && (t->seed % 16 == 12 || t->seed % 16 == 3); }
int trial_wants_nan(const struct trial *t) { return t->named ? t->wants_nan : t->seed % 16 == 7 || wants_nan_key(t); }

int trial_spoil_seen(struct trial *t) {
    t->nan_key = wants_nan_key(t);
    t->nan_row = !t->nan_key && trial_wants_nan(t);
    /* The gradient of a bias that all keys share is 0, and not every kernel makes it of its terms. */
    const int shared = t->g[BIAS].map && t->g[BIAS].shape[3] == 1;
    if ((!t->nan_row && !t->nan_key) || t->batch == 0 || t->huge || shared)
        return t->nan_row = t->nan_key = 0;
    const int64_t b = random_below(t, t->batch), h = random_below(t, t->heads);
    const struct guarded *cu = &t->g[t->nan_row ? CU_Q : CU_K];
    const int64_t begin = t->varlen ? (int64_t)guarded_get(cu, b) : 0;
    const int64_t length = t->varlen ? (int64_t)guarded_get(cu, b + 1) - begin : t->nan_row ? t->seqlen_q : t->seqlen_k;
    t->nan_batch = b;
    t->nan_head_kv = h / (t->heads / t->heads_kv);
    t->nan_row &= length > 0;
    t->nan_key &= length > 0 && !is_shared(&t->g[K]) && !is_shared(&t->g[V]);
    if (t->nan_row) {
        const int64_t row = t->named ? 0 : random_below(t, length);
        spoil_row(t, Q, b, begin + row, h, NAN);
        t->nan_row = sees_nothing(t, b, h, row) ? 2 : 1;
    }
    if (t->nan_key) {
        const int64_t row = begin + random_below(t, length);
        if (random_below(t, 2))
            spoil_row(t, K, b, row, t->nan_head_kv, NAN);
        else
            spoil_row(t, V, b, row, t->nan_head_kv, NAN);
    }
    return t->nan_row || t->nan_key;
}

/* Whether the n-th element of an output is of the batch and KV head in which there is a NaN. */
static int is_beside(const struct trial *t, enum role role, int64_t n) {
    const struct guarded *g = &t->g[role];
    const int64_t *shape = g->shape + (t->varlen ? 0 : 1), group = t->heads / t->heads_kv;
    if (role == DBIAS || role == DSINK)
        return 1;
    int64_t row, h, b; /* row: of the packed tensor, of all batches */
    if (role == LSE || role == LSE_LOW) {
        const int64_t rows = g->shape[g->tensor.ndim - 1];
        b = n / (rows * t->heads), h = n / rows % t->heads, row = n % rows;
    } else {
        b = n / (shape[0] * shape[1] * shape[2]), h = n / shape[2] % shape[1],
        row = n / (shape[1] * shape[2]) % shape[0];
    }
    if (role != DK && role != DV)
        h /= group;
    if (t->varlen) {
        const struct guarded *cu = &t->g[role == DK || role == DV ? CU_K : CU_Q];
        return h == t->nan_head_kv && row >= guarded_get(cu, t->nan_batch) && row < guarded_get(cu, t->nan_batch + 1);
    }
    return h == t->nan_head_kv && b == t->nan_batch;
}

/* Whether a head has a NaN for a sink, of the KV head's query heads; head_kv below 0: of all. */
static int has_nan_sink(const struct trial *t, int64_t head_kv) {
    const int64_t elements = t->g[SINK].map ? guarded_elements(&t->g[SINK]) : 0;
    for (int64_t n = 0; n < elements; n++)
        if ((head_kv < 0 || n % t->heads / (t->heads / t->heads_kv) == head_kv) && isnan(guarded_get(&t->g[SINK], n)))
            return 1;
    return 0;
}

int trial_may_be_nan(const struct trial *t, enum role role, int64_t n) {
    /* lse of its rows is NaN, and so may be what it is subtracted from: scores of pairs that a mask hides too. */
    if (role >= DQ && role <= DBIAS && t->g[SINK].map) {
        const struct guarded *g = &t->g[role];
        const int32_t axis = g->tensor.ndim - 2; /* of heads */
        const int64_t h = n / g->shape[axis + 1] % g->shape[axis];
        if (has_nan_sink(t, role == DBIAS ? -1 : role == DQ ? h / (t->heads / t->heads_kv) : h))
            return 1;
    }
    if (t->nan_key)
        return is_beside(t, role, n);
    return t->nan_row == 1 && role >= DK && is_beside(t, role, n);
}
