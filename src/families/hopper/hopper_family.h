/* hopper_family.h: the algorithms of the hopper family. */
#ifndef FDM_HOPPER_FAMILY_H
#define FDM_HOPPER_FAMILY_H

#include "gpu/gpu_family.h"

extern const struct gpu_algorithm hopper_forward_algorithm;
extern const struct gpu_algorithm hopper_gather_algorithm;

/* The tensor map of q, k or v: tiles of 64 columns and box_rows rows; axes are columns, rows, heads, batches. */
struct cuda_tensor_layout hopper_rows_layout(const fdm_problem *problem, const struct matrix_view *view,
                                             int64_t columns, int64_t rows, int64_t heads, int32_t box_rows);

#endif
