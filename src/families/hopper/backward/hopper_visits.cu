/* hopper_visits.cu: which blocks of keys of hopper_backward.cu come to which tiles of query rows, where masks or
 * intervals say so: from that a block knows its turn at a tile, when blocks add in a fixed order.
 *
 * Of each batch, KV head, tile of BLOCK_M rows and 32 blocks, in the order in which they begin, a word: the low half
 * has a bit for each that has the tile in its walk, the high half counts those of the words before.
 *
 * Grid: of each batch and KV head a block for 32 tiles. Its warps look at the keys of one block each, as
 * hopper_backward.cu does, and find the bits of these tiles; then each takes one tile, and turns bits of tiles to bits
 * of blocks. A key is looked at once for each 2048 rows. */
#include "cuda/ptx/launch.cuh"
#include "families/hopper/backward/hopper_visits.h"

HOPPER_VISITS_CONSTANTS(GPU_CONSTANT_GIVEN)

#define DESCENDS 1
#define ORDERED  1
#define PARTS    0
#define BLOCK_M  64
#define BLOCK_N  128
#define THREADS  (32 * HOPPER_VISITS_BLOCKS)
#include "families/hopper/backward/hopper_keys.cuh"

/* Those of the word-th 32 tiles that the block walks. */
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
    if (ROW_INTERVALS)
        bits = shown_by_ranges(a, k, word, bits);
    return bits;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_visits(const __grid_constant__ struct hopper_backward_params a) {
    __shared__ uint32_t walked[HOPPER_VISITS_BLOCKS]; /* by a block: bits of tiles */
    griddepcontrol_launch_dependents();
    const int words = (a.row_tiles + 31) / 32, head = (int)blockIdx.x / words, word = (int)blockIdx.x % words;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = word * 32 + warp, blocks = blocks_of_head(a);
    uint32_t before = 0;
#pragma unroll 1
    for (int n = 0; n < a.visit_words; n++) {
        const int turn = n * 32 + warp;
        const uint32_t tiles =
            turn < blocks ? walked_tiles(a, find_block(a, find_place(a, place_of(a, head, turn))), word) : 0;
        if (lane == 0)
            walked[warp] = tiles;
        __syncthreads();
        const uint32_t bits = __ballot_sync(0xffffffff, walked[lane] >> warp & 1);
        if (lane == 0 && tile < a.row_tiles)
            *visits_of(a, head, tile, n) = (uint64_t)before << 32 | bits;
        before += __popc(bits);
        __syncthreads();
    }
}
