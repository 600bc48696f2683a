/* packed.c: rows of packed tensors that belong to no sequence: before the first one and from the last one's end on. */
#include <math.h>
#include <string.h>

#include "problem/problem.h"

static void clear_matrix(const fdm_problem *p, const struct matrix_view *view, int64_t row, int64_t heads,
                         int64_t columns) {
    const int64_t bytes = fdm_dtype_bytes(p->dtype);
    for (int64_t h = 0; view->data && h < heads; h++)
        memset(view->data + (row * view->row + h * view->head) * bytes, 0, (size_t)(columns * bytes));
}

static void fill_row(const fdm_problem *p, const struct row_view *view, int64_t row, double value) {
    for (int64_t h = 0; view->data && h < p->heads; h++) {
        const int64_t at = h * view->head + row * view->row;
        if (p->dtype == FDM_FLOAT64)
            ((double *)(void *)view->data)[at] = value;
        else
            ((float *)(void *)view->data)[at] = (float)value;
    }
}

static void clear_query(const struct attention *a, int64_t row) {
    const fdm_problem *p = a->problem;
    if (p->pass == FDM_BACKWARD) {
        clear_matrix(p, &a->dq, row, p->heads, p->head_dim);
        return;
    }
    clear_matrix(p, &a->out, row, p->heads, p->head_dim_v);
    fill_row(p, &a->lse, row, INFINITY);
    fill_row(p, &a->lse_low, row, 0);
}

static void clear_key(const struct attention *a, int64_t row) {
    const fdm_problem *p = a->problem;
    clear_matrix(p, &a->dk, row, p->heads_kv, p->head_dim);
    clear_matrix(p, &a->dv, row, p->heads_kv, p->head_dim_v);
}

static void for_each_rest(const struct attention *a, const int32_t *cu_seqlens, int64_t total,
                          void (*clear)(const struct attention *a, int64_t row)) {
    for (int64_t row = 0; row < cu_seqlens[0]; row++)
        clear(a, row);
    for (int64_t row = cu_seqlens[a->problem->batch]; row < total; row++)
        clear(a, row);
}

void attention_clear_rest(const struct attention *a) {
    if (!a->problem->varlen)
        return;
    for_each_rest(a, a->cu_seqlens_q, a->problem->total_q, clear_query);
    for_each_rest(a, a->cu_seqlens_k, a->problem->total_k, clear_key);
}
