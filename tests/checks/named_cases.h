/* named_cases.h: how the listed problems are written: a loop begins one, sets what differs, and adds it to a group. */
#ifndef FDM_NAMED_CASES_H
#define FDM_NAMED_CASES_H

#include "checks.h"

#define FOR_EACH(list, at) for (size_t at = 0; at < sizeof(list) / sizeof *(list); at++)
static const fdm_dtype named_dtypes[] = {FDM_BFLOAT16, FDM_FLOAT16};

extern struct named_case named_next; /* what a loop has not set is as named_begin() leaves it */
void named_begin(const char *kernel, fdm_pass pass, int64_t head_dim, fdm_dtype dtype);
void named_shape(int64_t batch, int64_t heads, int64_t heads_kv, int64_t seqlen_q, int64_t seqlen_k);
void named_window(int64_t left, int64_t right);
void named_add(const char *group);

/* named_masks.c */
void named_tile_plans(void);
void named_seen_tiles(void);
void named_wide_intervals(void);
void named_rows(const char *kernel, fdm_pass pass, int32_t float32, int runs);
/* named_forms.c */
void named_forms(void);

#endif
