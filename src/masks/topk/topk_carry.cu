/* topk_carry.cu: of each span of keys, those that were there before and leave within it, for topk_intervals.
 *
 * Idea: a key that is kept at the end of the span before and not at the end of this one leaves within it, and nothing
 * else that was there before matters to it but the places it takes. As many leave as arrive, or fewer, so a span's list
 * is not longer than the span. Its order is left to chance: what is made of it sorts it.
 *
 * A block a span, the spans with most keys first. */
#include "masks/topk/topk_keys.cuh"

extern "C" __global__ void __launch_bounds__(CHUNK, 1) topk_carry(const __grid_constant__ struct topk_params a) {
    __shared__ uint32_t listed;
    const int32_t number = a.num_spans - 1 - (int32_t)blockIdx.x / a.num_rows;
    const struct topk_row row = topk_row_of(a, (int32_t)blockIdx.x % a.num_rows);
    const int64_t at = (int64_t)row.number * a.num_spans + number;
    const struct topk_bound before = number > 0 ? a.span_bounds[at - 1] : topk_bound{1, 0, 0};
    const uint64_t threshold = a.span_bounds[at].threshold;
    uint64_t *list = a.carried + at * a.span;
    if (threadIdx.x == 0)
        listed = 0;
    __syncthreads();
    visit_keys(a, row, 0, number * a.span, [&](uint64_t key) {
        if (before.threshold <= key && key < threshold) {
            const uint32_t place = atomicAdd(&listed, 1u);
            if (place < (uint32_t)a.span)
                list[place] = key;
        }
    });
    __syncthreads();
    if (threadIdx.x == 0)
        a.carries[at] = {(int32_t)listed, a.window - (before.kept - (int32_t)listed)};
}
