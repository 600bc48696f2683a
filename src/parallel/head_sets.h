/* head_sets.h: sets of KV heads that travel together. */
#ifndef FDM_PARALLEL_HEAD_SETS_H
#define FDM_PARALLEL_HEAD_SETS_H

#include <stdint.h>

enum { HEAD_SETS_MAX = 4 };

struct head_sets {
    int32_t count;
    int64_t heads[HEAD_SETS_MAX];
};

/* The first and the last set are the fewest heads that are worth a launch: nothing hides the first one's keys and the
 * last one's gradients. Those between share the rest. */
static inline struct head_sets head_sets_of(int64_t heads_kv, int64_t fewest, int32_t most) {
    if (fewest < 1)
        fewest = 1;
    const int64_t between = heads_kv - 2 * fewest;
    if (heads_kv < 2 * fewest || most < 2)
        return (struct head_sets){1, {heads_kv}};
    if (heads_kv < 3 * fewest || most < 3)
        return (struct head_sets){2, {fewest, heads_kv - fewest}};
    if (between <= 3 * fewest || most < 4)
        return (struct head_sets){3, {fewest, between, fewest}};
    return (struct head_sets){4, {fewest, between / 2, between - between / 2, fewest}};
}

/* Heads of the sets before one. */
static inline int64_t head_sets_before(const struct head_sets *sets, int32_t set) {
    int64_t heads = 0;
    for (int32_t n = 0; n < set; n++)
        heads += sets->heads[n];
    return heads;
}

/* Most heads of those sets that take turns in one of `slots` buffers. */
static inline int64_t head_sets_most(const struct head_sets *sets, int32_t slots, int32_t slot) {
    int64_t most = 0;
    for (int32_t n = slot; n < sets->count; n += slots)
        most = sets->heads[n] > most ? sets->heads[n] : most;
    return most;
}

#endif
