/* kept_plan.cu: what the masks of pairs leave of a kept mask plan, and the block mask that a kernel reads, out of one.
 *
 * Idea: join_mask_plan() takes the bytes of tiles of 64 rows and 64 keys and clears the bits of tiles that they hide. A
 * warp has a word, a lane a tile. mask_plan_blocks() goes the other way, for tiles of a kernel's own size: some row of
 * a tile sees some key where a tile of the plan that it touches is seen, and it is full where all of those are. Bound
 * by neither memory nor arithmetic: a plan is small.
 *
 * Grid: in one dimension, groups of MASK_PLAN_WARPS words of the plan, or of 32 tiles of the block mask. */
#include "gpu/kept_plan.h"

__device__ __forceinline__ int64_t first_item() { return (int64_t)blockIdx.x * MASK_PLAN_WARPS + threadIdx.x / 32; }

extern "C" __global__ void __launch_bounds__(32 * MASK_PLAN_WARPS)
    join_mask_plan(const __grid_constant__ struct join_plan_params a) {
    const struct tile_plan &plan = a.plan;
    for (int64_t item = first_item(); item < a.num_words; item += (int64_t)gridDim.x * MASK_PLAN_WARPS) {
        const int word = (int)(item % plan.key_words), tile = word * 32 + (int)threadIdx.x % 32;
        const int row_tile = (int)(item / plan.key_words % plan.row_tiles);
        const int of_head = (int)(item / plan.key_words / plan.row_tiles);
        const int batch = of_head / a.heads, head = of_head % a.heads * plan.group;
        int kind = GPU_BLOCK_HIDDEN;
        if (tile < a.num_tiles)
            kind = a.block_mask[batch * a.block_mask_batch + head / a.block_mask_group * a.block_mask_head +
                                row_tile * a.block_mask_row + tile];
        const uint32_t seen = __ballot_sync(0xffffffff, kind != GPU_BLOCK_HIDDEN);
        const uint32_t full = __ballot_sync(0xffffffff, kind == GPU_BLOCK_FULL);
        if (threadIdx.x % 32 == 0) {
            plan.seen[item] &= seen;
            plan.full[item] &= full;
        }
    }
}

/* The byte of tile number `tile`: a.block_n keys by `rows` tiles of the plan's rows from the first one on. */
__device__ __forceinline__ uint8_t kind_of(const struct plan_blocks_params &a, int64_t first, int rows, int tile) {
    const int64_t key = (int64_t)tile * a.block_n;
    const int first_key = (int)(key / TILE_PLAN_TILE);
    const int last_key = (int)((min(key + a.block_n, (int64_t)a.seqlen_k) + TILE_PLAN_TILE - 1) / TILE_PLAN_TILE);
    bool seen = false, full = true;
    for (int row = 0; row < rows; row++)
        for (int n = first_key; n < last_key; n++) {
            const int64_t at = (first + row) * a.plan.key_words + n / 32;
            seen |= a.plan.seen[at] >> n % 32 & 1;
            full &= a.plan.full[at] >> n % 32 & 1;
        }
    return !seen ? GPU_BLOCK_HIDDEN : full ? GPU_BLOCK_FULL : GPU_BLOCK_PARTIAL;
}

extern "C" __global__ void __launch_bounds__(32 * MASK_PLAN_WARPS)
    mask_plan_blocks(const __grid_constant__ struct plan_blocks_params a) {
    for (int64_t item = first_item(); item < a.num_items; item += (int64_t)gridDim.x * MASK_PLAN_WARPS) {
        const int tile = (int)(item % a.words) * 32 + (int)threadIdx.x % 32;
        const int64_t block = item / a.words, of_head = block / a.row_blocks;
        const int64_t row = block % a.row_blocks * a.block_m;
        const int first = (int)(row / TILE_PLAN_TILE);
        const int last = min((int)((row + a.block_m + TILE_PLAN_TILE - 1) / TILE_PLAN_TILE), a.plan.row_tiles);
        if (tile < a.num_tiles)
            a.block_mask[block * a.row_bytes + tile] =
                kind_of(a, of_head * a.plan.row_tiles + first, last - first, tile);
    }
}
