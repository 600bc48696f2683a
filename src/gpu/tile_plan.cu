/* tile_plan.cu: the tile plan of key intervals and of masks that all rows share, cut by causal, window and ends.
 *
 * Idea: the rows that see a key are a range, so the tiles of rows that it touches and those that it covers are runs of
 * bits. A warp has a tile of keys, two keys a lane, and makes a word of 32 tiles of rows at a time: the number of keys
 * that each of them sees follows from a transpose of 32 x 32 bits. Blocks of 32 tiles of keys turn their words, so that
 * a row of the plan is a tile of rows. Bound by neither memory nor arithmetic at the sizes that occur: a few
 * microseconds, mostly its launch.
 *
 * Grid: in one dimension, groups of 32 tiles of keys, then words, then heads and batches. The counts are 0 when it
 * begins. */
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "gpu/tile_plan.h"
#include "gpu/visible.cuh"

#define TILE TILE_PLAN_TILE

/* Bits of the tiles from .. to - 1 in the word-th 32. */
__device__ __forceinline__ uint32_t run_of_bits(int word, int from, int to) {
    const int low = max(from - word * 32, 0), high = min(to - word * 32, 32);
    return low < high ? 0xffffffffu << low & 0xffffffffu >> (32 - high) : 0;
}
__device__ __forceinline__ uint32_t touched_tiles(int word, const struct key_bounds &rows) {
    return rows.first < rows.last ? run_of_bits(word, rows.first / TILE, (rows.last + TILE - 1) / TILE) : 0;
}
/* The last tile's rows end with the sequence. */
__device__ __forceinline__ uint32_t covered_tiles(int word, const struct key_bounds &rows, int seqlen_q) {
    return rows.first < rows.last ? run_of_bits(word, (rows.first + TILE - 1) / TILE,
                                                (rows.last + (rows.last == seqlen_q ? TILE - 1 : 0)) / TILE)
                                  : 0;
}

/* Bit j of lane i becomes bit i of lane j. */
__device__ __forceinline__ uint32_t transpose_bits(uint32_t x) {
    const int lane = threadIdx.x % 32;
    uint32_t low = 0x0000ffff;
#pragma unroll
    for (int step = 16; step; step /= 2, low ^= low << step) {
        const uint32_t other = __shfl_xor_sync(0xffffffff, x, step);
        x = lane & step ? (x & ~low) | (other >> step & low) : (x & low) | (other & low) << step;
    }
    return x;
}

/* The words of 32 tiles of keys for one tile of rows each, from those of tiles of rows for one tile of keys each. */
__device__ __forceinline__ uint32_t turn_words(uint32_t (&words)[TILE_PLAN_WARPS]) {
    return __ballot_sync(0xffffffff, words[threadIdx.x % 32] >> threadIdx.x / 32 & 1);
}

extern "C" __global__ void __launch_bounds__(32 * TILE_PLAN_WARPS)
    tile_plan(const __grid_constant__ struct tile_plan_params a) {
    __shared__ uint32_t seen_words[TILE_PLAN_WARPS], full_words[TILE_PLAN_WARPS], dense_words[TILE_PLAN_WARPS];
    griddepcontrol_launch_dependents(); /* they wait for this one's end by themselves */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int block = blockIdx.x; block < a.blocks; block += gridDim.x) {
        const int key_word = block % a.plan.key_words, word = block / a.plan.key_words % a.row_words;
        const int of_head = block / a.plan.key_words / a.row_words;
        const struct sequence s = find_sequence(a.in, of_head / a.heads);
        const int head = of_head % a.heads * a.plan.group, key = (key_word * 32 + warp) * TILE + lane;
        const struct key_bounds left = rows_of_key(a.in, s, head, key), right = rows_of_key(a.in, s, head, key + 32);
        const int seeing = __popc(transpose_bits(touched_tiles(word, left))) +
                           __popc(transpose_bits(touched_tiles(word, right))); /* keys, of the lane-th tile of rows */
        const uint32_t seen = __ballot_sync(0xffffffff, seeing > 0);
        const uint32_t dense = __ballot_sync(0xffffffff, seeing >= TILE / 2);
        const uint32_t full = __reduce_and_sync(0xffffffff, covered_tiles(word, left, s.seqlen_q) &
                                                                covered_tiles(word, right, s.seqlen_q));
        if (lane == 0) {
            seen_words[warp] = seen;
            full_words[warp] = full;
            dense_words[warp] = dense;
        }
        __syncthreads();
        const uint32_t of_rows = turn_words(seen_words), covered = turn_words(full_words);
        const int row_tile = word * 32 + warp;
        if (lane == 0 && row_tile < a.plan.row_tiles) {
            const int64_t at = ((int64_t)of_head * a.plan.row_tiles + row_tile) * a.plan.key_words + key_word;
            a.plan.seen[at] = of_rows;
            a.plan.full[at] = covered;
        }
        if (warp == 0) {
            const int tiles = (int)__reduce_add_sync(0xffffffff, __popc(seen_words[lane]));
            const int half_seen = (int)__reduce_add_sync(0xffffffff, __popc(dense_words[lane]));
            if (lane == 0 && tiles > 0) {
                atomicAdd(&a.plan.counts[of_head].seen, tiles);
                atomicAdd(&a.plan.counts[of_head].dense, half_seen);
            }
        }
        __syncthreads();
    }
}
