/* ranks_local.h: the tensors that a rank gives to a call, as the plan knows them. */
#ifndef FDM_PARALLEL_RANKS_LOCAL_H
#define FDM_PARALLEL_RANKS_LOCAL_H

#include "parallel/ranks_call.h"

enum { LOCAL_TENSORS = 17 };

/* Descriptions without memory. Each has an address of its own: a multiple of 16, or, unaligned, an element behind. */
struct local_tensors {
    fdm_tensor list[LOCAL_TENSORS];
    int64_t shapes[LOCAL_TENSORS][4];
    fdm_tensors tensors;
};
void local_describe(const fdm_ranks_plan *plan, int unaligned, struct local_tensors *local);
/* Whether a caller's tensors are of these shapes and dtypes, on the plan's device. */
fdm_status local_check(const fdm_ranks_plan *plan, const fdm_tensors *given);

#endif
