/* count.c: visible pairs of a call, from intervals and ranges where there is no dense mask. */
#include "error.h"
#include "problem.h"

struct row_range {
    int64_t first, last;
};

/* Rows that causal and window let see key j: the transpose of problem_key_range. */
static struct row_range rows_of_key(const fdm_problem *p, const struct sequence *s, int64_t j) {
    struct row_range range = {0, s->seqlen_q};
    int64_t row = j - (s->seqlen_k - s->seqlen_q);
    if (p->causal && row > range.first)
        range.first = row;
    if (p->window_right >= 0 && p->window_right < row - range.first)
        range.first = row - p->window_right;
    if (p->window_left >= 0 && p->window_left < range.last - 1 - row)
        range.last = row + p->window_left + 1;
    return range;
}

static void clip_to_interval(const struct attention *a, const struct sequence *s, int64_t b, int64_t h, int64_t j,
                             struct row_range *range) {
    const struct interval_view *view = &a->intervals;
    int64_t key = s->k_begin + j, head = h / view->group;
    int64_t start = view->start[b * view->start_batch + head * view->start_head + key * view->start_key];
    int64_t end = view->end[b * view->end_batch + head * view->end_head + key * view->end_key];
    range->first = start > range->first ? start : range->first;
    range->last = end < range->last ? end : range->last;
}

static int64_t count_head(const struct attention *a, int64_t b, int64_t h) {
    const fdm_problem *p = a->problem;
    const struct score_view *mask = &a->mask;
    struct sequence s = attention_sequence(a, b);
    int64_t pairs = 0;
    for (int64_t j = 0; j < s.seqlen_k; j++) {
        struct row_range range = rows_of_key(p, &s, j);
        if (p->has_intervals)
            clip_to_interval(a, &s, b, h, j, &range);
        if (range.first >= range.last)
            continue;
        if (!p->has_mask) {
            pairs += range.last - range.first;
            continue;
        }
        const char *column = mask->data + b * mask->batch + h / mask->group * mask->head + j * mask->key;
        for (int64_t i = range.first; i < range.last; i++)
            pairs += column[i * mask->row] != 0;
    }
    return pairs;
}

fdm_status fdm_count_visible(const fdm_problem *problem, const fdm_tensors *tensors, int64_t *pairs) {
    if (!problem || !pairs)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", problem ? "pairs" : "problem");
    fdm_options options = problem_options(problem);
    fdm_problem described;
    struct attention attention;
    fdm_status status = problem_from_tensors(problem->pass, tensors, &options, &described, &attention);
    if (status)
        return status;
    /* Query heads that share every head of mask and intervals see the same pairs: counted once. */
    int64_t shared = described.heads;
    if (described.has_intervals)
        shared = attention.intervals.group;
    if (described.has_mask && attention.mask.group < shared)
        shared = attention.mask.group;
    *pairs = 0;
    for (int64_t b = 0; b < described.batch; b++)
        for (int64_t h = 0; h < described.heads; h += shared)
            *pairs += shared * count_head(&attention, b, h);
    return FDM_OK;
}
