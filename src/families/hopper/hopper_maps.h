/* hopper_maps.h: how the tensor maps of the family's kernels see q, k, v and dout. */
#ifndef FDM_HOPPER_MAPS_H
#define FDM_HOPPER_MAPS_H

#include "cuda/cuda.h"
#include "problem/problem.h"

/* The stride of an axis in bytes; of an axis of one entry, one that every map takes. */
int64_t hopper_stride(int64_t extent, int64_t stride, int32_t bytes);

/* Columns, rows, heads, batches of a matrix of 16-bit elements, in boxes of 64 columns and `box_rows` rows with the
 * 128-byte swizzle. rows: of all sequences where they are packed. */
struct cuda_tensor_layout hopper_rows_layout(const fdm_problem *problem, const struct matrix_view *view,
                                             int64_t columns, int64_t rows, int64_t heads, int32_t box_rows);

#endif
