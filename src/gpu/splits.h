/* splits.h: a forward whose keys are split over blocks, on the host: where the splits leave their results in the
 * workspace, and the launch that combines them (combine_splits.cu). */
#ifndef FDM_SPLITS_H
#define FDM_SPLITS_H

#include "gpu/combine_splits.h"
#include "gpu/gpu_family.h"

/* Query rows of all heads: each has a result in every split. */
static inline int64_t splits_rows(const fdm_problem *p) {
    return p->varlen ? p->heads * p->total_q : p->batch * p->heads * p->seqlen_q;
}
int64_t splits_workspace_bytes(const fdm_problem *problem, int32_t splits);
/* Tells the parameters how many splits there are and where in the workspace each leaves its results. */
void splits_fill(const fdm_problem *problem, int32_t splits, char *workspace, struct gpu_forward_params *params);

void combine_splits_request(const fdm_problem *problem, struct cuda_kernel_request *request);
/* early: it may begin before the splits have ended, which then say so (griddepcontrol). */
void combine_splits_add(struct gpu_launches *launches, int early, const struct gpu_forward_params *params);

#endif
