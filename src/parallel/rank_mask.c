/* rank_mask.c: which keys rows see, in global positions: the pairs of rows, and the keys that ranks need. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/struct_bytes.h"
#include "parallel/layout.h"

fdm_status rank_mask_read(const fdm_rank_mask *mask, int64_t seqlen_q, int64_t seqlen_k, fdm_rank_mask *whole) {
    fdm_rank_mask room;
    if (!(mask = STRUCT_READ(fdm_rank_mask, mask, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    *whole = *mask;
    if (mask->seqlen_q != seqlen_q || (seqlen_k >= 0 && mask->seqlen_k != seqlen_k) || mask->seqlen_k < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the mask is for %lld rows and %lld keys, the layouts have %lld, %lld",
                         (long long)mask->seqlen_q, (long long)mask->seqlen_k, (long long)seqlen_q,
                         (long long)(seqlen_k >= 0 ? seqlen_k : mask->seqlen_k));
    if (mask->window_left < -1 || mask->window_right < -1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the mask's window is (%lld, %lld); a bound is -1 or at least 0",
                         (long long)mask->window_left, (long long)mask->window_right);
    if (mask->num_lists < 0 || (mask->num_lists && mask->seqlen_k && (!mask->interval_start || !mask->interval_end)))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the mask has %lld lists of intervals and no %s",
                         (long long)mask->num_lists, mask->interval_start ? "interval_end" : "interval_start");
    return FDM_OK;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

fdm_range rank_mask_rows(const fdm_rank_mask *m, int64_t list, int64_t j) {
    const int64_t row = j - (m->seqlen_k - m->seqlen_q);
    fdm_range rows = {0, m->seqlen_q};
    if (m->num_lists) {
        rows.first = most(rows.first, m->interval_start[list * m->seqlen_k + j]);
        rows.end = least(rows.end, m->interval_end[list * m->seqlen_k + j]);
    }
    if (m->causal)
        rows.first = most(rows.first, row);
    if (m->window_right >= 0)
        rows.first = most(rows.first, row - m->window_right);
    if (m->window_left >= 0)
        rows.end = least(rows.end, row + m->window_left + 1);
    return rows;
}

fdm_range rank_mask_span(const fdm_rank_mask *m, fdm_range rows) {
    const int64_t shift = m->seqlen_k - m->seqlen_q;
    fdm_range keys = {0, m->seqlen_k};
    if (m->window_left >= 0)
        keys.first = most(0, rows.first + shift - m->window_left);
    if (m->causal)
        keys.end = rows.end + shift;
    if (m->window_right >= 0)
        keys.end = least(keys.end, rows.end + shift + m->window_right);
    keys.end = least(most(keys.end, 0), m->seqlen_k);
    return keys.first < keys.end && rows.first < rows.end ? keys : (fdm_range){0, 0};
}

void rank_mask_sums(const fdm_rank_mask *m, int64_t *sums) {
    memset(sums, 0, (size_t)(m->seqlen_q + 1) * sizeof *sums);
    /* sums[i + 1] holds how many more keys row i sees than row i - 1; what begins with row Sq is seen by none. */
    for (int64_t list = 0; list < most(m->num_lists, 1); list++)
        for (int64_t j = 0; j < m->seqlen_k; j++) {
            const fdm_range rows = rank_mask_rows(m, list, j);
            if (rows.first >= rows.end)
                continue;
            sums[rows.first + 1]++;
            if (rows.end < m->seqlen_q)
                sums[rows.end + 1]--;
        }
    for (int64_t i = 1; i <= m->seqlen_q; i++) /* keys of a row */
        sums[i] += sums[i - 1];
    for (int64_t i = 1; i <= m->seqlen_q; i++)
        sums[i] += sums[i - 1];
}

/* ---- needed keys ---- */

/* Without intervals: of each range of rows one range of keys, the later the higher. */
static int add_spans(const fdm_rank_mask *m, const fdm_layout *layout, struct range_list *needed) {
    int fits = 1;
    for (int64_t i = 0; i < layout->num_ranges; i++) {
        const struct owned_range *rows = &layout->sorted[i];
        struct range_list *list = &needed[rows->owner];
        fdm_range keys = rank_mask_span(m, (fdm_range){rows->first, rows->end});
        keys.first = keys.first / KEY_BLOCK * KEY_BLOCK;
        if (list->count)
            keys.first = most(keys.first, list->data[list->count - 1].end);
        fits &= range_list_add(list, keys.first, keys.end);
    }
    return fits;
}

/* Of the sorted ranges, how many keys of a page begin to be seen with each, and stop with the one before. */
struct page_counts {
    int32_t *steps; /* [num_ranges + 1], 0 between pages */
    int64_t low, high;
};

static void count_page(const fdm_rank_mask *m, const fdm_layout *layout, int64_t page, struct page_counts *c) {
    const int64_t end = least((page + 1) * KEY_PAGE, m->seqlen_k);
    c->low = layout->num_ranges;
    c->high = 0;
    for (int64_t list = 0; list < m->num_lists; list++)
        for (int64_t j = page * KEY_PAGE; j < end; j++) {
            const fdm_range rows = rank_mask_rows(m, list, j);
            if (rows.first >= rows.end)
                continue;
            const int64_t from = layout_range_at(layout, rows.first), to = layout_range_at(layout, rows.end - 1) + 1;
            c->steps[from]++;
            c->steps[to]--;
            c->low = least(c->low, from);
            c->high = most(c->high, to);
        }
}

static int add_pages(const fdm_rank_mask *m, const fdm_layout *layout, int32_t *steps, int64_t *last_page,
                     struct range_list *needed) {
    struct page_counts c = {.steps = steps};
    int fits = 1;
    memset(steps, 0, (size_t)(layout->num_ranges + 1) * sizeof *steps);
    for (int32_t r = 0; r < layout->ranks; r++)
        last_page[r] = -1;
    for (int64_t page = 0; page * KEY_PAGE < m->seqlen_k; page++) {
        int64_t seen = 0;
        count_page(m, layout, page, &c);
        for (int64_t i = c.low; i < c.high; i++) {
            const int32_t owner = layout->sorted[i].owner;
            seen += steps[i];
            steps[i] = 0;
            if (seen > 0 && last_page[owner] != page) {
                last_page[owner] = page;
                fits &= range_list_add(&needed[owner], page * KEY_PAGE, least((page + 1) * KEY_PAGE, m->seqlen_k));
            }
        }
        steps[most(c.high, 0)] = 0;
    }
    return fits;
}

fdm_status rank_mask_needed(const fdm_rank_mask *mask, const fdm_layout *layout, struct range_list *needed) {
    int fits = 1;
    if (!mask->num_lists) {
        fits = add_spans(mask, layout, needed);
    } else {
        int32_t *steps = memory_allocate((size_t)(layout->num_ranges + 1) * sizeof *steps);
        int64_t *last_page = memory_allocate((size_t)layout->ranks * sizeof *last_page);
        fits = steps && last_page && add_pages(mask, layout, steps, last_page, needed);
        memory_release(steps);
        memory_release(last_page);
    }
    return fits ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the keys of %d ranks", layout->ranks);
}
