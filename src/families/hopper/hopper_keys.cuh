/* hopper_keys.cuh: the keys of a block of hopper_backward.cu where something says key by key which rows see it (KEYED):
 * what is known of each, and which tiles of query rows have a step, in shared memory.
 *
 * At KEYS [3][BLOCK_N]: the first row that sees the key, the row past the last (both 0: none), its number. At SEEN a
 * bit for each tile of BLOCK_M rows that some key is seen by. The query heads of a group agree on both. */
#ifndef FDM_HOPPER_KEYS_CUH
#define FDM_HOPPER_KEYS_CUH

#include "families/hopper/hopper_gradients.cuh"

enum { SEEN_WORDS = HOPPER_BACKWARD_TILES_MAX / 32 };

/* The number of the block's n-th key; from seqlen_k on: none. */
__device__ __forceinline__ int key_number(const struct hopper_backward_params &a, const struct key_block &k, int n) {
#if GATHER
    const int64_t head = (int64_t)k.kv_head * a.in.in.group / a.in.in.intervals.group;
    return a.in.order[k.batch * a.in.order_batch + head * a.in.order_head + k.first_key + n];
#else
    return k.first_key + n;
#endif
}

/* A thread a key. */
__device__ __forceinline__ void list_keys(const struct hopper_backward_params &a, const struct key_block &k,
                                          uint32_t keys) {
    const int n = threadIdx.x;
    if (n >= BLOCK_N)
        return;
    const struct sequence s = find_sequence(a.in.in, k.batch);
    const int j = key_number(a, k, n);
    const struct key_bounds key = look_at_key(a.in.in, s, k.kv_head * a.in.in.group, j);
    const int first = max(key.first, first_row(a.in.in, s, j)), last = min(key.last, last_row(a.in.in, s, j));
    st_shared_4(keys + n * 4, first < last ? (uint32_t)first : 0);
    st_shared_4(keys + (BLOCK_N + n) * 4, first < last ? (uint32_t)last : 0);
    st_shared_4(keys + (2 * BLOCK_N + n) * 4, (uint32_t)j);
}

/* A warp a word: a lane's keys see tiles from one number to another. */
__device__ __forceinline__ void list_tiles(uint32_t keys, uint32_t seen) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int word = threadIdx.x / 32; word < SEEN_WORDS; word += THREADS / 32) {
        uint32_t bits = 0;
#pragma unroll
        for (int n = 0; n < BLOCK_N; n += 32) {
            const int first = (int)ld_shared_4(keys + (n + lane) * 4);
            const int last = (int)ld_shared_4(keys + (BLOCK_N + n + lane) * 4);
            const int from = max(first / BLOCK_M - word * 32, 0), to = min((last - 1) / BLOCK_M - word * 32, 31);
            if (first < last && from <= to)
                bits |= 0xffffffffu << from & 0xffffffffu >> (31 - to);
        }
        bits = __reduce_or_sync(0xffffffff, bits);
        if (lane == 0)
            st_shared_4(seen + word * 4, bits);
    }
}

#if KEYED
/* The block's steps, of those tiles alone. Every warp counts for itself. */
__device__ __forceinline__ struct key_block count_tiles(struct key_block k, int group, uint32_t seen) {
    const int lane = threadIdx.x % 32;
    int tiles = 0, first = HOPPER_BACKWARD_TILES_MAX, last = 0;
#    pragma unroll
    for (int word = lane; word < SEEN_WORDS; word += 32) {
        const uint32_t bits = ld_shared_4(seen + word * 4);
        tiles += __popc(bits);
        first = bits ? min(first, word * 32 + __ffs(bits) - 1) : first;
        last = bits ? word * 32 + 31 - __clz(bits) : last;
    }
    k.tiles = __reduce_add_sync(0xffffffff, tiles);
    k.first_tile = __reduce_min_sync(0xffffffff, first);
    k.last_tile = __reduce_max_sync(0xffffffff, last);
    k.steps = k.tiles * group;
    k.seen = seen;
    return k;
}
#endif

/* The rows of one matrix of the block's keys, `chunks` chunks of 16 bytes each, to panels of BLOCK_N rows, by 128
 * threads. `from`: key 0. */
template <int chunks>
__device__ __forceinline__ void gather_rows(uint32_t to, const char *from, int64_t row_bytes, int columns, int seqlen_k,
                                            uint32_t keys) {
#pragma unroll 4
    for (int n = threadIdx.x % 128; n < BLOCK_N * chunks; n += 128) {
        const int row = n / chunks, chunk = n % chunks, key = (int)ld_shared_4(keys + (2 * BLOCK_N + row) * 4);
        const int bytes = key < seqlen_k ? min(max(columns - chunk * 8, 0), 8) * 2 : 0;
        cp_async_16_fill(to + chunk / 8 * BLOCK_N * 128 + row * 128 + ((chunk % 8 ^ (row & 7)) << 4),
                         bytes ? from + key * row_bytes + chunk * 16 : from, bytes);
    }
}

#endif
