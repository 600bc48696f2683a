/* mma_decode.cu: few query rows, many keys: split along the keys.
 *
 * Idea: FlashDecoding (Dao et al., 2023): each block walks a range of the keys and leaves a partial result. Up to eight
 * of them (of single tiles 16) are merged by their own blocks, which are a cluster and write to each other's shared
 * memory (9.0): that saves a launch. More go by way of global memory to combine_splits.cu. The heads of a group are
 * packed as rows (row i * group + g), so that K and V are read once for each KV head. Bound by memory: the least time
 * is that of reading K and V once.
 *
 * What hides keys (mask, intervals, a bias of -inf) is looked at first, 2048 keys at a time, while copies are under
 * way: the keys that some row sees are listed, in their order, and only those are copied. Splits take units of 128 or
 * 256 keys in turn, so that hidden stretches are shared by all. Where rows differ in what they see, each looks at the
 * listed keys itself. Where not all blocks run at once and sequences have masks of their own, those that seem to see
 * most come first (ORDERED), so that the last blocks are short.
 *
 * Few keys (ONE_TILE) are bound by steps that follow each other: a split is one tile, nothing is listed, and what needs
 * nothing of the caller's is done before the kernel ahead in the stream has ended.
 *
 * Tile: 64 keys, 16 for each of four warps, which work on all 16 rows and never wait for each other: each has its own
 * maxima, sums and output, merged at the end. Lane l holds rows l / 4 and l / 4 + 8. With more rows, two to eight of
 * eight warps (ROW_GROUPS) take 16 rows each of the same keys and wait for each other once a tile. More rows than 128
 * are more blocks, which find K and V in the second-level cache. float32: three products of tf32 numbers
 * (mma_tf32.cuh); above head dim 128 two warps share the columns of O and the keys' scores (SHARE).
 *
 * Issue slots: a warp has few others beside it to hide its waits, so what a tile takes besides its products counts. A
 * lane's copies of a whole tile lie in one column: an address and two additions each.
 *
 * Shared memory: Q [ROWS][HEAD_DIM], then [STAGES] x (K [BLOCK_N][HEAD_DIM], V [BLOCK_N][HEAD_DIM_V]), all swizzled,
 * then the list, and scores of warps that share columns; at the end the ring holds [KEY_GROUPS][ROWS][PART_WIDTH]
 * floats, the warps' maxima and sums, and what a cluster's blocks leave here; an mbarrier for that is where Q was.
 *
 * Grid, in one dimension: splits, of blocks of rows, of KV heads, of batches. Registers: O takes HEAD_DIM_V / 2 /
 * SHARE. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/opaque.cuh"
#include "families/mma/forward/mma_decode.h"
#include "gpu/numbers.h"
#include "gpu/quad.cuh"

MMA_DECODE_CONSTANTS(GPU_CONSTANT_GIVEN)

#define THREADS (32 * WARPS)
#if DTYPE == GPU_FLOAT32
#    include "families/mma/float32/mma_tf32.cuh"
#else
#    include "families/mma/mma_tile.cuh"
#endif

#include "gpu/rest.cuh"
#include "gpu/scores.cuh"

#define ROWS        (16 * ROW_GROUPS)
#define SHARE       mma_decode_share(DTYPE == GPU_FLOAT32, HEAD_DIM_V)
#define SHARED      (DTYPE == GPU_FLOAT32 && HEAD_DIM_V > 128) /* SHARE > 1 */
#define MATES       (ROW_GROUPS * SHARE)                       /* warps that work on the same keys */
#define KEY_GROUPS  (WARPS / MATES)
#define GROUP_KEYS  (BLOCK_N / KEY_GROUPS) /* of a tile, that a warp works on */
#define WARP_KEYS   (BLOCK_N / WARPS)      /* that it copies */
#define PARTS       (KEY_GROUPS * ROWS)    /* rows of O that the warps hold in the end */
#define CLUSTER_MAX MMA_DECODE_CLUSTER_MAX(STAGES)
#define PART_WIDTH  (HEAD_DIM_V + MMA_DECODE_PART_PAD)
#define STEPS       (GROUP_KEYS / STEP_KEYS)
#define OUT_TILES   (HEAD_DIM_V / 8 / SHARE)
#define K_CHUNKS    (HEAD_DIM / CHUNK_ELEMENTS)
#define V_CHUNKS    (HEAD_DIM_V / CHUNK_ELEMENTS)
#define K_BYTES     (BLOCK_N * HEAD_DIM * ELEMENT_BYTES)
#define V_BYTES     (BLOCK_N * HEAD_DIM_V * ELEMENT_BYTES)
#define RING_BYTES \
    mma_decode_ring_bytes(ELEMENT_BYTES, HEAD_DIM, HEAD_DIM_V, BLOCK_N, ROW_GROUPS, WARPS / SHARE, STAGES, MERGE)
#define ONE_TILE (STAGES == 1)
#define LISTED   ((MASK || BIAS || INTERVALS) && !ONE_TILE)
/* Scores are kept in units of log2, where no bias could make that overflow; else as they are. */
#define IN_LOG2 (SCORES_BARE && DTYPE != GPU_FLOAT32)
#define TO_LOG2 (IN_LOG2 ? 1.0f : LOG2_E)
/* Q in registers; else read anew, so that nothing spills. */
#define KEEP_Q (DTYPE != GPU_FLOAT32 && !ONE_TILE && HEAD_DIM + HEAD_DIM_V <= (LISTED || SOFTCAP ? 256 : 320))
#define Q_STEPS                                \
    (KEEP_Q || HEAD_DIM <= 128 ? HEAD_DIM / 16 \
     : LISTED || SOFTCAP       ? 2             \
                               : 4) /* of Q K^T whose reads may be ahead: more would spill */
/* What else a lane keeps: what its rows see one step ahead; where they begin. Without, they are found anew. */
#define KEEP_ROWS  (HEAD_DIM_V <= 128 && DTYPE != GPU_FLOAT32)
#define Q_COPIES   ((ROWS * K_CHUNKS + THREADS - 1) / THREADS)   /* of a thread */
#define BLOCKS_MIN (ONE_TILE ? 2 : MMA_DECODE_WARPS_MAX / WARPS) /* of a multiprocessor */

/* Keys that a warp multiplies with at a time, and those of a lane. Products, maxima and shuffles of one step wait for
 * each other; of more keys more of them go side by side: as many as registers hold. */
#define FEW_KEYS  (DTYPE == GPU_FLOAT32 || BIAS || HEAD_DIM > 128 || HEAD_DIM_V > 128)
#define STEP_MOST (FEW_KEYS ? 16 : LISTED || SOFTCAP ? 32 : 64)
#define STEP_KEYS (GROUP_KEYS < STEP_MOST ? GROUP_KEYS : STEP_MOST)
#define LANE_KEYS (STEP_KEYS / 4)
#define ALL_SEEN  (0xffffffffu >> (32 - 2 * LANE_KEYS))
/* Of the keys that are there, or listed, rows may see some and not others. */
#define KEYS_DIFFER (WINDOW || BIAS || MASK_PER_ROW == MMA_DECODE_EACH || INTERVALS_PER_ROW == MMA_DECODE_EACH)

static_assert(GROUP_KEYS % STEP_KEYS == 0 && STEP_KEYS % 16 == 0 && KEY_GROUPS * MATES == WARPS, "whole steps");
static_assert((WARP_KEYS & (WARP_KEYS - 1)) == 0, "load_rows() takes it so");
static_assert(SHARE == (SHARED ? 2 : 1), "multiply_eight() takes half of the keys");
static_assert(SHARE == 1 || HEAD_DIM_V % 64 == 0, "each warp's columns are whole groups of chunks");
static_assert(!ORDERED || (MASK && LISTED && !VARLEN), "only a mask is looked at, whose keys are from 0 on");
static_assert(!ONE_TILE || (MATES == 1 && GROUP_KEYS == 16), "a warp works on the 16 keys that it copies");

#include "families/mma/forward/mma_decode_list.cuh"

/* The warp's share of a tile of K or V, whose first place in the split is `slot`; rows and columns past the ends become
 * zero. */
template <int chunks>
__device__ __forceinline__ void load_rows(uint32_t tile, int first_row, const char *data, int64_t row_bytes,
                                          const struct list &l, const struct place &at, int first_key, int slot,
                                          int columns) {
    constexpr int copies = (WARP_KEYS * chunks + 31) / 32;
    const int lane = threadIdx.x % 32, chunks_read = columns / CHUNK_ELEMENTS; /* of a row; the others are zero */
    constexpr bool in_columns = (chunks & (chunks - 1)) == 0 && WARP_KEYS * chunks % 32 == 0;
    if (in_columns && slot + first_row + WARP_KEYS <= (LISTED ? l.listed : at.seqlen_k - first_key)) {
        /* All keys are there, and a lane's copies lie in one column, or in the same two of each row. */
        constexpr int across = chunks > 32 ? chunks / 32 : 1, rows = chunks < 32 ? 32 / chunks : 1;
        const int row = first_row + lane / min(chunks, 32), chunk = lane % min(chunks, 32);
        const uint32_t to = tile + chunk_offset<chunks>(row, chunk);
        const char *from = data + chunk * 16;
#if LISTED
        const uint32_t key = l.keys + (uint32_t)slot % MMA_DECODE_LIST * 4 + row * 4;
#else
        from += (first_key + slot + row) * row_bytes;
#endif
#pragma unroll
        for (int n = 0; n < copies; n++) {
            const int down = n / across * rows, right = n % across * 32;
            /* `first_row` has no bit of `down`, which has none of the rest of `row` */
            const uint32_t swizzle = chunks % 8 == 0 ? (down & 7) << 4 : 0;
#if LISTED
            const char *at_row = from + (int)ld_shared_4(key + down * 4) * row_bytes;
#else
            const char *at_row = from;
            from += right == (across - 1) * 32 ? rows * row_bytes : 0;
#endif
            cp_async_16_fill((to ^ swizzle) + (down * chunks + right) * 16, at_row + right * 16,
                             chunk + right < chunks_read ? 16 : 0);
        }
    } else {
#pragma unroll 2
        for (int n = 0; n < copies; n++) {
            const int index = n * 32 + lane, row = index / chunks, chunk = index % chunks;
            if (WARP_KEYS * chunks % 32 && row >= WARP_KEYS)
                break;
            const int key = key_at(l, at, first_key, slot + first_row + row);
            cp_async_16_fill(tile + chunk_offset<chunks>(first_row + row, chunk),
                             data + max(key, 0) * row_bytes + chunk * 16, key >= 0 && chunk < chunks_read ? 16 : 0);
        }
    }
}

/* ---- scores ---- */

/* The lane's two rows: i of the sequence, and the keys that window and ends leave it. */
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
        const int r = at.first_row + (local < at.num_rows ? local : 0); /* what is made of others is not stored */
        rows.i[half] = r / a.group;
        const int64_t aligned = (int64_t)rows.i[half] + at.diagonal;
        rows.first_key[half] = WINDOW && a.window_left != UNBOUNDED ? (int)max((int64_t)0, aligned - a.window_left) : 0;
        rows.last_key[half] = WINDOW && a.window_right != UNBOUNDED
                                  ? (int)max((int64_t)-1, min((int64_t)at.seqlen_k - 1, aligned + a.window_right))
                                  : at.seqlen_k - 1;
        rows.view[half] = view_head(a, at, at.head_kv * a.group + r % a.group);
#if MASK
        rows.view[half].mask += rows.i[half] * a.mask.row;
#endif
#if BIAS
        rows.view[half].bias += rows.i[half] * a.bias.row * BIAS_BYTES;
#endif
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
#if INTERVALS_PER_ROW == MMA_DECODE_EACH
            if (seen)
                seen = rows.i[half] >= rows.view[half].start[j * a.intervals.start_key] &&
                       rows.i[half] < rows.view[half].end[j * a.intervals.end_key];
#endif
#if MASK_PER_ROW == MMA_DECODE_EACH
            if (seen)
                seen = rows.view[half].mask[j * a.mask.key];
#endif
#if BIAS
            f.bias[half][n] = seen ? bias_value(rows.view[half].bias + j * a.bias.key * BIAS_BYTES) : 0.0f;
            seen = seen && (!ONE_TILE || f.bias[half][n] != MINUS_INF);
#endif
            f.seen |= (uint32_t)seen << (half * LANE_KEYS + n);
        }
    }
    return f;
}

/* Of Q, packed row r is row r / group of head r % group of the group. */
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

#if ONE_TILE && !VARLEN
/* A number that follows from all that is made before the wait for the grid before this one. */
__device__ __forceinline__ uint32_t made_of(const struct lane_rows &rows, const struct q_copy (&copies)[Q_COPIES],
                                            const char *k, const char *v) {
    uint64_t made = (uint64_t)k ^ (uint64_t)v;
#    pragma unroll
    for (int half = 0; half < 2; half++) {
        const struct head_view &view = rows.view[half];
        made ^= (uint32_t)(rows.i[half] ^ rows.first_key[half] ^ rows.last_key[half]);
        made ^= (uint64_t)view.mask ^ (uint64_t)view.bias ^ (uint64_t)view.start ^ (uint64_t)view.end;
    }
#    pragma unroll
    for (int n = 0; n < Q_COPIES; n++)
        made ^= (uint64_t)copies[n].from ^ copies[n].to ^ copies[n].bytes;
    return (uint32_t)(made ^ made >> 32);
}
#endif

struct warp_state {
    float o[1][OUT_TILES][4];
    float row_max[2], row_sum[2]; /* maxima of scores, where IN_LOG2 in units of log2 */
};

#if SHARED
/* Scores of 8 keys of 16: the warp that shares the columns of O makes those of the others. */
__device__ __forceinline__ void multiply_eight(float (&c)[4], uint32_t q_tile, uint32_t k_tile, int warp_row,
                                               int key_row) {
    const int lane = threadIdx.x % 32;
    const lane_address<K_CHUNKS> left = left_of<K_CHUNKS>(q_tile, warp_row);
#    pragma unroll 2
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        uint32_t x[4], q_big[2][4], q_small[2][4], k_big[4], k_small[4];
#    pragma unroll
        for (int s = 0; s < 2; s++) {
            ldmatrix_x4(x, left.at_step(0, 4 * k + 2 * s));
#    pragma unroll
            for (int e = 0; e < 4; e++)
                split_tf32(q_big[s][e], q_small[s][e], __uint_as_float(x[e]));
        }
        ldmatrix_x4(x, k_tile + chunk_offset<K_CHUNKS>(key_row + lane % 8, 4 * k + lane / 8));
#    pragma unroll
        for (int e = 0; e < 4; e++)
            split_tf32(k_big[e], k_small[e], __uint_as_float(x[e]));
        float sum[2][4] = {}; /* as in multiply_scores(): the smallest products first, two sums side by side */
#    pragma unroll
        for (int product = 0; product < 3; product++)
#    pragma unroll
            for (int s = 0; s < 2; s++) {
                const uint32_t(&b)[4] = product == 1 ? k_small : k_big;
                mma_m16n8k8_tf32(sum[s], product == 0 ? q_small[s] : q_big[s], b[2 * s], b[2 * s + 1]);
            }
#    pragma unroll
        for (int e = 0; e < 4; e++)
            c[e] += sum[0][e] + sum[1][e];
    }
}

/* This warp's scores of 8 keys beside those of the warp that shares its columns, by two places in turn. */
__device__ __forceinline__ void exchange_scores(float (&s)[1][2][4], const float (&mine)[4], uint32_t places,
                                                int turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp % MATES / ROW_GROUPS;
    const uint32_t place = places + turn % 2 * WARPS * 512 + lane * 16;
    uint32_t theirs[4];
    st_shared_16(place + warp * 512, __float_as_uint(mine[0]), __float_as_uint(mine[1]), __float_as_uint(mine[2]),
                 __float_as_uint(mine[3]));
    barrier_sync(1 + KEY_GROUPS + warp / MATES * ROW_GROUPS + warp % ROW_GROUPS, 64);
    ld_shared_16(theirs, place + (warp ^ ROW_GROUPS) * 512);
#    pragma unroll
    for (int e = 0; e < 4; e++) {
        s[0][0][e] = share ? __uint_as_float(theirs[e]) : mine[e];
        s[0][1][e] = share ? mine[e] : __uint_as_float(theirs[e]);
    }
}
#endif

/* Scores of a step's keys from the warp's rows of Q. */
__device__ __forceinline__ void multiply(float (&s)[1][STEP_KEYS / 8][4],
                                         [[maybe_unused]] const uint32_t (&kept)[HEAD_DIM / 16][4], uint32_t q_tile,
                                         uint32_t k_tile, int warp_row, int key_row) {
#if DTYPE == GPU_FLOAT32
    multiply_scores<HEAD_DIM, 2, 2>(s, left_of<K_CHUNKS>(q_tile, warp_row), right_of<K_CHUNKS>(k_tile, key_row));
#else
    const int lane = threadIdx.x % 32;
#    pragma unroll Q_STEPS
    for (int k = 0; k < HEAD_DIM / 16; k++) {
#    if KEEP_Q
        const uint32_t(&q)[4] = kept[k];
#    else
        uint32_t q[4];
        ldmatrix_x4(q, q_tile + chunk_offset<K_CHUNKS>(warp_row + lane % 16, 2 * k + lane / 16));
#    endif
#    pragma unroll
        for (int n = 0; n < STEP_KEYS / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(
                b, k_tile + chunk_offset<K_CHUNKS>(key_row + n * 8 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
            mma_16x8x16(s[0][n], q, b[0], b[1]);
            mma_16x8x16(s[0][n + 1], q, b[2], b[3]);
        }
    }
#endif
}

#if ONE_TILE
/* Rows of V that no row of Q sees become zero: they were not listed, and may hold anything. */
__device__ __forceinline__ void clear_unseen(const struct seen_keys &f, uint32_t v_tile, int key_row) {
    const int lane = threadIdx.x % 32;
    uint32_t seen = (f.seen | f.seen >> 4) & 15; /* bit n: key n / 2 * 8 + lane % 4 * 2 + n % 2 */
    if (__all_sync(0xffffffff, seen == 15))
        return;
#    pragma unroll
    for (int step = 4; step < 32; step *= 2)
        seen |= __shfl_xor_sync(0xffffffff, seen, step);
#    pragma unroll 1
    for (int key = 0; key < 16; key++) {
        const uint32_t is_seen = __shfl_sync(0xffffffff, seen, key % 8 / 2) >> (key / 8 * 2 + key % 2) & 1;
        for (int chunk = lane; !is_seen && chunk < V_CHUNKS; chunk += 32)
            st_shared_16(v_tile + chunk_offset<V_CHUNKS>(key_row + key, chunk), 0, 0, 0, 0);
    }
    __syncwarp();
}
#endif

/* Where a row's maximum grew, what was summed with the old one shrinks. */
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

/* Products become scores: scaled, capped, biased, hidden. */
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
                                          const uint32_t (&kept)[HEAD_DIM / 16][4], uint32_t q_tile, uint32_t k_tile,
                                          uint32_t v_tile, int warp_row, int key_row, [[maybe_unused]] int share,
                                          [[maybe_unused]] uint32_t places, [[maybe_unused]] int turn,
                                          const struct seen_keys &f) {
    float s[1][STEP_KEYS / 8][4] = {};
#if SHARED
    float mine[4] = {};
    multiply_eight(mine, q_tile, k_tile, warp_row, key_row + share * 8);
    exchange_scores(s, mine, places, turn);
#else
    multiply(s, kept, q_tile, k_tile, warp_row, key_row);
#endif
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
#if ONE_TILE
    cp_async_wait<0>(); /* V */
    __syncwarp();
    clear_unseen(f, v_tile, key_row);
#endif
#if DTYPE == GPU_FLOAT32
    add_product<V_CHUNKS>(w.o, s, v_tile + key_row * HEAD_DIM_V * 4, share * OUT_TILES * 8);
#else
    const int lane = threadIdx.x % 32;
#    pragma unroll
    for (int sixteen = 0; sixteen < STEP_KEYS / 16; sixteen++) {
        uint32_t p[4];
#    pragma unroll
        for (int n = 0; n < 2; n++)
#    pragma unroll
            for (int half = 0; half < 2; half++) {
                const float(&x)[4] = s[0][sixteen * 2 + n];
                p[n * 2 + half] = pack(x[half * 2], x[half * 2 + 1]);
            }
#    pragma unroll
        for (int n = 0; n < OUT_TILES; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, v_tile + chunk_offset<V_CHUNKS>(key_row + sixteen * 16 + lane % 16, n + lane / 16));
            mma_16x8x16(w.o[0][n], p, b[0], b[1]);
            mma_16x8x16(w.o[0][n + 1], p, b[2], b[3]);
        }
    }
#endif
}

#include "families/mma/forward/mma_decode_merge.cuh"

/* The warps of a key group: what they have copied is seen by all of them, and none is a tile behind. */
__device__ __forceinline__ void wait_for_group(int warp) {
    if (MATES == 1)
        __syncwarp();
    else if (MATES == WARPS)
        __syncthreads();
    else
        barrier_sync(1 + warp / MATES, 32 * MATES);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_MIN)
    mma_decode(const __grid_constant__ struct gpu_forward_params a) {
    extern __shared__ __align__(128) char shared[];
    constexpr int q_bytes = ROWS * HEAD_DIM * ELEMENT_BYTES;
    const uint32_t q_tile = shared_address(shared), ring = q_tile + q_bytes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int key_group = warp / MATES, warp_row = warp % ROW_GROUPS * 16, share = warp % MATES / ROW_GROUPS;
    griddepcontrol_launch_dependents(); /* what follows waits for this grid's end by itself */
#if VARLEN || ORDERED
    griddepcontrol_wait();
#endif
    struct place at = find_place(a, blockIdx.x);
    const char *k = a.k.data + (at.batch * a.k.batch + at.k_begin * a.k.row + at.head_kv * a.k.head) * ELEMENT_BYTES;
    const char *v = a.v.data + (at.batch * a.v.batch + at.k_begin * a.v.row + at.head_kv * a.v.head) * ELEMENT_BYTES;
    const char *q =
        a.q.data +
        (at.batch * a.q.batch + at.q_begin * a.q.row + (int64_t)at.head_kv * a.group * a.q.head) * ELEMENT_BYTES;
#if ONE_TILE
    const struct lane_rows rows = find_rows(a, at, 0);
    struct q_copy q_copies[Q_COPIES];
#    pragma unroll
    for (int n = 0; n < Q_COPIES; n++)
        q_copies[n] = find_q(a, at, q, q_tile, threadIdx.x + n * THREADS);
#endif
#if ONE_TILE && !VARLEN /* nothing of the caller's is read before it, or written */
    griddepcontrol_wait_after(made_of(rows, q_copies, k, v));
#elif !VARLEN && !ORDERED
    griddepcontrol_wait();
#endif
    if (MERGE != MMA_MERGE_WORKSPACE && at.split == 0 && at.first_row == 0)
        for (int g = 0; g < a.group; g++)
            clear_rest_of_forward(a, at.batch, at.head_kv * a.group + g, threadIdx.x, THREADS);
    if (at.num_rows <= 0)
        return;

    /* This split's keys: those listed of every num_splits-th unit, or an equal share of the tiles. */
    struct list l = {};
    int first_key = 0, count = 0; /* of the split; its places */
#if LISTED
    const int units = max(0, (at.high + UNIT - 1) / UNIT - at.low / UNIT);
    l.keys = ring + RING_BYTES;
    l.counts = l.keys + MMA_DECODE_LIST * 4;
    l.num_units = at.high > at.low && units > at.split ? (units - at.split - 1) / a.num_splits + 1 : 0;
    list_up_to(l, a, at, STAGES * BLOCK_N);
#    if MERGE == MMA_MERGE_WORKSPACE
    if (l.listed == 0) {
        for (int index = threadIdx.x; index < at.num_rows * (HEAD_DIM_V / 4); index += THREADS)
            if (index % (HEAD_DIM_V / 4) * 4 < a.head_dim_v)
                leave_columns(a, at, index / (HEAD_DIM_V / 4), index % (HEAD_DIM_V / 4) * 4, make_float4(0, 0, 0, 0),
                              MINUS_INF, 0);
        return;
    }
#    endif
#elif ONE_TILE
    first_key = at.low + at.split * BLOCK_N;
    count = max(min(at.high - first_key, BLOCK_N), 0);
#else
    const int tiles = (max(at.high - at.low, 0) + BLOCK_N - 1) / BLOCK_N;
    const int each = tiles / a.num_splits, more = tiles % a.num_splits;     /* the first `more` splits have one more */
    first_key = at.low + (at.split * each + min(at.split, more)) * BLOCK_N; /* keys before are loaded by none */
    count = (each + (at.split < more)) * BLOCK_N;
#endif
    auto fetch_k = [&](int t) {
        if (t * BLOCK_N < (LISTED ? l.listed : count))
            load_rows<K_CHUNKS>(ring + t % STAGES * (K_BYTES + V_BYTES), warp * WARP_KEYS, k, a.k.row * ELEMENT_BYTES,
                                l, at, first_key, t * BLOCK_N, a.head_dim);
    };
    auto fetch_v = [&](int t) {
        if (t * BLOCK_N < (LISTED ? l.listed : count))
            load_rows<V_CHUNKS>(ring + t % STAGES * (K_BYTES + V_BYTES) + K_BYTES, warp * WARP_KEYS, v,
                                a.v.row * ELEMENT_BYTES, l, at, first_key, t * BLOCK_N, a.head_dim_v);
    };
    uint32_t q_fragments[HEAD_DIM / 16][4];
    struct warp_state w = {};
    w.row_max[0] = w.row_max[1] = MINUS_INF;
#if ONE_TILE
    fetch_k(0);
#    pragma unroll
    for (int n = 0; n < Q_COPIES; n++)
        if (ROWS * K_CHUNKS % THREADS == 0 || threadIdx.x + n * THREADS < ROWS * K_CHUNKS)
            cp_async_16_fill(q_copies[n].to, q_copies[n].from, q_copies[n].bytes);
    cp_async_commit();
    fetch_v(0);
    cp_async_commit();
    const struct seen_keys now = look(a, at, l, rows, first_key, warp * GROUP_KEYS);
    const bool is_seen = __any_sync(0xffffffff, now.seen);
    if (is_seen) /* a branch, so that what look() reads is under way before the wait */
        cp_async_wait<1>();
    else
        cp_async_wait<0>();
    __syncthreads();
    if (is_seen)
        take_keys(w, a, q_fragments, q_tile, ring, ring + K_BYTES, 0, warp * GROUP_KEYS, 0, 0, 0, now);
#else
    fetch_k(0);
    fetch_v(0);
    for (int index = threadIdx.x; index < ROWS * K_CHUNKS; index += THREADS) {
        const struct q_copy copy = find_q(a, at, q, q_tile, index);
        cp_async_16_fill(copy.to, copy.from, copy.bytes);
    }
    cp_async_commit(); /* the first tile's group */
#    pragma unroll
    for (int t = 1; t < STAGES - 1; t++) {
        fetch_k(t);
        fetch_v(t);
        cp_async_commit();
    }
    cp_async_wait<STAGES - 2>();
    __syncthreads();
#    if KEEP_Q
#        pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++)
        ldmatrix_x4(q_fragments[step], q_tile + chunk_offset<K_CHUNKS>(warp_row + lane % 16, 2 * step + lane / 16));
#    endif

#    if KEEP_ROWS
    const struct lane_rows rows = find_rows(a, at, warp_row);
    struct seen_keys ahead = look(a, at, l, rows, first_key, key_group * GROUP_KEYS);
#    endif
#    pragma unroll 1
    for (int t = 0; t * BLOCK_N < (LISTED ? l.listed : count); t++) {
        cp_async_wait<STAGES - 2>();
        wait_for_group(warp);
#    if LISTED
        list_up_to(l, a, at, (t + STAGES) * BLOCK_N);
#    endif
        fetch_k(t + STAGES - 1); /* into the stage of tile t - 1, which the group has left */
        fetch_v(t + STAGES - 1);
        cp_async_commit();
        const uint32_t stage = ring + t % STAGES * (K_BYTES + V_BYTES);
#    pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
#    if KEEP_ROWS
            const struct seen_keys now = ahead;
            const int next = step + 1 < STEPS ? t * BLOCK_N + (step + 1) * STEP_KEYS : (t + 1) * BLOCK_N;
            ahead = look(a, at, l, rows, first_key, next + key_group * GROUP_KEYS);
#    else
            int row = warp_row;
            row = opaque(row);
            const struct seen_keys now = look(a, at, l, find_rows(a, at, row), first_key,
                                              t * BLOCK_N + step * STEP_KEYS + key_group * GROUP_KEYS);
#    endif
            if (warp_row < at.num_rows)
                take_keys(w, a, q_fragments, q_tile, stage, stage + K_BYTES, warp_row,
                          key_group * GROUP_KEYS + step * STEP_KEYS, share,
                          ring + RING_BYTES + (LISTED ? MMA_DECODE_LIST_BYTES : 0), t * STEPS + step, now);
        }
    }
    uint32_t block = blockIdx.x;
    block = opaque(block);
    at = find_place(a, block, at.batch); /* the rest is not kept through the loop */
#endif
    cp_async_wait<0>();
    __syncthreads();
    const int pieces = at.num_rows * (HEAD_DIM_V / 4); /* of four columns */
#if MERGE == MMA_MERGE_CLUSTER
    /* Each block of the cluster merges a fair share, which all write to it: [num_splits][fair], and of their rows. */
    const int fair = (pieces + a.num_splits - 1) / a.num_splits, mine = min(max(pieces - at.split * fair, 0), fair);
    const uint32_t come = q_tile; /* an mbarrier where Q was */
    if (threadIdx.x == 0) {
        mbarrier_init(come, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(come, a.num_splits * mine * 24);
    }
    __syncwarp();
    barrier_cluster_arrive_relaxed(); /* nothing reads this block's ring any more */
#endif

    /* The warps' results side by side, then merged: [KEY_GROUPS][ROWS]. */
    float *outs = (float *)(shared + q_bytes), *maxima = outs + PARTS * PART_WIDTH, *sums = maxima + PARTS;
    leave_parts(w, outs, maxima, sums, at.num_rows, key_group, warp_row, share);
    __syncthreads();
#if MERGE == MMA_MERGE_CLUSTER
    const uint32_t inbox = shared_address(sums + PARTS), inbox_rows = inbox + a.num_splits * fair * 16;
    barrier_cluster_wait();
#endif
    for (int index = threadIdx.x; index < pieces; index += THREADS) {
        const int row = index / (HEAD_DIM_V / 4), column = index % (HEAD_DIM_V / 4) * 4;
        float most = MINUS_INF, sum = 0;
        float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int n = 0; n < KEY_GROUPS; n++)
            most = fmaxf(most, maxima[n * ROWS + row]);
#pragma unroll
        for (int n = 0; n < KEY_GROUPS; n++) {
            const float weight = weight_of(maxima[n * ROWS + row], most);
            sum += weight * sums[n * ROWS + row];
            add_weighted(x, weight, *(const float4 *)&outs[(n * ROWS + row) * PART_WIDTH + column]);
        }
#if MERGE == MMA_MERGE_CLUSTER
        const int to = index / fair, place = at.split * fair + index % fair;
        const uint32_t theirs = mapa_shared(come, to);
        st_async_16(mapa_shared(inbox, to) + place * 16, __float_as_uint(x.x), __float_as_uint(x.y),
                    __float_as_uint(x.z), __float_as_uint(x.w), theirs);
        st_async_8(mapa_shared(inbox_rows, to) + place * 8, __float_as_uint(most), __float_as_uint(sum), theirs);
#else
        if (column >= a.head_dim_v)
            continue;
#    if MERGE == MMA_MERGE_WORKSPACE
        leave_columns(a, at, row, column, x, most, sum);
#    else
        store_columns(a, at, row, column, x, most, sum);
#    endif
#endif
    }
#if MERGE == MMA_MERGE_CLUSTER
    if (threadIdx.x < mine) {
        mbarrier_wait_cluster(come, 0);
        merge_blocks(a, at, inbox, inbox_rows, fair, mine);
    }
#endif
}
