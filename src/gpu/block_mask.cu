/* block_mask.cu: which tiles of a dense mask are hidden, partial or full.
 *
 * Idea: many heads share a mask, and each of their blocks would read it. This kernel reads it once; each block then
 * lists its tiles from one byte a tile. A warp has a tile, and loads 16 bytes at a time where rows are contiguous and
 * aligned. Bound by memory: the mask is read once.
 *
 * Grid: groups of WARPS tiles of keys, of all row blocks, heads and batches of the mask in turn; where there are
 * more than a grid has blocks, a block takes several. */
#include "cuda/ptx/math.cuh"
#include "gpu/block_mask.h"

__device__ __forceinline__ void look_at_tile(const struct block_mask_params &a, int64_t row_block, int tile) {
    const int lane = threadIdx.x % 32;
    const int64_t of_head = row_block / a.num_row_blocks, batch = of_head / a.num_heads, head = of_head % a.num_heads;
    const int first_row = (int)(row_block % a.num_row_blocks) * a.block_m;
    const int num_rows = min(a.block_m, a.seqlen_q - first_row);
    const int first_key = tile * a.block_n, num_keys = min(a.block_n, a.seqlen_k - first_key);
    const char *from = a.mask.data + batch * a.mask.batch + head * a.mask.head + first_row * a.mask.row +
                       (int64_t)first_key * a.mask.key;
    uint32_t seen = 0, hidden = 0;
    if (a.aligned && num_keys % 16 == 0) {
        const int vectors = num_keys / 16;
#pragma unroll 4
        for (int n = lane; n < num_rows * vectors; n += 32) {
            const uint4 x = *(const uint4 *)(from + n / vectors * a.mask.row + n % vectors * 16);
            seen |= x.x | x.y | x.z | x.w;
            hidden |= zero_bytes(x.x) | zero_bytes(x.y) | zero_bytes(x.z) | zero_bytes(x.w);
        }
    } else {
        for (int n = lane; n < num_rows * num_keys; n += 32) {
            const bool visible = from[n / num_keys * a.mask.row + n % num_keys * a.mask.key];
            seen |= visible;
            hidden |= !visible;
        }
    }
    seen = __any_sync(0xffffffff, seen);
    hidden = __any_sync(0xffffffff, hidden);
    if (lane == 0)
        a.block_mask[row_block * a.row_bytes + tile] = !seen    ? GPU_BLOCK_HIDDEN
                                                       : hidden ? GPU_BLOCK_PARTIAL
                                                                : GPU_BLOCK_FULL;
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_MASK_WARPS)
    block_mask(const __grid_constant__ struct block_mask_params a) {
    const int groups = (a.num_tiles + BLOCK_MASK_WARPS - 1) / BLOCK_MASK_WARPS;
    for (int64_t group = blockIdx.x; group < a.num_groups; group += gridDim.x) {
        const int tile = (int)(group % groups) * BLOCK_MASK_WARPS + threadIdx.x / 32;
        if (tile < a.num_tiles)
            look_at_tile(a, group / groups, tile);
    }
}
