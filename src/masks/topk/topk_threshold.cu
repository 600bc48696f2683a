/* topk_threshold.cu: the bound at the end of each chunk of keys, or of each span of chunks, for topk_intervals.
 *
 * Idea: the W-th largest of the keys up to there by radix selection from the highest digit on. Each digit's bins say in
 * which of them the W-th is; only keys of that bin matter further. When the bin holds exactly as many keys as are still
 * wanted, its lowest number is the bound and the other digits are not looked at: ties alone need the digits of the
 * index. Keys are read again for each digit; they come from the second-level cache.
 *
 * A block a bound, two bins a thread; the bounds with most keys first. Bound by the chain of passes: five digits at the
 * most of 32 + 20 bits, with four barriers each. */
#include "masks/topk/topk_bins.cuh"

extern "C" __global__ void __launch_bounds__(CHUNK, 1) topk_threshold(const __grid_constant__ struct topk_params a) {
    __shared__ uint32_t bins[NUM_BINS];
    __shared__ uint32_t warp_sums[NUM_WARPS];
    __shared__ struct found_bin found;
    const int32_t num_bounds = a.of_spans ? a.num_spans : a.num_chunks;
    const int32_t number = num_bounds - 1 - (int32_t)blockIdx.x / a.num_rows;
    const struct topk_row row = topk_row_of(a, (int32_t)blockIdx.x % a.num_rows);
    struct topk_span span = {0, 0, a.window, 0};
    if (!a.of_spans)
        span = topk_span_of(a, row, number / (a.span / CHUNK));
    const int32_t end = min((number + 1) * (a.of_spans ? a.span : CHUNK), a.num_keys);
    struct topk_bound bound = {1, 0, 0};
    uint32_t wanted = (uint32_t)span.room;
    uint64_t prefix = 0; /* of the wanted-th key: its digits so far */
    int shift = VALUE_BITS + a.index_bits;
    if (wanted == 0)
        bound.threshold = 1ull << shift;
    for (bool first = true; wanted > 0; first = false) {
        const int above = shift, bits = min(DIGIT_BITS, shift);
        shift -= bits;
        bins[threadIdx.x] = bins[threadIdx.x + CHUNK] = 0;
        __syncthreads();
        visit_span(a, row, span, end, [&](uint64_t key) {
            if (key >> above == prefix)
                atomicAdd(&bins[(uint32_t)(key >> shift) & ((1u << bits) - 1)], 1u);
        });
        __syncthreads();
        const uint32_t total = find_bin(bins, warp_sums, wanted, &found);
        if (first && total <= wanted) { /* all are kept */
            bound.kept = (int32_t)total;
            break;
        }
        __syncthreads();
        prefix = prefix << bits | found.digit;
        wanted = found.wanted;
        if (wanted == found.inside) {
            bound.threshold = prefix << shift;
            bound.kept = span.room;
            break;
        }
    }
    if (threadIdx.x == 0)
        (a.of_spans ? a.span_bounds : a.chunk_bounds)[(int64_t)row.number * num_bounds + number] = bound;
}
