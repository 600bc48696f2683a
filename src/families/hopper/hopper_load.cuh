/* hopper_load.cuh: tiles of q, k, v or dout by TMA, in panels of 128 bytes a row. */
#ifndef FDM_HOPPER_LOAD_CUH
#define FDM_HOPPER_LOAD_CUH

#include "cuda/ptx/tma.cuh"

/* `panels` panels of 64 columns and `rows` rows from row `row` of a head on to `to`, in boxes of `box` rows, as the map
 * has them; the bytes count at `barrier`. */
template <int panels, int rows, int box = rows>
__device__ __forceinline__ void load_panels(uint32_t to, const struct cuda_tensor_map *map, uint32_t barrier, int row,
                                            int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < panels; panel++)
#pragma unroll
        for (int part = 0; part < rows; part += box)
            cp_async_bulk_tensor_4d(to + panel * rows * 128 + part * 128, map, barrier, panel * 64, row + part, head,
                                    batch);
}

#endif
