/* packed.c: rows that belong to no sequence: of packed tensors before the first one and from the last one's end on, and
 * those that seqused leaves over. */
#include <math.h>
#include <string.h>

#include "problem/problem.h"

static void clear_matrix(fdm_dtype dtype, const struct matrix_view *view, int64_t b, int64_t row, int64_t heads,
                         int64_t columns) {
    const int64_t bytes = fdm_dtype_bytes(dtype);
    for (int64_t h = 0; view->data && h < heads; h++)
        memset(view->data + (b * view->batch + row * view->row + h * view->head) * bytes, 0, (size_t)(columns * bytes));
}

static void fill_row(const fdm_problem *p, const struct row_view *view, int64_t b, int64_t row, double value) {
    for (int64_t h = 0; view->data && h < p->heads; h++) {
        const int64_t at = b * view->batch + h * view->head + row * view->row;
        if (p->dtype == FDM_FLOAT64)
            ((double *)(void *)view->data)[at] = value;
        else
            ((float *)(void *)view->data)[at] = (float)value;
    }
}

static void clear_query(const struct attention *a, int64_t b, int64_t row) {
    const fdm_problem *p = a->problem;
    if (p->pass == FDM_BACKWARD) {
        clear_matrix(p->dtype, &a->dq, b, row, p->heads, p->head_dim);
        return;
    }
    clear_matrix(p->dtype, &a->out, b, row, p->heads, p->head_dim_v);
    fill_row(p, &a->lse, b, row, INFINITY);
    fill_row(p, &a->lse_low, b, row, 0);
}

static void clear_key(const struct attention *a, int64_t b, int64_t row) {
    const fdm_problem *p = a->problem;
    if (p->add_dkv)
        return;
    clear_matrix(problem_dkv_dtype(p), &a->dk, b, row, p->heads_kv, p->head_dim);
    clear_matrix(problem_dkv_dtype(p), &a->dv, b, row, p->heads_kv, p->head_dim_v);
}

typedef void clear_function(const struct attention *a, int64_t b, int64_t row);

static void clear_rest(const struct attention *a, const int32_t *cu_seqlens, int64_t total, clear_function *clear) {
    for (int64_t row = 0; row < cu_seqlens[0]; row++)
        clear(a, 0, row);
    for (int64_t row = cu_seqlens[a->problem->batch]; row < total; row++)
        clear(a, 0, row);
}

/* The rows of each sequence from those on that seqused counts. */
static void clear_unused(const struct attention *a, const int32_t *cu_seqlens, int64_t longest, int of_keys,
                         clear_function *clear) {
    for (int64_t b = 0; b < a->problem->batch; b++) {
        const struct sequence s = attention_sequence(a, b);
        const int64_t all = cu_seqlens ? cu_seqlens[b + 1] - cu_seqlens[b] : longest;
        for (int64_t i = of_keys ? s.seqlen_k : s.seqlen_q; i < all; i++)
            clear(a, cu_seqlens ? 0 : b, (of_keys ? s.k_begin : s.q_begin) + i);
    }
}

void attention_clear_rest(const struct attention *a) {
    const fdm_problem *p = a->problem;
    if (a->cu_seqlens_q)
        clear_rest(a, a->cu_seqlens_q, p->total_q, clear_query);
    if (a->cu_seqlens_k)
        clear_rest(a, a->cu_seqlens_k, p->total_k, clear_key);
    if (a->seqused_q.data)
        clear_unused(a, a->cu_seqlens_q, p->seqlen_q, 0, clear_query);
    if (a->seqused_k.data && !p->has_cache)
        clear_unused(a, a->cu_seqlens_k, p->seqlen_k, 1, clear_key);
}
