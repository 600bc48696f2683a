/* layout.c: layouts by kind, and the public questions about them. */
#include "parallel/layout.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/struct_bytes.h"

/* ---- ranges ---- */

int range_list_add(struct range_list *list, int64_t first, int64_t end) {
    if (first >= end)
        return 1;
    if (list->count && list->data[list->count - 1].end == first) {
        list->data[list->count - 1].end = end;
        return 1;
    }
    if (list->count == list->room) {
        const int64_t room = list->room ? 2 * list->room : 8;
        fdm_range *more = memory_allocate((size_t)room * sizeof *more);
        if (!more)
            return 0;
        if (list->count)
            memcpy(more, list->data, (size_t)list->count * sizeof *more);
        memory_release(list->data);
        list->data = more;
        list->room = room;
    }
    list->data[list->count++] = (fdm_range){first, end};
    return 1;
}

void range_list_release(struct range_list *list) {
    memory_release(list->data);
    *list = (struct range_list){0};
}

int64_t ranges_size(const fdm_range *ranges, int64_t count) {
    int64_t size = 0;
    for (int64_t i = 0; i < count; i++)
        size += ranges[i].end - ranges[i].first;
    return size;
}

int64_t layout_rows(const fdm_layout *layout, int32_t rank) {
    return ranges_size(layout->ranges + layout->begin[rank], layout->begin[rank + 1] - layout->begin[rank]);
}

int64_t layout_range_at(const fdm_layout *layout, int64_t position) {
    int64_t low = 0, high = layout->num_ranges;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (layout->sorted[middle].end > position)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* ---- kinds ---- */

/* What is being made: the ranges of each rank. */
struct parts {
    const fdm_layout_wish *wish;
    int64_t block;
    struct range_list *ranks;
    int out_of_memory;
};

static void give(struct parts *p, int32_t rank, int64_t first, int64_t end) {
    p->out_of_memory |= !range_list_add(&p->ranks[rank], first, end);
}

/* Where chunk i of `count` begins, of nearly equal chunks that begin at multiples of block; i = count: the end. */
static int64_t edge(int64_t total, int64_t count, int64_t block, int64_t i) {
    const int64_t blocks = (total + block - 1) / block, at = blocks * i / count * block;
    return at < total ? at : total;
}

static void give_chunk(struct parts *p, int32_t rank, int64_t first, int64_t total, int64_t count, int64_t i) {
    give(p, rank, first + edge(total, count, p->block, i), first + edge(total, count, p->block, i + 1));
}

static void give_zigzag(struct parts *p, int64_t first, int64_t total) {
    const int32_t ranks = p->wish->ranks;
    for (int32_t r = 0; r < ranks; r++) {
        give_chunk(p, r, first, total, 2 * ranks, r);
        give_chunk(p, r, first, total, 2 * ranks, 2 * ranks - 1 - r);
    }
}

static void give_contiguous(struct parts *p) {
    for (int32_t r = 0; r < p->wish->ranks; r++)
        give_chunk(p, r, 0, p->wish->total, p->wish->ranks, r);
}

/* Longer first; of equal ones the earlier. */
static int longer_first(const void *a, const void *b) {
    const fdm_range *x = a, *y = b;
    const int64_t m = x->end - x->first, n = y->end - y->first;
    return m != n ? (m < n) - (m > n) : (x->first > y->first) - (x->first < y->first);
}

static int by_position(const void *a, const void *b) {
    const fdm_range *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

/* A rank's ranges in the order of positions; those that touch become one. */
static void sort_part(struct parts *p, int32_t rank) {
    const struct range_list given = p->ranks[rank];
    if (given.count)
        qsort(given.data, (size_t)given.count, sizeof *given.data, by_position);
    p->ranks[rank] = (struct range_list){0};
    for (int64_t i = 0; i < given.count; i++)
        give(p, rank, given.data[i].first, given.data[i].end);
    memory_release(given.data);
}

static void give_documents(struct parts *p) {
    const fdm_layout_wish *w = p->wish;
    fdm_range *whole = memory_allocate((size_t)(w->num_documents + 1) * sizeof *whole);
    double *loads = memory_allocate((size_t)w->ranks * sizeof *loads);
    int64_t count = 0;
    p->out_of_memory |= !whole || !loads;
    for (int64_t d = 0; !p->out_of_memory && d < w->num_documents; d++) {
        const int64_t first = w->cu_seqlens[d], end = w->cu_seqlens[d + 1];
        if (end - first >= 2 * w->ranks * p->block)
            give_zigzag(p, first, end - first);
        else
            whole[count++] = (fdm_range){first, end};
    }
    if (!p->out_of_memory) {
        qsort(whole, (size_t)count, sizeof *whole, longer_first);
        for (int32_t r = 0; r < w->ranks; r++)
            loads[r] = 0;
    }
    for (int64_t i = 0; !p->out_of_memory && i < count; i++) {
        const double length = (double)(whole[i].end - whole[i].first);
        int32_t least = 0;
        for (int32_t r = 1; r < w->ranks; r++)
            least = loads[r] < loads[least] ? r : least;
        give(p, least, whole[i].first, whole[i].end);
        loads[least] += length * length;
    }
    if (w->cu_seqlens[0] > 0) /* rows of no document */
        give(p, w->ranks - 1, 0, w->cu_seqlens[0]);
    for (int32_t r = 0; r < w->ranks; r++)
        sort_part(p, r);
    memory_release(loads);
    memory_release(whole);
}

static fdm_status give_balanced(struct parts *p) {
    const fdm_layout_wish *w = p->wish;
    const int64_t blocks = (w->total + p->block - 1) / p->block;
    fdm_rank_mask *masks = memory_allocate((size_t)w->num_masks * sizeof *masks);
    int32_t *part = memory_allocate((size_t)(blocks + 1) * sizeof *part);
    fdm_status status = masks && part ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a layout");
    const char *at = (const char *)w->masks;
    for (int32_t i = 0; !status && i < w->num_masks; i++) {
        const fdm_rank_mask *given = (const fdm_rank_mask *)(const void *)(at + (size_t)i * w->masks[0].struct_bytes);
        status = rank_mask_read(given, w->total, i ? masks[0].seqlen_k : -1, &masks[i]);
    }
    if (!status)
        status = balance_blocks(w, masks, p->block, part);
    for (int64_t b = 0; !status && b < blocks; b++) {
        const int64_t end = (b + 1) * p->block;
        give(p, part[b], b * p->block, end < w->total ? end : w->total);
    }
    memory_release(masks);
    memory_release(part);
    return status;
}

static fdm_status give_ranges(struct parts *p) {
    const fdm_range *at = p->wish->ranges;
    for (int32_t r = 0; r < p->wish->ranks; r++)
        for (int64_t n = p->wish->range_counts[r]; n > 0; n--, at++) {
            if (at->first < 0 || at->end < at->first)
                return error_set(FDM_ERROR_INVALID_ARGUMENT,
                                 "a range of rank %d is (%lld, %lld); it begins at 0 or above and does not end before",
                                 r, (long long)at->first, (long long)at->end);
            give(p, r, at->first, at->end);
        }
    return FDM_OK;
}

/* ---- making ---- */

static fdm_status check_documents(const fdm_layout_wish *w) {
    if (!w->cu_seqlens || w->num_documents < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "a layout of documents has no cu_seqlens");
    int fine = w->cu_seqlens[0] >= 0 && w->cu_seqlens[w->num_documents] == w->total;
    for (int64_t d = 0; d < w->num_documents; d++)
        fine &= w->cu_seqlens[d] <= w->cu_seqlens[d + 1];
    return fine ? FDM_OK
                : error_set(FDM_ERROR_INVALID_ARGUMENT,
                            "cu_seqlens must be numbers from 0 on that never fall and end with total, %lld",
                            (long long)w->total);
}

static fdm_status check_wish(const fdm_layout_wish *w) {
    if (w->ranks < 1 || w->ranks > RANKS_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "ranks is %d; it must be 1 to %d", w->ranks, RANKS_MAX);
    if (w->total < 0 || w->total > INT64_MAX / RANKS_MAX / 4 || w->block < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "total is %lld and block %lld; neither may be below 0 or above 2^45", (long long)w->total,
                         (long long)w->block);
    switch (w->kind) {
    case FDM_LAYOUT_CONTIGUOUS:
    case FDM_LAYOUT_ZIGZAG: return FDM_OK;
    case FDM_LAYOUT_DOCUMENTS: return check_documents(w);
    case FDM_LAYOUT_BALANCED:
        return w->masks && w->num_masks > 0 ? FDM_OK
                                            : error_set(FDM_ERROR_INVALID_ARGUMENT, "a balanced layout has no masks");
    case FDM_LAYOUT_RANGES:
        return w->ranges && w->range_counts
                   ? FDM_OK
                   : error_set(FDM_ERROR_INVALID_ARGUMENT, "a layout of ranges has no ranges or range_counts");
    default: return error_set(FDM_ERROR_INVALID_ARGUMENT, "kind is %d; it is no kind of layout", (int)w->kind);
    }
}

static int by_first(const void *a, const void *b) {
    const struct owned_range *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

/* Sorts, and checks that every position is in one range. */
static fdm_status sort_all(fdm_layout *layout) {
    int64_t last = 0;
    for (int32_t r = 0; r < layout->ranks; r++)
        for (int64_t i = layout->begin[r], place = 0; i < layout->begin[r + 1]; i++) {
            layout->sorted[i] = (struct owned_range){layout->ranges[i].first, layout->ranges[i].end, place, r};
            place += layout->ranges[i].end - layout->ranges[i].first;
        }
    if (layout->num_ranges)
        qsort(layout->sorted, (size_t)layout->num_ranges, sizeof *layout->sorted, by_first);
    for (int64_t i = 0; i < layout->num_ranges; last = layout->sorted[i++].end)
        if (layout->sorted[i].first != last) {
            const int64_t first = layout->sorted[i].first;
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "position %lld is in %s; every position must be in exactly one",
                             (long long)(first < last ? first : last), first > last ? "no range" : "two ranges");
        }
    if (last != layout->total)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the ranges end with %lld, but total is %lld", (long long)last,
                         (long long)layout->total);
    return FDM_OK;
}

static fdm_status collect(const struct parts *p, fdm_layout **layout) {
    const int32_t ranks = p->wish->ranks;
    fdm_layout *made = memory_allocate(sizeof *made);
    if (!made)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a layout");
    *made = (fdm_layout){.ranks = ranks, .total = p->wish->total, .block = p->block};
    made->begin = memory_allocate(((size_t)ranks + 1) * sizeof *made->begin);
    for (int32_t r = 0; r < ranks; r++)
        made->num_ranges += p->ranks[r].count;
    made->ranges = memory_allocate((size_t)made->num_ranges * sizeof *made->ranges);
    made->sorted = memory_allocate((size_t)made->num_ranges * sizeof *made->sorted);
    if (!made->begin || !made->ranges || !made->sorted) {
        const long long count = made->num_ranges;
        fdm_layout_release(made);
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a layout of %lld ranges", count);
    }
    made->begin[0] = 0;
    for (int32_t r = 0; r < ranks; r++) {
        if (p->ranks[r].count)
            memcpy(made->ranges + made->begin[r], p->ranks[r].data, (size_t)p->ranks[r].count * sizeof(fdm_range));
        made->begin[r + 1] = made->begin[r] + p->ranks[r].count;
    }
    const fdm_status status = sort_all(made);
    if (status)
        fdm_layout_release(made);
    else
        *layout = made;
    return status;
}

fdm_status fdm_layout_create(const fdm_layout_wish *wish, fdm_layout **layout) {
    fdm_layout_wish room;
    if (!(wish = STRUCT_READ(fdm_layout_wish, wish, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    if (!layout)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "layout is NULL");
    fdm_status status = check_wish(wish);
    if (status)
        return status;
    struct parts p = {.wish = wish, .block = wish->block ? wish->block : LAYOUT_BLOCK};
    if (!(p.ranks = memory_allocate((size_t)wish->ranks * sizeof *p.ranks)))
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a layout of %d ranks", wish->ranks);
    for (int32_t r = 0; r < wish->ranks; r++)
        p.ranks[r] = (struct range_list){0};
    switch (wish->kind) {
    case FDM_LAYOUT_CONTIGUOUS: give_contiguous(&p); break;
    case FDM_LAYOUT_ZIGZAG: give_zigzag(&p, 0, wish->total); break;
    case FDM_LAYOUT_DOCUMENTS: give_documents(&p); break;
    case FDM_LAYOUT_BALANCED: status = give_balanced(&p); break;
    default: status = give_ranges(&p);
    }
    if (!status && p.out_of_memory)
        status = error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a layout of %d ranks", wish->ranks);
    if (!status)
        status = collect(&p, layout);
    for (int32_t r = 0; r < wish->ranks; r++)
        range_list_release(&p.ranks[r]);
    memory_release(p.ranks);
    return status;
}

void fdm_layout_release(fdm_layout *layout) {
    if (!layout)
        return;
    memory_release(layout->begin);
    memory_release(layout->ranges);
    memory_release(layout->sorted);
    memory_release(layout);
}

/* ---- reading ---- */

fdm_status fdm_layout_ranges(const fdm_layout *layout, int32_t rank, const fdm_range **ranges, int64_t *count) {
    if (!layout || !ranges || !count)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", !layout ? "layout" : !ranges ? "ranges" : "count");
    if (rank < 0 || rank >= layout->ranks)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "rank is %d; this layout has ranks 0 to %d", rank,
                         layout->ranks - 1);
    *ranges = layout->ranges + layout->begin[rank];
    *count = layout->begin[rank + 1] - layout->begin[rank];
    return FDM_OK;
}

int64_t layout_fetched(const fdm_layout *keys, const struct range_list *needed, int32_t rank) {
    int64_t fetched = 0;
    for (int64_t n = 0; n < needed->count; n++) {
        const fdm_range *range = &needed->data[n];
        for (int64_t k = layout_range_at(keys, range->first);
             k < keys->num_ranges && keys->sorted[k].first < range->end; k++) {
            const struct owned_range *own = &keys->sorted[k];
            const int64_t first = own->first > range->first ? own->first : range->first;
            const int64_t end = own->end < range->end ? own->end : range->end;
            fetched += own->owner == rank ? 0 : end - first;
        }
    }
    return fetched;
}

static fdm_status work_of(const fdm_layout *layout, const fdm_layout *keys, const fdm_rank_mask *mask,
                          struct range_list *needed, int64_t *pairs, int64_t *fetched) {
    int64_t *sums = pairs ? memory_allocate((size_t)(layout->total + 1) * sizeof *sums) : NULL;
    if (pairs && !sums)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the pairs of %lld rows", (long long)layout->total);
    if (pairs) {
        rank_mask_sums(mask, sums);
        for (int32_t r = 0; r < layout->ranks; r++) {
            pairs[r] = 0;
            for (int64_t i = layout->begin[r]; i < layout->begin[r + 1]; i++)
                pairs[r] += sums[layout->ranges[i].end] - sums[layout->ranges[i].first];
        }
        memory_release(sums);
    }
    const fdm_status status = fetched ? rank_mask_needed(mask, layout, needed) : FDM_OK;
    for (int32_t r = 0; fetched && !status && r < layout->ranks; r++)
        fetched[r] = layout_fetched(keys, &needed[r], r);
    return status;
}

fdm_status fdm_layout_work(const fdm_layout *layout, const fdm_layout *layout_keys, const fdm_rank_mask *mask,
                           int64_t *pairs, int64_t *fetched) {
    fdm_rank_mask whole;
    if (!layout)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "layout is NULL");
    const fdm_layout *keys = layout_keys ? layout_keys : layout;
    if (keys->ranks != layout->ranks)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "layout has %d ranks, but layout_keys has %d", layout->ranks,
                         keys->ranks);
    fdm_status status = rank_mask_read(mask, layout->total, keys->total, &whole);
    if (status)
        return status;
    struct range_list *needed = memory_allocate((size_t)layout->ranks * sizeof *needed);
    if (!needed)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the keys of %d ranks", layout->ranks);
    for (int32_t r = 0; r < layout->ranks; r++)
        needed[r] = (struct range_list){0};
    status = work_of(layout, keys, &whole, needed, pairs, fetched);
    for (int32_t r = 0; r < layout->ranks; r++)
        range_list_release(&needed[r]);
    memory_release(needed);
    return status;
}
