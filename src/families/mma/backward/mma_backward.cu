/* mma_backward.cu: gradients of attention on mma.sync: dK and dV of a block's keys, and what they add to dQ.
 *
 * Idea: a block owns BLOCK_N keys and walks the queries that see them. Scores are made transposed, S^T = K Q^T, with 16
 * or 32 keys to a warp: then P^T and dS^T are already the left operands of dV += P^T dO and dK += dS^T Q. dS passes
 * through shared memory, for dQ += dS K, which the warps share by rows and columns; where warps share keys by columns
 * (BY_COLUMNS), so does P, for the rows whose scores another warp made. A warp's tiles are near to 32 x 32 in every
 * product: shared-memory reads are what bounds the kernel next to the tensor cores. Scores are made SUB_ROWS rows at a
 * time, so that they and the sums fit the registers. What a key may be seen by is one range of rows (causal, window,
 * intervals and ends together).
 *
 * Staged rows: BLOCK_M at a time, the next ones loaded under dQ; or, where shared memory has room for it (RING), stages
 * of 64 rows in a ring of two or three, filled by TMA (TMA) or by all threads, each with an mbarrier
 * that says when it is there. One more says when all warps have staged a stage's scores: a warp arrives, works on its
 * own rows, and then waits; that is the stage's only wait for other warps. Whether rows have a visible pair is known
 * before their loads begin.
 *
 * Grid: x key blocks, y KV heads (the query heads of the group one after the other: dK and dV are summed in fp32
 * without traffic; SPLIT: parts of groups, backward_combine adds them), z batches. Bound by: tensor cores and the
 * shared-memory reads that feed them, five products a pair. */
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/opaque.cuh"
#include "families/mma/backward/mma_backward.h"
#include "gpu/block_mask.h"
#include "gpu/key_sort.h"
#include "gpu/packed.cuh"
#if TMA
#    include "cuda/ptx/tma.cuh"
#endif

#define WIDEST (HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V)
/* A warp has one or two tiles of 16 keys. */
#define HALF_BLOCK    (BLOCK_N == 128 && WIDEST <= 64 && !V_IN_REGISTERS)
#define KEY_TILES     (HALF_BLOCK || PAIRED ? 2 : 1)
#define WARPS         (HALF_BLOCK ? MMA_BACKWARD_WARPS / 2 : MMA_BACKWARD_WARPS)
#define THREADS       (32 * WARPS)
#define SUB_ROWS      (BLOCK_N == 128 && WIDEST > 96 && !PAIRED ? 32 : 64)
#define WARP_KEYS     (16 * KEY_TILES)
#define KEY_WARPS     (BLOCK_N / WARP_KEYS)
#define SHARE         (WARPS / KEY_WARPS) /* warps with the same keys */
#define BY_COLUMNS    (PAIRED || (BLOCK_N < 128 && WIDEST > 128))
#define COLUMN_SHARES (BY_COLUMNS ? SHARE : 1)
#define WARP_ROWS     (SUB_ROWS / SHARE) /* rows of a sub-tile whose scores a warp makes */
/* PART_ROWS: rows of them whose scores are in registers at a time, as many as registers hold. */
#define SCARCE      (WIDEST > 192 && (VARLEN || BIAS || MASK || DETERMINISTIC))
#define CROWDED     (SOFTCAP || (VARLEN && PAIRED) || (DETERMINISTIC && (MASK || BIAS || INTERVALS || VARLEN)))
#define TURNS_DQ    (DETERMINISTIC && NEEDS_DQ)
#define TURNS_DBIAS (DETERMINISTIC && DBIAS == GPU_DBIAS_SUMS)
#define PART_ROWS                                                                 \
    (SCARCE || WARP_ROWS == 16 || TURNS_DBIAS || (KEY_TILES == 2 && CROWDED) ? 16 \
     : WARP_ROWS == 64 && (KEY_TILES == 2 || WIDEST > 64)                    ? 32 \
                                                                             : WARP_ROWS)
#define ROW_TILES     (PART_ROWS / 8)
#define SUM_COLUMNS_K (BY_COLUMNS ? HEAD_DIM / SHARE : HEAD_DIM) /* of dK and dV that a warp sums */
#define SUM_COLUMNS_V (BY_COLUMNS ? HEAD_DIM_V / SHARE : HEAD_DIM_V)
/* dQ: tiles of 16 rows that a warp makes; groups of them; warps that make the same, each every DQ_SHARE-th 16 columns.
 */
#define DQ_TILES   (KEY_TILES == 2 && HEAD_DIM % (WARPS * 512 / SUB_ROWS) == 0 ? 2 : 1)
#define DQ_GROUPS  (SUB_ROWS / 16 / DQ_TILES)
#define DQ_SHARE   (WARPS / DQ_GROUPS)
#define DQ_COLUMNS (HEAD_DIM / DQ_SHARE)
#define DQ_STEP    (DQ_COLUMNS % 32 || OVERLAY || V_IN_REGISTERS || SCARCE ? 16 : 32) /* at a time */
#define DQ_PASSES  (DQ_COLUMNS / DQ_STEP)
/* Passes over columns of dQ before the products of other warps' rows, so that not all additions come at once. */
#define DQ_EARLY   (RING && BY_COLUMNS && DQ_PASSES > 1 ? 1 : 0)
#define KEY_BIAS   (BIAS && !BIAS_ROWS)
#define KEYED      (INTERVALS || (MASK && !MASK_ROWS) || KEY_BIAS) /* keys may be seen by no row */
#define SUMMARISED (MASK && MASK_ROWS)
#define BARE       (PLAIN && !MASK && !INTERVALS && !VARLEN && !DETERMINISTIC)
/* Full sub-tiles have code of their own: measured 4 % faster with half blocks, 2 % slower where registers are scarcer.
 */
#define TWO_BODIES (HALF_BLOCK && BARE)
#define READS \
    (CROWDED || SCARCE ? 1 : 2) /* of right operands at a time: two measured 1 % faster, where registers allow */
/* A warp's own rows of bias and mask are copied, a sub-tile ahead, to where it will stage dS or P of them. */
#define CAN_COPY    (SCORES_ALIGNED && DS_BUFFERS == 2 && PART_ROWS <= 32)
#define BIAS_COPIED (CAN_COPY && BIAS == GPU_BIAS_SAME && BIAS_ROWS)
#define MASK_COPIED (CAN_COPY && SUMMARISED && (!BIAS_COPIED || BY_COLUMNS))
#define COPIED      (BIAS_COPIED || MASK_COPIED)
/* The gradient of a bias is written from the staged dS, 16 bytes a lane. */
#define DBIAS_FROM_DS \
    (DBIAS == GPU_DBIAS_DIRECT && SCORES_ALIGNED && BIAS == GPU_BIAS_SAME && !SOFTCAP && KEY_TILES == 2)
#define PLAIN     (!BIAS && !SOFTCAP) /* scores stay as the products are, in units of exp2; else in natural units */
#define UNBOUNDED 0x7fffffff
#define NO_ROW    0x7fffffff
#define LOG2_E    1.4426950408889634f
#define MINUS_INF (-__int_as_float(0x7f800000))

#include "families/mma/mma_tile.cuh"

static_assert(WARPS == mma_backward_warps(BLOCK_N, WIDEST, V_IN_REGISTERS), "the host launches them");
static_assert(!PAIRED || mma_backward_can_pair(BLOCK_N, HEAD_DIM, HEAD_DIM_V, V_IN_REGISTERS), "for some head dims");
static_assert(!RING || ((PAIRED || HALF_BLOCK) && DS_BUFFERS == 2 && !OVERLAY && (RING == 2 || RING == 3)),
              "a ring is of paired warps or of half blocks");
static_assert(!TMA || (mma_backward_panel(HEAD_DIM) == 8 * panel_chunks<HEAD_DIM / 8> &&
                       mma_backward_panel(HEAD_DIM_V) == 8 * panel_chunks<HEAD_DIM_V / 8>),
              "TMA's panels are the tiles'");
static_assert(!RING || SUB_ROWS == MMA_BACKWARD_STAGE_ROWS, "the host's maps and bytes are of such stages");
static_assert(!GATHER || (INTERVALS && !VARLEN && !(MASK && MASK_ROWS) && !(BIAS && BIAS_ROWS)), "of keys alone");
static_assert(DQ_COLUMNS % 16 == 0 && SUM_COLUMNS_K % 16 == 0 && SUM_COLUMNS_V % 16 == 0, "shares are steps of 16");

/* Shared memory. */
#define STAGE_ROWS   (RING ? SUB_ROWS : BLOCK_M) /* staged at a time */
#define Q_BYTES      (STAGE_ROWS * HEAD_DIM * 2)
#define DOUT_BYTES   (STAGE_ROWS * HEAD_DIM_V * 2)
#define LOW_STAGED   (BIAS && mma_backward_stages_low(RING, WIDEST, KEYED))
#define ROW_WORDS    (LOW_STAGED ? 3 : 2) /* of a row: lse, delta, and beside a bias what lse has rounded away */
#define ROWS_BYTES   (STAGE_ROWS * 4 * ROW_WORDS)
#define SCORES_BYTES (BLOCK_N * SUB_ROWS * 2)
/* With a ring, tiles are in panels of 128 or 64 bytes a row, as TMA leaves them: one place in a step serves
 * all. */
#define PANEL_ROWS (RING ? STAGE_ROWS : 0)
#define PANEL_KEYS (RING ? BLOCK_N : 0)
/* What a thread is, kept for the whole loop: its warp, and its places in a step where rows have 128 bytes. */
struct self {
    int warp;
    uint32_t rows, chunks;
};
struct tiles {
    struct self self;
    uint32_t q, dout, staged, rows, k, v, keys, barriers;
};
/* Staged rows: where Q and dO are, and the words of rows, STAGE_ROWS of each; RING: the barrier that says they are
 * there. */
struct stage {
    uint32_t q, dout, rows, full;
};
__device__ __forceinline__ struct tiles lay_out(uint32_t shared) {
    struct tiles t;
    t.self.warp = RING ? __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0) : (int)threadIdx.x / 32;
    t.self.rows = place_by_rows<8>();
    t.self.chunks = place_by_chunks<8>();
    opaque_pair(t.self.rows, t.self.chunks); /* not made anew */
    t.q = shared;
    t.dout = t.q + (RING ? RING : STAGES) * Q_BYTES;
    t.staged = t.dout + (RING ? RING : 1) * DOUT_BYTES;
    t.k = t.staged + (OVERLAY ? 0 : SCORES_BYTES * (BY_COLUMNS ? 2 : 1) * DS_BUFFERS);
    t.v = t.k + BLOCK_N * HEAD_DIM * 2;
    t.rows = t.v + (V_IN_REGISTERS ? 0 : BLOCK_N * HEAD_DIM_V * 2);
    t.keys = t.rows + (RING ? RING : 1) * ROWS_BYTES;
    t.barriers = t.keys + mma_backward_keys_bytes(BLOCK_N, !KEYED ? 0 : KEY_BIAS ? 3 : 2);
    return t;
}

/* The lane's number, opaque to the compiler: what follows from it is computed again, not kept in registers through the
 * loop. Where it is called was decided by the spills of all specialisations. */
__device__ __forceinline__ int fresh_lane() {
    int thread = threadIdx.x;
    thread = opaque(thread);
    return thread % 32;
}
template <int chunks, int panel_rows>
__device__ __forceinline__ lane_address<chunks, panel_rows> by_rows(const struct self &self, uint32_t tile, int row) {
    constexpr int wide = row_chunks<chunks, panel_rows>;
    return {tile + (wide == 8 && RING ? self.rows : place_by_rows<wide>()), row};
}
template <int chunks, int panel_rows>
__device__ __forceinline__ lane_address<chunks, panel_rows> by_chunks(const struct self &self, uint32_t tile, int row) {
    constexpr int wide = row_chunks<chunks, panel_rows>;
    return {tile + (wide == 8 && RING ? self.chunks : place_by_chunks<wide>()), row};
}

/* The block's place, and one query head's addresses. */
struct place {
    int batch, part, first_key; /* part: of all groups of query heads; unless they are split, a KV head */
    int seqlen_q, seqlen_k, q_begin, k_begin, diagonal;
};
struct head {
    int index;
    const char *q, *dout;
    const float *lse, *delta, *low;
    float *dq;
    const char *mask, *bias;
    const uint8_t *block_mask;
};

__device__ __forceinline__ struct place find_place(const struct gpu_backward_params &a, uint32_t x, uint32_t y,
                                                   uint32_t z) {
    struct place at;
    at.batch = (int)z;
    at.part = (int)y;
    at.first_key = (int)x * BLOCK_N;
    at.seqlen_q = a.in.seqlen_q;
    at.seqlen_k = a.in.seqlen_k;
    at.q_begin = at.k_begin = 0;
#if VARLEN
    const struct packed q = find_packed_q(a.in, at.batch), k = find_packed_k(a.in, at.batch);
    at.q_begin = q.begin;
    at.k_begin = k.begin;
    at.seqlen_q = q.length;
    at.seqlen_k = k.length;
#endif
    at.diagonal = at.seqlen_k - at.seqlen_q;
    return at;
}

__device__ __forceinline__ int head_kv_of(const struct gpu_backward_params &a, const struct place &at) {
    return SPLIT ? at.part / a.group_parts : at.part;
}
/* Query heads that the block takes. */
__device__ __forceinline__ int num_heads(const struct gpu_backward_params &a) {
    return SPLIT ? a.part_heads : a.in.group;
}

/* Where the head's rows begin in the workspace's arrays. */
__device__ __forceinline__ int64_t rows_begin(const struct gpu_backward_params &a, const struct place &at, int h) {
    return VARLEN ? backward_begin(at.q_begin, at.batch, MMA_BACKWARD_ROW_STEP) + h * a.rows
                  : ((int64_t)at.batch * a.in.heads + h) * a.rows;
}

/* Made anew where it is needed: kept through the loop, the addresses would take registers that the sums need. */
__device__ __forceinline__ struct head find_head(const struct gpu_backward_params &a, const struct place &at, int h) {
    struct head head;
    h = opaque(h);
    head.index = h;
    head.q = a.in.q.data + (at.batch * a.in.q.batch + (int64_t)at.q_begin * a.in.q.row + h * a.in.q.head) * 2;
    head.dout = a.dout.data + (at.batch * a.dout.batch + (int64_t)at.q_begin * a.dout.row + h * a.dout.head) * 2;
    const int64_t rows = rows_begin(a, at, h);
    head.lse = a.lse_rows + rows;
    head.delta = a.delta_rows + rows;
#if BIAS
    head.low = a.low_rows + rows;
#endif
    head.dq = a.dq_sums + rows * HEAD_DIM;
#if MASK
    head.mask = a.in.mask.data + at.batch * a.in.mask.batch + h / a.in.mask.group * a.in.mask.head;
#endif
#if BIAS
    head.bias = a.in.bias.data + (at.batch * a.in.bias.batch + h / a.in.bias.group * a.in.bias.head) * BIAS_BYTES;
#endif
#if SUMMARISED
    head.block_mask = a.in.block_mask + at.batch * a.in.block_mask_batch + h / a.in.mask.group * a.in.block_mask_head +
                      at.first_key / BLOCK_N;
#endif
    return head;
}

/* Bytes from a row of mask, bias or dbias to the n-th after it. Aligned ones are less than 2^31 apart: registers are
 * scarce. */
__device__ __forceinline__ int64_t mask_rows(const struct gpu_backward_params &a, int n) {
    return SCORES_ALIGNED ? (int64_t)n * a.mask_row_bytes : n * a.in.mask.row;
}
__device__ __forceinline__ int64_t bias_rows(const struct gpu_backward_params &a, int n) {
    return SCORES_ALIGNED ? (int64_t)n * a.bias_row_bytes : n * a.in.bias.row * BIAS_BYTES;
}
__device__ __forceinline__ int64_t dbias_rows(const struct gpu_backward_params &a, int n) {
#if DBIAS == GPU_DBIAS_SUMS
    return SCORES_ALIGNED ? (int64_t)n * a.dbias_row_bytes : n * a.dbias_row * 4;
#else
    return SCORES_ALIGNED ? (int64_t)n * a.dbias_row_bytes : n * a.dbias.row * BIAS_BYTES;
#endif
}
__device__ __forceinline__ float bias_value(const char *at) {
#if BIAS == GPU_BIAS_FLOAT32
    return *(const float *)at;
#else
    return unpack(*(const uint16_t *)at);
#endif
}

/* The key at a place of the block's. */
__device__ __forceinline__ int key_at(const struct gpu_backward_params &a, const struct place &at, int local) {
#if GATHER
    const int64_t head = (int64_t)head_kv_of(a, at) * a.in.group / a.in.intervals.group;
    return a.order[at.batch * a.order_batch + head * a.order_head + at.first_key + local];
#else
    return at.first_key + local;
#endif
}

/* Rows first <= i < last see a key, as far as window and ends decide. */
__device__ __forceinline__ int first_row(const struct gpu_backward_params &a, const struct place &at, int64_t key) {
    return WINDOW && a.in.window_right != UNBOUNDED
               ? (int)min(max(key - at.diagonal - a.in.window_right, (int64_t)0), (int64_t)at.seqlen_q)
               : 0;
}
__device__ __forceinline__ int last_row(const struct gpu_backward_params &a, const struct place &at, int64_t key) {
    return WINDOW && a.in.window_left != UNBOUNDED
               ? (int)min(max(key - at.diagonal + a.in.window_left + 1, (int64_t)0), (int64_t)at.seqlen_q)
               : at.seqlen_q;
}

/* The thread's keys, two of each tile: the rows that see them, and their bias. */
struct keys {
    int first[KEY_TILES][2], last[KEY_TILES][2];
    float bias[KEY_TILES][2];
};
/* By window and ends. Where nothing else decides, made where it is needed: few sub-tiles are partial. Bounds are those
 * of the block's first key and the distance from it; clamped so that 32 bits hold them, they may lie outside of the
 * rows. */
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
/* Otherwise they are kept in shared memory: first, last and bias of each of BLOCK_N keys. */
__device__ __forceinline__ void store_keys(const struct gpu_backward_params &a, const struct place &at,
                                           const struct head &head, uint32_t to) {
    if (threadIdx.x >= BLOCK_N)
        return;
    const int j = key_at(a, at, threadIdx.x);
    int first = first_row(a, at, j), last = last_row(a, at, j);
    float bias = 0;
    if (j >= at.seqlen_k) {
        last = 0;
    } else {
#if INTERVALS
        const struct gpu_intervals &i = a.in.intervals;
        const int64_t h = head.index / i.group, key = (int64_t)at.k_begin + j;
        first = max(first, i.start[at.batch * i.start_batch + h * i.start_head + key * i.start_key]);
        last = min(last, i.end[at.batch * i.end_batch + h * i.end_head + key * i.end_key]);
#endif
#if MASK && !MASK_ROWS
        if (!head.mask[(int64_t)j * a.in.mask.key])
            last = 0;
#endif
#if BIAS && !BIAS_ROWS
        bias = bias_value(head.bias + (int64_t)j * a.in.bias.key * BIAS_BYTES);
        if (bias == MINUS_INF)
            last = 0;
#endif
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

/* Row blocks in which some row sees some key; and which of those need no test of pairs. */
struct walk {
    int first, last;           /* rows that window and ends leave: first <= i < last */
    int full_first, full_last; /* rows that see all keys of the block, by window and ends */
};
__device__ __forceinline__ struct walk plan_walk(const struct gpu_backward_params &a, const struct place &at) {
    struct walk w;
    const int group = GATHER ? KEY_SORT_KEYS : BLOCK_N, first_key = at.first_key / group * group;
    const int last_key = min(first_key + group, at.seqlen_k) - 1;
    w.first = first_row(a, at, first_key);
    w.last = last_row(a, at, last_key);
    w.full_first = first_row(a, at, last_key);
    w.full_last = first_key + group <= at.seqlen_k ? last_row(a, at, first_key) : 0;
    if (w.full_last == at.seqlen_q)
        w.full_last = UNBOUNDED; /* rows past the end have weight 0 */
    return w;
}
#if KEYED
/* The part of the walk that intervals, masks and biases of the keys leave. `scratch`: 32 bytes that nobody uses. */
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
#    pragma unroll
    for (int n = 0; n < BLOCK_N / 32; n++) {
        first = min(first, (int)ld_shared_4(scratch + n * 8));
        last = max(last, (int)ld_shared_4(scratch + n * 8 + 4));
    }
    __syncthreads();
    w.first = max(w.first, first);
    w.last = min(w.last, last);
    return w;
}
#endif
#if SUMMARISED
/* GPU_BLOCK_*: what the mask shows of the block's keys to the BLOCK_M rows that `row` is one of. */
__device__ __forceinline__ uint8_t mask_kind(const struct gpu_backward_params &a, const struct place &at, int h,
                                             int row) {
    return find_head(a, at, h).block_mask[(int64_t)(row / BLOCK_M) * a.in.block_mask_row];
}
#endif
__device__ __forceinline__ bool active(const struct gpu_backward_params &a, const struct place &at, uint32_t keys,
                                       int h, int row) {
    bool any = true;
#if SUMMARISED
    any = mask_kind(a, at, h, row) != GPU_BLOCK_HIDDEN;
#endif
#if KEYED
#    if RING
    bool mine = false; /* every warp looks at all keys: no barrier */
#        pragma unroll
    for (int n = 0; any && n < BLOCK_N; n += 32) {
        const int first = (int)ld_shared_4(keys + (n + threadIdx.x % 32) * 4);
        const int last = (int)ld_shared_4(keys + (BLOCK_N + n + threadIdx.x % 32) * 4);
        mine = mine || (first < row + STAGE_ROWS && last > row && first < last);
    }
    any = __any_sync(0xffffffff, mine);
#    else
    bool mine = false;
    if (any && threadIdx.x < BLOCK_N) {
        const int first = (int)ld_shared_4(keys + threadIdx.x * 4);
        const int last = (int)ld_shared_4(keys + (BLOCK_N + threadIdx.x) * 4);
        mine = first < row + STAGE_ROWS && last > row && first < last;
    }
    any = __syncthreads_or(mine);
#    endif
#endif
    return any;
}

#if DETERMINISTIC
/* Blocks add to SUB_ROWS rows of dQ, and to the gradient of a shared bias, in the order of their tickets, one after the
 * other: a semaphore counts those that have added. Of the key blocks of a head the last is first: where keys are seen
 * from their diagonal on, each then comes to rows that the one before has just left, and none waits. */
__device__ __forceinline__ void await_turn(const int *semaphore, int mine) {
    while (ld_acquire(semaphore) != mine) {
    }
}
__device__ __forceinline__ int *semaphore_of(const struct gpu_backward_params &a, const struct place &at, int h,
                                             int row) {
    return a.semaphores + (rows_begin(a, at, h) + row) / 16;
}
/* Key blocks before this one whose walk, by window and ends, has some of SUB_ROWS rows from `row` on. */
__device__ __forceinline__ int my_turn(const struct gpu_backward_params &a, const struct place &at, int row) {
    const int group = GATHER ? KEY_SORT_KEYS : BLOCK_N;
    int64_t last = at.seqlen_k - 1;
    if (WINDOW && a.in.window_right != UNBOUNDED && row + SUB_ROWS <= at.seqlen_q)
        last = min(last, (int64_t)row + SUB_ROWS - 1 + at.diagonal + a.in.window_right);
    const int blocks = ((int)(last / group) + 1) * (group / BLOCK_N);
    return min(blocks, (at.seqlen_k + BLOCK_N - 1) / BLOCK_N) - 1 - at.first_key / BLOCK_N;
}
/* Of the bias' gradient: heads and batches that share it, in order. */
__device__ __forceinline__ int *dbias_semaphore_of(const struct gpu_backward_params &a, const struct place &at, int h,
                                                   int row) {
    const int batch = a.dbias_batches == 1 ? 0 : at.batch;
    return a.dbias_semaphores +
           (((int64_t)batch * a.dbias_heads + h / a.in.bias.group) * (FOLDED ? a.grid_x : gridDim.x) +
            at.first_key / BLOCK_N) *
               backward_semaphores(a.in.seqlen_q) +
           row / SUB_ROWS;
}
__device__ __forceinline__ int my_dbias_turn(const struct gpu_backward_params &a, const struct place &at, int h) {
    return (a.dbias_batches == 1 ? at.batch * a.in.bias.group : 0) + h % a.in.bias.group;
}

/* Which turns of a head the block has yet to hand on. */
struct turns {
    int row, added; /* the first rows of them; rows to which the block has added */
};
/* Rows of the sequence that take part: those of the walk; where lengths differ and batches share a bias, all. */
__device__ __forceinline__ struct turns first_turns(const struct walk &w) {
    return {TURNS_DBIAS && VARLEN ? 0 : w.first / SUB_ROWS * SUB_ROWS, NO_ROW};
}
/* Hands on the turns of rows before `end`, when all warps have added to them; where nothing was added the block awaits
 * its turn here. */
__device__ __forceinline__ void hand_on(struct turns &turns, const struct gpu_backward_params &a,
                                        const struct place &at, const struct walk &w, int h, int end) {
    if (threadIdx.x != 0)
        return;
    h = opaque(h);
#    pragma unroll 1
    for (; turns.row < end; turns.row += SUB_ROWS) {
        const int row = turns.row;
        [[maybe_unused]] const bool walked = !(TURNS_DBIAS && VARLEN) || (row < w.last && row + SUB_ROWS > w.first);
#    if TURNS_DQ
        if (walked) {
            int *semaphore = semaphore_of(a, at, h, row);
            const int mine = my_turn(a, at, row);
            if (row != turns.added)
                await_turn(semaphore, mine);
            st_release(semaphore, mine + 1);
        }
#    endif
#    if TURNS_DBIAS
        if (row != turns.added) { /* else hand_on_before() was there */
            int *semaphore = dbias_semaphore_of(a, at, h, row);
            const int mine = my_dbias_turn(a, at, h);
            await_turn(semaphore, mine);
            st_release(semaphore, mine + 1);
        }
#    endif
    }
}
/* When all warps have made the scores of the rows from `row` on: the turns before them, and of the bias' gradient
 * theirs too, since heads and batches wait for it long enough. */
__device__ __forceinline__ void hand_on_before(struct turns &turns, const struct gpu_backward_params &a,
                                               const struct place &at, int h, int row) {
    hand_on(turns, a, at, plan_walk(a, at), h, row);
    turns.added = row;
    h = opaque(h); /* made here, not kept */
    if (TURNS_DBIAS && threadIdx.x == 0)
        st_release(dbias_semaphore_of(a, at, h, row), my_dbias_turn(a, at, h) + 1);
}
__device__ __forceinline__ void hand_on_rest(struct turns &turns, const struct gpu_backward_params &a,
                                             const struct place &at, const struct walk &w, int h) {
    hand_on(turns, a, at, w, h, TURNS_DBIAS && VARLEN ? a.in.seqlen_q : w.last);
}
#endif

/* Where the rows of a block begin that window and ends leave, in whole sub-tiles. */
__device__ __forceinline__ int first_sub_tile(const struct walk &w, int row) {
    return max(w.first - row, 0) / SUB_ROWS * SUB_ROWS;
}

/* The next active rows to stage from `row` on; NO_ROW when there is none. */
__device__ __forceinline__ int next_active(const struct gpu_backward_params &a, const struct place &at,
                                           const struct walk &w, uint32_t keys, int h, int row) {
    while (row < w.last && !active(a, at, keys, h, row))
        row += STAGE_ROWS;
    return row < w.last ? row : NO_ROW;
}

__device__ __forceinline__ void load_q(const struct gpu_backward_params &a, const struct place &at, int h,
                                       uint32_t tile, int row) {
    const struct head head = find_head(a, at, h);
    load_tile<HEAD_DIM / 8, STAGE_ROWS, PANEL_ROWS>(tile, head.q + (int64_t)row * a.in.q.row * 2, a.in.q.row * 2,
                                                    at.seqlen_q - row, a.in.head_dim);
}
/* The word-th of what there is for each row of a head. */
__device__ __forceinline__ const float *row_words(const struct head &head, int word) {
#if BIAS
    if (word == 2)
        return head.low;
#endif
    return word ? head.delta : head.lse;
}
/* dO and what there is for each row. */
__device__ __forceinline__ void load_dout(const struct gpu_backward_params &a, const struct place &at, int h,
                                          const struct stage &stage, int row) {
    const struct head head = find_head(a, at, h);
    load_tile<HEAD_DIM_V / 8, STAGE_ROWS, PANEL_ROWS>(stage.dout, head.dout + (int64_t)row * a.dout.row * 2,
                                                      a.dout.row * 2, at.seqlen_q - row, a.in.head_dim_v);
    if (threadIdx.x < STAGE_ROWS / 4 * ROW_WORDS) {
        const int n = threadIdx.x * 4 % STAGE_ROWS;
        cp_async_16(stage.rows + threadIdx.x * 16, row_words(head, threadIdx.x * 4 / STAGE_ROWS) + row + n);
    }
}

#if RING
/* The slot of the stage that is computed, and which of its barrier's phases says that it is there. */
struct ring {
    int slot;
    uint32_t parity;
};
__device__ __forceinline__ int slot_after(int slot) { return slot == RING - 1 ? 0 : slot + 1; }
__device__ __forceinline__ struct stage stage_at(const struct tiles &tiles, int slot) {
    return {tiles.q + slot * Q_BYTES, tiles.dout + slot * DOUT_BYTES, tiles.rows + slot * ROWS_BYTES,
            tiles.barriers + slot * 8};
}
/* Ends a phase when all warps have staged a stage's scores. */
__device__ __forceinline__ uint32_t scores_barrier(const struct tiles &tiles) { return tiles.barriers + RING * 8; }
/* To a slot that all warps have left. */
__device__ __forceinline__ void load_stage(const struct mma_backward_params &params, const struct place &at, int h,
                                           const struct tiles &tiles, int slot, int row) {
    const struct gpu_backward_params &a = params.shared;
    if (row == NO_ROW)
        return;
    const struct stage stage = stage_at(tiles, slot);
#    if TMA
    if (threadIdx.x % 32)
        return;
    /* A copy for each warp, then the next: words of rows, panels of Q, panels of dO. */
    constexpr int columns_q = mma_backward_panel(HEAD_DIM), columns_v = mma_backward_panel(HEAD_DIM_V);
    constexpr int panels_q = HEAD_DIM / columns_q, panels = panels_q + HEAD_DIM_V / columns_v;
    const struct head head = find_head(a, at, h);
    if (threadIdx.x == 0)
        mbarrier_arrive_expect_tx(stage.full, Q_BYTES + DOUT_BYTES + ROWS_BYTES);
#        pragma unroll
    for (int n = threadIdx.x / 32; n < panels + ROW_WORDS; n += WARPS) {
        const int panel = n - ROW_WORDS;
        if (panel < 0)
            cp_async_bulk(stage.rows + n * (STAGE_ROWS * 4), row_words(head, n) + row, STAGE_ROWS * 4, stage.full);
        else if (panel < panels_q)
            cp_async_bulk_tensor_4d(stage.q + panel * (columns_q * STAGE_ROWS * 2), &params.q_map, stage.full,
                                    panel * columns_q, row, head.index, at.batch);
        else
            cp_async_bulk_tensor_4d(stage.dout + (panel - panels_q) * (columns_v * STAGE_ROWS * 2), &params.dout_map,
                                    stage.full, (panel - panels_q) * columns_v, row, head.index, at.batch);
    }
#    else
    load_q(a, at, h, stage.q, row);
    load_dout(a, at, h, stage, row);
    cp_async_mbarrier_arrive_noinc(stage.full);
    if (!ALIGNED)
        mbarrier_arrive(stage.full); /* for what was stored, not copied */
#    endif
}
__device__ __forceinline__ int following(const struct gpu_backward_params &a, const struct place &at,
                                         const struct walk &w, uint32_t keys, int h, int row) {
    return row == NO_ROW ? NO_ROW : next_active(a, at, w, keys, h, row + STAGE_ROWS);
}
#endif

struct sums {
    float dk[KEY_TILES][SUM_COLUMNS_K / 8][4], dv[KEY_TILES][SUM_COLUMNS_V / 8][4];
    float dbias[KEY_TILES][2];
};
#if V_IN_REGISTERS
typedef uint32_t value_fragments[HEAD_DIM_V / 16][4];
#else
typedef uint32_t value_fragments[1][4];
#endif

/* c = A B^T for the warp's keys and PART_ROWS rows from `row` on of a tile of rows. */
template <int depth, bool kept_left>
__device__ __forceinline__ void multiply_scores(float (&c)[KEY_TILES][ROW_TILES][4], const struct self &self,
                                                uint32_t left, int warp_key, const uint32_t (*kept)[4], uint32_t right,
                                                int row) {
    const auto keys = by_rows<depth / 8, PANEL_KEYS>(self, left, warp_key);
    const auto rows = by_chunks<depth / 8, PANEL_ROWS>(self, right, row);
#pragma unroll
    for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[t][n][e] = 0;
#pragma unroll
    for (int k = 0; k < depth / 16; k++) {
        uint32_t x[KEY_TILES][4];
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++) {
            if constexpr (kept_left) {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[t][e] = kept[k][e];
            } else {
                ldmatrix_x4(x[t], keys.at_step(t * 16, 2 * k));
            }
        }
#pragma unroll
        for (int n = 0; n < ROW_TILES; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, rows.at_step(n * 8, 2 * k));
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) {
                mma_16x8x16(c[t][n], x[t], b[0], b[1]);
                mma_16x8x16(c[t][n + 1], x[t], b[2], b[3]);
            }
        }
    }
}

/* sum += A B, A 16 x 16 of each of `lefts` tiles, B `rows` rows on in a tile; of its columns every `share`-th 16. */
template <int share, int chunks, int panel_rows, int lefts, int tiles>
__device__ __forceinline__ void add_product(float (&sum)[lefts][tiles][4], const uint32_t (&left)[lefts][4],
                                            const lane_address<chunks, panel_rows> &right, int rows) {
#pragma unroll
    for (int n = 0; n < tiles; n += 2 * READS) {
        uint32_t b[READS][4];
#pragma unroll
        for (int i = 0; i < READS && n + 2 * i < tiles; i++)
            ldmatrix_x4_trans(b[i], right.at_step(rows, (n + 2 * i) * share));
#pragma unroll
        for (int i = 0; i < READS && n + 2 * i < tiles; i++)
#pragma unroll
            for (int t = 0; t < lefts; t++) {
                mma_16x8x16(sum[t][n + 2 * i], left[t], b[i][0], b[i][1]);
                mma_16x8x16(sum[t][n + 2 * i + 1], left[t], b[i][2], b[i][3]);
            }
    }
}

#if DBIAS == GPU_DBIAS_DIRECT || DBIAS == GPU_DBIAS_SUMS
/* Row 0 of one key of the bias' gradient, or of its sums; and bytes from row to row. */
#    define DBIAS_BYTES (DBIAS == GPU_DBIAS_SUMS ? 4 : BIAS_BYTES)
__device__ __forceinline__ char *dbias_of_key(const struct gpu_backward_params &a, const struct place &at, int64_t h,
                                              int key) {
    h /= a.in.bias.group;
#    if DBIAS == GPU_DBIAS_SUMS
    return (char *)(a.dbias_sums + at.batch * a.dbias_batch + h * a.dbias_head + key * a.dbias_key);
#    else
    return (char *)a.dbias.data + (at.batch * a.dbias.batch + h * a.dbias.head + key * a.dbias.key) * BIAS_BYTES;
#    endif
}
__device__ __forceinline__ void add_dbias(char *to, float x) {
#    if DBIAS == GPU_DBIAS_SUMS
    red_add((float *)to, x);
#    elif BIAS == GPU_BIAS_FLOAT32
    *(float *)to = x;
#    else
    *(uint16_t *)to = (uint16_t)pack(x, 0);
#    endif
}
#endif

#if COPIED
/* Where the copies lie: a part's region is WARP_KEYS lines of PART_ROWS / 8 chunks. Bias: chunk of a row and eight
 * keys. */
__device__ __forceinline__ int line_of(int row, int eight) {
    return WARP_KEYS >= PART_ROWS ? row + PART_ROWS * (eight / (PART_ROWS / 8)) : row % WARP_KEYS;
}
__device__ __forceinline__ int column_of(int row, int eight) {
    return WARP_KEYS >= PART_ROWS ? eight % (PART_ROWS / 8) : eight + row / WARP_KEYS * (WARP_KEYS / 8);
}
__device__ __forceinline__ void read_pairs(uint32_t (&r)[4], uint32_t from) { ldmatrix_x4_trans(r, from); }
__device__ __forceinline__ void read_pairs(uint32_t (&r)[2], uint32_t from) { ldmatrix_x2_trans(r, from); }
/* Mask: 16 keys of a row are chunk row + 16-key group * PART_ROWS; beside a bias it lies where P will, after dS. */
__device__ __forceinline__ uint32_t mask_place(uint32_t staged, int warp_key, int part, int chunk) {
    return staged + (BIAS_COPIED ? SCORES_BYTES : 0) +
           chunk_offset<SUB_ROWS / 8>(warp_key + chunk % WARP_KEYS, part / 8 + chunk / WARP_KEYS);
}

/* What the warp's own rows of the sub-tile at `sub_row` need; `staged`: where their dS will go. */
__device__ __forceinline__ void copy_scores(const struct gpu_backward_params &a, const struct place &at, int h,
                                            uint32_t staged, int sub_row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp / KEY_WARPS;
    const int warp_key = warp % KEY_WARPS * WARP_KEYS;
    const struct head head = find_head(a, at, h);
#    pragma unroll 1
    for (int part = share * WARP_ROWS; part < share * WARP_ROWS + WARP_ROWS; part += PART_ROWS) {
        const int rows = at.seqlen_q - sub_row - part;
#    if BIAS_COPIED
        constexpr int eights = WARP_KEYS / 8, step = 32 / eights;
        const int eight = lane % eights, key = at.first_key + warp_key + eight * 8;
        const int bytes = min(max(at.seqlen_k - key, 0), 8) * 2;
        const char *bias = head.bias + bias_rows(a, sub_row + part + lane / eights) + key * BIAS_BYTES;
#        pragma unroll
        for (int n = 0; n < PART_ROWS; n += step, bias += bias_rows(a, step)) {
            const int row = n + lane / eights, count = row < rows ? bytes : 0;
            cp_async_16_fill(
                staged + chunk_offset<SUB_ROWS / 8>(warp_key + line_of(row, eight), part / 8 + column_of(row, eight)),
                count ? bias : head.bias, count);
        }
#    endif
#    if MASK_COPIED
#        pragma unroll
        for (int n = 0; n < PART_ROWS * WARP_KEYS / 16; n += 32) {
            const int chunk = n + lane, row = chunk % PART_ROWS;
            const int key = at.first_key + warp_key + chunk / PART_ROWS * 16;
            const int count = row < rows ? min(max(at.seqlen_k - key, 0), 16) : 0;
            const char *mask = head.mask + mask_rows(a, sub_row + part + row) + key;
            if (chunk < PART_ROWS * WARP_KEYS / 16)
                cp_async_16_fill(mask_place(staged, warp_key, part, chunk), count ? mask : head.mask, count);
        }
#    endif
    }
}
#endif

#if MASK_COPIED
/* Whether the mask shows the warp's keys to row `lane` of a part: bit k % 4 * 8 + k / 4 says it of key k. */
__device__ __forceinline__ uint32_t copied_mask(uint32_t staged, int warp_key, int part) {
    const int lane = threadIdx.x % 32;
    uint32_t seen = 0;
#    pragma unroll
    for (int n = 0; n < PART_ROWS * WARP_KEYS / 16; n += 32) {
        const int chunk = (n + lane) % (PART_ROWS * WARP_KEYS / 16);
        uint32_t bytes[4];
        ld_shared_16(bytes, mask_place(staged, warp_key, part, chunk));
#    pragma unroll
        for (int i = 0; i < 4; i++) /* the highest bit of each byte that is not 0 */
            seen = seen >> 1 | ((((bytes[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes[i]) & 0x80808080u);
    }
    if (WARP_KEYS == 16)
        return seen >> 4;
    if (PART_ROWS == 16) { /* each lane has read half of a row's keys */
        seen = lane < 16 ? seen >> 4 : seen;
        seen |= __shfl_xor_sync(0xffffffff, seen, 16);
    }
    return seen;
}
#endif

#if SUMMARISED && !MASK_COPIED
/* One bit for each score of the thread: whether the mask shows it. Read ahead of the products, which hide the wait. */
__device__ __forceinline__ uint32_t read_mask(const struct gpu_backward_params &a, const struct place &at, int h,
                                              int warp_key, int first_row) {
    const int lane = threadIdx.x % 32;
    static_assert(ROW_TILES * KEY_TILES <= 8, "a bit each");
    uint32_t seen = 0;
#    pragma unroll
    for (int j = 0; j < 2 * KEY_TILES; j++) {
        const char *mask =
            find_head(a, at, h).mask + min(at.first_key + warp_key + lane / 4 + j * 8, at.seqlen_k - 1) * a.in.mask.key;
#    pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#    pragma unroll
            for (int c = 0; c < 2; c++) {
                const int row = min(first_row + n * 8 + lane % 4 * 2 + c, at.seqlen_q - 1);
                seen |= (mask[mask_rows(a, row)] != 0) << ((n * 2 + c) * 2 * KEY_TILES + j);
            }
    }
    return seen;
}
#endif

/* Of PART_ROWS rows: P, and the slope of the cap, rounded as dS will be. */
struct p_fragments {
    float p[KEY_TILES][ROW_TILES][4];
    uint32_t slope[SOFTCAP ? ROW_TILES : 1][2 * KEY_TILES];
};
/* P or dS as left operands. */
typedef uint32_t score_fragments[ROW_TILES / 2][KEY_TILES][4];

__device__ __forceinline__ void pack_scores(score_fragments &left, const float (&x)[KEY_TILES][ROW_TILES][4]) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int j = 0; j < 2 * KEY_TILES; j++)
            left[n / 2][j / 2][n % 2 * 2 + j % 2] = pack(x[j / 2][n][j % 2 * 2], x[j / 2][n][j % 2 * 2 + 1]);
}

__device__ __forceinline__ void make_p(struct p_fragments &w, const struct gpu_backward_params &a,
                                       const struct place &at, int h, const struct tiles &tiles,
                                       const struct stage &stage, uint32_t staged, int warp_key, int block_row,
                                       int sub_row, bool partial, bool copying) {
    const int lane = fresh_lane();
#if SUMMARISED && !MASK_COPIED
    const uint32_t seen = partial ? read_mask(a, at, h, warp_key, block_row + sub_row) : 0xffffffffu;
#endif
    multiply_scores<HEAD_DIM, false>(w.p, tiles.self, tiles.k, warp_key, nullptr, stage.q, sub_row);
#if COPIED
    if (RING || copying)
        cp_async_wait<0>();
    __syncwarp();
#endif
#if BIAS_COPIED
    const int own = lane % 8, eight = lane / 8 % (2 * KEY_TILES);
    const lane_address<SUB_ROWS / 8> copied(staged, warp_key + line_of(own, eight),
                                            sub_row % SUB_ROWS / 8 + column_of(own, eight));
#elif BIAS && BIAS_ROWS
    const char *bias[2 * KEY_TILES]; /* row 0 of the keys */
#    pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; n++)
        bias[n] = find_head(a, at, h).bias +
                  min(at.first_key + warp_key + lane / 4 + n * 8, at.seqlen_k - 1) * a.in.bias.key * BIAS_BYTES;
#endif
#if KEYED
    const struct keys keys = stored_keys(tiles.keys, warp_key);
#endif
#if BIAS
    [[maybe_unused]] const float *low_rows = find_head(a, at, h).low + block_row;
#endif
    [[maybe_unused]] const float factor = PLAIN ? a.in.scale * LOG2_E : a.in.scale;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        const int local = sub_row + n * 8 + lane % 4 * 2;
        uint32_t lse[2];
        ld_shared_8(lse[0], lse[1], stage.rows + local * 4);
#if BIAS
        uint32_t low[2];
        if (LOW_STAGED) {
            ld_shared_8(low[0], low[1], stage.rows + (2 * STAGE_ROWS + local) * 4);
        } else {
            const float2 pair = *(const float2 *)(low_rows + local);
            low[0] = __float_as_uint(pair.x);
            low[1] = __float_as_uint(pair.y);
        }
#endif
#if BIAS_COPIED
        uint32_t bias[2 * KEY_TILES]; /* two rows of a key */
        read_pairs(bias, WARP_KEYS >= PART_ROWS ? copied.at_step(n * 8, 0) : copied.at_step(n % 2 * 8, n / 2 * 2));
#endif
#pragma unroll
        for (int c = 0; c < 2; c++) {
#if BIAS && BIAS_ROWS && !BIAS_COPIED
            const int inside = min(block_row + local + c, at.seqlen_q - 1);
#endif
#pragma unroll
            for (int j = 0; j < 2 * KEY_TILES; j++) {
                const int tile = j / 2, half = j % 2;
                float x = w.p[tile][n][half * 2 + c];
#if SOFTCAP
                const float t = tanh_accurate(x * a.in.scale * a.in.softcap_inverse);
                w.slope[n][j] = c ? w.slope[n][j] | pack(0, 1.0f - t * t) : pack(1.0f - t * t, 0);
                x = a.in.softcap * t;
#else
                x *= factor;
#endif
#if BIAS_COPIED
                x += unpack((uint16_t)(bias[j] >> c * 16));
#elif BIAS && BIAS_ROWS
                x += bias_value(bias[j] + bias_rows(a, inside));
#elif BIAS
                x += keys.bias[tile][half];
#endif
                x -= __uint_as_float(lse[c]);
#if BIAS
                x = ex2_approx(x * LOG2_E + __uint_as_float(low[c]));
#else
                x = ex2_approx(PLAIN ? x : x * LOG2_E);
#endif
                w.p[tile][n][half * 2 + c] = x;
            }
        }
    }
    if (KEYED || partial) {
#if !KEYED
        const struct keys keys = bound_keys(a, at, warp_key);
#endif
#if MASK_COPIED
        const uint32_t rows_seen = copied_mask(staged, warp_key, sub_row % SUB_ROWS);
#endif
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
#if MASK_COPIED
                const uint32_t seen =
                    __shfl_sync(0xffffffff, rows_seen, n * 8 + lane % 4 * 2 + c) >> (lane / 4 % 4 * 8 + lane / 16);
#endif
#pragma unroll
                for (int j = 0; j < 2 * KEY_TILES; j++) {
                    const int row = block_row + sub_row + n * 8 + lane % 4 * 2 + c;
                    bool visible =
                        (!(WINDOW || KEYED) || row >= keys.first[j / 2][j % 2]) && row < keys.last[j / 2][j % 2];
#if MASK_COPIED
                    visible = visible && (seen >> 2 * j & 1);
#elif SUMMARISED
                    visible = visible && (seen >> ((n * 2 + c) * 2 * KEY_TILES + j) & 1);
#endif
                    w.p[j / 2][n][j % 2 * 2 + c] = visible ? w.p[j / 2][n][j % 2 * 2 + c] : 0.0f;
                }
            }
    }
}

/* dS = P (dP - delta), as left operands. */
__device__ __forceinline__ void make_ds(score_fragments &left, struct sums &sums, const struct p_fragments &w,
                                        const struct gpu_backward_params &a, const struct place &at, int h,
                                        const struct tiles &tiles, const struct stage &stage,
                                        const value_fragments &values, int warp_key, int block_row, int sub_row,
                                        bool partial) {
    const int lane = (RING && !BARE) || VARLEN || (V_IN_REGISTERS && DETERMINISTIC) ? fresh_lane() : threadIdx.x % 32;
#if TURNS_DBIAS
    await_turn(dbias_semaphore_of(a, at, h, block_row + sub_row), my_dbias_turn(a, at, h));
#endif
    float dp[KEY_TILES][ROW_TILES][4];
#if (DBIAS == GPU_DBIAS_DIRECT && !DBIAS_FROM_DS) || DBIAS == GPU_DBIAS_SUMS
    char *dbias[SCORES_ALIGNED ? 1 : 2 * KEY_TILES]; /* aligned: the other keys' lie at known distances */
#    pragma unroll
    for (int n = 0; n < (SCORES_ALIGNED ? 1 : 2 * KEY_TILES); n++)
        dbias[n] = dbias_of_key(a, at, h, at.first_key + warp_key + lane / 4 + n * 8);
    [[maybe_unused]] const int num_keys = at.seqlen_k - at.first_key - warp_key - lane / 4;
#endif
    multiply_scores<HEAD_DIM_V, V_IN_REGISTERS>(dp, tiles.self, tiles.v, warp_key, values, stage.dout, sub_row);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        const int local = sub_row + n * 8 + lane % 4 * 2;
        uint32_t delta[2];
        ld_shared_8(delta[0], delta[1], stage.rows + (STAGE_ROWS + local) * 4);
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[t][n][e] = w.p[t][n][e] * (dp[t][n][e] - __uint_as_float(delta[e % 2]));
    }
    if (KEYED || partial) /* nothing of hidden pairs, also where dO is not finite */
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    dp[t][n][e] = w.p[t][n][e] == 0.0f ? 0.0f : dp[t][n][e];
#if (DBIAS && !DBIAS_FROM_DS) || SOFTCAP
#    pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#    pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#    pragma unroll
            for (int e = 0; e < 4; e++) {
#    if DBIAS == GPU_DBIAS_KEYS
                sums.dbias[t][e / 2] += dp[t][n][e];
#    elif DBIAS && !DBIAS_FROM_DS
                const int row = block_row + sub_row + n * 8 + lane % 4 * 2 + e % 2, j = 2 * t + e / 2;
                char *to = dbias[SCORES_ALIGNED ? 0 : j] + dbias_rows(a, row);
                /* One condition in two forms, each where the assembler spills less with it. */
                const bool inside = SCORES_ALIGNED || V_IN_REGISTERS
                                        ? j * 8 < num_keys
                                        : at.first_key + warp_key + lane / 4 + j * 8 < at.seqlen_k;
                if (row < at.seqlen_q && inside)
                    add_dbias(to + (SCORES_ALIGNED ? j * 8 * DBIAS_BYTES : 0), dp[t][n][e]);
#    endif
#    if SOFTCAP
                dp[t][n][e] *= unpack((uint16_t)(w.slope[n][2 * t + e / 2] >> e % 2 * 16));
#    endif
            }
#endif
    pack_scores(left, dp);
}

/* Scores to shared memory as [key][row of the sub-tile]. */
__device__ __forceinline__ void store_scores(uint32_t tile, const uint32_t (&left)[ROW_TILES / 2][KEY_TILES][4],
                                             int warp_key, int warp_row) {
    const int lane = BARE ? threadIdx.x % 32 : fresh_lane();
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int j = 0; j < 2 * KEY_TILES; j++)
            st_shared_4(tile + chunk_offset<SUB_ROWS / 8>(warp_key + lane / 4 + j * 8, warp_row / 8 + n) + lane % 4 * 4,
                        left[n / 2][j / 2][n % 2 * 2 + j % 2]);
}

#if DBIAS_FROM_DS
/* The gradient of the bias from the dS that the warp has staged, eight keys of a row a lane. `row`: the part's first.
 * Of lane % 4 = p, matrix m has the keys 8 p + 2 (m ^ p) and the next: the eight lines of a matrix lie in different
 * banks. */
__device__ __forceinline__ void store_dbias(const struct gpu_backward_params &a, const struct place &at, int h,
                                            uint32_t staged, int warp_key, int part, int row) {
    const int lane = threadIdx.x % 32, own = lane % 4, line = lane % 8 / 2;
    const lane_address<SUB_ROWS / 8> from(staged, warp_key + 8 * line + 2 * (lane / 8 ^ line) + lane % 2, part / 8);
    const int key = at.first_key + warp_key + 8 * own, num_keys = min(at.seqlen_k - key, 8);
    char *to = dbias_of_key(a, at, h, key) + dbias_rows(a, row + lane / 4);
    __syncwarp();
#    pragma unroll
    for (int n = 0; n < ROW_TILES; n++, to += dbias_rows(a, 8)) {
        uint32_t x[4];
        ldmatrix_x4_trans(x, from.at_step(0, n));
        const uint4 odd = own & 1 ? make_uint4(x[1], x[0], x[3], x[2]) : make_uint4(x[0], x[1], x[2], x[3]);
        const uint4 pairs = own & 2 ? make_uint4(odd.z, odd.w, odd.x, odd.y) : odd;
        if (row + n * 8 + lane / 4 < at.seqlen_q)
            store_words<true>(to, {pairs.x, pairs.y, pairs.z, pairs.w}, num_keys);
    }
}
#endif

/* A row that sees no key has no gradient, whatever comes in: its P is 0, but 0 times NaN is not. Where one of a stage's
 * rows says that NaN or inf comes in, dO of those without keys becomes 0 before anybody reads it; all warps look at the
 * same words. */
__device__ __forceinline__ void clear_spoiled(const struct walk &walk, const struct stage &stage, int row) {
    if (!(MASK || BIAS || INTERVALS) && (!WINDOW || row >= walk.full_first))
        return; /* rows without a key are before those that see one */
    const int lane = fresh_lane();
    bool spoiled = false;
#pragma unroll
    for (int n = 0; n < STAGE_ROWS; n += 32)
        spoiled = spoiled || ld_shared_4(stage.rows + (STAGE_ROWS + n + lane) * 4) == BACKWARD_SPOILED_ROW;
    if (!__any_sync(0xffffffff, spoiled))
        return;
    constexpr int chunks = HEAD_DIM_V / 8;
#pragma unroll 1
    for (int n = threadIdx.x; n < STAGE_ROWS * chunks; n += THREADS)
        if (__uint_as_float(ld_shared_4(stage.rows + n / chunks * 4)) == -MINUS_INF)
            st_shared_16(stage.dout + chunk_offset_in<chunks, PANEL_ROWS>(n / chunks, n % chunks), 0, 0, 0, 0);
#if TMA
    fence_proxy_async(); /* TMA will write there again */
#endif
    __syncthreads();
}

/* What a part's own rows add to a sum. */
template <int tiles, class address>
__device__ __forceinline__ void add_rows(float (&sum)[KEY_TILES][tiles][4], const score_fragments &left,
                                         const address &right) {
#pragma unroll
    for (int n = 0; n < ROW_TILES / 2; n++)
        add_product<COLUMN_SHARES>(sum, left[n], right, n * 16);
}

/* Scores of a sub-tile's rows that are the warp's own, what they add to dK and dV, and dS (BY_COLUMNS also P) to shared
 * memory for the other warps. */
__device__ __forceinline__ void add_own(struct sums &sums, const struct gpu_backward_params &a, const struct place &at,
                                        int h, const struct tiles &tiles, const struct stage &stage,
                                        const value_fragments &values, uint32_t staged, int row, int sub, bool partial,
                                        bool copying) {
    const int warp = tiles.self.warp, share = warp / KEY_WARPS, warp_key = warp % KEY_WARPS * WARP_KEYS;
#pragma unroll 1
    for (int part = share * WARP_ROWS; part < share * WARP_ROWS + WARP_ROWS; part += PART_ROWS) {
        struct p_fragments made;
        score_fragments p, ds;
        make_p(made, a, at, h, tiles, stage, staged, warp_key, row, sub + part, partial, copying);
        pack_scores(p, made.p);
        if (BY_COLUMNS)
            store_scores(staged + SCORES_BYTES, p, warp_key, part);
        auto dout = by_rows<HEAD_DIM_V / 8, PANEL_ROWS>(tiles.self, stage.dout, sub + part);
        auto q = by_rows<HEAD_DIM / 8, PANEL_ROWS>(tiles.self, stage.q, sub + part);
        if (BY_COLUMNS) {
            dout.move(share * 2);
            q.move(share * 2);
        }
        if (!RING)
            add_rows(sums.dv, p, dout);
        make_ds(ds, sums, made, a, at, h, tiles, stage, values, warp_key, row, sub + part, partial);
        if (OVERLAY)
            __syncthreads();
        store_scores(staged, ds, warp_key, part);
#if RING
        if (part + PART_ROWS == share * WARP_ROWS + WARP_ROWS) { /* the products below hide the wait for the others */
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                mbarrier_arrive(scores_barrier(tiles));
        }
#endif
#if DBIAS_FROM_DS
        store_dbias(a, at, h, staged, warp_key, part, row + sub + part);
#endif
        if (RING)
            add_rows(sums.dv, p, dout);
        add_rows(sums.dk, ds, q);
    }
}

#if BY_COLUMNS
/* What rows of other warps with the same keys add to the warp's columns of dK and dV. */
__device__ __forceinline__ void add_others_rows(struct sums &sums, const struct tiles &tiles, const struct stage &stage,
                                                uint32_t staged, int warp_key, int sub, int row, int share) {
    auto dout = by_rows<HEAD_DIM_V / 8, PANEL_ROWS>(tiles.self, stage.dout, sub + row);
    auto q = by_rows<HEAD_DIM / 8, PANEL_ROWS>(tiles.self, stage.q, sub + row);
    auto scores = by_rows<SUB_ROWS / 8, 0>(tiles.self, staged, warp_key);
    dout.move(share * 2);
    q.move(share * 2);
    scores.move(row / 8);
#    pragma unroll
    for (int n = 0; n < WARP_ROWS / 16; n++) {
        uint32_t left[KEY_TILES][4];
#    pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
            ldmatrix_x4(left[t], scores.at_step(t * 16, 2 * n) + SCORES_BYTES);
        add_product<SHARE>(sums.dv, left, dout, n * 16);
#    pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
            ldmatrix_x4(left[t], scores.at_step(t * 16, 2 * n));
        add_product<SHARE>(sums.dk, left, q, n * 16);
    }
}
__device__ __forceinline__ void add_others(struct sums &sums, const struct tiles &tiles, const struct stage &stage,
                                           uint32_t staged, int sub) {
    const int warp = tiles.self.warp, share = warp / KEY_WARPS, warp_key = warp % KEY_WARPS * WARP_KEYS;
#    pragma unroll
    for (int other = 1; other < SHARE; other++)
        add_others_rows(sums, tiles, stage, staged, warp_key, sub, (share ^ other) * WARP_ROWS, share);
}
#endif

/* Words that a lane adds at a time to dQ. */
#if __CUDA_ARCH__ >= 900
#    define DQ_WORDS 4
#else
#    define DQ_WORDS 1
#endif
/* dQ of the warp's rows and columns from the staged dS, added in global memory, in turn; some passes over columns of
 * all. */
template <int first_pass = 0, int end_pass = DQ_PASSES>
__device__ __forceinline__ void add_dq(const struct gpu_backward_params &a, const struct place &at, int h, float *dq,
                                       const struct tiles &tiles, uint32_t staged, int row, int sub_row) {
    const int lane = SCARCE && !RING ? fresh_lane() : threadIdx.x % 32;
    const int warp = tiles.self.warp, group = warp % DQ_GROUPS, share = warp / DQ_GROUPS;
    float *to = dq + (int64_t)(sub_row + group * 16 * DQ_TILES) * HEAD_DIM + share * 256 +
                first_pass * (DQ_STEP * DQ_SHARE * 16);
    auto scores = by_chunks<SUB_ROWS / 8, 0>(tiles.self, staged, 0);
    auto keys = by_rows<HEAD_DIM / 8, PANEL_KEYS>(tiles.self, tiles.k, 0);
    scores.move(group * 2 * DQ_TILES);
    keys.move(share * 2);
#pragma unroll 1
    for (int pass = first_pass; pass < end_pass; pass++, to += DQ_STEP * DQ_SHARE * 16) {
        auto columns = keys;
        columns.move(pass * (DQ_STEP / 8 * DQ_SHARE));
        float sum[DQ_TILES][DQ_STEP / 8][4] = {};
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; k++) {
            uint32_t x[DQ_TILES][4];
#pragma unroll
            for (int t = 0; t < DQ_TILES; t++)
                ldmatrix_x4_trans(x[t], scores.at_step(k * 16, 2 * t));
            add_product<DQ_SHARE>(sum, x, columns, k * 16);
        }
#if TURNS_DQ
        if (pass == 0)
            await_turn(semaphore_of(a, at, h, row + sub_row), my_turn(a, at, row + sub_row));
#endif
        float *mine = to + lane * DQ_WORDS;
        mine = opaque(mine); /* the other addresses are known distances from it */
#pragma unroll
        for (int i = 0; i < DQ_TILES * DQ_STEP / 8; i++) {
            const int t = i / (DQ_STEP / 8), n = i % (DQ_STEP / 8);
            float *tile = mine + t * 16 * HEAD_DIM + (n / 2 * 2 * DQ_SHARE + n % 2) * 128;
#if __CUDA_ARCH__ >= 900
            red_add_4(tile, sum[t][n][0], sum[t][n][1], sum[t][n][2], sum[t][n][3]);
#else
#    pragma unroll
            for (int e = 0; e < 4; e++)
                red_add(tile + e * 32, sum[t][n][e]);
#endif
        }
    }
}

/* The sums of warps with the same keys, added in the first of them. */
template <int tiles> __device__ __forceinline__ void gather_shares(float (&sum)[tiles][4], float *shared) {
#if SHARE > 1 && !BY_COLUMNS
    const int warp = threadIdx.x / 32, share = warp / KEY_WARPS;
    float *mine = shared + (warp % KEY_WARPS) * tiles * 128 + threadIdx.x % 32 * 4;
#    pragma unroll 1
    for (int s = 1; s < SHARE; s++) {
        __syncthreads();
        if (share == s)
#    pragma unroll
            for (int n = 0; n < tiles; n++)
                *(float4 *)(mine + n * 128) = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
        __syncthreads();
        if (share == 0)
#    pragma unroll
            for (int n = 0; n < tiles; n++) {
                const float4 x = *(const float4 *)(mine + n * 128);
                sum[n][0] += x.x, sum[n][1] += x.y, sum[n][2] += x.z, sum[n][3] += x.w;
            }
    }
#endif
}

/* The block's keys in a tensor: from it to a tile, and back. */
__device__ __forceinline__ char *keys_of(const struct gpu_matrix &x, const struct gpu_backward_params &a,
                                         const struct place &at) {
    return x.data + (at.batch * x.batch + (int64_t)(at.k_begin + (GATHER ? 0 : at.first_key)) * x.row +
                     head_kv_of(a, at) * x.head) *
                        2;
}
template <int chunks>
__device__ __forceinline__ void load_keys_tile(uint32_t tile, const struct gpu_matrix &from,
                                               const struct gpu_backward_params &a, const struct place &at,
                                               int num_columns) {
    const char *data = keys_of(from, a, at);
    if (!GATHER) {
        load_tile<chunks, BLOCK_N, PANEL_KEYS>(tile, data, from.row * 2, at.seqlen_k - at.first_key, num_columns);
        return;
    }
    for (int n = threadIdx.x; n < BLOCK_N * chunks; n += THREADS) {
        const int row = n / chunks, chunk = n % chunks, key = key_at(a, at, row);
        const int count = key < at.seqlen_k ? min(max(num_columns - chunk * 8, 0), 8) : 0;
        const char *at_key = count ? data + key * from.row * 2 + chunk * 16 : data;
        load_chunk(tile + chunk_offset_in<chunks, PANEL_KEYS>(row, chunk), at_key, count);
    }
}
template <int chunks>
__device__ __forceinline__ void store_keys_tile(const struct gpu_matrix &to, const struct gpu_backward_params &a,
                                                const struct place &at, uint32_t tile, int num_columns) {
    char *data = keys_of(to, a, at);
    if (!GATHER) {
        store_tile<chunks>(data, to.row * 2, tile, min(BLOCK_N, at.seqlen_k - at.first_key), num_columns,
                           (int)threadIdx.x, THREADS);
        return;
    }
    for (int n = threadIdx.x; n < BLOCK_N * chunks; n += THREADS) {
        const int row = n / chunks, chunk = n % chunks, key = key_at(a, at, row);
        const int count = min(num_columns - chunk * 8, 8);
        if (key < at.seqlen_k && count > 0)
            store_chunk(data + key * to.row * 2 + chunk * 16, tile + chunk_offset<chunks>(row, chunk), count);
    }
}

#if SPLIT
/* One part of a gradient of the block's keys, in fp32: rows of HEAD_DIM or HEAD_DIM_V as the keys lie in the tensor. */
template <int columns, int tiles>
__device__ __forceinline__ void store_part(const float (&sum)[KEY_TILES][tiles][4], float *to,
                                           const struct gpu_backward_params &a, const struct place &at) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp / KEY_WARPS;
    const int64_t begin = at.part * a.key_rows + (VARLEN ? at.k_begin : (int64_t)at.batch * a.in.seqlen_k);
    if (!BY_COLUMNS && share)
        return;
#    pragma unroll
    for (int j = 0; j < 2 * KEY_TILES; j++) {
        const int key = key_at(a, at, warp % KEY_WARPS * WARP_KEYS + lane / 4 + j * 8);
        if (key < at.seqlen_k)
#    pragma unroll
            for (int n = 0; n < tiles; n++)
                *(float2 *)(to + (begin + key) * columns +
                            (BY_COLUMNS ? n / 2 * 2 * SHARE + share * 2 + n % 2 : n) * 8 + lane % 4 * 2) =
                    make_float2(sum[j / 2][n][j % 2 * 2], sum[j / 2][n][j % 2 * 2 + 1]);
    }
}
#endif

/* One gradient of the block's keys: rounded, through shared memory, to global memory. */
template <int columns, int tiles>
__device__ __forceinline__ void store_sums(const float (&sum)[KEY_TILES][tiles][4], float factor, uint32_t tile,
                                           const struct gpu_matrix &to, const struct gpu_backward_params &a,
                                           const struct place &at, int num_columns) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp / KEY_WARPS;
    __syncthreads();
    if (BY_COLUMNS || share == 0)
#pragma unroll
        for (int n = 0; n < tiles; n++)
#pragma unroll
            for (int j = 0; j < 2 * KEY_TILES; j++)
                st_shared_4(tile +
                                chunk_offset<columns / 8>(warp % KEY_WARPS * WARP_KEYS + lane / 4 + j * 8,
                                                          BY_COLUMNS ? n / 2 * 2 * SHARE + share * 2 + n % 2 : n) +
                                lane % 4 * 4,
                            pack(sum[j / 2][n][j % 2 * 2] * factor, sum[j / 2][n][j % 2 * 2 + 1] * factor));
    __syncthreads();
    if (to.data)
        store_keys_tile<columns / 8>(to, a, at, tile, num_columns);
}

extern "C" __global__ void __launch_bounds__(THREADS, HALF_BLOCK ? 2 : 1)
    mma_backward(const __grid_constant__ struct mma_backward_params params) {
    const struct gpu_backward_params &a = params.shared;
    extern __shared__ __align__(128) char shared[];
    const struct tiles tiles = lay_out(shared_address(shared));
    /* From the last head: what backward_prepare wrote last is still in the second-level cache. */
#if FOLDED
    uint32_t x = blockIdx.x % a.grid_x, y = (gridDim.x - 1 - blockIdx.x) / a.grid_x, z = y / a.grid_y;
    y %= a.grid_y;
#else
    uint32_t x = blockIdx.x, y = gridDim.y - 1 - blockIdx.y, z = gridDim.z - 1 - blockIdx.z;
#endif
#if DETERMINISTIC
    /* Places in the order in which blocks begin: a block waits only for blocks that run or have ended. */
    if (threadIdx.x == 0)
        *(int *)shared = atomicAdd(a.ticket, 1);
    __syncthreads();
    const uint32_t ticket = *(const int *)shared;
    __syncthreads();
    x = a.grid_x - 1 - ticket % a.grid_x;
    y = ticket / a.grid_x % a.grid_y;
    z = ticket / a.grid_x / a.grid_y;
#endif
    const struct place at = find_place(a, x, y, z);
    if (at.first_key >= at.seqlen_k) {
#if TURNS_DBIAS && VARLEN
        for (int g = 0; g < num_heads(a); g++) { /* blocks of other sequences may wait for this one */
            struct turns turns = {0, NO_ROW};
            hand_on_rest(turns, a, at, {0, 0, 0, 0}, at.part * num_heads(a) + g);
        }
#endif
        return;
    }
    [[maybe_unused]] const int warp = tiles.self.warp, warp_key = warp % KEY_WARPS * WARP_KEYS;

#if RING
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < RING; slot++)
            mbarrier_init(stage_at(tiles, slot).full, TMA ? 1 : ALIGNED ? THREADS : 2 * THREADS);
        mbarrier_init(scores_barrier(tiles), WARPS);
#    if TMA
        fence_mbarrier_init();
#    endif
    }
#endif
    load_keys_tile<HEAD_DIM_V / 8>(V_IN_REGISTERS ? tiles.q : tiles.v, a.in.v, a, at, a.in.head_dim_v);
    load_keys_tile<HEAD_DIM / 8>(tiles.k, a.in.k, a, at, a.in.head_dim);
    cp_async_commit();
    value_fragments values;
#if V_IN_REGISTERS
    cp_async_wait<0>();
    __syncthreads();
#    pragma unroll
    for (int step = 0; step < HEAD_DIM_V / 16; step++)
        ldmatrix_x4(values[step], by_rows<HEAD_DIM_V / 8, 0>(tiles.self, tiles.q, warp_key).at_step(0, 2 * step));
    __syncthreads();
#endif
    struct sums sums = {};
    [[maybe_unused]] uint32_t ds_buffer = 0;
#if RING
    struct ring ring = {0, 0};
#    if TMA
    fence_proxy_async(); /* the ticket, and V on its way to registers, lay where TMA will write */
#    endif
    __syncthreads(); /* its barriers are ready */
#endif

#pragma unroll 1
    for (int g = 0; g < num_heads(a); g++) {
        const int h = at.part * num_heads(a) + g;
#if KEYED
        store_keys(a, at, find_head(a, at, h), tiles.keys);
        __syncthreads();
        const struct walk walk = narrow(plan_walk(a, at), tiles.keys, tiles.rows);
#else
        const struct walk walk = plan_walk(a, at);
#endif
#if DETERMINISTIC
        struct turns turns = first_turns(plan_walk(a, at));
#endif
#if RING
        /* Stages of 64 rows lie in a ring; one is loaded RING - 1 stages ahead, when all warps have left its place. */
        int row = next_active(a, at, walk, tiles.keys, h, walk.first / STAGE_ROWS * STAGE_ROWS), next = NO_ROW;
#    if COPIED
        if (row != NO_ROW)
            copy_scores(a, at, h, tiles.staged + ds_buffer, row);
        cp_async_commit();
#    endif
#    if TMA && KEYED
        fence_proxy_async(); /* narrow() wrote where TMA will */
        __syncthreads();
#    endif
        load_stage(params, at, h, tiles, ring.slot, row);
        if (RING == 3) {
            next = following(a, at, walk, tiles.keys, h, row);
            load_stage(params, at, h, tiles, slot_after(ring.slot), next);
        }
        cp_async_wait<0>();
        __syncthreads(); /* K and V are there */
#    pragma unroll 1
        while (row != NO_ROW) {
            const struct stage stage = stage_at(tiles, ring.slot);
            const uint32_t staged = tiles.staged + ds_buffer, scores_parity = ds_buffer != 0;
            bool partial = row < walk.full_first || row + STAGE_ROWS > walk.full_last;
#    if SUMMARISED
            partial = partial || mask_kind(a, at, h, row) != GPU_BLOCK_FULL;
#    endif
            ds_buffer ^= SCORES_BYTES * (BY_COLUMNS ? 2 : 1);
            mbarrier_wait(stage.full, ring.parity);
            clear_spoiled(walk, stage, row);
            if (TWO_BODIES && !partial)
                add_own(sums, a, at, h, tiles, stage, values, staged, row, 0, false, false);
            else
                add_own(sums, a, at, h, tiles, stage, values, staged, row, 0, TWO_BODIES || partial, false);
            mbarrier_wait(scores_barrier(tiles), scores_parity); /* scores are staged; all have left the stage before */
#    if DETERMINISTIC
            hand_on_before(turns, a, at, h, row);
#    endif
            const int last = following(a, at, walk, tiles.keys, h, RING == 3 ? next : row);
            ring.slot = slot_after(ring.slot);
            ring.parity ^= ring.slot == 0;
#    if COPIED
            if ((RING == 3 ? next : last) != NO_ROW)
                copy_scores(a, at, h, tiles.staged + ds_buffer, RING == 3 ? next : last);
            cp_async_commit();
#    endif
            load_stage(params, at, h, tiles, RING == 3 ? slot_after(ring.slot) : ring.slot, last);
#    if NEEDS_DQ
            if (DQ_EARLY)
                add_dq<0, DQ_EARLY>(a, at, h, find_head(a, at, h).dq + (int64_t)row * HEAD_DIM, tiles, staged, row, 0);
#    endif
#    if BY_COLUMNS
            add_others(sums, tiles, stage, staged, 0);
#    endif
#    if NEEDS_DQ
            add_dq<DQ_EARLY>(a, at, h, find_head(a, at, h).dq + (int64_t)row * HEAD_DIM, tiles, staged, row, 0);
#    endif
            row = RING == 3 ? next : last;
            next = last;
        }
#else
        int buffer = 0, row = next_active(a, at, walk, tiles.keys, h, walk.first / BLOCK_M * BLOCK_M);
        if (row != NO_ROW) {
#    if COPIED
            copy_scores(a, at, h, tiles.staged + ds_buffer, row + first_sub_tile(walk, row));
#    endif
            load_q(a, at, h, tiles.q, row);
            load_dout(a, at, h, {tiles.q, tiles.dout, tiles.rows}, row);
        }
        cp_async_commit();
#    pragma unroll 1
        while (row != NO_ROW) {
            const int next = next_active(a, at, walk, tiles.keys, h, row + BLOCK_M);
            const struct stage stage = {tiles.q + buffer * Q_BYTES, tiles.dout, tiles.rows};
            if (STAGES == 2) {
                buffer ^= 1;
                if (next != NO_ROW)
                    load_q(a, at, h, tiles.q + buffer * Q_BYTES, next);
                cp_async_commit();
            }
            cp_async_wait<STAGES - 1>();
            __syncthreads();
            clear_spoiled(walk, stage, row);
            const int begin = first_sub_tile(walk, row), end = min(BLOCK_M, walk.last - row);
#    pragma unroll 1
            for (int sub = begin; sub < end; sub += SUB_ROWS) {
                const bool last = sub + SUB_ROWS >= end;
                bool partial = row + sub < walk.full_first || row + sub + SUB_ROWS > walk.full_last;
#    if SUMMARISED
                partial = partial || mask_kind(a, at, h, row) != GPU_BLOCK_FULL;
#    endif
                const uint32_t staged = OVERLAY ? tiles.dout + sub * HEAD_DIM_V * 2 : tiles.staged + ds_buffer;
                if (DS_BUFFERS == 2)
                    ds_buffer ^= SCORES_BYTES * (BY_COLUMNS ? 2 : 1);
                if (TWO_BODIES && !partial)
                    add_own(sums, a, at, h, tiles, stage, values, staged, row, sub, false, sub > begin);
                else
                    add_own(sums, a, at, h, tiles, stage, values, staged, row, sub, TWO_BODIES || partial, sub > begin);
                __syncthreads();
#    if DETERMINISTIC
                hand_on_before(turns, a, at, h, row + sub);
#    endif
#    if BY_COLUMNS
                add_others(sums, tiles, stage, staged, sub);
                if (last)
                    __syncthreads();
#    endif
#    if COPIED
                if (!last) {
                    copy_scores(a, at, h, tiles.staged + ds_buffer, row + sub + SUB_ROWS);
                    cp_async_commit();
                } else if (next != NO_ROW) {
                    copy_scores(a, at, h, tiles.staged + ds_buffer, next + first_sub_tile(walk, next));
                }
#    endif
                if (last) {
                    if (STAGES == 1 && next != NO_ROW)
                        load_q(a, at, h, tiles.q, next);
                    if (!OVERLAY && next != NO_ROW)
                        load_dout(a, at, h, stage, next);
                    cp_async_commit();
                }
#    if NEEDS_DQ
                add_dq(a, at, h, find_head(a, at, h).dq + (int64_t)row * HEAD_DIM, tiles, staged, row, sub);
#    endif
                if (DS_BUFFERS == 1) /* with two, the next sub-tile's barrier is enough */
                    __syncthreads();
            }
            if (OVERLAY) {
                if (next != NO_ROW)
                    load_dout(a, at, h, stage, next);
                cp_async_commit();
            }
            row = next;
        }
#endif
#if DBIAS == GPU_DBIAS_KEYS
#    pragma unroll
        for (int n = 0; n < 2 * KEY_TILES; n++) {
            float x = sums.dbias[n / 2][n % 2];
            x += __shfl_xor_sync(0xffffffff, x, 1);
            x += __shfl_xor_sync(0xffffffff, x, 2);
            const int key = key_at(a, at, warp_key + threadIdx.x % 32 / 4 + n * 8);
            if (threadIdx.x % 4 == 0 && key < at.seqlen_k)
                a.dbias_sums[(((int64_t)(warp / KEY_WARPS) * a.in.batch + at.batch) * a.in.heads + h) * a.in.seqlen_k +
                             key] = x;
            sums.dbias[n / 2][n % 2] = 0;
        }
#endif
        cp_async_wait<0>();
        __syncthreads();
#if DETERMINISTIC
        hand_on_rest(turns, a, at, plan_walk(a, at), h);
#endif
    }
    gather_shares(sums.dk[0], (float *)shared);
#if SPLIT
    store_part<HEAD_DIM>(sums.dk, a.dk_parts, a, at);
#else
    store_sums<HEAD_DIM>(sums.dk, a.in.scale, tiles.q, a.dk, a, at, a.in.head_dim);
#endif
    gather_shares(sums.dv[0], (float *)shared);
#if SPLIT
    store_part<HEAD_DIM_V>(sums.dv, a.dv_parts, a, at);
#else
    store_sums<HEAD_DIM_V>(sums.dv, 1.0f, tiles.q, a.dv, a, at, a.in.head_dim_v);
#endif
}
