/* tile_maps.c: layouts of tensor maps. */
#include "gpu/tile_maps.h"

int64_t tile_map_stride(int64_t extent, int64_t stride, int32_t bytes) { return extent > 1 ? stride * bytes : 16; }

struct cuda_tensor_layout tile_rows_layout(const fdm_problem *p, const struct matrix_view *view, int64_t columns,
                                           int64_t rows, int64_t heads, int32_t box_rows) {
    return (struct cuda_tensor_layout){.type = p->dtype == FDM_FLOAT16 ? CUDA_MAP_FLOAT16 : CUDA_MAP_BFLOAT16,
                                       .rank = 4,
                                       .address = view->data,
                                       .extents = {columns, rows, heads, p->varlen ? 1 : p->batch},
                                       .stride_bytes = {2, tile_map_stride(rows, view->row, 2),
                                                        tile_map_stride(heads, view->head, 2),
                                                        p->varlen ? 16 : tile_map_stride(p->batch, view->batch, 2)},
                                       .box = {64, box_rows, 1, 1},
                                       .swizzle_bytes = 128,
                                       .l2_bytes = 256};
}

struct cuda_tensor_layout tile_scores_layout(const struct score_view *view, const int64_t *shape, fdm_dtype dtype,
                                             int32_t box_rows) {
    const int32_t bytes = fdm_dtype_bytes(dtype);
    return (struct cuda_tensor_layout){.type = dtype == FDM_BOOL      ? CUDA_MAP_UINT8
                                               : dtype == FDM_FLOAT32 ? CUDA_MAP_FLOAT32
                                               : dtype == FDM_FLOAT16 ? CUDA_MAP_FLOAT16
                                                                      : CUDA_MAP_BFLOAT16,
                                       .rank = 4,
                                       .address = view->data,
                                       .extents = {shape[3], shape[2], shape[1], shape[0]},
                                       .stride_bytes = {bytes, tile_map_stride(shape[2], view->row, bytes),
                                                        tile_map_stride(shape[1], view->head, bytes),
                                                        tile_map_stride(shape[0], view->batch, bytes)},
                                       .box = {128 / bytes, box_rows, 1, 1},
                                       .swizzle_bytes = 128,
                                       .l2_bytes = 256};
}
