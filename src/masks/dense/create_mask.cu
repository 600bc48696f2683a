/* create_mask.cu: a dense mask of the W largest biases of each row, or of those above 0, smoothed by blocks of keys.
 *
 * Idea: the W-th largest of the row by radix selection, as in topk_threshold.cu: keys are their biases' bits in their
 * order above the inverted index, so that no two are equal and ties are decided. Hidden keys share one bias, which is
 * never kept: where the selection reaches it, it ends. Then each key is compared with the bound.
 *
 * A block a row. Shared memory: the biases of the first CREATE_STAGED_KEYS keys, read once; those behind them are read
 * again for each digit, from the second-level cache. Bound by the chain of passes over the row: two or three of random
 * float32 biases, and one to write. */
#include "masks/dense/dense_params.h"
#include "masks/topk/topk_bins.cuh"

struct mask_row {
    const char *bias;
    const uint8_t *shown;
    uint8_t *mask;
};

__device__ __forceinline__ struct mask_row row_of(const struct create_mask_params &a, int64_t number) {
    const int64_t i = number % a.seqlen_q, of_head = number / a.seqlen_q;
    const int64_t batch = of_head / a.num_heads, head = of_head % a.num_heads;
    struct mask_row row = {a.bias, a.shown, a.mask.data + batch * a.mask.batch + head * a.mask.head + i * a.mask.row};
    row.bias += (batch * a.bias_batch + head * a.bias_head + i * a.bias_row) * (VALUE_BITS / 8);
    if (a.shown)
        row.shown += batch * a.shown_batch + head * a.shown_head + i * a.shown_row;
    return row;
}

/* The place of key j's bias in the order. */
__device__ __forceinline__ uint32_t read_order(const struct create_mask_params &a, const struct mask_row &row,
                                               int32_t j) {
    const char *at = row.bias + j * a.bias_key * (VALUE_BITS / 8);
    const uint32_t bits = VALUE_BITS == 32 ? *(const uint32_t *)at : *(const uint16_t *)at;
    const bool is_nan = (bits & ~(1u << (VALUE_BITS - 1))) > infinite_bits();
    const bool shown = !row.shown || j < a.first_shown || row.shown[(j - a.first_shown) * a.shown_key] != 0;
    return shown && !is_nan ? ordered(bits) : a.hidden;
}

__device__ __forceinline__ uint64_t above_index(const struct create_mask_params &a, uint32_t order, int32_t j) {
    return (uint64_t)order << a.index_bits | ((1u << a.index_bits) - 1 - (uint32_t)j);
}

/* Each key and the place of its bias, by one thread of the block. */
template <class Visit>
__device__ __forceinline__ void visit_row(const struct create_mask_params &a, const struct mask_row &row,
                                          const uint32_t *staged, Visit visit) {
    const int32_t first_read = min(CREATE_STAGED_KEYS, a.num_keys);
    for (int32_t j = (int32_t)threadIdx.x; j < first_read; j += CHUNK)
        visit(staged[j], j);
    for (int32_t j = first_read + (int32_t)threadIdx.x; j < a.num_keys; j += CHUNK)
        visit(read_order(a, row, j), j);
}

/* The least key that is kept, but for hidden ones. By the whole block. */
__device__ __forceinline__ uint64_t find_threshold(const struct create_mask_params &a, const struct mask_row &row,
                                                   const uint32_t *staged, uint32_t *bins, uint32_t *warp_sums,
                                                   struct found_bin *found) {
    if (a.window == 0)
        return (uint64_t)(ordered(0) + 1) << a.index_bits;
    uint32_t wanted = (uint32_t)a.window;
    uint64_t prefix = 0; /* of the wanted-th key: its digits so far */
    int shift = a.window < a.num_keys ? VALUE_BITS + a.index_bits : 0;
    while (shift > 0) {
        const int above = shift, bits = min(DIGIT_BITS, shift);
        shift -= bits;
        bins[threadIdx.x] = bins[threadIdx.x + CHUNK] = 0;
        __syncthreads();
        visit_row(a, row, staged, [&](uint32_t order, int32_t j) {
            const uint64_t key = above_index(a, order, j);
            if (key >> above == prefix)
                atomicAdd(&bins[(uint32_t)(key >> shift) & ((1u << bits) - 1)], 1u);
        });
        __syncthreads();
        find_bin(bins, warp_sums, wanted, found);
        __syncthreads();
        prefix = prefix << bits | found->digit;
        wanted = found->wanted;
        const bool is_hidden = shift <= a.index_bits && prefix >> (a.index_bits - shift) == a.hidden;
        if (wanted == found->inside || is_hidden)
            break;
    }
    return prefix << shift;
}

/* A block of keys becomes all 1 where more than half of it is, else all 0; a warp a block. The last may be short. */
__device__ __forceinline__ void smooth_blocks(const struct create_mask_params &a, uint8_t *mask) {
    const int32_t lane = (int32_t)threadIdx.x % 32, warp = (int32_t)threadIdx.x / 32;
    for (int64_t first = (int64_t)warp * a.block_size; first < a.num_keys; first += (int64_t)NUM_WARPS * a.block_size) {
        const int32_t last = (int32_t)min(first + a.block_size, (int64_t)a.num_keys);
        uint32_t kept = 0;
        for (int32_t j = (int32_t)first + lane; j < last; j += 32)
            kept += mask[j * a.mask.key];
        kept = __shfl_sync(0xffffffffu, warp_sum_upto(kept), 31);
        for (int32_t j = (int32_t)first + lane; j < last; j += 32)
            mask[j * a.mask.key] = 2 * (int64_t)kept > last - (int32_t)first;
    }
}

extern "C" __global__ void __launch_bounds__(CHUNK) create_mask(const __grid_constant__ struct create_mask_params a) {
    __shared__ uint32_t staged[CREATE_STAGED_KEYS];
    __shared__ uint32_t bins[NUM_BINS];
    __shared__ uint32_t warp_sums[NUM_WARPS];
    __shared__ struct found_bin found;
    for (int64_t number = blockIdx.x; number < a.num_rows; number += gridDim.x) {
        const struct mask_row row = row_of(a, number);
        for (int32_t j = (int32_t)threadIdx.x; j < min(CREATE_STAGED_KEYS, a.num_keys); j += CHUNK)
            staged[j] = read_order(a, row, j);
        __syncthreads();
        const uint64_t threshold = find_threshold(a, row, staged, bins, warp_sums, &found);
        visit_row(a, row, staged, [&](uint32_t order, int32_t j) {
            row.mask[j * a.mask.key] = order != a.hidden && above_index(a, order, j) >= threshold;
        });
        __syncthreads(); /* what was staged is read, and the row is written */
        if (a.block_size > 1)
            smooth_blocks(a, row.mask);
    }
}
