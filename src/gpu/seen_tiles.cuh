/* seen_tiles.cuh: the tile plan for kernels that look at each key: the tiles of keys that none of a block's rows sees,
 * where no look is needed. Such a kernel finds the same keys with a plan and without one.
 *
 * These kernels have no block mask; in its place the parameters have the plan's words (tile_plan_add_of_keys()). */
#ifndef FDM_SEEN_TILES_CUH
#define FDM_SEEN_TILES_CUH

#include "gpu/tile_plan.h"
#include "gpu/visible.cuh"

/* What the plan has: key intervals, or a mask that all rows share. Other kernels leave the functions here out by `if
 * constexpr`, and so keep their code. */
#define SEEN_TILES ((INTERVALS || (MASK && !MASK_ROWS)) && !BLOCK_MASKED)

/* A bit for each of the word-th 32 tiles of keys: one of `rows` rows from first_row on sees some of it. */
template <int rows>
__device__ __forceinline__ uint32_t seen_tiles(const struct gpu_forward_params &a, int batch, int head, int first_row,
                                               int word) {
    const uint8_t *const words = a.block_mask + batch * a.block_mask_batch +
                                 head / a.block_mask_group * a.block_mask_head + word * (int64_t)sizeof(uint32_t);
    const int end = (min(first_row + rows, a.seqlen_q) + TILE_PLAN_TILE - 1) / TILE_PLAN_TILE;
    uint32_t seen = 0;
#pragma unroll 1
    for (int tile = first_row / TILE_PLAN_TILE; tile < end; tile++)
        seen |= __ldg((const uint32_t *)(words + tile * a.block_mask_row));
    return seen;
}

/* The first key from `key` on, below `end`, that lies in such a tile; `end` where there is none; `key` without a plan.
 * The same for all threads that ask the same. */
template <int rows>
__device__ __forceinline__ int next_seen_key(const struct gpu_forward_params &a, int batch, int head, int first_row,
                                             int key, int end) {
    if (!a.block_mask)
        return key;
    int tile = key / TILE_PLAN_TILE;
#pragma unroll 1
    while (tile * TILE_PLAN_TILE < end) {
        const uint32_t seen = seen_tiles<rows>(a, batch, head, first_row, tile / 32) >> tile % 32;
        if (seen)
            return min(max(key, (tile + __ffs((int)seen) - 1) * TILE_PLAN_TILE), end);
        tile = (tile / 32 + 1) * 32;
    }
    return end;
}

/* Whether there is a plan, and no row sees any of `keys` keys from `key` on, which lie in a tile or fill some. */
template <int rows, int keys>
__device__ __forceinline__ bool hides_keys(const struct gpu_forward_params &a, int batch, int head, int first_row,
                                           int key) {
    return next_seen_key<rows>(a, batch, head, first_row, key, key + keys) == key + keys;
}

#endif
