/* key_intervals.h: masks as key intervals on the CPU; the arguments have been checked. */
#ifndef FDM_KEY_INTERVALS_H
#define FDM_KEY_INTERVALS_H

#include "flash_dmattn.h"

/* A bound of an interval. Rows are raw; past int32 the last one is as good. */
static inline int32_t clamp_row(int64_t row) {
    return row > INT32_MAX ? INT32_MAX : row < INT32_MIN ? INT32_MIN : (int32_t)row;
}

/* Causal masks, windows and prefixes: key j is visible to rows from j - row_shift - right (from 0 where j < prefix) to
 * j - row_shift + left. */
struct interval_rule {
    int64_t row_shift; /* Sk - Sq */
    int64_t prefix;
    int64_t left, right; /* left -1 = unbounded; sums with keys fit */
};

/* start, end [B, h, Sk]: the same for all of B and h. */
void intervals_by_rule(const struct interval_rule *rule, const fdm_tensor *start, const fdm_tensor *end);
void intervals_of_documents(const int32_t *cu_seqlens, int64_t stride, int64_t num_documents, int32_t causal,
                            const fdm_tensor *start, const fdm_tensor *end);
/* Whether each key's rows are one run; when not, nothing is written. mask [B, h, Sq, Sk]. */
int intervals_from_mask(const fdm_tensor *mask, const fdm_tensor *start, const fdm_tensor *end);

size_t topk_workspace_on_cpu(int64_t num_keys);
void topk_on_cpu(const fdm_tensor *bias, const fdm_tensor *padding, int64_t window, int64_t seqlen_q,
                 const fdm_tensor *start, const fdm_tensor *end, void *workspace);

#endif
