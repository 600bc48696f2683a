/* key_sort.cu: sorts keys by the last row that sees them, for the backwards.
 *
 * Idea: keys that rows stop seeing at about the same time belong in one tile. Among neighbouring keys of a dynamic
 * mask some are seen to the end and most are not, so that nearly every tile of neighbours is active for nearly every
 * row; in this order a tile of long-lived keys stays and the others end early, or are never seen. Keys stay within
 * their group of KEY_SORT_KEYS, since the first row that may see a tile follows from its first key.
 *
 * One block a group; a bitonic network (Batcher 1968) over 64-bit words of last row and number, in shared memory: no
 * two are equal, so the order is unique. Grid: groups of all heads and batches of the intervals; where there are more
 * than a grid has blocks, a block takes several. */
#include "cuda/ptx/math.cuh"
#include "gpu/key_sort.h"
#include "gpu/numbers.h"

/* The row past the last one that sees key j; 0 where no row does. */
__device__ __forceinline__ int last_row(const struct key_sort_params &a, int64_t batch, int64_t head, int64_t j) {
    if (j >= a.seqlen_k)
        return -1;
    const struct gpu_intervals &i = a.intervals;
    const int64_t diagonal = (int64_t)a.seqlen_k - a.seqlen_q;
    int64_t first = i.start[batch * i.start_batch + head * i.start_head + j * i.start_key];
    int64_t last = min(i.end[batch * i.end_batch + head * i.end_head + j * i.end_key], a.seqlen_q);
    first = max(first, (int64_t)0);
    if (a.window_right != UNBOUNDED)
        first = max(first, j - diagonal - a.window_right);
    if (a.window_left != UNBOUNDED)
        last = min(last, j - diagonal + a.window_left + 1);
    return first < last ? (int)last : 0;
}

__device__ __forceinline__ void sort_group(const struct key_sort_params &a, uint64_t *words, int64_t of_head,
                                           int64_t begin) {
    const int64_t batch = of_head / a.num_heads, head = of_head % a.num_heads;
    for (int n = threadIdx.x; n < KEY_SORT_KEYS; n += KEY_SORT_THREADS) {
        const uint64_t rank = UNBOUNDED - (int64_t)last_row(a, batch, head, begin + n); /* the longest seen first */
        words[n] = rank << 32 | (uint64_t)n;
    }
    for (int size = 2; size <= KEY_SORT_KEYS; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            const int low = threadIdx.x / step * step * 2 + threadIdx.x % step, high = low + step;
            const uint64_t x = words[low], y = words[high];
            const bool rising = !(low & size);
            if ((x > y) == rising) {
                words[low] = y;
                words[high] = x;
            }
        }
    __syncthreads();
    int32_t *to = a.order + of_head * a.stride + begin;
    for (int n = threadIdx.x; n < KEY_SORT_KEYS; n += KEY_SORT_THREADS)
        to[n] = (int32_t)(begin + (int64_t)(words[n] & 0xffffffffu));
}

extern "C" __global__ void __launch_bounds__(KEY_SORT_THREADS)
    key_sort(const __grid_constant__ struct key_sort_params a) {
    __shared__ uint64_t words[KEY_SORT_KEYS];
    if (a.scattered && !*a.scattered)
        return;
    for (int64_t n = blockIdx.x; n < a.num_sorts; n += gridDim.x) {
        sort_group(a, words, n / a.num_groups, n % a.num_groups * KEY_SORT_KEYS);
        __syncthreads(); /* the words are read */
    }
}
