/* visible_pairs.c: visible pairs of a call, from intervals and ranges where there is no dense mask. */
#include "base/error.h"
#include "base/struct_bytes.h"
#include "problem/block_views.h"
#include "problem/interval_views.h"
#include "problem/tree.h"

enum { BLOCK_KEYS = 64 };

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
    int64_t start = view->start[b * view->start_batch + head * view->start_head + key * view->start_item];
    int64_t end = view->end[b * view->end_batch + head * view->end_head + key * view->end_item];
    range->first = start > range->first ? start : range->first;
    range->last = end < range->last ? end : range->last;
}

/* Set bytes of a mask [rows, count] within each key's rows; count <= BLOCK_KEYS keys, so that the lines of a row-major
 * mask are read once. */
static int64_t count_set(const char *mask, int64_t row_stride, int64_t key_stride, const struct row_range *ranges,
                         int64_t count) {
    int64_t pairs = 0, first = INT64_MAX, last = 0;
    for (int64_t n = 0; n < count; n++) {
        first = ranges[n].first < first ? ranges[n].first : first;
        last = ranges[n].last > last ? ranges[n].last : last;
    }
    for (int64_t i = first; i < last; i++)
        for (int64_t n = 0; n < count; n++)
            pairs += (mask[i * row_stride + n * key_stride] != 0) & (ranges[n].first <= i) & (i < ranges[n].last);
    return pairs;
}

static int64_t count_lengths(const char *mask, int64_t key_stride, const struct row_range *ranges, int64_t count) {
    int64_t pairs = 0;
    for (int64_t n = 0; n < count; n++)
        if (ranges[n].first < ranges[n].last && (!mask || mask[n * key_stride]))
            pairs += ranges[n].last - ranges[n].first;
    return pairs;
}

/* Where row intervals, a block mask or a tree are given: every pair by itself, of keys whose rows are known. */
static int64_t count_each(const struct attention *a, const struct sequence *s, int64_t b, int64_t h, int64_t j,
                          const struct row_range *ranges, int64_t count) {
    const struct score_view *mask = &a->mask;
    const char *bytes = a->problem->has_mask ? mask->data + b * mask->batch + h / mask->group * mask->head : NULL;
    int64_t pairs = 0;
    for (int64_t i = 0; i < s->seqlen_q; i++) {
        const struct row_ranges of_row = row_ranges_of(a, s, b, h, i);
        const uint32_t *tree = tree_row(a, s, b, i);
        for (int64_t n = 0; n < count; n++)
            pairs += ranges[n].first <= i && i < ranges[n].last && (!of_row.start || row_ranges_hold(&of_row, j + n)) &&
                     (!tree || tree_holds(a, s, tree, j + n)) && block_mask_holds(a, b, h, i, j + n) &&
                     (!bytes || bytes[i * mask->row + (j + n) * mask->key]);
    }
    return pairs;
}

static int64_t count_head(const struct attention *a, int64_t b, int64_t h) {
    const struct score_view *mask = &a->mask;
    struct sequence s = attention_sequence(a, b);
    struct row_range ranges[BLOCK_KEYS];
    int64_t pairs = 0;
    for (int64_t j = s.first_key; j < s.seqlen_k; j += BLOCK_KEYS) {
        int64_t count = s.seqlen_k - j < BLOCK_KEYS ? s.seqlen_k - j : BLOCK_KEYS;
        for (int64_t n = 0; n < count; n++) {
            ranges[n] = rows_of_key(a->problem, &s, j + n);
            if (a->problem->has_intervals)
                clip_to_interval(a, &s, b, h, j + n, &ranges[n]);
        }
        const char *block = NULL; /* the same for every row: a stride of 0, or no mask */
        if (a->problem->has_mask)
            block = mask->data + b * mask->batch + h / mask->group * mask->head + j * mask->key;
        if (a->problem->has_row_intervals || a->block_mask.data || a->tree.data)
            pairs += count_each(a, &s, b, h, j, ranges, count);
        else if (block && mask->row)
            pairs += count_set(block, mask->row, mask->key, ranges, count);
        else
            pairs += count_lengths(block, mask->key, ranges, count);
    }
    return pairs;
}

fdm_status fdm_count_visible(const fdm_problem *problem, const fdm_tensors *tensors, int64_t *pairs) {
    if (!problem || !pairs)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", problem ? "pairs" : "problem");
    fdm_tensors room;
    if (!(tensors = STRUCT_READ(fdm_tensors, tensors, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
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
    if (described.has_row_intervals && attention.row_intervals.group < shared)
        shared = attention.row_intervals.group;
    if (described.block_mask_size && attention.block_mask.group < shared)
        shared = attention.block_mask.group;
    if (described.has_mask && attention.mask.group < shared)
        shared = attention.mask.group;
    *pairs = 0;
    for (int64_t b = 0; b < described.batch; b++)
        for (int64_t h = 0; h < described.heads; h += shared)
            *pairs += shared * count_head(&attention, b, h);
    return FDM_OK;
}
