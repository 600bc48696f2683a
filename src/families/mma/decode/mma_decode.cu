/* mma_decode.cu: attention of few query rows over many keys, which are split over blocks.
 *
 * Idea: FlashDecoding (Dao et al., 2023): each block walks a range of the keys and leaves a partial result. Up to eight
 * blocks (16 of single tiles) form a cluster on 9.0, which merges their results through each other's shared memory and
 * saves a launch. The results of more blocks go through global memory to combine_splits.cu. The heads of a group are
 * packed as rows (row i * group + g), so that K and V are read once for each KV head. Memory bounds the kernel: the
 * least time is that of reading K and V once.
 *
 * A block first reads what hides keys (mask, intervals, a bias of -inf), 2048 keys at a time, while copies are under
 * way. It lists the keys that some row sees, in their order, and copies those alone. Splits take alternate units of 128
 * or 256 keys, so that all share hidden stretches. Where rows differ in what they see, each row tests the listed keys
 * itself. Where not all blocks run at once and sequences have masks of their own, the sequences that seem to see most
 * keys come first (ORDERED), so that the last blocks are short.
 *
 * Keys in pages (PAGED): a lane reads the table for one key of its warp, a tile ahead, and hands the key's address to
 * the lanes that copy it. A word for each warp and stage in shared memory marks the keys that have a page. Without a
 * table, and where nothing is appended, a cache's keys lie side by side as in a dense call. The device reads how many
 * keys there are: the plan has as many splits as the bound of lengths needs, and each takes its share of the keys.
 *
 * Where few rows are new, the kernel appends new keys and applies rotary embeddings to q and new keys (APPENDS,
 * mma_decode_append.cuh).
 *
 * Few keys (ONE_TILE): the time is that of dependent steps. A split is one tile, nothing is listed, and what reads no
 * tensor of the caller is computed before the kernel ahead in the stream has ended.
 *
 * Tile: 64 keys, 16 for each of four warps, which work on all 16 rows and never wait for each other: each has its own
 * maxima, sums and output, merged at the end. Lane l holds rows l / 4 and l / 4 + 8. With more rows, two to eight of
 * eight warps (ROW_GROUPS) take 16 rows each of the same keys and wait for each other once a tile. Rows beyond 128 go
 * to more blocks, which find K and V in the second-level cache. float32 takes three products of tf32 numbers
 * (mma_tf32.cuh); above head dim 128 two warps share the columns of O and the keys' scores (COLUMN_SHARES).
 *
 * Issue slots: few other warps hide a warp's waits, so the instructions of a tile beside its products count. A lane's
 * copies of a whole tile lie in one column, and each takes an address and two additions.
 *
 * Shared memory: Q [ROWS][HEAD_DIM], then [STAGES] x (K [BLOCK_N][HEAD_DIM], V [BLOCK_N][HEAD_DIM_V]), all swizzled,
 * then the list, scores of warps that share columns, and the marks of pages. At the end the ring holds
 * [KEY_GROUPS][ROWS][PART_WIDTH] floats, the warps' maxima and sums, and what a cluster's other blocks write here; the
 * mbarrier of those writes replaces Q.
 *
 * Grid: one dimension, in which splits vary fastest, then blocks of rows, KV heads and batches. Registers: O takes
 * HEAD_DIM_V / 2 / COLUMN_SHARES. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/opaque.cuh"
#include "families/mma/decode/mma_decode.h"
#include "gpu/numbers.h"
#include "gpu/quad.cuh"

MMA_DECODE_CONSTANTS(GPU_CONSTANT_GIVEN)

#define THREADS (32 * WARPS)
#include "gpu/row_ranges.cuh"
#include "gpu/scores.cuh"
#include "gpu/unused_rows.cuh"

#define ROWS          (16 * ROW_GROUPS)
#define COLUMN_SHARES mma_decode_share(DTYPE == GPU_FLOAT32, HEAD_DIM_V)
#define SPLIT_COLUMNS (DTYPE == GPU_FLOAT32 && HEAD_DIM_V > 128) /* COLUMN_SHARES > 1 */
#define GROUP_WARPS   (ROW_GROUPS * COLUMN_SHARES)               /* warps that work on the same keys */
#define KEY_GROUPS    (WARPS / GROUP_WARPS)
#define GROUP_KEYS    (BLOCK_N / KEY_GROUPS) /* of a tile, that a warp works on */
#define WARP_KEYS     (BLOCK_N / WARPS)      /* that it copies */
#define PART_ROWS     (KEY_GROUPS * ROWS)    /* rows of O that the warps hold in the end */
#define CLUSTER_MAX   MMA_DECODE_CLUSTER_MAX(STAGES)
#define PART_WIDTH    (HEAD_DIM_V + MMA_DECODE_PART_PAD)
#define STEPS         (GROUP_KEYS / STEP_KEYS)
#define OUT_TILES     (HEAD_DIM_V / 8 / COLUMN_SHARES)
#define K_CHUNKS      (HEAD_DIM / CHUNK_ELEMENTS)
#define V_CHUNKS      (HEAD_DIM_V / CHUNK_ELEMENTS)
#define Q_BYTES       (ROWS * HEAD_DIM * ELEMENT_BYTES)
#define K_BYTES       (BLOCK_N * HEAD_DIM * ELEMENT_BYTES)
#define V_BYTES       (BLOCK_N * HEAD_DIM_V * ELEMENT_BYTES)
#define RING_BYTES                                                                                                 \
    mma_decode_ring_bytes(ELEMENT_BYTES, HEAD_DIM, HEAD_DIM_V, BLOCK_N, ROW_GROUPS, WARPS / COLUMN_SHARES, STAGES, \
                          MERGE)
#define ONE_TILE (STAGES == 1)
#define LISTED   ((MASK || BIAS || INTERVALS || ROW_RUNS) && !ONE_TILE)
#define PAGED    (CACHE == GPU_CACHE_PAGES)
/* The table is read a tile ahead; otherwise when rows are copied, so that nothing spills. */
#define TABLE_AHEAD (PAGED && !(LISTED && HEAD_DIM_V > 128))
#define ROTATES     (APPENDS && ROTARY != APPEND_PLAIN)
/* The block's coordinates depend on global memory. */
#define PLACE_IS_READ (VARLEN || SEQUSED || CACHE || ORDERED)
#define MARKS_OFFSET  (Q_BYTES + RING_BYTES + (LISTED ? MMA_DECODE_LIST_BYTES : 0) + (SPLIT_COLUMNS ? WARPS * 1024 : 0))
/* Scores are in units of log2 where no bias could make that overflow. */
#define IN_LOG2 (SCORES_BARE && DTYPE != GPU_FLOAT32)
#define TO_LOG2 (IN_LOG2 ? 1.0f : LOG2_E)
/* Q stays in registers; otherwise each step reads it again, so that nothing spills. */
#define KEEP_Q (DTYPE != GPU_FLOAT32 && !ONE_TILE && HEAD_DIM + HEAD_DIM_V <= (LISTED || SOFTCAP ? 256 : 320))
#define Q_STEPS                                \
    (KEEP_Q || HEAD_DIM <= 128 ? HEAD_DIM / 16 \
     : LISTED || SOFTCAP       ? 2             \
                               : 4) /* steps of Q K^T whose reads may be ahead: more would spill */
/* A lane keeps where its rows begin and what they see one step ahead; otherwise it computes both again. */
#define KEEP_ROWS                                                                 \
    (HEAD_DIM_V <= 128 && DTYPE != GPU_FLOAT32 && !(MASK && BIAS && INTERVALS) && \
     !(ROW_RUNS && (MASK || BIAS || INTERVALS)))
#define Q_COPIES   ((ROWS * K_CHUNKS + THREADS - 1) / THREADS)   /* of a thread */
#define BLOCKS_MIN (ONE_TILE ? 2 : MMA_DECODE_WARPS_MAX / WARPS) /* of a multiprocessor */

/* The keys that a warp multiplies with in a step, and those of a lane. Products, maxima and shuffles of a step depend
 * on each other; with more keys more of them are in flight. STEP_MOST is as many as registers hold; float32, a
 * bias and wide heads leave few. */
#define LOW_REGISTERS (DTYPE == GPU_FLOAT32 || BIAS || HEAD_DIM > 128 || HEAD_DIM_V > 128)
#define STEP_MOST     (LOW_REGISTERS ? 16 : LISTED || SOFTCAP ? 32 : 64)
#define STEP_KEYS     (GROUP_KEYS < STEP_MOST ? GROUP_KEYS : STEP_MOST)
#define LANE_KEYS     (STEP_KEYS / 4)
#define ALL_SEEN      (0xffffffffu >> (32 - 2 * LANE_KEYS))
/* Of the keys that exist, or are listed, rows may see some and not others. */
#define KEYS_DIFFER \
    (WINDOW || BIAS || ROW_RUNS || TREE || MASK_PER_ROW == MMA_DECODE_EACH || INTERVALS_PER_ROW == MMA_DECODE_EACH)

static_assert(GROUP_KEYS % STEP_KEYS == 0 && STEP_KEYS % 16 == 0 && KEY_GROUPS * GROUP_WARPS == WARPS, "whole steps");
static_assert((WARP_KEYS & (WARP_KEYS - 1)) == 0, "load_rows() adds its bits");
static_assert(COLUMN_SHARES == (SPLIT_COLUMNS ? 2 : 1), "multiply_eight() takes half of the keys");
static_assert(COLUMN_SHARES == 1 || HEAD_DIM_V % 64 == 0, "each warp's columns are whole groups of chunks");
static_assert(!ORDERED || (MASK && LISTED && !VARLEN), "the order comes from a mask, whose keys begin at 0");
static_assert(SPLIT_RULE <= MMA_PARTS_BY_LENGTH || (SPLIT_RULE % BLOCK_N == 0 && !LISTED), "whole tiles");
static_assert(!TREE || !(MASK || BIAS || INTERVALS || ROW_RUNS), "keys are found by their number");
static_assert(!APPENDS || (PAGED && !LISTED), "a new key is found by its number");
static_assert(!ONE_TILE || (GROUP_WARPS == 1 && GROUP_KEYS == 16), "a warp works on the 16 keys that it copies");

#include "families/mma/decode/mma_decode_list.cuh"
#include "families/mma/decode/mma_decode_products.cuh"
/* It reads tiles as those do. */
#include "families/mma/decode/mma_decode_append.cuh"

/* The address that another lane holds. */
__device__ __forceinline__ const char *address_of_lane(const char *address, int lane) {
    return (const char *)__shfl_sync(0xffffffff, (unsigned long long)address, lane);
}

/* Copies the warp's share of a tile of K or V, whose first place in the split is `slot`. Rows and columns past the ends
 * become zero. PAGED: `in_pages` of lane n is the address of the n-th row, or NULL. */
template <int chunks>
__device__ __forceinline__ void
load_rows(uint32_t tile, int first_row, const char *data, int64_t row_bytes, const struct gpu_forward_params &a,
          const struct list &l, const struct place &at, int first_key, int slot, int columns, const char *in_pages) {
    constexpr int copies = (WARP_KEYS * chunks + 31) / 32;
    const int lane = threadIdx.x % 32, chunks_read = columns / CHUNK_ELEMENTS; /* of a row; the others are zero */
    constexpr bool in_columns = (chunks & (chunks - 1)) == 0 && WARP_KEYS * chunks % 32 == 0;
    const bool all_there = PAGED ? __all_sync(0xffffffff, in_pages != nullptr)
                                 : slot + first_row + WARP_KEYS <= (LISTED ? l.listed
                                                                    : TREE ? at.diagonal - first_key /* all see those */
                                                                           : at.seqlen_k - first_key);
    if (in_columns && all_there) {
        /* All keys are there, and a lane's copies lie in one column, or in the same two of each row. */
        constexpr int across = chunks > 32 ? chunks / 32 : 1, rows = chunks < 32 ? 32 / chunks : 1;
        const int row = first_row + lane / min(chunks, 32), chunk = lane % min(chunks, 32);
        const uint32_t to = tile + chunk_offset<chunks>(row, chunk);
        const char *from = data + chunk * 16;
        const uint32_t key = l.keys + (uint32_t)slot % MMA_DECODE_LIST * 4 + row * 4; /* in the list */
        if (!LISTED && !PAGED)
            from += (first_key + slot + row) * row_bytes;
#pragma unroll
        for (int n = 0; n < copies; n++) {
            const int down = n / across * rows, right = n % across * 32;
            /* `first_row` has no bit of `down`, which has none of the rest of `row` */
            const uint32_t swizzle = chunks % 8 == 0 ? (down & 7) << 4 : 0;
            const char *at_row = from;
            if (PAGED)
                at_row = address_of_lane(in_pages, lane / min(chunks, 32) + down) + chunk * 16;
            else if (LISTED)
                at_row += (int)ld_shared_4(key + down * 4) * row_bytes;
            else
                from += right == (across - 1) * 32 ? rows * row_bytes : 0;
            cp_async_16_fill((to ^ swizzle) + (down * chunks + right) * 16, at_row + right * 16,
                             chunk + right < chunks_read ? 16 : 0);
        }
    } else {
#pragma unroll 2
        for (int n = 0; n < copies; n++) {
            const int index = n * 32 + lane, row = index / chunks, chunk = index % chunks;
            const char *from = PAGED ? address_of_lane(in_pages, row % WARP_KEYS) : nullptr;
            if (WARP_KEYS * chunks % 32 && row >= WARP_KEYS)
                break;
            if (PAGED) {
                cp_async_16_fill(tile + chunk_offset<chunks>(first_row + row, chunk), from ? from + chunk * 16 : data,
                                 from && chunk < chunks_read ? 16 : 0);
                continue;
            }
            const int key = wanted_key_at(a, l, at, first_key, slot + first_row + row);
            cp_async_16_fill(tile + chunk_offset<chunks>(first_row + row, chunk),
                             data + max(key, 0) * row_bytes + chunk * 16, key >= 0 && chunk < chunks_read ? 16 : 0);
        }
    }
}

/* ---- scores ---- */

/* The lane's two rows: i in the sequence, and the keys that window and ends leave visible. */
struct lane_rows {
    int i[2], first_key[2], last_key[2];
    struct head_view view[2];
};
__device__ __forceinline__ struct lane_rows find_rows(const struct gpu_forward_params &a, const struct place &at,
                                                      int warp_row) {
    struct lane_rows rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int local = warp_row + threadIdx.x % 32 / 4 + half * 8;
        const int r = at.first_row + (local < at.num_rows ? local : 0); /* results of others are not stored */
        rows.i[half] = r / a.group;
        const int64_t aligned = (int64_t)rows.i[half] + at.diagonal;
        rows.first_key[half] = WINDOW && a.window_left != UNBOUNDED ? (int)max((int64_t)0, aligned - a.window_left) : 0;
        rows.last_key[half] = WINDOW && a.window_right != UNBOUNDED
                                  ? (int)max((int64_t)-1, min((int64_t)at.seqlen_k - 1, aligned + a.window_right))
                                  : at.seqlen_k - 1;
        rows.view[half] = view_head(a, at, at.head_kv * a.group + r % a.group);
        if (MASK)
            rows.view[half].mask += rows.i[half] * a.mask.row;
        if (BIAS)
            rows.view[half].bias += rows.i[half] * a.bias.row * BIAS_BYTES;
        if (ROW_RUNS)
            rows.view[half].ranges = ranges_of(a, rows.view[half], rows.i[half]);
    }
    return rows;
}

/* What the lane's rows see of its keys of a step, and their biases: read one step ahead. */
struct seen_keys {
    uint32_t seen; /* bit half * LANE_KEYS + key */
    float bias[BIAS ? 2 : 1][BIAS ? LANE_KEYS : 1];
};
__device__ __forceinline__ struct seen_keys look(const struct gpu_forward_params &a, const struct place &at,
                                                 const struct list &l, const struct lane_rows &rows, int first_key,
                                                 int slot) {
    struct seen_keys f = {};
    if (!KEYS_DIFFER) {
        const int left = (LISTED ? l.listed : at.seqlen_k - first_key) - slot - (int)threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < LANE_KEYS; n++)
            f.seen |= n / 2 * 8 + n % 2 < left ? (1u | 1u << LANE_KEYS) << n : 0;
        return f;
    }
#pragma unroll
    for (int n = 0; n < LANE_KEYS; n++) {
        const int j = key_at(l, at, first_key, slot + n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bool seen = j >= rows.first_key[half] && j <= rows.last_key[half]; /* -1 is below */
            if (INTERVALS_PER_ROW == MMA_DECODE_EACH && seen)
                seen = rows.i[half] >= rows.view[half].start[j * a.intervals.start_key] &&
                       rows.i[half] < rows.view[half].end[j * a.intervals.end_key];
            if (ROW_RUNS && seen)
                seen = ranges_hold(a, rows.view[half].ranges, j);
            if (MASK_PER_ROW == MMA_DECODE_EACH && seen)
                seen = rows.view[half].mask[j * a.mask.key];
            if (BIAS) {
                f.bias[half][n] = seen ? bias_value(rows.view[half].bias + j * a.bias.key * BIAS_BYTES) : 0.0f;
                seen = seen && f.bias[half][n] != MINUS_INF; /* or NaN in the product would stay */
            }
            f.seen |= (uint32_t)seen << (half * LANE_KEYS + n);
        }
    }
    hide_by_tree(a, at, rows.i, first_key + slot, f.seen);
    return f;
}

/* The copy of a chunk of Q. Packed row r is row r / group of head r % group of the group. */
struct q_copy {
    const char *from;
    uint32_t to, bytes;
};
__device__ __forceinline__ struct q_copy find_q(const struct gpu_forward_params &a, const struct place &at,
                                                const char *q, uint32_t q_tile, int index) {
    const int row = index / K_CHUNKS, chunk = index % K_CHUNKS, r = at.first_row + row;
    const int count = row < at.num_rows ? min(max(a.head_dim - chunk * CHUNK_ELEMENTS, 0), CHUNK_ELEMENTS) : 0;
    const char *from = q + (r / a.group * a.q.row + r % a.group * a.q.head) * ELEMENT_BYTES + chunk * 16;
    return {count ? from : q, q_tile + chunk_offset<K_CHUNKS>(row, chunk), (uint32_t)(count * ELEMENT_BYTES)};
}

/* A number that depends on everything computed before the wait for the preceding grid. */
__device__ __forceinline__ uint32_t made_of(const struct lane_rows &rows, const struct q_copy (&copies)[Q_COPIES],
                                            const char *k, const char *v) {
    uint64_t made = (uint64_t)k ^ (uint64_t)v;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const struct head_view &view = rows.view[half];
        made ^= (uint32_t)(rows.i[half] ^ rows.first_key[half] ^ rows.last_key[half]);
        made ^= (uint64_t)view.mask ^ (uint64_t)view.bias ^ (uint64_t)view.start ^ (uint64_t)view.end;
        made ^= (uint64_t)view.ranges.start ^ (uint64_t)view.ranges.end;
    }
#pragma unroll
    for (int n = 0; n < Q_COPIES; n++)
        made ^= (uint64_t)copies[n].from ^ copies[n].to ^ copies[n].bytes;
    return (uint32_t)(made ^ made >> 32);
}

struct warp_state {
    float o[1][OUT_TILES][4];
    float row_max[2], row_sum[2]; /* maxima of scores, where IN_LOG2 in units of log2 */
};

/* Clears the rows of V that no row of Q sees: without a list they are copied, and may hold anything. */
__device__ __forceinline__ void clear_unseen(const struct seen_keys &f, uint32_t v_tile, int key_row) {
    const int lane = threadIdx.x % 32;
    uint32_t seen = (f.seen | f.seen >> 4) & 15; /* bit n: key n / 2 * 8 + lane % 4 * 2 + n % 2 */
    if (__all_sync(0xffffffff, seen == 15))
        return;
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
        seen |= __shfl_xor_sync(0xffffffff, seen, step);
#pragma unroll 1
    for (int key = 0; key < 16; key++) {
        const uint32_t is_seen = __shfl_sync(0xffffffff, seen, key % 8 / 2) >> (key / 8 * 2 + key % 2) & 1;
        for (int chunk = lane; !is_seen && chunk < V_CHUNKS; chunk += 32)
            st_shared_16(v_tile + chunk_offset<V_CHUNKS>(key_row + key, chunk), 0, 0, 0, 0);
    }
    __syncwarp();
}

/* Scales the sums of rows whose maximum grew. */
__device__ __forceinline__ void raise_maxima(struct warp_state &w, const float (&next)[2]) {
    if (__any_sync(0xffffffff, next[0] > w.row_max[0] || next[1] > w.row_max[1])) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float factor =
                next[half] == w.row_max[half] ? 1.0f : ex2_approx((w.row_max[half] - next[half]) * TO_LOG2);
            w.row_max[half] = next[half];
            w.row_sum[half] *= factor;
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++) {
                w.o[0][n][half * 2] *= factor;
                w.o[0][n][half * 2 + 1] *= factor;
            }
        }
    }
}

/* Makes scores of products: scales, caps, adds the bias and hides. */
__device__ __forceinline__ void finish_scores(float (&s)[1][STEP_KEYS / 8][4], const struct gpu_forward_params &a,
                                              const struct seen_keys &f) {
    const float unit = a.scale * (IN_LOG2 ? LOG2_E : 1.0f);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < LANE_KEYS; n++) {
            float &x = s[0][n / 2][half * 2 + n % 2];
            x = cap_score(a, x * unit);
            if (BIAS)
                x += f.bias[half][n];
        }
    if (f.seen != ALL_SEEN) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < LANE_KEYS; n++) {
                float &x = s[0][n / 2][half * 2 + n % 2];
                x = f.seen >> (half * LANE_KEYS + n) & 1 ? x : MINUS_INF;
            }
    }
}

/* One step: the scores of its keys, their P, and what they add to the output. */
__device__ __forceinline__ void take_keys(struct warp_state &w, const struct gpu_forward_params &a,
                                          const uint32_t (&kept)[HEAD_DIM / 16][4], const struct operands &of,
                                          const struct seen_keys &f) {
    float s[1][STEP_KEYS / 8][4] = {};
    multiply(s, kept, of);
    finish_scores(s, a, f);
    float next[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float m = w.row_max[half];
#pragma unroll
        for (int n = 0; n < LANE_KEYS; n++)
            m = fmaxf(m, s[0][n / 2][half * 2 + n % 2]);
        next[half] = quad_max(m);
    }
    raise_maxima(w, next);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float shift = w.row_max[half] == MINUS_INF ? 0.0f : w.row_max[half];
#pragma unroll
        for (int n = 0; n < LANE_KEYS; n++) {
            float &x = s[0][n / 2][half * 2 + n % 2];
            x = ex2_approx((x - shift) * TO_LOG2);
            w.row_sum[half] += x;
        }
    }
    if (ONE_TILE) {
        cp_async_wait<0>(); /* V */
        __syncwarp();
        clear_unseen(f, of.v_tile, of.key_row);
    }
    add_values(w.o, s, of);
}

#include "families/mma/decode/mma_decode_merge.cuh"

/* ---- a warp ---- */

struct decoder {
    const struct gpu_forward_params &a;
    char *const shared;
    const uint32_t q_tile, ring;
    const int warp, key_group, warp_row, share;
    struct place at;
    const char *q, *k, *v;
    struct list l;
    struct page_row ahead; /* PAGED: where the lane's key of the next tile to copy lies */
    int first_key, count;  /* of the split where nothing is listed; its places */
    struct warp_state w;
    uint32_t q_fragments[HEAD_DIM / 16][4];

    __device__ __forceinline__ decoder(const struct gpu_forward_params &params, char *memory)
        : a(params), shared(memory), q_tile(shared_address(memory)), ring(q_tile + Q_BYTES), warp(threadIdx.x / 32),
          key_group(warp / GROUP_WARPS), warp_row(warp % ROW_GROUPS * 16), share(warp % GROUP_WARPS / ROW_GROUPS),
          at(find_place(params, blockIdx.x)), l(), ahead(), first_key(0), count(0), w() {
        q = a.q.data +
            (at.batch * a.q.batch + at.q_begin * a.q.row + (int64_t)at.head_kv * a.group * a.q.head) * ELEMENT_BYTES;
        const int64_t batch = CACHE ? at.in_cache.list : at.batch; /* PAGED: rows have addresses of their own */
        k = a.k.data + (batch * a.k.batch + at.k_begin * a.k.row + at.head_kv * a.k.head) * ELEMENT_BYTES;
        v = a.v.data + (batch * a.v.batch + at.k_begin * a.v.row + at.head_kv * a.v.head) * ELEMENT_BYTES;
        w.row_max[0] = w.row_max[1] = MINUS_INF;
    }

    /* Finds the split's keys: those listed of every num_splits-th unit, or an equal share of the tiles. */
    __device__ __forceinline__ void find_keys() {
        if (LISTED) {
            const int units = max(0, (at.high + UNIT - 1) / UNIT - at.low / UNIT);
            l.keys = ring + RING_BYTES;
            l.counts = l.keys + MMA_DECODE_LIST * 4;
            l.num_units = at.high > at.low && units > at.split ? (units - at.split - 1) / a.num_splits + 1 : 0;
            list_up_to(l, a, at, (STAGES + TABLE_AHEAD) * BLOCK_N);
        } else if (ONE_TILE) {
            first_key = at.low + at.split * BLOCK_N;
            count = max(min(at.high - first_key, BLOCK_N), 0);
        } else if (SPLIT_RULE > MMA_PARTS_BY_LENGTH) {
            const int64_t before = (int64_t)at.split * SPLIT_RULE; /* a split has whole tiles */
            first_key = (int)min((int64_t)at.low + before, (int64_t)at.high);
            count = (min(max(at.high - first_key, 0), SPLIT_RULE) + BLOCK_N - 1) / BLOCK_N * BLOCK_N;
        } else {
            const int keys = max(at.high - at.low, 0), tiles = (keys + BLOCK_N - 1) / BLOCK_N;
            const int splits =
                SPLIT_RULE == MMA_PARTS_BY_LENGTH ? mma_decode_parts(keys, at.seqlen_q * a.group) : a.num_splits;
            const int each = tiles / splits, more = tiles % splits;                 /* the first splits have one more */
            first_key = at.low + (at.split * each + min(at.split, more)) * BLOCK_N; /* none loads keys before it */
            count = at.split < splits ? (each + (at.split < more)) * BLOCK_N : 0;
        }
    }
    __device__ __forceinline__ bool has_tile(int t) const { return t * BLOCK_N < (LISTED ? l.listed : count); }

    /* Reads the table for the lane's key of tile t. */
    __device__ __forceinline__ void read_table(int t) {
        if (!PAGED)
            return;
        const int slot = t * BLOCK_N + warp * WARP_KEYS + threadIdx.x % WARP_KEYS;
        int batch = at.batch;
        if (!TABLE_AHEAD)
            batch = opaque(batch); /* what is known of the sequence is not kept */
        ahead = find_page_row(a.cache, TABLE_AHEAD ? at.in_cache : find_cached_keys(a, batch),
                              has_tile(t) ? wanted_key_at(a, l, at, first_key, slot) : -1);
    }
    /* The address of that key in K or V. */
    __device__ __forceinline__ const char *address(const struct gpu_matrix &pages,
                                                   const struct gpu_matrix &added) const {
        return PAGED ? row_address<ELEMENT_BYTES>(a.cache, ahead, pages, added, at.batch, at.head_kv) : nullptr;
    }
    __device__ __forceinline__ uint32_t marks_of(int t) const { return q_tile + MARKS_OFFSET + t % STAGES * WARPS * 4; }

    __device__ __forceinline__ void fetch_k(int t) const {
        if (!has_tile(t))
            return;
        const char *const in_pages = address(a.k, a.cache.k_new);
        if (PAGED) {
            const uint32_t there = __ballot_sync(0xffffffff, in_pages != nullptr);
            if (threadIdx.x % 32 == 0)
                st_shared_4(marks_of(t) + warp * 4, there);
        }
        load_rows<K_CHUNKS>(ring + t % STAGES * (K_BYTES + V_BYTES), warp * WARP_KEYS, k, a.k.row * ELEMENT_BYTES, a, l,
                            at, first_key, t * BLOCK_N, a.head_dim, in_pages);
    }
    __device__ __forceinline__ void fetch_v(int t) const {
        if (has_tile(t))
            load_rows<V_CHUNKS>(ring + t % STAGES * (K_BYTES + V_BYTES) + K_BYTES, warp * WARP_KEYS, v,
                                a.v.row * ELEMENT_BYTES, a, l, at, first_key, t * BLOCK_N, a.head_dim_v,
                                address(a.v, a.cache.v_new));
    }

    /* Hides the keys that have no page, of those from place `key` of tile t on. */
    __device__ __forceinline__ void hide_missing(struct seen_keys &f, int t, int key) const {
        if (!PAGED)
            return;
        uint32_t there = 0;
#pragma unroll
        for (int n = 0; n < LANE_KEYS; n += 2) { /* two neighbours are of one warp */
            const int of_tile = key + n / 2 * 8 + threadIdx.x % 4 * 2;
            there |= (ld_shared_4(marks_of(t) + of_tile / WARP_KEYS * 4) >> of_tile % WARP_KEYS & 3) << n;
        }
        f.seen &= there | there << LANE_KEYS;
    }

    /* APPENDS: appends new keys, while the first copies are under way. */
    __device__ __forceinline__ void append() const {
        if (APPENDS && at.split == a.num_splits - 1 && at.first_row == 0)
            append_keys(a, at);
    }
    __device__ __forceinline__ void rotate_rows() const {
        if (APPENDS)
            rotate_q(a, at, q, shared);
    }
    /* ROTATES: rotates the new keys of tile t that the warp has copied. */
    __device__ __forceinline__ void rotate_new_keys(int t) const {
        if (!ROTATES)
            return;
        const int begin = first_key + t * BLOCK_N + warp * WARP_KEYS, cached = at.in_cache.cached;
        const int end = min(begin + WARP_KEYS, at.seqlen_k);
        if (end <= cached)
            return;
        const int64_t first = first_position(a.rotary, at.batch, cached) - cached;
        char *const tile = shared + Q_BYTES + t % STAGES * (K_BYTES + V_BYTES);
        __syncwarp();
#pragma unroll 1
        for (int key = max(begin, cached); key < end; key++)
            rotate_row_of_tile(a.rotary, tile, warp * WARP_KEYS + key - begin, first + key);
    }

    /* ONE_TILE: a warp works on the keys that it copies. */
    __device__ __forceinline__ void take_tile(const struct lane_rows &rows, const struct q_copy (&copies)[Q_COPIES]) {
        read_table(0);
        fetch_k(0);
#pragma unroll
        for (int n = 0; n < Q_COPIES; n++)
            if (!ROTATES && (ROWS * K_CHUNKS % THREADS == 0 || threadIdx.x + n * THREADS < ROWS * K_CHUNKS))
                cp_async_16_fill(copies[n].to, copies[n].from, copies[n].bytes);
        cp_async_commit();
        fetch_v(0);
        cp_async_commit();
        if (ROTATES)
            rotate_rows();
        append();
        struct seen_keys now = look(a, at, l, rows, first_key, warp * GROUP_KEYS);
        const bool is_seen = __any_sync(0xffffffff, now.seen);
        if (is_seen) /* a branch, so that what look() reads is under way before the wait */
            cp_async_wait<1>();
        else
            cp_async_wait<0>();
        rotate_new_keys(0);
        __syncthreads();
        if (is_seen) {
            hide_missing(now, 0, warp * GROUP_KEYS);
            take_keys(w, a, q_fragments, {q_tile, ring, ring + K_BYTES, 0, warp * GROUP_KEYS, 0, 0, 0}, now);
        }
    }

    /* Loads Q and the tiles of the first stages. */
    __device__ __forceinline__ void fill_ring() {
        read_table(0);
        fetch_k(0);
        fetch_v(0);
        for (int index = threadIdx.x; !ROTATES && index < ROWS * K_CHUNKS; index += THREADS) {
            const struct q_copy copy = find_q(a, at, q, q_tile, index);
            cp_async_16_fill(copy.to, copy.from, copy.bytes);
        }
        cp_async_commit(); /* the first tile's group */
#pragma unroll
        for (int t = 1; t < STAGES - 1; t++) {
            read_table(t);
            fetch_k(t);
            fetch_v(t);
            cp_async_commit();
        }
        if (TABLE_AHEAD)
            read_table(STAGES - 1);
        if (ROTATES)
            rotate_rows();
        append();
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (KEEP_Q)
#pragma unroll
            for (int step = 0; step < HEAD_DIM / 16; step++)
                ldmatrix_x4(q_fragments[step], q_tile + chunk_offset<K_CHUNKS>(warp_row + threadIdx.x % 16,
                                                                               2 * step + threadIdx.x % 32 / 16));
    }

    /* Waits until all warps of the key group have copied their share of the tile, and have left the tile before. */
    __device__ __forceinline__ void wait_for_group() const {
        if (GROUP_WARPS == 1)
            __syncwarp();
        else if (GROUP_WARPS == WARPS)
            __syncthreads();
        else
            barrier_sync(1 + warp / GROUP_WARPS, 32 * GROUP_WARPS);
    }

    /* The same as look(), of rows that are computed again, so that no register outlives the step. */
    __device__ __forceinline__ struct seen_keys look_anew(int slot) const {
        int row = warp_row;
        row = opaque(row);
        return look(a, at, l, find_rows(a, at, row), first_key, slot);
    }

    __device__ __forceinline__ void walk_ring() {
        const int own = key_group * GROUP_KEYS;
        struct lane_rows rows;
        struct seen_keys ahead;
        if (KEEP_ROWS) {
            rows = find_rows(a, at, warp_row);
            ahead = look(a, at, l, rows, first_key, own);
        }
#pragma unroll 1
        for (int t = 0; has_tile(t); t++) {
            cp_async_wait<STAGES - 2>();
            rotate_new_keys(t);
            wait_for_group();
            if (LISTED)
                list_up_to(l, a, at, (t + STAGES + TABLE_AHEAD) * BLOCK_N);
            if (!TABLE_AHEAD)
                read_table(t + STAGES - 1);
            fetch_k(t + STAGES - 1); /* into the stage of tile t - 1, which the group has left */
            fetch_v(t + STAGES - 1);
            cp_async_commit();
            if (TABLE_AHEAD)
                read_table(t + STAGES);
            const uint32_t stage = ring + t % STAGES * (K_BYTES + V_BYTES);
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                struct seen_keys now;
                if (KEEP_ROWS) {
                    const int next = step + 1 < STEPS ? t * BLOCK_N + (step + 1) * STEP_KEYS : (t + 1) * BLOCK_N;
                    now = ahead;
                    ahead = look(a, at, l, rows, first_key, next + own);
                } else {
                    now = look_anew(t * BLOCK_N + step * STEP_KEYS + own);
                }
                hide_missing(now, t, own + step * STEP_KEYS);
                if (warp_row < at.num_rows)
                    take_keys(w, a, q_fragments,
                              {q_tile, stage, stage + K_BYTES, warp_row, own + step * STEP_KEYS, share,
                               ring + RING_BYTES + (LISTED ? MMA_DECODE_LIST_BYTES : 0), t * STEPS + step},
                              now);
            }
        }
        uint32_t block = blockIdx.x;
        block = opaque(block);
        at = find_place(a, block, at.batch); /* the other coordinates are not kept through the loop */
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_MIN)
    mma_decode(const __grid_constant__ struct gpu_forward_params a) {
    extern __shared__ __align__(128) char shared[];
    griddepcontrol_launch_dependents(); /* the next kernel waits by itself for the end of this grid */
    if (PLACE_IS_READ)
        griddepcontrol_wait();
    struct decoder d(a, shared);
    struct lane_rows rows;
    struct q_copy copies[Q_COPIES];
    if (ONE_TILE) {
        rows = find_rows(a, d.at, 0);
#pragma unroll
        for (int n = 0; n < Q_COPIES; n++)
            copies[n] = find_q(a, d.at, d.q, d.q_tile, threadIdx.x + n * THREADS);
    }
    if (ONE_TILE && !PLACE_IS_READ) /* no tensor of the caller is read or written before it */
        griddepcontrol_wait_after(made_of(rows, copies, d.k, d.v));
    else if (!PLACE_IS_READ)
        griddepcontrol_wait();
    if (MERGE != MMA_MERGE_WORKSPACE && d.at.split == 0 && d.at.first_row == 0)
        for (int g = 0; g < a.group; g++)
            clear_unused_of_forward(a, d.at.batch, d.at.head_kv * a.group + g, threadIdx.x, THREADS);
    if (d.at.num_rows <= 0) {
        d.append();
        return;
    }
    d.find_keys();
    if ((LISTED || SPLIT_RULE) && MERGE == MMA_MERGE_WORKSPACE && !d.has_tile(0)) {
        d.append();
        leave_nothing(a, d.at);
        return;
    }
    if (ONE_TILE) {
        d.take_tile(rows, copies);
    } else {
        d.fill_ring();
        d.walk_ring();
    }
    cp_async_wait<0>();
    __syncthreads();
    merge_warps(d.w, a, d.at, d.q_tile, (float *)(shared + Q_BYTES), {d.key_group, d.warp_row, d.share});
}
