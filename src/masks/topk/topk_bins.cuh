/* topk_bins.cuh: the bins of a radix selection by a block, two a thread, for topk_threshold.cu and create_mask.cu. */
#ifndef FDM_TOPK_BINS_CUH
#define FDM_TOPK_BINS_CUH

#include "masks/topk/topk_keys.cuh"

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

#endif
