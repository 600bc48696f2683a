/* block_views.h: the block mask of a call: what it may be, and where it lies. */
#ifndef FDM_BLOCK_VIEWS_H
#define FDM_BLOCK_VIEWS_H

#include "problem/problem.h"

/* What a problem says of its block mask. */
fdm_status block_mask_validate(const fdm_problem *problem);
/* The block mask of tensors, where they hold one: fills the problem's facts and the view. */
fdm_status block_mask_resolve(const fdm_tensors *tensors, fdm_problem *problem, struct attention *attention);

/* Whether the block of row i and key j of a sequence is visible to query head h; 1 where there is no block mask. */
static inline int block_mask_holds(const struct attention *a, int64_t b, int64_t h, int64_t i, int64_t j) {
    const struct score_view *v = &a->block_mask;
    const int64_t size = a->problem->block_mask_size;
    return !v->data || v->data[b * v->batch + h / v->group * v->head + i / size * v->row + j / size * v->key] != 0;
}

#endif
