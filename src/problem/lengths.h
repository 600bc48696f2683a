/* lengths.h: cu_seqlens and seqused of a call, checked. */
#ifndef FDM_LENGTHS_H
#define FDM_LENGTHS_H

#include "problem/problem.h"

/* cu_seqlens and seqused of a call: sets batch, lengths and totals of a packed problem, and the lists of `attention`. A
 * dense problem has its batch and lengths. */
fdm_status lengths_describe(const fdm_tensors *tensors, const fdm_options *options, fdm_problem *problem,
                            struct attention *attention);
/* One of cu_seqlens: never falls, from 0 or above to at most `total`; *longest receives the longest sequence. On a CUDA
 * device its values are not looked at: that would wait for the device. */
fdm_status lengths_check_cu_seqlens(const fdm_tensor *tensor, const char *name, int64_t batch, int64_t total,
                                    int64_t *longest);

#endif
