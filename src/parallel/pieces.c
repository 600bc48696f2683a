/* pieces.c: a rank's rows as calls of attention: which rows against which keys of its buffer, and the mask in local
 * terms. */
#include <limits.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "cuda/cuda.h"
#include "parallel/ranks_plan.h"

struct maker {
    struct pieces *made;
    const fdm_rank_mask *mask;
    const struct range_list *needed;
    int64_t room;
};

static int64_t lists_of(const fdm_rank_mask *mask) { return mask->num_lists ? mask->num_lists : 1; }

/* Where a position lies in the buffer of needed keys: its own place, or that of the next one there is. */
static int64_t place_of(const struct range_list *needed, int64_t position) {
    int64_t place = 0;
    for (int64_t n = 0; n < needed->count && needed->data[n].first < position; n++) {
        const int64_t end = needed->data[n].end < position ? needed->data[n].end : position;
        place += end - needed->data[n].first;
    }
    return place;
}

/* The needed range that holds keys whole; NULL: there is none. */
static const fdm_range *holder_of(const struct range_list *needed, fdm_range keys) {
    for (int64_t n = 0; n < needed->count; n++)
        if (needed->data[n].first <= keys.first && keys.end <= needed->data[n].end)
            return &needed->data[n];
    return NULL;
}

static struct piece *next_piece(struct maker *m) {
    if (m->made->count == m->room)
        return NULL;
    struct piece *piece = &m->made->data[m->made->count++];
    *piece = (struct piece){.left = -1, .right = -1};
    return piece;
}

static int allocate_intervals(struct piece *piece, int64_t lists) {
    const size_t count = (size_t)(lists * (piece->keys.end - piece->keys.first)) + 1;
    piece->start = memory_allocate(count * sizeof *piece->start);
    piece->end = memory_allocate(count * sizeof *piece->end);
    return piece->start && piece->end;
}

/* ---- a call for each range ---- */

static int32_t local_row(int32_t row, int64_t first) {
    return row == INT32_MAX ? row : (int32_t)((row > first ? row : first) - first);
}

/* Keys end where the last row's end, so that bottom-right alignment puts every row where it is in the whole. */
static int add_span(struct maker *m, fdm_range rows, int64_t place) {
    struct piece *piece = next_piece(m);
    const fdm_rank_mask *mask = m->mask;
    fdm_range keys = rank_mask_span(mask, rows);
    if (!piece)
        return 0;
    piece->rows = (fdm_range){place, place + rows.end - rows.first};
    if (keys.first >= keys.end)
        return 1;
    const fdm_range *holder = holder_of(m->needed, keys);
    const int64_t beyond = keys.end - rows.end - (mask->seqlen_k - mask->seqlen_q);
    const int64_t rounded = keys.first / KEY_BLOCK * KEY_BLOCK;
    keys.first = rounded > holder->first ? rounded : holder->first;
    piece->columns = keys;
    piece->keys.first = place_of(m->needed, keys.first);
    piece->keys.end = piece->keys.first + keys.end - keys.first;
    piece->causal = mask->causal;
    piece->left = mask->window_left >= 0 ? mask->window_left + beyond : -1;
    piece->right = mask->window_right >= 0 ? (mask->window_right > beyond ? mask->window_right - beyond : 0) : -1;
    if (!mask->num_lists)
        return 1;
    if (!allocate_intervals(piece, mask->num_lists))
        return 0;
    for (int64_t list = 0, n = 0; list < mask->num_lists; list++)
        for (int64_t j = keys.first; j < keys.end; j++, n++) {
            piece->start[n] = local_row(mask->interval_start[list * mask->seqlen_k + j], rows.first);
            piece->end[n] = local_row(mask->interval_end[list * mask->seqlen_k + j], rows.first);
        }
    return 1;
}

/* Whether every range has all its keys in one range of the buffer. */
static int fits_spans(const struct maker *m, const fdm_range *ranges, int64_t count) {
    int fits = count <= MOST_CALLS;
    for (int64_t i = 0; fits && i < count; i++) {
        const fdm_range keys = rank_mask_span(m->mask, ranges[i]);
        fits = keys.first >= keys.end || holder_of(m->needed, keys);
    }
    return fits;
}

/* ---- one call for rising ranges ---- */

/* How many rows of rising ranges lie before a position. */
static int32_t rows_below(const fdm_range *ranges, int64_t count, int64_t position) {
    int64_t below = 0;
    for (int64_t i = 0; i < count && ranges[i].first < position; i++)
        below += (ranges[i].end < position ? ranges[i].end : position) - ranges[i].first;
    return (int32_t)below;
}

/* An interval of global rows is one of theirs, and keys may have holes. */
static int add_folded(struct maker *m, const fdm_range *ranges, int64_t count, int64_t place) {
    struct piece *piece = next_piece(m);
    const int64_t lists = lists_of(m->mask);
    if (!piece)
        return 0;
    piece->rows = (fdm_range){place, place + ranges_size(ranges, count)};
    piece->keys = (fdm_range){0, ranges_size(m->needed->data, m->needed->count)};
    if (m->needed->count) /* one range, where a mask or bias has a column for every key */
        piece->columns = (fdm_range){m->needed->data[0].first, m->needed->data[m->needed->count - 1].end};
    if (!allocate_intervals(piece, lists))
        return 0;
    for (int64_t list = 0, n = 0; list < lists; list++)
        for (int64_t k = 0; k < m->needed->count; k++)
            for (int64_t j = m->needed->data[k].first; j < m->needed->data[k].end; j++, n++) {
                const fdm_range rows = rank_mask_rows(m->mask, list, j);
                piece->start[n] = rows_below(ranges, count, rows.first);
                piece->end[n] = rows.first < rows.end ? rows_below(ranges, count, rows.end) : 0;
            }
    return 1;
}

fdm_status pieces_make(struct pieces *pieces, const fdm_rank_mask *mask, const fdm_range *ranges, int64_t count,
                       const struct range_list *needed) {
    struct maker m = {pieces, mask, needed, count + 1};
    int64_t place = 0;
    int fits = 1;
    *pieces = (struct pieces){memory_allocate((size_t)m.room * sizeof *pieces->data), 0, 0, 0};
    if (!pieces->data)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %lld ranges of rows", (long long)count);
    if (fits_spans(&m, ranges, count)) {
        for (int64_t i = 0; fits && i < count; place += ranges[i].end - ranges[i].first, i++)
            fits = add_span(&m, ranges[i], place);
    } else {
        for (int64_t i = 0, next; fits && i < count; i = next) { /* as long as positions rise */
            for (next = i + 1; next < count && ranges[next - 1].end <= ranges[next].first;)
                next++;
            fits = add_folded(&m, ranges + i, next - i, place);
            place += ranges_size(ranges + i, next - i);
        }
    }
    return fits ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the intervals of a rank's calls");
}

fdm_status pieces_whole(struct pieces *pieces, const fdm_rank_mask *mask) {
    struct maker m = {.made = pieces, .mask = mask, .room = 1};
    const size_t bytes = (size_t)(mask->num_lists * mask->seqlen_k) * sizeof *mask->interval_start;
    *pieces = (struct pieces){memory_allocate(sizeof *pieces->data), 0, 0, 0};
    if (!pieces->data)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a rank's call");
    struct piece *piece = next_piece(&m);
    piece->rows = (fdm_range){0, mask->seqlen_q};
    piece->keys = piece->columns = (fdm_range){0, mask->seqlen_k};
    piece->causal = mask->causal;
    piece->left = mask->window_left;
    piece->right = mask->window_right;
    if (!mask->num_lists)
        return FDM_OK;
    if (!allocate_intervals(piece, mask->num_lists))
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the intervals of a rank's call");
    if (bytes) {
        memcpy(piece->start, mask->interval_start, bytes);
        memcpy(piece->end, mask->interval_end, bytes);
    }
    return FDM_OK;
}

static fdm_status to_device(int32_t **list, size_t bytes, int32_t device) {
    void *copy = NULL;
    fdm_status status = cuda_memory_allocate(device, bytes, &copy);
    if (!status && (status = cuda_memory_copy(device, copy, *list, bytes, 0)))
        cuda_memory_release(device, copy);
    if (status)
        copy = NULL;
    memory_release(*list);
    *list = copy;
    return status;
}

fdm_status pieces_to_device(struct pieces *pieces, int64_t lists, int32_t device) {
    fdm_status status = FDM_OK;
    for (int64_t i = 0; i < pieces->count; i++) {
        struct piece *piece = &pieces->data[i];
        const int64_t count = lists * (piece->keys.end - piece->keys.first) + 1;
        int32_t **const both[] = {&piece->start, &piece->end};
        for (int n = 0; n < 2; n++)
            if (status)
                memory_release(*both[n]), *both[n] = NULL;
            else if (*both[n])
                status = to_device(both[n], (size_t)count * sizeof **both[n], device);
    }
    pieces->on_device = 1;
    pieces->device = device;
    return status;
}

static void release_list(const struct pieces *pieces, int32_t *list) {
    if (!pieces->on_device)
        memory_release(list);
    else if (list)
        cuda_memory_release(pieces->device, list);
}

void pieces_release(struct pieces *pieces) {
    for (int64_t i = 0; i < pieces->count; i++) {
        release_list(pieces, pieces->data[i].start);
        release_list(pieces, pieces->data[i].end);
    }
    memory_release(pieces->data);
    *pieces = (struct pieces){0};
}
