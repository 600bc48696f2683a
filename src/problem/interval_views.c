/* interval_views.c: checks key and row intervals, and resolves them to addresses and strides. */
#include "problem/interval_views.h"

#include "base/error.h"
#include "problem/tensor.h"

static fdm_status check_shared(const char *name, int64_t batch, int64_t heads, const fdm_problem *p) {
    if (batch != 1 && batch != p->batch)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s have batch %lld; it must be 1 or %lld", name, (long long)batch,
                         (long long)p->batch);
    if (heads != 1 && heads != p->heads && heads != p->heads_kv)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s have %lld heads; it must be 1, %lld or %lld", name,
                         (long long)heads, (long long)p->heads_kv, (long long)p->heads);
    return FDM_OK;
}

fdm_status intervals_validate(const fdm_problem *p) {
    fdm_status status = FDM_OK;
    if (p->has_intervals)
        status = check_shared("key intervals", p->interval_batch, p->interval_heads, p);
    if (!status && p->has_row_intervals)
        status = check_shared("row intervals", p->row_interval_batch, p->row_interval_heads, p);
    if (!status && p->has_row_intervals && (p->row_ranges < 1 || p->row_ranges > ROW_RANGES_MAX))
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "row intervals have %d ranges a row; it must be 1 to %d",
                           p->row_ranges, ROW_RANGES_MAX);
    return status;
}

/* Both of a pair, or an error. */
static fdm_status check_pair(const fdm_tensor *const pair[2], const char *const names[2], const char *what,
                             int32_t ndim) {
    fdm_status status = FDM_OK;
    if (!pair[0] || !pair[1])
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is missing; %s are a pair", names[pair[0] ? 1 : 0], what);
    for (int i = 0; i < 2 && !status; i++) {
        status = tensor_check(pair[i], names[i], ndim, TENSOR_INPUT, 0);
        if (!status)
            status = tensor_expect_dtype(pair[i], names[i], FDM_INT32);
    }
    return status;
}

static fdm_status check_shapes(const fdm_tensor *const pair[2], const char *const names[2], const int64_t *shape) {
    fdm_status status = FDM_OK;
    for (int i = 0; i < 2 && !status; i++)
        status = tensor_expect_shape(pair[i], names[i], shape);
    return status;
}

/* An empty tensor may have no address; one that is present never is NULL. */
static const int32_t *elements_of(const fdm_tensor *tensor) {
    static const int32_t nothing;
    return tensor_data(tensor) ? (const int32_t *)(void *)tensor_data(tensor) : &nothing;
}

/* of_rows: ranges of keys of each row, with an axis more, else an interval of rows of each key. */
static fdm_status resolve(const fdm_tensor *const pair[2], int of_rows, fdm_problem *p, struct interval_view *view) {
    static const char *const all_names[][2] = {{"interval_start", "interval_end"}, {"row_start", "row_end"}};
    const char *const *const names = all_names[of_rows];
    const int32_t packed = p->varlen ? 1 : 0, axis = 1 - packed, items = axis + 1 + of_rows;
    if (!pair[0] && !pair[1])
        return FDM_OK;
    fdm_status status = check_pair(pair, names, of_rows ? "row intervals" : "key intervals", items + 1);
    if (status)
        return status;
    const int64_t batch = packed ? 1 : pair[0]->shape[0], heads = pair[0]->shape[axis];
    const int64_t ranges = of_rows ? pair[0]->shape[axis + 1] : 1;
    const int64_t rows = packed ? p->total_q : p->seqlen_q, keys = packed ? p->total_k : p->seqlen_k;
    const int64_t shape[4] = {batch, heads, of_rows ? ranges : keys, rows};
    *(of_rows ? &p->has_row_intervals : &p->has_intervals) = 1;
    *(of_rows ? &p->row_interval_batch : &p->interval_batch) = batch;
    *(of_rows ? &p->row_interval_heads : &p->interval_heads) = heads;
    if (of_rows)
        p->row_ranges = ranges > ROW_RANGES_MAX ? ROW_RANGES_MAX + 1 : (int32_t)ranges;
    if ((status = intervals_validate(p)) || (status = check_shapes(pair, names, shape + packed)))
        return status;
    *view = (struct interval_view){.start = elements_of(pair[0]),
                                   .end = elements_of(pair[1]),
                                   .start_batch = packed ? 0 : tensor_stride(pair[0], 0),
                                   .end_batch = packed ? 0 : tensor_stride(pair[1], 0),
                                   .start_head = tensor_stride(pair[0], axis),
                                   .end_head = tensor_stride(pair[1], axis),
                                   .start_range = of_rows ? tensor_stride(pair[0], axis + 1) : 0,
                                   .end_range = of_rows ? tensor_stride(pair[1], axis + 1) : 0,
                                   .start_item = tensor_stride(pair[0], items),
                                   .end_item = tensor_stride(pair[1], items),
                                   .group = p->heads / heads};
    return FDM_OK;
}

fdm_status intervals_resolve(const fdm_tensors *t, fdm_problem *p, struct attention *a) {
    const fdm_tensor *const of_keys[2] = {t->interval_start, t->interval_end};
    const fdm_tensor *const of_rows[2] = {t->row_start, t->row_end};
    const fdm_status status = resolve(of_keys, 0, p, &a->intervals);
    return status ? status : resolve(of_rows, 1, p, &a->row_intervals);
}

struct key_range row_ranges_cut(const struct row_ranges *r, struct key_range range) {
    struct key_range hull = {range.last, range.first};
    if (!r->start || range.first >= range.last)
        return range;
    for (int32_t n = 0; n < r->count; n++) {
        const int64_t start = r->start[n * r->start_step], end = r->end[n * r->end_step];
        if (start >= end || end <= range.first || start >= range.last)
            continue;
        hull.first = start < hull.first ? start : hull.first;
        hull.last = end > hull.last ? end : hull.last;
    }
    range.first = hull.first > range.first ? hull.first : range.first;
    range.last = hull.last < range.last ? hull.last : range.last;
    return range;
}
