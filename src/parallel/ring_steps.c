/* ring_steps.c: the ring's plan: in step t a rank has the keys that it needs of the rank t before it. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "parallel/ranks_plan.h"

/* Adds the needed keys that an owner has, in the order of positions. */
static int add_owned(const fdm_layout *keys, const struct range_list *needed, int32_t owner, struct range_list *owned) {
    int fits = 1;
    for (int64_t n = 0; n < needed->count; n++) {
        const fdm_range want = needed->data[n];
        for (int64_t k = layout_range_at(keys, want.first); k < keys->num_ranges && keys->sorted[k].first < want.end;
             k++) {
            const struct owned_range *own = &keys->sorted[k];
            const int64_t first = own->first > want.first ? own->first : want.first;
            if (own->owner == owner)
                fits &= range_list_add(owned, first, own->end < want.end ? own->end : want.end);
        }
    }
    return fits;
}

/* Calls on keys [first, end) of the list, which lie from `place` on in the step's buffer. */
static fdm_status make_fold(struct pieces *fold, const fdm_layout *rows, int32_t rank, const fdm_rank_mask *mask,
                            struct range_list keys, int64_t place) {
    const int64_t first = rows->begin[rank];
    const fdm_status status = pieces_make(fold, mask, rows->ranges + first, rows->begin[rank + 1] - first, &keys);
    for (int64_t i = 0; !status && i < fold->count; i++) {
        fold->data[i].keys.first += place;
        fold->data[i].keys.end += place;
    }
    return status;
}

/* The first step has every row, with keys or without. */
static fdm_status make_folds(struct ring_step *step, const fdm_layout *rows, int32_t rank, const fdm_rank_mask *mask,
                             const struct range_list *keys, int has_columns, int is_first) {
    const int64_t count = has_columns && keys->count ? keys->count : keys->count || is_first ? 1 : 0;
    step->buffer_rows = ranges_size(keys->data, keys->count);
    step->folds = memory_allocate((size_t)(count + 1) * sizeof *step->folds);
    if (!step->folds)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the ring of %d ranks", rows->ranks);
    memset(step->folds, 0, (size_t)(count + 1) * sizeof *step->folds);
    fdm_status status = FDM_OK;
    int64_t place = 0;
    while (!status && step->num_folds < count) {
        const int64_t n = step->num_folds++;
        const struct range_list part = has_columns && keys->count ? (struct range_list){keys->data + n, 1, 1} : *keys;
        status = make_fold(&step->folds[n], rows, rank, mask, part, place);
        place += ranges_size(part.data, part.count);
    }
    return status;
}

fdm_status ring_steps_make(fdm_ranks_plan *plan, const fdm_layout *rows, const fdm_layout *keys,
                           const fdm_rank_mask *mask, const struct range_list *needed, int has_columns) {
    const int32_t ranks = plan->ranks;
    const size_t bytes = (size_t)ranks * sizeof *plan->steps;
    struct range_list *owned = memory_allocate((size_t)ranks * sizeof *owned);
    plan->steps = memory_allocate(bytes);
    fdm_status status =
        owned && plan->steps ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the ring of %d ranks", ranks);
    if (plan->steps)
        memset(plan->steps, 0, bytes);
    for (int32_t t = 0; !status && t < ranks; t++) {
        struct ring_step *step = &plan->steps[t];
        int fits = 1;
        memset(owned, 0, (size_t)ranks * sizeof *owned);
        for (int32_t r = 0; r < ranks; r++)
            fits &= add_owned(keys, &needed[r], (r - t + ranks) % ranks, &owned[r]);
        if (!fits)
            status = error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the keys of %d ranks", ranks);
        if (!status)
            status = routes_make(keys, owned, plan->rank, &step->sends, &step->receives);
        if (!status)
            status = make_folds(step, rows, plan->rank, mask, &owned[plan->rank], has_columns, t == 0);
        for (int32_t r = 0; r < ranks; r++)
            range_list_release(&owned[r]);
        plan->buffer_rows = step->buffer_rows > plan->buffer_rows ? step->buffer_rows : plan->buffer_rows;
    }
    memory_release(owned);
    return status;
}

void ring_steps_release(fdm_ranks_plan *plan) {
    for (int32_t t = 0; plan->steps && t < plan->ranks; t++) {
        struct ring_step *step = &plan->steps[t];
        routes_release(&step->sends);
        routes_release(&step->receives);
        for (int64_t n = 0; n < step->num_folds; n++)
            pieces_release(&step->folds[n]);
        memory_release(step->folds);
    }
    memory_release(plan->steps);
}
