/* blocks_from_lists.cu: lists of blocks as a block mask.
 *
 * Idea: a warp hides the blocks of its row, then shows those that the row's list names. A count beyond the list's room
 * is cut to it, and an index outside of the row names nothing. Bound by memory: the lists are read and the mask is
 * written once. */
#include "masks/dense/dense_params.h"

__device__ __forceinline__ void show_list(const struct list_params &a, int64_t list) {
    const int lane = threadIdx.x % 32;
    const int64_t of_head = list / a.num_rows, row = list % a.num_rows;
    const int64_t batch = of_head / a.num_heads, head = of_head % a.num_heads;
    const struct dense_mask &m = a.blocks;
    uint8_t *blocks = m.data + batch * m.batch + head * m.head + row * m.row;
    for (int key = lane; key < a.num_keys; key += 32)
        blocks[key * m.key] = 0;
    __syncwarp();
    const int32_t *indices = a.indices + batch * a.index_batch + head * a.index_head + row * a.index_row;
    const int count = min(a.counts.data[batch * a.counts.batch + head * a.counts.head + row * a.counts.key], a.room);
    for (int n = lane; n < count; n += 32) {
        const int key = indices[n * a.index_entry];
        if (key >= 0 && key < a.num_keys)
            blocks[key * m.key] = 1;
    }
}

extern "C" __global__ void __launch_bounds__(LISTS_THREADS)
    blocks_from_lists(const __grid_constant__ struct list_params a) {
    for (int64_t group = blockIdx.x; group < a.num_groups; group += gridDim.x) {
        const int64_t list = group * (LISTS_THREADS / 32) + threadIdx.x / 32;
        if (list < a.num_lists)
            show_list(a, list);
    }
}
