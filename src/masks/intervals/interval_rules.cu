/* interval_rules.cu: causal masks, windows, prefixes and documents as key intervals.
 *
 * Idea: a key's rows follow from its number alone, or from the document that it lies in, which is found by bisection of
 * the offsets. A thread a key, for all heads; bound by the writes. */
#include "masks/intervals/interval_params.h"
#include "masks/intervals/key_rows.cuh"

extern "C" __global__ void __launch_bounds__(INTERVAL_THREADS)
    interval_rules(const __grid_constant__ struct interval_params a) {
    const int64_t j = (int64_t)blockIdx.x * INTERVAL_THREADS + threadIdx.x;
    if (j >= a.num_keys)
        return;
    int32_t start, end;
    if (a.cu_seqlens) {
        const int64_t above = first_above(a.cu_seqlens, a.cu_stride, a.num_documents + 1, (int32_t)j, false);
        const bool inside = 0 < above && above <= a.num_documents;
        start = inside && !a.causal ? a.cu_seqlens[(above - 1) * a.cu_stride] : (int32_t)j;
        end = inside ? a.cu_seqlens[above * a.cu_stride] : (int32_t)j;
    } else {
        start = j < a.prefix ? 0 : clamp_row(j - a.row_shift - a.right);
        end = a.left < 0 ? 0x7fffffff : clamp_row(j - a.row_shift + a.left + 1);
    }
    for (int32_t row = 0; row < a.num_rows; row++) {
        const int64_t batch = row / a.num_heads, head = row % a.num_heads;
        a.start.data[batch * a.start.batch + head * a.start.head + j * a.start.key] = start;
        a.end.data[batch * a.end.batch + head * a.end.head + j * a.end.key] = end;
    }
}
