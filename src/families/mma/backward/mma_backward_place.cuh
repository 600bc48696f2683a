/* mma_backward_place.cuh: the coordinates of a block of mma_backward.cu, and which rows see its keys. */
#ifndef FDM_MMA_BACKWARD_PLACE_CUH
#define FDM_MMA_BACKWARD_PLACE_CUH

#include "families/mma/backward/mma_backward_shape.cuh"
#include "gpu/block_mask.h"
#include "gpu/key_sort.h"
#include "gpu/semaphores.cuh"
#include "gpu/visible.cuh"

/* The block's coordinates, and one query head's addresses. */
struct place : sequence {
    int part, first_key; /* part: of all groups of query heads; unless they are split, a KV head */
};
struct head {
    int index;
    const char *q, *dout;
    const float *lse, *delta, *low;
    float *dq;
    const char *mask, *bias; /* those that the problem has */
    const uint8_t *block_mask;
};

/* The coordinates of the block. The last head comes first, since the second-level cache still holds what
 * backward_prepare wrote last. `scratch` is a word of shared memory. */
__device__ __forceinline__ struct place find_block(const struct mma_backward_params &params, int *scratch) {
    const struct gpu_backward_params &a = params.shared;
    uint32_t x = blockIdx.x, y = gridDim.y - 1 - blockIdx.y, z = gridDim.z - 1 - blockIdx.z;
    if (FOLDED) {
        x = blockIdx.x % a.grid_x;
        y = (gridDim.x - 1 - blockIdx.x) / a.grid_x;
        z = y / a.grid_y;
        y %= a.grid_y;
    }
    if (DETERMINISTIC) {
        const uint32_t ticket = take_ticket(a.ticket, scratch);
        /* Of heads_in_turn heads the last key blocks begin first, then those before them, and so on. Few blocks of a
         * head begin at a time, since each is a step behind the one before. */
        const uint32_t all = (FOLDED ? gridDim.x / a.grid_x : gridDim.y * gridDim.z), turn = params.heads_in_turn;
        const uint32_t first = ticket / (turn * a.grid_x) * turn, heads = min(turn, all - first);
        const uint32_t place = ticket - first * a.grid_x, head = first + place % heads;
        x = a.grid_x - 1 - place / heads;
        y = head % a.grid_y;
        z = head / a.grid_y;
    }
    return {find_sequence(a.in, (int)z), (int)y, (int)x * BLOCK_N};
}

__device__ __forceinline__ int head_kv_of(const struct gpu_backward_params &a, const struct place &at) {
    return SPLIT ? at.part / a.group_parts : at.part;
}
/* Query heads that the block processes. */
__device__ __forceinline__ int num_heads(const struct gpu_backward_params &a) {
    return SPLIT ? a.part_heads : a.in.group;
}

/* Index of the head's first row in the workspace's arrays. */
__device__ __forceinline__ int64_t rows_begin(const struct gpu_backward_params &a, const struct place &at, int h) {
    return VARLEN ? backward_begin(at.q_begin, at.batch, MMA_BACKWARD_ROW_STEP) + h * a.rows
                  : ((int64_t)at.batch * a.in.heads + h) * a.rows;
}

/* The addresses are computed again at each use: kept through the loop they would take registers that the sums need. */
__device__ __forceinline__ struct head find_head(const struct gpu_backward_params &a, const struct place &at, int h) {
    struct head head;
    h = opaque(h);
    head.index = h;
    head.q = a.in.q.data + (at.batch * a.in.q.batch + (int64_t)at.q_begin * a.in.q.row + h * a.in.q.head) * 2;
    head.dout = a.dout.data + (at.batch * a.dout.batch + (int64_t)at.q_begin * a.dout.row + h * a.dout.head) * 2;
    const int64_t rows = rows_begin(a, at, h);
    head.lse = a.lse_rows + rows;
    head.delta = a.delta_rows + rows;
    head.low = a.low_rows + rows;
    head.dq = a.dq_sums + rows * HEAD_DIM;
    if (MASK)
        head.mask = mask_of(a.in, at.batch, h);
    if (BIAS)
        head.bias = a.in.bias.data + (at.batch * a.in.bias.batch + h / a.in.bias.group * a.in.bias.head) * BIAS_BYTES;
    if (BLOCK_MASKED)
        head.block_mask = a.in.block_mask + at.batch * a.in.block_mask_batch +
                          h / a.in.block_mask_group * a.in.block_mask_head + at.first_key / BLOCK_N;
    return head;
}

/* Bytes from a row of mask, bias or dbias to the n-th row after it. Aligned rows are less than 2^31 bytes apart,
 * which saves registers. */
__device__ __forceinline__ int64_t mask_rows(const struct gpu_backward_params &a, int n) {
    return WIDE_SCORES ? (int64_t)n * a.mask_row_bytes : n * a.in.mask.row;
}
__device__ __forceinline__ int64_t bias_rows(const struct gpu_backward_params &a, int n) {
    return WIDE_SCORES ? (int64_t)n * a.bias_row_bytes : n * a.in.bias.row * BIAS_BYTES;
}
__device__ __forceinline__ int64_t dbias_rows(const struct gpu_backward_params &a, int n) {
    return WIDE_SCORES               ? (int64_t)n * a.dbias_row_bytes
           : DBIAS == GPU_DBIAS_SUMS ? n * a.dbias_row * 4
                                     : n * a.dbias.row * BIAS_BYTES;
}

/* The number of the block's n-th key. */
__device__ __forceinline__ int key_at(const struct gpu_backward_params &a, const struct place &at, int local) {
    if (!GATHER)
        return at.first_key + local;
    const int64_t head = (int64_t)head_kv_of(a, at) * a.in.group / a.in.intervals.group;
    return a.order[at.batch * a.order_batch + head * a.order_head + at.first_key + local];
}

/* The rows that see the thread's keys, two of each tile, and the keys' bias. */
struct keys {
    int first[KEY_TILES][2], last[KEY_TILES][2];
    float bias[KEY_TILES][2];
};
/* The rows by window and ends. Where nothing else hides pairs they are computed at each use, since few sub-tiles are
 * partial. Bounds are those of the block's first key and the distance from it; they are clamped to 32 bits, and may
 * lie outside of the rows. */
__device__ __forceinline__ int bound_of(int64_t row) {
    return (int)min(max(row, (int64_t)-BLOCK_N), (int64_t)(UNBOUNDED - BLOCK_N));
}
__device__ __forceinline__ struct keys bound_keys(const struct gpu_backward_params &a, const struct place &at,
                                                  int warp_key) {
    struct keys keys = {};
    warp_key = opaque(warp_key); /* made here, not kept */
    const int64_t own = (int64_t)at.first_key - at.diagonal;
    const int first = WINDOW && a.in.window_right != UNBOUNDED ? bound_of(own - a.in.window_right) : -BLOCK_N;
    const int last =
        WINDOW && a.in.window_left != UNBOUNDED ? bound_of(own + a.in.window_left + 1) : UNBOUNDED - BLOCK_N;
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; n++) {
        const int distance = warp_key + threadIdx.x % 32 / 4 + n * 8;
        keys.first[n / 2][n % 2] = first + distance;
        keys.last[n / 2][n % 2] = at.first_key + distance >= at.seqlen_k ? -BLOCK_N
                                  : WINDOW                               ? last + distance
                                                                         : UNBOUNDED;
    }
    return keys;
}
/* Otherwise shared memory holds first, last and bias of each of BLOCK_N keys. */
__device__ __forceinline__ void store_keys(const struct gpu_backward_params &a, const struct place &at,
                                           const struct head &head, uint32_t to) {
    if (threadIdx.x >= BLOCK_N)
        return;
    const int j = key_at(a, at, threadIdx.x);
    int first = first_row(a.in, at, j), last = last_row(a.in, at, j);
    float bias = 0;
    if (j >= at.seqlen_k) { /* not look_at_key(): a bias of the keys would spill */
        last = 0;
    } else {
        if (INTERVALS) {
            const struct gpu_intervals &i = a.in.intervals;
            const int64_t h = head.index / i.group, key = (int64_t)at.k_begin + j;
            first = max(first, i.start[at.batch * i.start_batch + h * i.start_head + key * i.start_key]);
            last = min(last, i.end[at.batch * i.end_batch + h * i.end_head + key * i.end_key]);
        }
        if (MASK && !MASK_ROWS && !head.mask[(int64_t)j * a.in.mask.key])
            last = 0;
        if (KEY_BIAS)
            bias = bias_value(head.bias + (int64_t)j * a.in.bias.key * BIAS_BYTES);
        if (KEY_BIAS && bias == MINUS_INF)
            last = 0;
    }
    st_shared_4(to + threadIdx.x * 4, (uint32_t)first);
    st_shared_4(to + (BLOCK_N + threadIdx.x) * 4, (uint32_t)last);
    if (KEY_BIAS)
        st_shared_4(to + (2 * BLOCK_N + threadIdx.x) * 4, __float_as_uint(bias));
}
__device__ __forceinline__ struct keys stored_keys(uint32_t from, int warp_key) {
    struct keys keys;
    from += (warp_key + threadIdx.x % 32 / 4) * 4;
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; n++) {
        keys.first[n / 2][n % 2] = (int)ld_shared_4(from + n * 32);
        keys.last[n / 2][n % 2] = (int)ld_shared_4(from + (BLOCK_N + n * 8) * 4);
        keys.bias[n / 2][n % 2] = KEY_BIAS ? __uint_as_float(ld_shared_4(from + (2 * BLOCK_N + n * 8) * 4)) : 0;
    }
    return keys;
}

/* The row blocks in which some row sees some key, and those of them that need no test of pairs. */
struct walk {
    int first, last;           /* rows that window and ends leave: first <= i < last */
    int full_first, full_last; /* rows that see all keys of the block, by window and ends */
};
__device__ __forceinline__ struct walk plan_walk(const struct gpu_backward_params &a, const struct place &at) {
    struct walk w;
    const int group = GATHER ? KEY_SORT_KEYS : BLOCK_N, first_key = at.first_key / group * group;
    const int last_key = min(first_key + group, at.seqlen_k) - 1;
    w.first = first_row(a.in, at, first_key);
    w.last = last_row(a.in, at, last_key);
    w.full_first = first_row(a.in, at, last_key);
    w.full_last = first_key + group <= at.seqlen_k ? last_row(a.in, at, first_key) : 0;
    if (w.full_last == at.seqlen_q)
        w.full_last = UNBOUNDED; /* rows past the end have weight 0 */
    return w;
}
/* The part of the walk that intervals, masks and biases of keys leave. `scratch` is 32 unused bytes. */
__device__ __forceinline__ struct walk narrow(struct walk w, uint32_t keys, uint32_t scratch) {
    if (threadIdx.x < BLOCK_N) {
        int first = (int)ld_shared_4(keys + threadIdx.x * 4);
        int last = (int)ld_shared_4(keys + (BLOCK_N + threadIdx.x) * 4);
        first = __reduce_min_sync(0xffffffff, first < last ? first : UNBOUNDED);
        last = __reduce_max_sync(0xffffffff, last);
        st_shared_4(scratch + threadIdx.x / 32 * 8, (uint32_t)first);
        st_shared_4(scratch + threadIdx.x / 32 * 8 + 4, (uint32_t)last);
    }
    __syncthreads();
    int first = UNBOUNDED, last = 0;
#pragma unroll
    for (int n = 0; n < BLOCK_N / 32; n++) {
        first = min(first, (int)ld_shared_4(scratch + n * 8));
        last = max(last, (int)ld_shared_4(scratch + n * 8 + 4));
    }
    __syncthreads();
    w.first = max(w.first, first);
    w.last = min(w.last, last);
    return w;
}
/* GPU_BLOCK_*: what mask and row intervals show of the block's keys to the BLOCK_M rows that `row` is one of. */
__device__ __forceinline__ uint8_t mask_kind(const struct gpu_backward_params &a, const struct place &at, int h,
                                             int row) {
    return find_head(a, at, h).block_mask[(int64_t)(row / BLOCK_M) * a.in.block_mask_row];
}
/* Whether some of STAGE_ROWS rows see one of the block's keys from `n` on. A lane or thread has a key. */
__device__ __forceinline__ bool is_seen(uint32_t keys, int n, int row) {
    const int first = (int)ld_shared_4(keys + n * 4), last = (int)ld_shared_4(keys + (BLOCK_N + n) * 4);
    return first < row + STAGE_ROWS && last > row && first < last;
}
__device__ __forceinline__ bool active(const struct gpu_backward_params &a, const struct place &at, uint32_t keys,
                                       int h, int row) {
    const bool any = !BLOCK_MASKED || mask_kind(a, at, h, row) != GPU_BLOCK_HIDDEN;
    if (!KEYED)
        return any;
    if (!RING)
        return __syncthreads_or(any && threadIdx.x < BLOCK_N && is_seen(keys, threadIdx.x, row));
    bool mine = false; /* every warp reads all keys, so that no barrier is needed */
#pragma unroll
    for (int n = 0; any && n < BLOCK_N; n += 32)
        mine = mine || is_seen(keys, n + threadIdx.x % 32, row);
    return __any_sync(0xffffffff, mine);
}

/* The first row, in whole sub-tiles, that window and ends leave a block. */
__device__ __forceinline__ int first_sub_tile(const struct walk &w, int row) {
    return max(w.first - row, 0) / SUB_ROWS * SUB_ROWS;
}

/* V in registers. */
typedef uint32_t value_fragments[V_IN_REGISTERS ? HEAD_DIM_V / 16 : 1][4];

/* What a block works on with one query head. */
struct work {
    const struct mma_backward_params &params;
    const struct place &at;
    const struct tiles &tiles;
    const struct walk &walk;
    const value_fragments &values;
    int h;
    const uint32_t &spoiled; /* SCRUB: the result of scrub_keys() */
};

/* The next active rows to stage from `row` on; NO_ROW when there are none. */
__device__ __forceinline__ int next_active(const struct work &on, int row) {
    while (row < on.walk.last && !active(on.params.shared, on.at, on.tiles.keys, on.h, row))
        row += STAGE_ROWS;
    return row < on.walk.last ? row : NO_ROW;
}

#endif
