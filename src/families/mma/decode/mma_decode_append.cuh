/* mma_decode_append.cuh: appending in mma_decode.cu: it writes new keys to the cache and applies rotary embeddings to q
 * and new keys, which a launch of append.cu does before other kernels. It uses the constants and macros of
 * mma_decode.cu.
 *
 * One block of a KV head writes the new keys of a sequence. Attention reads new keys from the call's tensors, so that
 * no block waits for that one: each rotates its rows of q as it copies them, and a warp rotates the new keys of a tile
 * in shared memory, where it has copied them. */
#ifndef FDM_MMA_DECODE_APPEND_CUH
#define FDM_MMA_DECODE_APPEND_CUH

#include "gpu/rotary.cuh"

/* The n-th two elements of a row: a pair that is rotated, or two neighbours that are not. */
struct two_elements {
    int first, second;
    bool rotated;
};
__device__ __forceinline__ struct two_elements find_two(const struct gpu_rotary &r, int n) {
    const bool rotated = ROTARY && n < r.dim / 2, halves = rotated && ROTARY == APPEND_HALVES;
    const int first = halves ? n : 2 * n;
    return {first, halves ? n + r.dim / 2 : first + 1, rotated};
}

__device__ __forceinline__ float element_at(const char *at) {
    return DTYPE == GPU_FLOAT32 ? *(const float *)at : unpack(*(const uint16_t *)at);
}
__device__ __forceinline__ void set_element(char *at, float x) {
    if (DTYPE == GPU_FLOAT32)
        *(float *)at = x;
    else
        *(uint16_t *)at = (uint16_t)pack(x, 0.0f);
}

/* Two neighbours, the first of them even. */
__device__ __forceinline__ void copy_two(char *to, const char *from) {
    if (DTYPE == GPU_FLOAT32)
        *(uint64_t *)to = *(const uint64_t *)from;
    else
        *(uint32_t *)to = *(const uint32_t *)from;
}

/* An element of a row of Q or K in shared memory. */
__device__ __forceinline__ char *element_in_tile(char *tile, int row, int element) {
    return tile + chunk_offset<K_CHUNKS>(row, element / CHUNK_ELEMENTS) + element % CHUNK_ELEMENTS * ELEMENT_BYTES;
}

/* Copies the block's rows of q, rotated; rows and columns past the ends become zero. */
__device__ __forceinline__ void rotate_q(const struct gpu_forward_params &a, const struct place &at, const char *q,
                                         char *q_tile) {
    const int64_t first = first_position(a.rotary, at.batch, at.in_cache.cached);
#pragma unroll 2
    for (int index = threadIdx.x; index < ROWS * HEAD_DIM / 2; index += THREADS) {
        const int row = index / (HEAD_DIM / 2), r = at.first_row + row;
        const struct two_elements two = find_two(a.rotary, index % (HEAD_DIM / 2));
        float x = 0, y = 0;
        if (row < at.num_rows && two.first < a.head_dim) {
            const char *from = q + (r / a.group * a.q.row + r % a.group * a.q.head) * ELEMENT_BYTES;
            x = element_at(from + two.first * ELEMENT_BYTES);
            y = element_at(from + two.second * ELEMENT_BYTES);
            if (two.rotated)
                turn_pair(a.rotary, first + (a.rotary.moves ? r / a.group : 0), two.first >> (ROTARY != APPEND_HALVES),
                          x, y);
        }
        set_element(element_in_tile(q_tile, row, two.first), x);
        set_element(element_in_tile(q_tile, row, two.second), y);
    }
}

/* Rotates row `row` of a tile of K by `position`. A warp calls it. */
__device__ __forceinline__ void rotate_row_of_tile(const struct gpu_rotary &r, char *tile, int row, int64_t position) {
#pragma unroll 1
    for (int n = threadIdx.x % 32; n < r.dim / 2; n += 32) {
        const struct two_elements two = find_two(r, n);
        char *const first = element_in_tile(tile, row, two.first), *const second =
                                                                       element_in_tile(tile, row, two.second);
        float x = element_at(first), y = element_at(second);
        turn_pair(r, position, n, x, y);
        set_element(first, x);
        set_element(second, y);
    }
}

/* Writes the sequence's new keys to the cache. All threads of one block of its KV head call it. */
__device__ __forceinline__ void append_keys(const struct gpu_forward_params &a, const struct place &at) {
    const struct gpu_cache &c = a.cache;
    const int pairs = a.head_dim / 2, chunks = a.head_dim_v / CHUNK_ELEMENTS;
    const int64_t first = first_position(a.rotary, at.batch, at.in_cache.cached);
    struct cached_keys all = at.in_cache;
    all.cached = all.seqlen_k; /* find_page_row() is to give the place in the cache */
#pragma unroll 1
    for (int n = 0; n < all.seqlen_k - at.in_cache.cached; n++) {
        const struct page_row to = find_page_row(c, all, at.in_cache.cached + n);
        const struct page_row from = {0, -1 - (all.new_begin + n)};
        char *const k_to = (char *)row_address<ELEMENT_BYTES>(c, to, a.k, c.k_new, at.batch, at.head_kv);
        char *const v_to = (char *)row_address<ELEMENT_BYTES>(c, to, a.v, c.v_new, at.batch, at.head_kv);
        if (!k_to)
            continue;
        const char *const k = row_address<ELEMENT_BYTES>(c, from, a.k, c.k_new, at.batch, at.head_kv);
        const char *const v = row_address<ELEMENT_BYTES>(c, from, a.v, c.v_new, at.batch, at.head_kv);
        for (int index = threadIdx.x; index < pairs + chunks; index += THREADS) {
            if (index >= pairs) {
                *(uint4 *)(v_to + (index - pairs) * 16) = *(const uint4 *)(v + (index - pairs) * 16);
                continue;
            }
            const struct two_elements two = find_two(a.rotary, index);
            if (!two.rotated) { /* bits stay as they are, those of a NaN too */
                copy_two(k_to + two.first * ELEMENT_BYTES, k + two.first * ELEMENT_BYTES);
                continue;
            }
            float x = element_at(k + two.first * ELEMENT_BYTES), y = element_at(k + two.second * ELEMENT_BYTES);
            turn_pair(a.rotary, first + n, index, x, y);
            set_element(k_to + two.first * ELEMENT_BYTES, x);
            set_element(k_to + two.second * ELEMENT_BYTES, y);
        }
    }
}

#endif
