/* row_block_mask.cu: which tiles of row intervals and of the caller's blocks are hidden, partial or full; beside a
 * mask, what all leave.
 *
 * Idea: of 32 tiles of keys, those that a row's ranges touch and those that they cover are runs of bits. A warp has 32
 * tiles and all rows of a block, some a lane; the or of the rows' touched tiles and the and of their covered ones are
 * exact. Ranges that overlap or touch are joined first. Of the caller's blocks a lane looks at those that its tile
 * touches. Where both hide something, a tile is partial also where no pair is left that both show: nothing is lost but
 * its time. Bound by neither memory nor arithmetic at the sizes that occur.
 *
 * Grid: blocks of rows, of all heads and batches in turn; where there are more than a grid has blocks, a block takes
 * several. The warps of a block take words of 32 tiles in turn. */
#include "gpu/block_mask.h"
#include "gpu/packed.cuh"
#include "gpu/row_ranges.cuh"

/* A bit for each of 32 tiles of keys: some row of the block sees some key; every row sees every key. For a warp. */
__device__ __forceinline__ struct tile_bits look_at_tiles(const struct row_block_mask_params &a,
                                                          const struct sequence &s, int head, int first_row, int word) {
    struct tile_bits tiles = {0, 0xffffffff};
    for (int n = threadIdx.x % 32; n < a.block_m && first_row + n < s.seqlen_q; n += 32) {
        const struct gpu_row_intervals &r = a.in.row_intervals;
        const struct row_ranges row = ranges_of_row(a.in, s.batch, s.q_begin, head, first_row + n);
        const struct tile_bits own = tiles_of_ranges(join_ranges(r, row, 0, s.seqlen_k), word, a.block_n, s.seqlen_k);
        tiles.seen |= own.seen;
        tiles.full &= own.full;
    }
    return {__reduce_or_sync(0xffffffff, tiles.seen), __reduce_and_sync(0xffffffff, tiles.full)};
}

/* The same of the caller's blocks, of a lane's own tile. */
__device__ __forceinline__ struct tile_bits
look_at_blocks(const struct row_block_mask_params &a, const struct sequence &s, int head, int first_row, int tile) {
    const struct gpu_blocks &b = a.in.blocks;
    const int last_row = min(first_row + a.block_m, s.seqlen_q), first_key = tile * a.block_n;
    const int last_key = min(first_key + a.block_n, s.seqlen_k);
    bool seen = false, full = true;
    for (int row = first_row; row < last_row; row = next_block(b, row)) {
        const struct row_ranges of_row = ranges_of_row(a.in, s.batch, s.q_begin, head, row);
        for (int key = first_key; key < last_key; key = next_block(b, key)) {
            const bool visible = block_holds(b, of_row, key);
            seen |= visible;
            full &= visible;
        }
    }
    return {__ballot_sync(0xffffffff, seen), __ballot_sync(0xffffffff, full)};
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_MASK_WARPS)
    row_block_mask(const __grid_constant__ struct row_block_mask_params a) {
    const int lane = threadIdx.x % 32;
    for (int block = blockIdx.x; block < a.num_blocks; block += gridDim.x) {
        const int row_block = block % a.num_row_blocks, of_head = block / a.num_row_blocks;
        const int batch = of_head / a.num_heads, head = of_head % a.num_heads * (a.in.heads / a.num_heads);
        const struct sequence s = find_sequence(a.in, batch);
        const uint8_t *of_mask = nullptr;
        if (a.beside_mask)
            of_mask = a.in.block_mask + batch * a.in.block_mask_batch +
                      head / a.in.block_mask_group * a.in.block_mask_head + row_block * a.in.block_mask_row;
        for (int word = threadIdx.x / 32; word * 32 < a.num_tiles; word += BLOCK_MASK_WARPS) {
            const int tile = word * 32 + lane, first_row = row_block * a.block_m;
            struct tile_bits tiles = {0xffffffff, 0xffffffff};
            if (ROW_INTERVALS)
                tiles = look_at_tiles(a, s, head, first_row, word);
            if (BLOCKS) {
                const struct tile_bits blocks = look_at_blocks(a, s, head, first_row, tile);
                tiles = {tiles.seen & blocks.seen, tiles.full & blocks.full};
            }
            if (tile >= a.num_tiles)
                continue;
            const int kind = !(tiles.seen >> lane & 1) ? GPU_BLOCK_HIDDEN
                             : tiles.full >> lane & 1  ? GPU_BLOCK_FULL
                                                       : GPU_BLOCK_PARTIAL;
            a.block_mask[(int64_t)block * a.row_bytes + tile] =
                (uint8_t)(of_mask ? min(kind, (int)of_mask[tile]) : kind);
        }
    }
}
