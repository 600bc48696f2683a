/* tile_plan.cu: the tile plan of key intervals, of masks that all rows share, of row intervals and of the caller's
 * blocks, cut by windows and ends.
 *
 * Idea: the rows that see a key are a range, so the tiles of rows that it touches and those that it covers are runs of
 * bits. A warp has a tile of keys, two keys a lane, and makes a word of 32 tiles of rows at a time: the number of keys
 * that each of them sees follows from a transpose of 32 x 32 bits. Blocks of 32 tiles of keys turn their words, so that
 * a row of the plan is a tile of rows. The keys that a row sees by row intervals are ranges: there a warp has a tile of
 * rows, two rows a lane, and its words need no turn. Of the caller's blocks a lane reads the one that its tile is in.
 * Beside each other all hide tiles: then a tile is called seen if each leaves something of it, and full if each leaves
 * all. Where an order is wanted, the block that writes the last word of a head puts the head's blocks of rows in order:
 * with those that see most tiles first, no long one is begun last. Bound by neither memory nor arithmetic at the sizes
 * that occur: a few microseconds, mostly its launch.
 *
 * Grid: in one dimension, groups of 32 tiles of keys, then words, then heads and batches. Where tiles are counted the
 * counts are 0 when it begins; else nothing has to be. */
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "gpu/tile_plan.h"
#include "gpu/visible.cuh"

#define TILE TILE_PLAN_TILE
/* Key intervals say which rows see a key. Windows are cut from key intervals and from row intervals alike. */
#define BY_KEYS (INTERVALS || (MASK && !MASK_ROWS) || !ROW_INTERVALS)

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

/* Rows that see the n-th key of a head. */
__device__ __forceinline__ struct key_bounds find_key(const struct tile_plan_params &a, const struct sequence &s,
                                                      int of_head, int n) {
    if (a.keys && *a.sorted)
        n = n < a.keys_head ? a.keys[(int64_t)of_head * a.keys_head + n] : s.seqlen_k;
    return rows_of_key(a.in, s, of_head % a.heads * a.plan.group, n);
}

/* Of a tile of rows, or of keys: its tiles of keys, or of rows, that are seen and that are full; those seen by half. */
struct tile_words {
    uint32_t seen, full, dense;
};

/* The words of 32 tiles of keys for one tile of rows each, from those of tiles of rows for one tile of keys each. */
__device__ __forceinline__ uint32_t turn_words(uint32_t (&words)[TILE_PLAN_WARPS]) {
    return __ballot_sync(0xffffffff, words[threadIdx.x % 32] >> threadIdx.x / 32 & 1);
}

/* Tiles of keys that the rows of a block see, for a warp. */
__device__ __forceinline__ int count_tiles(const struct tile_plan_params &a, const uint32_t *seen, int row_block) {
    const int first = row_block * a.block_tiles, end = min(first + a.block_tiles, a.plan.row_tiles);
    int tiles = 0;
    for (int word = threadIdx.x % 32; word < a.plan.key_words; word += 32) {
        uint32_t by_some = 0;
        for (int row_tile = first; row_tile < end; row_tile++)
            by_some |= __ldcg(seen + (int64_t)row_tile * a.plan.key_words + word); /* as other blocks wrote it */
        tiles += __popc(by_some);
    }
    return (int)__reduce_add_sync(0xffffffff, tiles);
}

/* Blocks of rows of a head by the tiles that they see, of equals the last rows first. For all threads. */
__device__ __forceinline__ void order_rows(const struct tile_plan_params &a, int of_head) {
    __shared__ uint32_t keys[TILE_PLAN_ORDERED]; /* tiles and number of a block of rows: no two are equal */
    const int64_t first_row = (int64_t)of_head * a.plan.row_tiles;
    const int blocks = (a.plan.row_tiles + a.block_tiles - 1) / a.block_tiles;
    int32_t *order = a.plan.order + first_row;
    if (blocks > TILE_PLAN_ORDERED) {
        for (int i = threadIdx.x; i < blocks; i += 32 * TILE_PLAN_WARPS)
            order[i] = blocks - 1 - i;
        return;
    }
    for (int i = threadIdx.x / 32; i < blocks; i += TILE_PLAN_WARPS) {
        const int tiles =
            min(count_tiles(a, a.plan.seen + first_row * a.plan.key_words, i), (int)(0xffffffffu / TILE_PLAN_ORDERED));
        if (threadIdx.x % 32 == 0)
            keys[i] = (uint32_t)tiles * TILE_PLAN_ORDERED + i;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < blocks; i += 32 * TILE_PLAN_WARPS) {
        int before = 0;
        for (int j = 0; j < blocks; j++)
            before += keys[j] > keys[i];
        order[before] = i;
    }
    __syncthreads(); /* the next head's keys come after all have read these */
}

/* Whether the words of a head are there when this block's are. For all threads. */
__device__ __forceinline__ bool is_last_of_head(const struct tile_plan_params &a, int of_head) {
    __shared__ int written;
    __threadfence();
    __syncthreads(); /* all have written */
    if (threadIdx.x == 0)
        written = atomicAdd(&a.plan.counts[of_head].words, 1);
    __syncthreads();
    __threadfence();
    return written == a.plan.key_words * a.row_words - 1;
}

/* By keys, the words of a warp's tile of keys. */
__device__ __forceinline__ struct tile_words look_at_keys(const struct tile_plan_params &a, const struct sequence &s,
                                                          int of_head, int key_tile, int word) {
    const int key = key_tile * TILE + threadIdx.x % 32;
    const struct key_bounds left = find_key(a, s, of_head, key), right = find_key(a, s, of_head, key + 32);
    const int seeing = __popc(transpose_bits(touched_tiles(word, left))) +
                       __popc(transpose_bits(touched_tiles(word, right))); /* keys, of the lane-th tile of rows */
    return {
        __ballot_sync(0xffffffff, seeing > 0),
        __reduce_and_sync(0xffffffff, covered_tiles(word, left, s.seqlen_q) & covered_tiles(word, right, s.seqlen_q)),
        __ballot_sync(0xffffffff, seeing >= TILE / 2)};
}

/* By row intervals, the words of a warp's tile of rows: ranges are loaded whole, so all that is seen is dense. */
__device__ __forceinline__ struct tile_words look_at_rows(const struct tile_plan_params &a, const struct sequence &s,
                                                          int of_head, int row_tile, int word) {
    const struct gpu_row_intervals &r = a.in.row_intervals;
    struct tile_bits tiles = {0, 0xffffffff};
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int row = row_tile * TILE + n * 32 + (int)threadIdx.x % 32;
        if (row >= s.seqlen_q)
            continue;
        const struct row_ranges ranges = ranges_of_row(a.in, s.batch, s.q_begin, of_head % a.heads * a.plan.group, row);
        const struct tile_bits own = tiles_of_ranges(
            join_ranges(r, ranges, first_key(a.in, s, row), last_key(a.in, s, row) + 1), word, TILE, s.seqlen_k);
        tiles.seen |= own.seen;
        tiles.full &= own.full;
    }
    const uint32_t seen = __reduce_or_sync(0xffffffff, tiles.seen);
    return {seen, __reduce_and_sync(0xffffffff, tiles.full) & seen, seen};
}

/* By blocks, the same: a lane's tile lies in one. */
__device__ __forceinline__ uint32_t look_at_blocks(const struct tile_plan_params &a, const struct sequence &s,
                                                   int of_head, int row_tile, int word) {
    const int row = row_tile * TILE, key = (word * 32 + (int)threadIdx.x % 32) * TILE;
    bool seen = row < s.seqlen_q && key < s.seqlen_k;
    if (seen)
        seen = block_holds(a.in.blocks, ranges_of_row(a.in, s.batch, s.q_begin, of_head % a.heads * a.plan.group, row),
                           key);
    return __ballot_sync(0xffffffff, seen);
}

/* Words of the tiles of rows, a warp each, from those of the tiles of keys; for all threads. */
__device__ __forceinline__ struct tile_words turn(const struct tile_words &of_keys) {
    __shared__ uint32_t seen[TILE_PLAN_WARPS], full[TILE_PLAN_WARPS], dense[TILE_PLAN_WARPS];
    if (threadIdx.x % 32 == 0) {
        seen[threadIdx.x / 32] = of_keys.seen;
        full[threadIdx.x / 32] = of_keys.full;
        dense[threadIdx.x / 32] = of_keys.dense;
    }
    __syncthreads();
    return {turn_words(seen), turn_words(full), turn_words(dense)};
}

/* What each warp's tile of rows sees is added to the counts of the head; for all threads. */
__device__ __forceinline__ void count(const struct tile_plan_params &a, int of_head, const struct tile_words &words) {
    __shared__ int seen[TILE_PLAN_WARPS], dense[TILE_PLAN_WARPS];
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
        seen[threadIdx.x / 32] = __popc(words.seen);
        dense[threadIdx.x / 32] = __popc(words.dense);
    }
    __syncthreads(); /* also: all have read what turn() left */
    if (threadIdx.x >= 32)
        return;
    const int all_seen = __reduce_add_sync(0xffffffff, seen[lane]), half = __reduce_add_sync(0xffffffff, dense[lane]);
    if (lane == 0 && all_seen > 0) {
        atomicAdd(&a.plan.counts[of_head].seen, all_seen);
        atomicAdd(&a.plan.counts[of_head].dense, half);
    }
}

extern "C" __global__ void __launch_bounds__(32 * TILE_PLAN_WARPS)
    tile_plan(const __grid_constant__ struct tile_plan_params a) {
    griddepcontrol_launch_dependents(); /* kernels that begin early wait for this one's end by themselves */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (a.item_counts && blockIdx.x == 0 && threadIdx.x < TILE_PLAN_ITEM_COUNTS)
        a.item_counts[threadIdx.x] = 0;
    for (int block = blockIdx.x; block < a.blocks; block += gridDim.x) {
        const int key_word = block % a.plan.key_words, row_word = block / a.plan.key_words % a.row_words;
        const int of_head = block / a.plan.key_words / a.row_words, row_tile = row_word * 32 + warp;
        const struct sequence s = find_sequence(a.in, of_head / a.heads);
        struct tile_words words = {0xffffffff, 0xffffffff, 0xffffffff};
        if (BY_KEYS)
            words = turn(look_at_keys(a, s, of_head, key_word * 32 + warp, row_word));
        if (ROW_INTERVALS) {
            const struct tile_words by_rows = look_at_rows(a, s, of_head, row_tile, key_word);
            words = {words.seen & by_rows.seen, words.full & by_rows.full, words.dense & by_rows.dense};
        }
        if (BLOCKS) {
            const uint32_t seen = look_at_blocks(a, s, of_head, row_tile, key_word);
            words = {words.seen & seen, words.full & seen, words.dense & seen};
        }
        if (s.seqlen_k % TILE) /* rows see no key behind the sequence's last one */
            words.full &= ~run_of_bits(key_word, s.seqlen_k / TILE, s.seqlen_k / TILE + 1);
        if (lane == 0 && row_tile < a.plan.row_tiles) {
            const int64_t at = ((int64_t)of_head * a.plan.row_tiles + row_tile) * a.plan.key_words + key_word;
            a.plan.seen[at] = words.seen;
            a.plan.full[at] = words.full;
        }
        if (a.counted)
            count(a, of_head, words);
        __syncthreads();
        if (a.block_tiles && is_last_of_head(a, of_head))
            order_rows(a, of_head);
    }
}
