/* hopper_panels.cuh: matrices of 16-bit elements in panels (cuda/panels.cuh), which TMA writes and wgmma reads. */
#ifndef FDM_HOPPER_PANELS_CUH
#define FDM_HOPPER_PANELS_CUH

#include "cuda/panels.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

/* Loads `count` panels of 64 columns and `rows` rows, from row `row` of a head on, to `to`, in the map's boxes of
 * `box` rows. `barrier` counts the bytes. */
template <int count, int rows, int box = rows>
__device__ __forceinline__ void load_panels(uint32_t to, const struct cuda_tensor_map *map, uint32_t barrier, int row,
                                            int head, int batch) {
#pragma unroll
    for (int n = 0; n < count; n++)
#pragma unroll
        for (int part = 0; part < rows; part += box)
            cp_async_bulk_tensor_4d(panels<rows>{to}.panel(n).rows(part).at, map, barrier, n * 64, row + part, head,
                                    batch);
}

/* The n-th operand of a product that sums over columns, 16 at a time; over rows. */
template <int rows> __device__ __forceinline__ uint64_t by_columns(const panels<rows> &matrix, int n) {
    return wgmma_descriptor(matrix.at, 0) + ((matrix.columns_16(n) - matrix.at) >> 4);
}
template <int rows> __device__ __forceinline__ uint64_t by_rows(const panels<rows> &matrix, int n) {
    return wgmma_descriptor(matrix.at, panels<rows>::BYTES) + ((matrix.rows_16(n) - matrix.at) >> 4);
}

#endif
