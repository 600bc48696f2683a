/* tune_contents.h: what the files that make a tuner's tensors share: shapes before there is memory, numbers after. */
#ifndef FDM_TUNE_CONTENTS_H
#define FDM_TUNE_CONTENTS_H

#include "tuner/tune_data.h"

void tune_set_shape(struct tune_data *data, enum tune_role role, fdm_dtype dtype, int32_t ndim, const int64_t *shape);

/* Fills the int32 tensor of a role, number by number. */
typedef int32_t (*tune_number)(const fdm_problem *problem, const int32_t *ends, int64_t index);
int32_t tune_end(const fdm_problem *problem, const int32_t *ends, int64_t index); /* the index-th end */
fdm_status tune_fill_numbers(struct tune_data *data, enum tune_role role, tune_number number, const int32_t *ends);

/* Where packed sequences end, from 0 on: lengths fall from the longest on by equal steps and sum up to the total. */
void tune_make_ends(int64_t batch, int64_t longest, int64_t total, int32_t *ends);
/* Of `length` rows or keys of sequence b, those that count: all of the first, half of the last one's. */
int64_t tune_length_used(int64_t length, int64_t b, int64_t batch);

/* Ends of packed sequences, lengths within a call, and trees. */
void tune_set_lengths(struct tune_data *data);
fdm_status tune_fill_lengths(struct tune_data *data);
/* Keys that each sequence has room for; without a cache seqlen_k. */
int64_t tune_cache_room(const fdm_problem *problem);
/* All that a KV cache has besides k and v. */
void tune_set_cache(struct tune_data *data);
fdm_status tune_fill_cache(struct tune_data *data);

#endif
