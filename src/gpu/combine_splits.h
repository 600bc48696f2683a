/* combine_splits.h: the contract of combine_splits.cu, which takes struct gpu_forward_params; for C and CUDA C. */
#ifndef FDM_COMBINE_SPLITS_H
#define FDM_COMBINE_SPLITS_H

#include "cuda/constants.h"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

#define COMBINE_SPLITS_WARPS 4
#define GPU_SPLITS_MAX       128 /* of the keys: a thread for each */

#endif
