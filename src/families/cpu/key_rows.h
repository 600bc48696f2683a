/* key_rows.h: where rows of K and V begin, of a call's own tensors or of a cache. */
#ifndef FDM_CPU_KEY_ROWS_H
#define FDM_CPU_KEY_ROWS_H

#include "problem/problem.h"

/* Keys of one KV head that lie one row behind the other in K or in V. */
struct key_run {
    const struct attention *attention;
    const struct sequence *sequence;
    int64_t batch, kv_head;
    int of_values;
    int64_t first, last; /* the same before the first key_address() */
    const char *base;    /* of key 0, were it in the run */
    int64_t step;
};

static inline const char *key_address(struct key_run *run, int64_t key) {
    if (key < run->first || key >= run->last) {
        const struct key_place place = attention_key_place(run->attention, run->sequence, run->batch, key);
        const struct matrix_view *view = run->of_values ? place.v : place.k;
        const int64_t bytes = fdm_dtype_bytes(run->attention->problem->dtype);
        run->first = key;
        run->last = key + place.count;
        run->step = view->row * bytes;
        run->base = view->data +
                    (place.batch * view->batch + place.row * view->row + run->kv_head * view->head) * bytes -
                    key * run->step;
    }
    return run->base + key * run->step;
}

#endif
