/* intervals_from_mask.cu: a dense mask as key intervals, and whether it is one per key.
 *
 * Idea: the rows that see a key are one run exactly when they are as many as from the first of them to the last. A
 * block takes RUN_KEYS neighbouring keys of a head and cuts the rows into slices, a warp each; first, last and number
 * of rows of the slices are put together in shared memory. Bound by reading the mask once, 32 neighbouring bytes at a
 * time. */
#include "masks/intervals/interval_params.h"

#define THREADS (RUN_KEYS * RUN_SLICES)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    intervals_from_mask(const __grid_constant__ struct run_params a) {
    __shared__ int32_t firsts[THREADS], lasts[THREADS], counts[THREADS];
    const int32_t lane = (int32_t)threadIdx.x % RUN_KEYS, slice = (int32_t)threadIdx.x / RUN_KEYS;
    const int64_t of_head = blockIdx.x / (uint32_t)a.groups;
    const int64_t batch = of_head / a.num_heads, head = of_head % a.num_heads;
    const int64_t j = (int64_t)(blockIdx.x % (uint32_t)a.groups) * RUN_KEYS + lane;
    const int64_t rows = a.seqlen_q;
    const int32_t begin = (int32_t)(rows * slice / RUN_SLICES), end = (int32_t)(rows * (slice + 1) / RUN_SLICES);
    int32_t first = a.seqlen_q, last = -1, count = 0;
    if (j < a.num_keys) {
        const uint8_t *column = a.mask + batch * a.mask_batch + head * a.mask_head + j * a.mask_key;
#pragma unroll 8
        for (int32_t i = begin; i < end; i++)
            if (column[i * a.mask_row] != 0) {
                first = count == 0 ? i : first;
                last = i;
                count++;
            }
    }
    firsts[threadIdx.x] = first;
    lasts[threadIdx.x] = last;
    counts[threadIdx.x] = count;
    __syncthreads();
    if (slice > 0 || j >= a.num_keys)
        return;
    for (int32_t n = lane + RUN_KEYS; n < THREADS; n += RUN_KEYS) {
        first = min(first, firsts[n]);
        last = max(last, lasts[n]);
        count += counts[n];
    }
    if (count > 0 && count != last - first + 1)
        *a.exact = 0;
    a.start.data[batch * a.start.batch + head * a.start.head + j * a.start.key] = first;
    a.end.data[batch * a.end.batch + head * a.end.head + j * a.end.key] = count == 0               ? a.seqlen_q
                                                                          : last == a.seqlen_q - 1 ? 0x7fffffff
                                                                                                   : last + 1;
}
