/* topk_threshold.cu: the bound at the end of each chunk of keys, or of each span of chunks, for topk_intervals.
 *
 * Idea: the W-th largest of the keys up to there by radix selection from the highest digit on. Each digit's bins say in
 * which of them the W-th is; only keys of that bin matter further. When the bin holds exactly as many keys as are still
 * wanted, its lowest number is the bound and the other digits are not looked at: ties alone need the digits of the
 * index. Keys are read again for each digit; they come from the second-level cache.
 *
 * A block a bound, two bins a thread; the bounds with most keys first. Bound by the chain of passes: five digits at the
 * most of 32 + 20 bits, with four barriers each. */
#include "gpu/masks/topk_keys.cuh"

#define NUM_WARPS (CHUNK / 32)
#define NUM_BINS  (2 * CHUNK)

/* Binary logarithm of a power of 2. */
__device__ constexpr int log2_of(int x) { return x == 1 ? 0 : 1 + log2_of(x / 2); }
#define DIGIT_BITS log2_of(NUM_BINS)

struct found_bin {
    uint32_t digit, wanted, inside; /* of the keys inside the bin, the `wanted` largest are kept */
};

/* Sum of x up to this thread, itself included; *total is that of all. One barrier. */
__device__ __forceinline__ uint32_t block_sum_upto(uint32_t x, uint32_t *warp_sums, uint32_t *total) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, upto = warp_sum_upto(x);
    if (lane == 31)
        warp_sums[warp] = upto;
    __syncthreads();
    const uint32_t sums = warp_sum_upto(lane < NUM_WARPS ? warp_sums[lane] : 0);
    const uint32_t before = __shfl_sync(0xffffffffu, sums, (int)(warp + 31) % 32);
    *total = __shfl_sync(0xffffffffu, sums, 31);
    return upto + (warp > 0 ? before : 0);
}

/* Fills `found` with the bin of the wanted-th key from the largest bin down, when there are more keys; returns how many
 * there are. The bins are complete. */
__device__ __forceinline__ uint32_t find_bin(const uint32_t *bins, uint32_t *warp_sums, uint32_t wanted,
                                             struct found_bin *found) {
    const uint32_t digit = NUM_BINS - 1 - 2 * threadIdx.x, high = bins[digit], low = bins[digit - 1];
    uint32_t total;
    const uint32_t upto = block_sum_upto(high + low, warp_sums, &total), before = upto - high - low;
    if (before < wanted && wanted <= upto) {
        const bool in_high = wanted <= before + high;
        found->digit = in_high ? digit : digit - 1;
        found->wanted = wanted - (in_high ? before : before + high);
        found->inside = in_high ? high : low;
    }
    return total;
}

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
