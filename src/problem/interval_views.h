/* interval_views.h: the key and row intervals of a call: what they may be, and where they lie. */
#ifndef FDM_INTERVAL_VIEWS_H
#define FDM_INTERVAL_VIEWS_H

#include "problem/problem.h"

enum { ROW_RANGES_MAX = 4 };

/* What a problem says of its intervals. */
fdm_status intervals_validate(const fdm_problem *problem);
/* The intervals of tensors, where they hold some: fills the problem's facts and the views. */
fdm_status intervals_resolve(const fdm_tensors *tensors, fdm_problem *problem, struct attention *attention);

/* The ranges of keys of one row: start and end of range n lie n * start_step and n * end_step further. */
struct row_ranges {
    const int32_t *start, *end; /* NULL: the call has none */
    int64_t start_step, end_step;
    int32_t count;
};
static inline struct row_ranges row_ranges_of(const struct attention *a, const struct sequence *s, int64_t b, int64_t h,
                                              int64_t i) {
    const struct interval_view *v = &a->row_intervals;
    struct row_ranges ranges = {NULL, NULL, v->start_range, v->end_range, a->problem->row_ranges};
    if (v->start) {
        const int64_t head = h / v->group, row = s->q_begin + i;
        ranges.start = v->start + b * v->start_batch + head * v->start_head + row * v->start_item;
        ranges.end = v->end + b * v->end_batch + head * v->end_head + row * v->end_item;
    }
    return ranges;
}
static inline int row_ranges_hold(const struct row_ranges *r, int64_t key) {
    int held = 0;
    for (int32_t n = 0; n < r->count; n++)
        held |= r->start[n * r->start_step] <= key && key < r->end[n * r->end_step];
    return held;
}
/* The part of `range` from the first key that some range holds to the last. */
struct key_range row_ranges_cut(const struct row_ranges *ranges, struct key_range range);

#endif
