/* tile_maps.h: how the tensor maps of kernels see q, k, v and dout, and masks and biases with rows: tiles of 128 bytes
 * a row. */
#ifndef FDM_TILE_MAPS_H
#define FDM_TILE_MAPS_H

#include "cuda/cuda.h"
#include "problem/problem.h"

/* The stride of an axis in bytes; of an axis of one entry, one that every map takes. */
int64_t tile_map_stride(int64_t extent, int64_t stride, int32_t bytes);

/* Columns, rows, heads, batches of a matrix of 16-bit elements, in boxes of 64 columns and `box_rows` rows with the
 * 128-byte swizzle. rows: of all sequences where they are packed. */
struct cuda_tensor_layout tile_rows_layout(const fdm_problem *problem, const struct matrix_view *view, int64_t columns,
                                           int64_t rows, int64_t heads, int32_t box_rows);
/* Keys, query rows, heads, batches of a mask (FDM_BOOL) or bias of such a shape, in boxes of 128 bytes and `box_rows`
 * rows with the same swizzle. Axes that are shared have one entry. */
struct cuda_tensor_layout tile_scores_layout(const struct score_view *view, const int64_t *shape, fdm_dtype dtype,
                                             int32_t box_rows);

#endif
