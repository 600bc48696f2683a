/* intervals_to_mask.cu: key intervals as a dense mask.
 *
 * Idea: a thread keeps the intervals of a few neighbouring keys in registers and writes what each of its block's rows
 * shows of them, as one word where the rows are aligned. Bound by writing the mask once. */
#include "masks/dense/dense_params.h"

__device__ __forceinline__ void show_rows(const struct to_mask_params &a, int64_t of_head, int32_t rows, int32_t keys) {
    const int64_t batch = of_head / a.num_heads, head = of_head % a.num_heads;
    const int32_t first = (keys * TO_MASK_THREADS + (int32_t)threadIdx.x) * TO_MASK_KEYS;
    const int32_t count = min(TO_MASK_KEYS, a.num_keys - first);
    int32_t start[TO_MASK_KEYS], end[TO_MASK_KEYS];
    if (count <= 0)
        return;
#pragma unroll
    for (int n = 0; n < TO_MASK_KEYS; n++) {
        const int64_t key = min(first + n, a.num_keys - 1);
        start[n] = a.start.data[batch * a.start.batch + head * a.start.head + key * a.start.key];
        end[n] = a.end.data[batch * a.end.batch + head * a.end.head + key * a.end.key];
    }
    const int32_t last_row = min((rows + 1) * TO_MASK_ROWS, a.seqlen_q);
    for (int32_t i = rows * TO_MASK_ROWS; i < last_row; i++) {
        uint8_t *row = a.mask.data + batch * a.mask.batch + head * a.mask.head + i * a.mask.row + first * a.mask.key;
        uint32_t word = 0;
#pragma unroll
        for (int n = 0; n < TO_MASK_KEYS; n++)
            word |= (uint32_t)(start[n] <= i && i < end[n]) << 8 * n;
        if (a.words)
            *(uint32_t *)row = word;
        else
            for (int n = 0; n < count; n++)
                row[n * a.mask.key] = (uint8_t)(word >> 8 * n);
    }
}

extern "C" __global__ void __launch_bounds__(TO_MASK_THREADS)
    intervals_to_mask(const __grid_constant__ struct to_mask_params a) {
    for (int64_t item = blockIdx.x; item < a.num_items; item += gridDim.x) {
        const int64_t of_keys = item / a.key_groups;
        show_rows(a, of_keys / a.row_groups, (int32_t)(of_keys % a.row_groups), (int32_t)(item % a.key_groups));
    }
}
