/* hopper_key_list.cuh: the lists that a block of keys makes in shared memory before its steps. KEYED: the rows that see
 * each key. LISTED: the tiles of query rows that have a step, because some row of theirs sees some key of the block.
 *
 * `keys` is the address of arrays of BLOCK_N words: the first row that sees the key, the row past the last (both 0: no
 * row), its bias. `seen` is the address of a bit for each tile of BLOCK_M rows: it has a step. With MASK_TILE a second
 * array says that the mask hides a part of the tile; with ROW_RUNS one array for each 64 keys says that row
 * intervals or windows do. All query heads of a group have the same lists. */
#ifndef FDM_HOPPER_KEY_LIST_CUH
#define FDM_HOPPER_KEY_LIST_CUH

#include "families/hopper/backward/hopper_backward_common.cuh"
#include "gpu/block_mask.h"

enum { SEEN_WORDS = HOPPER_BACKWARD_TILES_MAX / 32 };

/* The number of the block's n-th key. A number of seqlen_k or above is no key. */
__device__ __forceinline__ int key_number(const struct hopper_backward_params &a, const struct key_block &k, int n) {
    return are_sorted(a) ? *sorted_keys(a, k, n) : k.first_key + n;
}

/* Rows first .. last - 1 see the block's n-th key; no row does where that range is empty. */
__device__ __forceinline__ struct key_bounds find_key(const struct hopper_backward_params &a, const struct key_block &k,
                                                      const struct sequence &s, int n) {
    return rows_of_key(a.in.in, s, k.kv_head * a.in.in.group, key_number(a, k, n));
}

/* Writes the words of the block's keys; a thread has one key. */
__device__ __forceinline__ void list_keys(const struct hopper_backward_params &a, const struct key_block &k,
                                          uint32_t keys) {
    const int n = threadIdx.x;
    if (n >= BLOCK_N)
        return;
    const struct key_bounds key = find_key(a, k, find_sequence(a.in.in, k.batch), n);
    st_shared_4(keys + n * 4, key.first < key.last ? (uint32_t)key.first : 0);
    st_shared_4(keys + (BLOCK_N + n) * 4, key.first < key.last ? (uint32_t)key.last : 0);
    if (BIAS && !BIAS_ROWS)
        st_shared_4(keys + (2 * BLOCK_N + n) * 4, __float_as_uint(key.bias));
}

/* Writes two words for each warp: the rows from the first up to the second see all of the warp's 16 keys. */
__device__ __forceinline__ void note_covered(uint32_t keys, uint32_t covered) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= BLOCK_N / 16)
        return;
    const uint32_t at = keys + (warp * 16 + lane % 16) * 4;
    const int first = __reduce_max_sync(0xffffffff, (int)ld_shared_4(at));
    const int end = __reduce_min_sync(0xffffffff, (int)ld_shared_4(at + BLOCK_N * 4));
    if (lane == 0) {
        st_shared_4(covered + warp * 8, (uint32_t)first);
        st_shared_4(covered + warp * 8 + 4, (uint32_t)end);
    }
}

/* Tiles of the word-th 32 that rows first .. last - 1 lie in. */
__device__ __forceinline__ uint32_t tiles_of_rows(int word, int first, int last) {
    const int from = max(first / BLOCK_M - word * 32, 0), to = min((last - 1) / BLOCK_M - word * 32, 31);
    return first < last && from <= to ? 0xffffffffu << from & 0xffffffffu >> (31 - to) : 0;
}

/* GPU_BLOCK_* of the lane-th tile of the word-th 32: what the mask hides of it. Tiles outside `bits` are hidden. */
__device__ __forceinline__ int kind_of_tile(const struct hopper_backward_params &a, const struct key_block &k, int word,
                                            uint32_t bits) {
    const struct gpu_forward_params &in = a.in.in;
    const int lane = threadIdx.x % 32, tile = word * 32 + lane;
    const uint8_t *kinds = in.block_mask + k.batch * in.block_mask_batch +
                           k.kv_head * in.group / in.mask.group * in.block_mask_head + k.first_key / BLOCK_N;
    return bits >> lane & 1 ? (int)kinds[(int64_t)tile * in.block_mask_row] : GPU_BLOCK_HIDDEN;
}

/* The tile plan's bits of the lane-th tile of the word-th 32, one for each 64 keys of the block; 0 outside `bits`. */
static_assert(!ROW_RUNS || BLOCK_N == 64 || BLOCK_N == 128, "a block's bits lie in one word");
__device__ __forceinline__ uint32_t planned_bits(const struct hopper_backward_params &a, const struct key_block &k,
                                                 const uint32_t *plan, int word, uint32_t bits) {
    const int lane = threadIdx.x % 32, tile = word * 32 + lane, key_tile = k.first_key / TILE_PLAN_TILE;
    const int64_t row = (int64_t)tile_plan_head(&a.plan, k.first_head, k.batch) * a.plan.row_tiles + tile;
    return bits >> lane & 1 && tile < a.plan.row_tiles
               ? plan[row * a.plan.key_words + key_tile / 32] >> key_tile % 32 & ((1u << BLOCK_N / 64) - 1)
               : 0;
}
/* The tiles of `bits` whose rows see a key by their row intervals. */
__device__ __forceinline__ uint32_t shown_by_ranges(const struct hopper_backward_params &a, const struct key_block &k,
                                                    int word, uint32_t bits) {
    return __ballot_sync(0xffffffff, planned_bits(a, k, a.plan.seen, word, bits));
}

/* Writes the bits of tiles; a warp has a word. */
__device__ __forceinline__ void list_tiles(const struct hopper_backward_params &a, const struct key_block &k,
                                           uint32_t keys, uint32_t seen) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int word = threadIdx.x / 32; word < SEEN_WORDS; word += THREADS / 32) {
        uint32_t bits = 0;
        if (KEYED) {
#pragma unroll
            for (int n = 0; n < BLOCK_N; n += 32)
                bits |= tiles_of_rows(word, (int)ld_shared_4(keys + (n + lane) * 4),
                                      (int)ld_shared_4(keys + (BLOCK_N + n + lane) * 4));
            bits = __reduce_or_sync(0xffffffff, bits);
        } else {
            bits = tiles_of_rows(word, k.first_tile * BLOCK_M, (k.first_tile + k.tiles) * BLOCK_M);
        }
        if (MASK_TILE) {
            const int kind = kind_of_tile(a, k, word, bits);
            bits = __ballot_sync(0xffffffff, kind != GPU_BLOCK_HIDDEN);
            const uint32_t parts = __ballot_sync(0xffffffff, kind == GPU_BLOCK_PARTIAL);
            if (lane == 0)
                st_shared_4(seen + (SEEN_WORDS + word) * 4, parts);
        }
        if (ROW_RUNS) {
            bits = shown_by_ranges(a, k, word, bits);
            const uint32_t full = planned_bits(a, k, a.plan.full, word, bits);
#pragma unroll
            for (int n = 0; n < BLOCK_N / 64; n++) {
                const uint32_t parts = __ballot_sync(0xffffffff, !(full >> n & 1));
                if (lane == 0)
                    st_shared_4(seen + ((1 + MASK_TILE + n) * SEEN_WORDS + word) * 4, parts);
            }
        }
        if (lane == 0)
            st_shared_4(seen + word * 4, bits);
    }
}

/* The tiles whose bits are set: their number, the first and the last. Every warp counts for itself. */
struct listed_tiles {
    int count, first, last;
};
__device__ __forceinline__ struct listed_tiles count_listed(uint32_t seen) {
    const int lane = threadIdx.x % 32;
    int tiles = 0, first = HOPPER_BACKWARD_TILES_MAX, last = 0;
#pragma unroll
    for (int word = lane; word < SEEN_WORDS; word += 32) {
        const uint32_t bits = ld_shared_4(seen + word * 4);
        tiles += __popc(bits);
        first = bits ? min(first, word * 32 + __ffs(bits) - 1) : first;
        last = bits ? word * 32 + 31 - __clz(bits) : last;
    }
    return {(int)__reduce_add_sync(0xffffffff, tiles), __reduce_min_sync(0xffffffff, first),
            __reduce_max_sync(0xffffffff, last)};
}
#if LISTED
/* The block with steps at listed tiles alone. */
__device__ __forceinline__ struct key_block count_tiles(struct key_block k, int heads, uint32_t seen) {
    const struct listed_tiles listed = count_listed(seen);
    k.tiles = listed.count;
    k.first_tile = listed.first;
    k.last_tile = listed.last;
    k.steps = k.tiles * heads;
    k.seen = seen;
    return k;
}
#endif

/* Whether the mask hides a part of a tile that has a step; whether row intervals or windows do, of the n-th 64 keys. */
__device__ __forceinline__ bool hides_part(uint32_t seen, int tile) {
    return ld_shared_4(seen + (SEEN_WORDS + tile / 32) * 4) >> tile % 32 & 1;
}
__device__ __forceinline__ bool ranges_hide_part(uint32_t seen, int tile, int n) {
    return ROW_RUNS && hides_part(seen + (MASK_TILE + n) * SEEN_WORDS * 4, tile);
}

/* Copies the rows of the block's keys, `chunks` chunks of 16 bytes each, to panels of BLOCK_N rows, by `threads`
 * threads. */
template <int chunks, int threads = 128>
__device__ __forceinline__ void gather_rows(uint32_t to, const struct gpu_matrix &from, int columns,
                                            const struct hopper_backward_params &a, const struct key_block &k) {
    const char *head = row_address(from, k.batch, k.kv_head, 0);
#pragma unroll 4
    for (int n = threadIdx.x % threads; n < BLOCK_N * chunks; n += threads) {
        const int row = n / chunks, chunk = n % chunks, key = key_number(a, k, row);
        const int bytes = key < a.in.in.seqlen_k ? min(max(columns - chunk * 8, 0), 8) * 2 : 0;
        cp_async_16_fill(panels<BLOCK_N>{to}.chunk(row, chunk), bytes ? head + key * from.row * 2 + chunk * 16 : head,
                         bytes);
    }
}

#endif
