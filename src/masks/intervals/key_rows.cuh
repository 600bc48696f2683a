/* key_rows.cuh: what the kernels that make key intervals by rules have in common. */
#ifndef FDM_KEY_ROWS_CUH
#define FDM_KEY_ROWS_CUH

#include "masks/topk/topk_params.h"

/* A bound past int32 is as good as the largest int32. */
__device__ __forceinline__ int32_t clamp_row(int64_t row) {
    return row > 0x7fffffff ? 0x7fffffff : row < -0x7fffffff - 1 ? -0x7fffffff - 1 : (int32_t)row;
}

/* The index of the first of `count` numbers, which rise, that is above `value` (or_equal: or as large); `count` when
 * there is none. Of other numbers it is an index in that range too. */
__device__ __forceinline__ int64_t first_above(const int32_t *data, int64_t stride, int64_t count, int32_t value,
                                               bool or_equal) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        const int32_t number = data[middle * stride];
        if (number < value || (!or_equal && number == value))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

#endif
