/* row_ranges.cuh: row intervals and block masks: the runs of keys that a query row sees. */
#ifndef FDM_ROW_RANGES_CUH
#define FDM_ROW_RANGES_CUH

#include "gpu/forward_params.h"

#define ROW_RUNS (ROW_INTERVALS || BLOCKS) /* rows have runs of keys, which both leave */

/* Where start and end of a row's first range lie, and the first byte of its blocks. */
struct row_ranges {
    const int32_t *start, *end;
    const char *blocks;
};
/* Of row `row` of a sequence that begins at row q_begin, for a query head. */
__device__ __forceinline__ struct row_ranges ranges_of_row(const struct gpu_forward_params &a, int batch,
                                                           int64_t q_begin, int head, int row) {
    struct row_ranges ranges = {};
    if (ROW_INTERVALS) {
        const struct gpu_row_intervals &r = a.row_intervals;
        const int64_t h = head / r.group, i = q_begin + row;
        ranges.start = r.start + batch * r.start_batch + h * r.start_head + i * r.start_row;
        ranges.end = r.end + batch * r.end_batch + h * r.end_head + i * r.end_row;
    }
    if (BLOCKS) {
        const struct gpu_blocks &b = a.blocks;
        ranges.blocks = b.data + batch * b.batch + head / b.group * b.head + (row >> b.shift) * b.row;
    }
    return ranges;
}

/* Where the block after that of a row or key begins. */
__device__ __forceinline__ int next_block(const struct gpu_blocks &b, int n) { return ((n >> b.shift) + 1) << b.shift; }

/* Whether the block of a key is visible; of a key past the last one, that of the last. */
__device__ __forceinline__ bool block_holds(const struct gpu_blocks &b, const struct row_ranges &row, int key) {
    return row.blocks[min((uint32_t)key >> b.shift, (uint32_t)b.key_blocks - 1) * b.key];
}

/* Whether a range of the row holds a key, and its block is visible. */
__device__ __forceinline__ bool ranges_hold(const struct gpu_forward_params &a, const struct row_ranges &row, int key) {
    const struct gpu_row_intervals &r = a.row_intervals;
    bool held = !ROW_INTERVALS;
#pragma unroll 1
    for (int n = 0; ROW_INTERVALS && n < r.ranges; n++)
        held = held || (row.start[n * r.start_range] <= key && key < row.end[n * r.end_range]);
    return held && (!BLOCKS || block_holds(a.blocks, row, key));
}

/* The same for `count` keys, key_of(0) and so on, as a bit each; of ranges alone, and of both. */
template <int count, class numbering>
__device__ __forceinline__ uint32_t keys_in_ranges(const struct gpu_forward_params &a, const struct row_ranges &row,
                                                   const numbering &key_of) {
    static_assert(count <= 32, "a bit each");
    const struct gpu_row_intervals &r = a.row_intervals;
    uint32_t held = ROW_INTERVALS ? 0 : 0xffffffff >> (32 - count);
#pragma unroll 1
    for (int n = 0; ROW_INTERVALS && n < r.ranges; n++) {
        const int start = row.start[n * r.start_range], end = row.end[n * r.end_range];
#pragma unroll
        for (int i = 0; i < count; i++) {
            const int key = key_of(i);
            held |= (uint32_t)(start <= key && key < end) << i;
        }
    }
    return held;
}
template <int count, class numbering>
__device__ __forceinline__ uint32_t keys_held(const struct gpu_forward_params &a, const struct row_ranges &row,
                                              const numbering &key_of) {
    uint32_t held = keys_in_ranges<count>(a, row, key_of);
    if (BLOCKS) {
#pragma unroll
        for (int i = 0; i < count; i++)
            held &= ~((uint32_t)!block_holds(a.blocks, row, key_of(i)) << i);
    }
    return held;
}

/* The word-th 32-bit word of a row of bits whose bits from .. to - 1 are set. */
__device__ __forceinline__ uint32_t run_of_bits(int word, int from, int to) {
    const int low = max(from - word * 32, 0), high = min(to - word * 32, 32);
    return low < high ? 0xffffffffu << low & 0xffffffffu >> (32 - high) : 0;
}

/* The ranges of a row, cut to the keys first <= key < last. A range that another one overlaps or touches at its end is
 * extended to that one's end. */
#define ROW_RANGES_MAX 4
struct joined_ranges {
    int start[ROW_RANGES_MAX], end[ROW_RANGES_MAX];
};
__device__ __forceinline__ struct joined_ranges join_ranges(const struct gpu_row_intervals &r,
                                                            const struct row_ranges &row, int first, int last) {
    struct joined_ranges joined;
#pragma unroll
    for (int n = 0; n < ROW_RANGES_MAX; n++) {
        joined.start[n] = n < r.ranges ? max(row.start[n * r.start_range], first) : 0;
        joined.end[n] = n < r.ranges ? min(row.end[n * r.end_range], last) : 0;
    }
#pragma unroll
    for (int pass = 1; pass < ROW_RANGES_MAX; pass++)
#pragma unroll
        for (int n = 0; n < ROW_RANGES_MAX; n++)
#pragma unroll
            for (int other = 0; other < ROW_RANGES_MAX; other++)
                if (joined.start[n] < joined.end[n] && joined.start[other] <= joined.end[n])
                    joined.end[n] = max(joined.end[n], joined.end[other]);
    return joined;
}

/* A bit for each of the word-th 32 tiles of tile_keys keys: the ranges touch the tile (seen), or cover it (full). The
 * last tile ends with the sequence's last key. */
struct tile_bits {
    uint32_t seen, full;
};
__device__ __forceinline__ struct tile_bits tiles_of_ranges(const struct joined_ranges &ranges, int word, int tile_keys,
                                                            int seqlen_k) {
    struct tile_bits tiles = {0, 0};
#pragma unroll
    for (int n = 0; n < ROW_RANGES_MAX; n++) {
        const int start = ranges.start[n], end = ranges.end[n];
        if (start >= end)
            continue;
        tiles.seen |= run_of_bits(word, start / tile_keys, (end + tile_keys - 1) / tile_keys);
        tiles.full |= run_of_bits(word, (start + tile_keys - 1) / tile_keys,
                                  (end + (end == seqlen_k ? tile_keys - 1 : 0)) / tile_keys);
    }
    return tiles;
}

#endif
