/* softmax_plan.h: the list of softmax kernels, and what a plan launches. */
#ifndef FDM_SOFTMAX_PLAN_H
#define FDM_SOFTMAX_PLAN_H

#include "companions/companion.h"
#include "companions/softmax/softmax.h"

extern const struct companion_operation softmax_operation;

/* The kernels that the plan launches; 0 for a plan that companion_choose() cannot have made. */
int32_t softmax_requests(const struct fdm_softmax_plan *plan, struct cuda_kernel_request *requests);
/* Fills what of the parameters depends on the plan, and enqueues. */
fdm_status softmax_launch(const struct fdm_softmax_plan *plan, struct softmax_params *params, void *workspace,
                          void *stream);

#endif
