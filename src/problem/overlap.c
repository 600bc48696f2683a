/* overlap.c: whether two tensors have a byte in common.
 *
 * That their spans overlap does not say so: q, k and v may be views of one tensor [B, S, 3, H, D], each between the
 * rows of the others. A common byte is a pair of elements whose addresses are less than an element apart: a sum of
 * strides times indices. Strides are walked from the largest to the smallest; what is left must be within reach of the
 * smaller ones, so that few indices of each come into question. */
#include "base/error.h"
#include "problem/tensor.h"

enum {
    TENSORS_MAX = 40,
    TERMS_MAX = 16,
    LOOKS_MAX = 4096
}; /* beyond LOOKS_MAX looks, which no usual layout needs, no overlap is found */

/* stride * n with low <= n <= high, in bytes; equal strides of both tensors are one term. */
struct term {
    int64_t stride, low, high;
    int64_t least_after, most_after; /* what the terms behind it add up to */
};
struct equation {
    struct term terms[TERMS_MAX];
    int32_t num_terms, looks;
    int64_t below, above; /* the sum must lie between, both excluded */
};

static int64_t bytes_of(const fdm_tensor *t) { return t->dtype.bits / 8; }

/* Of an axis, asked from the last to the first of a tensor that is not empty; *inner: 1 at first. */
static int64_t stride_of(const fdm_tensor *t, int32_t axis, int64_t *inner) {
    const int64_t contiguous = *inner;
    *inner *= t->shape[axis];
    return t->strides ? t->strides[axis] : contiguous;
}

/* Keeps terms sorted, the largest stride first. */
static void add_term(struct equation *e, int64_t stride, int64_t low, int64_t high) {
    int32_t at = 0;
    while (at < e->num_terms && e->terms[at].stride > stride)
        at++;
    if (at < e->num_terms && e->terms[at].stride == stride) {
        e->terms[at].low += low;
        e->terms[at].high += high;
        return;
    }
    for (int32_t i = e->num_terms++; i > at; i--)
        e->terms[i] = e->terms[i - 1];
    e->terms[at] = (struct term){stride, low, high, 0, 0};
}

static void add_axes(struct equation *e, const fdm_tensor *t, int sign) {
    int64_t inner = 1;
    for (int32_t axis = t->ndim - 1; axis >= 0; axis--) {
        const int64_t stride = stride_of(t, axis, &inner), last = t->shape[axis] - 1;
        if (stride > 0 && last > 0)
            add_term(e, stride * bytes_of(t), sign < 0 ? -last : 0, sign < 0 ? 0 : last);
    }
}

/* Least n with stride * n > x. */
static int64_t above_of(int64_t x, int64_t stride) { return x >= 0 ? x / stride + 1 : -((-x - 1) / stride); }

static int solve(struct equation *e, int32_t term, int64_t sum) {
    if (term == e->num_terms)
        return e->below < sum && sum < e->above;
    const struct term *t = &e->terms[term];
    int64_t first = above_of(e->below - sum - t->most_after, t->stride),
            last = above_of(e->above - sum - t->least_after - 1, t->stride) - 1;
    first = first > t->low ? first : t->low;
    last = last < t->high ? last : t->high;
    for (int64_t n = first; n <= last && e->looks++ < LOOKS_MAX; n++)
        if (solve(e, term + 1, sum + t->stride * n))
            return 1;
    return 0;
}

struct span {
    uintptr_t first, end; /* first == end: no byte */
};
static struct span span_of(const fdm_tensor *t) {
    int64_t last = 0, inner = 1;
    for (int32_t axis = 0; axis < t->ndim; axis++)
        if (t->shape[axis] == 0)
            return (struct span){0, 0};
    for (int32_t axis = t->ndim - 1; axis >= 0; axis--)
        last += (t->shape[axis] - 1) * stride_of(t, axis, &inner);
    const uintptr_t first = (uintptr_t)tensor_data(t);
    return (struct span){first, first + (uintptr_t)((last + 1) * bytes_of(t))};
}

/* Of tensors whose spans overlap. */
static int shares_a_byte(const fdm_tensor *a, struct span of_a, const fdm_tensor *b, struct span of_b) {
    if (a->ndim + b->ndim > TERMS_MAX)
        return 0;
    struct equation e;
    e.num_terms = e.looks = 0;
    e.below = -bytes_of(a), e.above = bytes_of(b);
    add_axes(&e, a, 1);
    add_axes(&e, b, -1);
    for (int32_t i = e.num_terms - 2; i >= 0; i--) {
        const struct term *next = &e.terms[i + 1];
        e.terms[i].least_after = next->least_after + next->stride * next->low;
        e.terms[i].most_after = next->most_after + next->stride * next->high;
    }
    return solve(&e, 0, (int64_t)(of_a.first - of_b.first));
}

static int spans_overlap(struct span a, struct span b) { return a.first < b.end && b.first < a.end; }

int tensors_overlap(const fdm_tensor *a, const fdm_tensor *b) {
    const struct span of_a = span_of(a), of_b = span_of(b);
    return spans_overlap(of_a, of_b) && shares_a_byte(a, of_a, b, of_b);
}

/* The first axis from `axis` on that is longer than 1, or ndim. */
static int32_t long_axis(const fdm_tensor *t, int32_t axis) {
    while (axis < t->ndim && t->shape[axis] == 1)
        axis++;
    return axis;
}

int tensors_same(const fdm_tensor *a, const fdm_tensor *b) {
    if (tensor_data(a) != tensor_data(b) || bytes_of(a) != bytes_of(b))
        return 0;
    int32_t i = long_axis(a, 0), j = long_axis(b, 0);
    while (i < a->ndim && j < b->ndim) {
        if (a->shape[i] != b->shape[j] || tensor_stride(a, i) != tensor_stride(b, j))
            return 0;
        i = long_axis(a, i + 1), j = long_axis(b, j + 1);
    }
    return i == a->ndim && j == b->ndim;
}

int tensor_begins(const fdm_tensor *part, const fdm_tensor *whole) {
    int same = tensor_data(part) == tensor_data(whole) && bytes_of(part) == bytes_of(whole);
    for (int32_t i = 0; i + 1 < part->ndim; i++)
        same &= part->shape[i] == whole->shape[i] && tensor_stride(part, i) == tensor_stride(whole, i);
    return same && part->shape[part->ndim - 1] <= whole->shape[part->ndim - 1];
}

fdm_status tensors_check_apart(const struct named_tensor *all, int32_t count) {
    struct span spans[TENSORS_MAX];
    for (int32_t i = 0; i < count; i++)
        spans[i] = all[i].tensor ? span_of(all[i].tensor) : (struct span){0, 0};
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = 0; j < count && all[i].written; j++) {
            const int seen = all[j].written && j <= i, may_replace = all[i].replaces >> j & 1;
            if (seen || !spans_overlap(spans[i], spans[j]) ||
                !shares_a_byte(all[i].tensor, spans[i], all[j].tensor, spans[j]) ||
                (may_replace && tensors_same(all[i].tensor, all[j].tensor)))
                continue;
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "%s overlaps %s in memory; it is written, and must lie apart from every other tensor%s%s",
                             all[i].name, all[j].name, may_replace ? ", or be exactly " : "",
                             may_replace ? all[j].name : "");
        }
    return FDM_OK;
}
