/* hopper_dq_order.cu: which key blocks of hopper_backward.cu process which tiles of query rows, where masks or
 * intervals decide that. A key block reads from it how many blocks add to a tile of dQ before it, when additions have a
 * fixed order.
 *
 * dq_order[batch][kv_head][row_tile][n] is a word of 64 bits about the n-th 32 key blocks, in the order in which blocks
 * begin. Bit i of its low half says that block i processes the tile; its high half counts the blocks of earlier words
 * that do.
 *
 * Grid: one block for each batch, KV head and 32 row tiles. Each of its warps reads the keys of one key block, as
 * hopper_backward.cu does, and finds the bits of these tiles. Then each warp takes one tile, and transposes bits of
 * tiles to bits of blocks. A key is read once for each 2048 rows. */
#include "cuda/ptx/launch.cuh"
#include "families/hopper/backward/hopper_dq_order.h"

HOPPER_DQ_ORDER_CONSTANTS(GPU_CONSTANT_GIVEN)

#define ROWS_DESCENDING 1
#define DETERMINISTIC   1
#define PARTS           0
#define BLOCK_M         64
#define BLOCK_N         128
#define THREADS         (32 * HOPPER_DQ_ORDER_BLOCKS)
#include "families/hopper/backward/hopper_key_list.cuh"

/* The bits of the tiles among the word-th 32 that the block processes. */
__device__ __forceinline__ uint32_t walked_tiles(const struct hopper_backward_params &a, const struct key_block &k,
                                                 int word) {
    uint32_t bits = 0;
#if KEYED
    const struct sequence s = find_sequence(a.in.in, k.batch);
#    pragma unroll
    for (int n = threadIdx.x % 32; n < BLOCK_N; n += 32) {
        const struct key_bounds key = find_key(a, k, s, n);
        bits |= tiles_of_rows(word, key.first, key.last);
    }
    bits = __reduce_or_sync(0xffffffff, bits);
#else
    bits = tiles_of_rows(word, k.first_tile * BLOCK_M, (k.first_tile + k.tiles) * BLOCK_M);
#endif
#if MASK_TILE
    bits = __ballot_sync(0xffffffff, kind_of_tile(a, k, word, bits) != GPU_BLOCK_HIDDEN);
#endif
    if (ROW_RUNS)
        bits = shown_by_ranges(a, k, word, bits);
    return bits;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_dq_order(const __grid_constant__ struct hopper_backward_params a) {
    __shared__ uint32_t walked[HOPPER_DQ_ORDER_BLOCKS]; /* of each key block: bits of tiles */
    griddepcontrol_launch_dependents();
    const int words = (a.row_tiles + 31) / 32, head = (int)blockIdx.x / words, word = (int)blockIdx.x % words;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = word * 32 + warp, blocks = blocks_of_head(a);
    uint32_t before = 0;
#pragma unroll 1
    for (int n = 0; n < a.dq_order_words; n++) {
        const int turn = n * 32 + warp;
        const uint32_t tiles =
            turn < blocks ? walked_tiles(a, find_block(a, find_place(a, place_of(a, head, turn))), word) : 0;
        if (lane == 0)
            walked[warp] = tiles;
        __syncthreads();
        const uint32_t bits = __ballot_sync(0xffffffff, walked[lane] >> warp & 1);
        if (lane == 0 && tile < a.row_tiles)
            *dq_order_of(a, head, tile, n) = (uint64_t)before << 32 | bits;
        before += __popc(bits);
        __syncthreads();
    }
}
