/* tree.h: the tree of a draft: which rows of a sequence see which of its last keys. */
#ifndef FDM_TREE_H
#define FDM_TREE_H

#include "problem/problem.h"

/* What a problem says of a tree. */
fdm_status tree_validate(const fdm_problem *problem);
/* The tree of tensors, where they hold one: fills the problem's fact and the view. */
fdm_status tree_resolve(const fdm_tensors *tensors, fdm_problem *problem, struct attention *attention);

/* Words of row i of a sequence; NULL: the call has no tree. */
static inline const uint32_t *tree_row(const struct attention *a, const struct sequence *s, int64_t b, int64_t i) {
    const struct tree_view *v = &a->tree;
    return v->data ? v->data + b * v->batch + (s->q_begin + i) * v->row : NULL;
}
/* Whether a row sees key j of the sequence, as far as its tree says. */
static inline int tree_holds(const struct attention *a, const struct sequence *s, const uint32_t *row, int64_t j) {
    const int64_t t = j - (s->seqlen_k - s->seqlen_q);
    return t < 0 || (row[t / 32 * a->tree.word] >> t % 32 & 1);
}

#endif
