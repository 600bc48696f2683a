/* plan_predicted.h: fdm plan --predict. */
#ifndef FDM_CLI_PLAN_PREDICTED_H
#define FDM_CLI_PLAN_PREDICTED_H

#include "flash_dmattn.h"

/* Prints them; `of`: the plan's options, topk: W of intervals, 0 = unknown. Returns the command's exit code. */
int plan_predicted(const fdm_device *device, const fdm_problem *problem, const fdm_options *of, int64_t topk, int json);

#endif
