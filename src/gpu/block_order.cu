/* block_order.cu: the order in which the key blocks of a backward begin, for each head of key intervals, and whether
 * the head's keys lie scattered.
 *
 * Idea: a block walks the tiles of rows from the first row that sees one of its keys to the last. Where keys see less
 * than half of what their blocks walk, they are scattered: key_sort.cu sorts them. Elsewhere, as in documents and
 * prefixes, they stay, and the longest walks begin first: a count ranks the walks. 32 keys of a block, evenly spread,
 * stand for all, since the result affects time alone.
 *
 * Grid: a block for each head and batch. Its warps take TOGETHER blocks of keys each; then its threads one. */
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "gpu/block_order.h"
#include "gpu/visible.cuh"

enum { WARPS = BLOCK_ORDER_THREADS / 32, TOGETHER = 8, ROWS_OF_A_TILE = 64 };

/* The rows that a key block walks, in whole tiles, and the mean number of them that see a key. Each lane has a key. */
struct walk {
    int rows;
    float seen;
};
__device__ __forceinline__ struct walk find_walk(const struct sequence &s, const struct key_bounds &key) {
    const bool is_seen = key.first < key.last;
    const int first = __reduce_min_sync(0xffffffff, is_seen ? key.first : s.seqlen_q) / ROWS_OF_A_TILE;
    const int last = (__reduce_max_sync(0xffffffff, is_seen ? key.last : 0) + ROWS_OF_A_TILE - 1) / ROWS_OF_A_TILE;
    const int seen = __reduce_add_sync(0xffffffff, is_seen ? (key.last - key.first) / 32 : 0);
    return {max(last - first, 0) * ROWS_OF_A_TILE, (float)seen};
}

extern "C" __global__ void __launch_bounds__(BLOCK_ORDER_THREADS)
    block_order(const __grid_constant__ struct block_order_params a) {
    __shared__ int rows[BLOCK_ORDER_RANKED];
    __shared__ float walked[WARPS], seen[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int batch = blockIdx.x / a.num_heads, head = blockIdx.x % a.num_heads * a.group;
    const struct sequence s = find_sequence(a.in, batch);
    float all_walked = 0, all_seen = 0;
    griddepcontrol_launch_dependents();
    for (int from = warp; from < a.blocks; from += WARPS * TOGETHER) {
        struct key_bounds keys[TOGETHER]; /* their loads are in flight together */
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            keys[i] = rows_of_key(a.in, s, head, (from + i * WARPS) * a.block_n + lane * (a.block_n - 1) / 31);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const struct walk walk = find_walk(s, keys[i]);
            const int block = from + i * WARPS;
            all_walked += (float)walk.rows;
            all_seen += walk.seen;
            if (lane == 0 && block < min(a.blocks, BLOCK_ORDER_RANKED))
                rows[block] = walk.rows;
        }
    }
    if (lane == 0) {
        walked[warp] = all_walked;
        seen[warp] = all_seen;
    }
    __syncthreads();
    all_walked = all_seen = 0;
    for (int n = 0; n < WARPS; n++) {
        all_walked += walked[n];
        all_seen += seen[n];
    }
    int32_t *to = a.order + (int64_t)blockIdx.x * (1 + a.blocks);
    if (threadIdx.x == 0)
        to[0] = 2 * all_seen < all_walked;
    for (int block = threadIdx.x; block < a.blocks; block += BLOCK_ORDER_THREADS) {
        int place = block;
        if (a.blocks <=
            BLOCK_ORDER_RANKED) { /* its rank is the number of blocks that walk more, or as much and come before */
            place = 0;
#pragma unroll 8
            for (int n = 0; n < a.blocks; n++)
                place += rows[n] > rows[block] || (rows[n] == rows[block] && n < block);
        }
        to[1 + place] = block;
    }
}
