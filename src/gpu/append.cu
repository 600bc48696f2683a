/* append.cu: writes new keys and values into a KV cache, and turns keys and queries by rotary embeddings.
 *
 * Idea: a row of all heads is one block's, first the new keys, then the rows of q. Where a row goes comes from lengths,
 * tables or slots on the device; one that has no place is dropped. A turned key goes to the cache and to the workspace,
 * from where the attention of the same call reads it: two sequences may append to one row of the cache, and each sees
 * its own. Pairs are turned in float32 and rounded once. Bound by the launch, or by memory: each row is read and
 * written once.
 *
 * Grid: rows, walked with a stride of the grid. */
#include "cuda/ptx/launch.cuh"
#include "gpu/append.h"
#include "gpu/convert.cuh"
#include "gpu/packed.cuh"
#include "gpu/rotary.cuh"

APPEND_CONSTANTS(GPU_CONSTANT_GIVEN)

#define BYTES (DTYPE == GPU_FLOAT32 ? 4 : 2)
#define UNIT  (VECTOR ? 16 / BYTES : 1) /* elements of a piece */

/* ---- pieces ---- */

__device__ __forceinline__ void copy_piece(char *to, const char *from) {
    if (VECTOR)
        *(uint4 *)to = *(const uint4 *)from;
    else if (BYTES == 4)
        *(uint32_t *)to = *(const uint32_t *)from;
    else
        *(uint16_t *)to = *(const uint16_t *)from;
}

__device__ __forceinline__ void load_piece(float (&x)[UNIT], const char *from) {
#if VECTOR
    const uint4 bits = *(const uint4 *)from;
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#    pragma unroll
    for (int n = 0; n < UNIT; n++)
        x[n] =
            BYTES == 4 ? __uint_as_float(word[n * BYTES / 4]) : unpack((uint16_t)(word[n * BYTES / 4] >> n % 2 * 16));
#else
    x[0] = BYTES == 4 ? *(const float *)from : unpack(*(const uint16_t *)from);
#endif
}

__device__ __forceinline__ void store_piece(char *to, const float (&x)[UNIT]) {
#if VECTOR && DTYPE == GPU_FLOAT32
    *(uint4 *)to =
        make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
#elif VECTOR
    *(uint4 *)to = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
#elif DTYPE == GPU_FLOAT32
    *(float *)to = x[0];
#else
    *(uint16_t *)to = (uint16_t)pack(x[0], 0.0f);
#endif
}

/* ---- rows ---- */

/* A row of all heads: where it begins, and the bytes from a head to the next. */
struct row_of_heads {
    char *at; /* NULL: there is none */
    int64_t head;
};
__device__ __forceinline__ struct row_of_heads find_row(const struct gpu_matrix &m, int64_t batch, int64_t row) {
    return {m.data ? m.data + (batch * m.batch + row * m.row) * BYTES : (char *)0, m.head * BYTES};
}

__device__ __forceinline__ void copy_row(const struct row_of_heads &to, const struct row_of_heads &from, int heads,
                                         int depth) {
    const int pieces = depth / UNIT;
    for (int n = threadIdx.x; to.at && n < heads * pieces; n += APPEND_THREADS)
        copy_piece(to.at + n / pieces * to.head + n % pieces * UNIT * BYTES,
                   from.at + n / pieces * from.head + n % pieces * UNIT * BYTES);
}

/* A piece of pairs, from the t-th on, of which the first and the second elements lie in two pieces, or one after the
 * other in both. */
__device__ __forceinline__ void turn_piece(const struct gpu_rotary &r, int64_t position, int t, float (&one)[UNIT],
                                           float (&two)[UNIT]) {
#pragma unroll
    for (int n = 0; n < UNIT; n++) {
        float &x = ROTARY == APPEND_HALVES ? one[n] : 2 * n < UNIT ? one[2 * n % UNIT] : two[2 * n % UNIT];
        float &y = ROTARY == APPEND_HALVES ? two[n]
                   : 2 * n + 1 < UNIT      ? one[(2 * n + 1) % UNIT]
                                           : two[(2 * n + 1) % UNIT];
        turn_pair(r, position, t + n, x, y);
    }
}

/* The row turned as at `position`, to one place or two. */
__device__ __forceinline__ void turn_row(const struct append_params &a, const struct row_of_heads &to,
                                         const struct row_of_heads &also, const struct row_of_heads &from, int heads,
                                         int64_t position) {
    const int dim = a.in.rotary.dim, pairs = dim / 2, turned = pairs / UNIT;
    const int pieces = turned + (a.in.head_dim - dim) / UNIT;
    for (int n = threadIdx.x; n < heads * pieces; n += APPEND_THREADS) {
        const int head = n / pieces, piece = n % pieces, t = piece * UNIT;
        const bool turns = piece < turned;
        const int first = !turns ? dim + t - pairs : ROTARY == APPEND_HALVES ? t : 2 * t;
        const int second = turns ? first + (ROTARY == APPEND_HALVES ? pairs : UNIT) : first;
        float one[UNIT], two[UNIT];
        load_piece(one, from.at + head * from.head + first * BYTES);
        load_piece(two, from.at + head * from.head + second * BYTES);
        if (turns)
            turn_piece(a.in.rotary, position, t, one, two);
        for (int place = 0; place < 2; place++) {
            const struct row_of_heads &there = place ? also : to;
            if (!there.at)
                continue;
            store_piece(there.at + head * there.head + first * BYTES, one);
            if (turns)
                store_piece(there.at + head * there.head + second * BYTES, two);
        }
    }
}

/* ---- where rows go ---- */

__device__ __forceinline__ int64_t position_of(const struct append_params &a, int64_t row, int batch, int cached,
                                               int64_t behind) {
    if (a.positions.data)
        return index_at(a.positions, row);
    return first_position(a.in.rotary, batch, cached) + behind;
}

__device__ __forceinline__ void write_key(const struct append_params &a, int64_t batch, int64_t row, uint64_t page,
                                          int64_t in_page, int64_t position) {
    const struct gpu_cache &c = a.in.cache;
    const bool is_page = page < (uint64_t)c.num_pages;
    const struct row_of_heads none = {}, k = find_row(c.k_new, batch, row), v = find_row(c.v_new, batch, row);
    const struct row_of_heads k_to = is_page ? find_row(a.in.k, (int64_t)page, in_page) : none;
    if (is_page)
        copy_row(find_row(a.in.v, (int64_t)page, in_page), v, a.in.heads_kv, a.in.head_dim_v);
    if (ROTARY)
        turn_row(a, k_to, find_row(a.k_to, batch, row), k, a.in.heads_kv, position);
    else
        copy_row(k_to, k, a.in.heads_kv, a.in.head_dim);
}

/* The n-th new key of all. */
__device__ __forceinline__ void append_key(const struct append_params &a, int64_t n) {
    const struct gpu_cache &c = a.in.cache;
    if (a.slots.data) {
        const int64_t slot = index_at(a.slots, n);
        if (slot >= 0 && slot < (int64_t)c.page_rows * c.num_pages)
            write_key(a, 0, n, (uint64_t)(slot / c.page_rows), slot % c.page_rows, position_of(a, n, 0, 0, 0));
        return;
    }
    const int batch = c.cu_seqlens_new ? sequence_behind(c.cu_seqlens_new, a.in.batch, n) : (int)(n / c.seqlen_new);
    if (batch >= a.in.batch)
        return;
    const struct cached_keys s = find_cached_keys(a.in, batch);
    const int64_t own = c.cu_seqlens_new ? n - s.new_begin : n % c.seqlen_new;
    if (own < 0 || own >= s.seqlen_k - s.cached)
        return;
    struct cached_keys all = s;
    all.cached = s.seqlen_k; /* it is to be where the cache has it */
    const struct page_row at = find_page_row(c, all, s.cached + (int)own);
    write_key(a, c.cu_seqlens_new ? 0 : batch, c.cu_seqlens_new ? n : own, at.page, at.row,
              position_of(a, n, batch, s.cached, own));
}

/* The n-th row of q of all. */
__device__ __forceinline__ void turn_query(const struct append_params &a, int64_t n) {
    const bool packed = VARLEN && a.in.cu_seqlens_q;
    int batch = VARLEN ? 0 : (int)(n / a.in.seqlen_q);
    int64_t own = VARLEN ? n : n % a.in.seqlen_q;
    int cached = 0;
    if (packed || SEQUSED) {
        batch = packed ? sequence_behind(a.in.cu_seqlens_q, a.in.batch, n) : batch;
        if (batch >= a.in.batch)
            return;
        const struct sequence s = find_sequence_q(a.in, batch);
        own = packed ? n - s.q_begin : own;
        if (own < 0 || own >= s.seqlen_q)
            return;
    }
    if (!a.positions.data && !a.in.rotary.start.data)
        cached = find_cached_keys(a.in, batch).cached;
    const int64_t position = position_of(a, n, batch, cached, a.in.rotary.moves ? own : 0), row = VARLEN ? n : own;
    turn_row(a, find_row(a.q_to, VARLEN ? 0 : batch, row), {}, find_row(a.in.q, VARLEN ? 0 : batch, row), a.in.heads,
             position);
}

extern "C" __global__ void __launch_bounds__(APPEND_THREADS)
    cache_append(const __grid_constant__ struct append_params a) {
    for (int64_t n = blockIdx.x; n < a.new_rows + a.query_rows; n += gridDim.x)
        if (n < a.new_rows)
            append_key(a, n);
        else if (ROTARY)
            turn_query(a, n - a.new_rows);
}
