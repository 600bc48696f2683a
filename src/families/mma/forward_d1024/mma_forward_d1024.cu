/* mma_forward_d1024.cu: attention forward for head dims up to 1024, float16 and bfloat16, on mma.sync.
 *
 * Idea. One warp cannot hold 16 rows of O beyond 256 columns, so O is spread over the warps of a block as a grid of
 * 32 rows x up to 128 columns each, and P goes from the warps that made it to the warps that need it through shared
 * memory. Every row keeps a reference maximum that is raised only when its P grows beyond 2^12; in all other
 * steps O is not rescaled and the warps need no maximum of each other, so that one meeting of the warps that share 32
 * rows publishes P and votes on the maximum. A cluster of two blocks (9.0) shares the rows, splits keys of S and
 * columns of O, and so halves what is read per row.
 * Sources: Dao, "FlashAttention-2" (arXiv 2307.08691) for the loop; Milakov and Gimelshein (arXiv 1805.02867) for the
 * running softmax; FlashAttention-4 rescales lazily too.
 *
 * Who computes what. Row group w / COLUMN_GROUPS, column group w % COLUMN_GROUPS.
 *   S: 32 rows x WARP_KEYS keys, over all of D.   O: 32 rows x UNITS times 16 columns, interleaved between the groups.
 *
 * Shared memory: mma_forward_d1024.h. Rows of every tile are multiples of 128 bytes; the 16-byte chunk c of row r lies
 * at c ^ (r & 7), so that eight rows of one chunk column (ldmatrix, cp.async, stores of P) touch all 32 banks once.
 *
 * Ring. Slots of one step: D / SLICE_D slices of K, then BLOCK_N / SLICE_KEYS * SLICE_PARTS slices of V. All threads
 * copy, AHEAD slots before they compute.
 *
 * Barriers. "full" and "empty" of every stage are mbarriers, so that no warp waits for another but for bytes or room;
 * row groups drift apart by up to STAGES - AHEAD slots, and one's softmax runs beside another's products. The warps of
 * a row group meet once a step when P and the vote are published (twice more in the rare steps that raise a maximum),
 * and "p_free" keeps P until all have read it. With a cluster, a row group is that of both blocks.
 *
 * Registers of a thread: O 4 * UNITS * 4 = 128, S 4 * WARP_KEYS / 8 * 2 = 32, operands of two steps 32, maxima and
 * sums 8; bounded by 255. Addresses that are needed once a step are found anew from the thread's index. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special.cuh"
#include "families/mma/forward_d1024/mma_forward_d1024.h"
#include "gpu/finite.cuh"
#include "gpu/quad.cuh"
#include "gpu/redo.cuh"
#include "gpu/unused_rows.cuh"
#include "gpu/visible.cuh"

MMA_FORWARD_D1024_CONSTANTS(GPU_CONSTANT_GIVEN)

constexpr int THREADS = WARPS * 32;
#include "families/mma/mma_tile.cuh"

constexpr int COPY_ROWS = THREADS / 8; /* rows of a panel that the block copies at a time */
constexpr int COLUMN_GROUPS = MMA_FORWARD_D1024_COLUMN_GROUPS(WARPS, BLOCK_M);
constexpr int BLOCK_KEYS = BLOCK_N / CLUSTER;         /* keys of S that this block computes */
constexpr int BLOCK_COLUMNS = HEAD_DIM_V / CLUSTER;   /* columns of O that this block holds */
constexpr int WARP_KEYS = BLOCK_KEYS / COLUMN_GROUPS; /* keys of S per warp */
constexpr int KEY_TILES = WARP_KEYS / 8;
constexpr int UNITS = BLOCK_COLUMNS / COLUMN_GROUPS / 16; /* 16-column units of O per warp */
constexpr int PART_UNITS = UNITS / SLICE_PARTS;
constexpr int PART_COLUMNS = BLOCK_COLUMNS / SLICE_PARTS;
constexpr int K_SLOTS = HEAD_DIM / SLICE_D;
constexpr int V_SLOTS = BLOCK_N / SLICE_KEYS * SLICE_PARTS;
constexpr int SLOTS = K_SLOTS + V_SLOTS;
constexpr int STATISTICS = COLUMN_GROUPS * CLUSTER; /* warps that see a row */

constexpr int Q_PITCH = HEAD_DIM * 2;
constexpr int K_PITCH = SLICE_D * 2;
constexpr int V_PITCH = PART_COLUMNS * 2;
constexpr int P_PITCH = MMA_FORWARD_D1024_P_PITCH(BLOCK_N);
/* A row group's part of O overwrites its rows of Q where it fits there, else the whole of shared memory. */
constexpr bool OUT_OVER_Q = BLOCK_COLUMNS <= HEAD_DIM;
constexpr int OUT_PITCH = OUT_OVER_Q ? Q_PITCH : BLOCK_COLUMNS * 2;
constexpr int GROUP_THREADS = COLUMN_GROUPS * 32;
constexpr int STAGE_BYTES =
    MMA_FORWARD_D1024_STAGE_BYTES(BLOCK_N, SLICE_D, SLICE_KEYS, SLICE_PARTS, HEAD_DIM_V, CLUSTER);
constexpr int P_OFFSET = MMA_FORWARD_D1024_Q_BYTES(BLOCK_M, HEAD_DIM);
constexpr int RING_OFFSET = P_OFFSET + MMA_FORWARD_D1024_P_BYTES(BLOCK_M, BLOCK_N);
constexpr bool PAGED = CACHE == GPU_CACHE_PAGES;
constexpr int SHARED_BYTES = MMA_FORWARD_D1024_SHARED_BYTES(HEAD_DIM, HEAD_DIM_V, WARPS, BLOCK_M, BLOCK_N, SLICE_D,
                                                            SLICE_KEYS, SLICE_PARTS, STAGES, CLUSTER, false);
constexpr int SEQUENCE_OFFSET = SHARED_BYTES; /* PAGED */
constexpr int BARRIERS_OFFSET = SHARED_BYTES - MMA_FORWARD_D1024_BARRIER_BYTES(STAGES);
constexpr int FULL_OFFSET = BARRIERS_OFFSET;             /* [STAGES]: the slice has arrived */
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;   /* [STAGES]: all warps have read it */
constexpr int P_FREE_OFFSET = EMPTY_OFFSET + STAGES * 8; /* [row group]: all its warps have read P */
constexpr int EXCHANGE_OFFSET = P_FREE_OFFSET + 4 * 8;   /* [row group], cluster: all its warps have published */
constexpr int VOTES_OFFSET = EXCHANGE_OFFSET + 4 * 8;    /* [row group][3], cluster */
constexpr int STATISTICS_OFFSET = BARRIERS_OFFSET - MMA_FORWARD_D1024_STATISTICS_BYTES(WARPS, CLUSTER);
constexpr int AHEAD = (STAGES * 2 + 2) / 3; /* slots that are loaded ahead; the other stages let warps drift apart */

static_assert(DTYPE == GPU_FLOAT16 || DTYPE == GPU_BFLOAT16, "mma_forward_d1024.cu takes float16 and bfloat16");
static_assert(CLUSTER == 1 || (CLUSTER == 2 && !CACHE), "a cluster has one or two blocks");
static_assert(sizeof(cached_keys) <= MMA_FORWARD_D1024_SEQUENCE_BYTES, "the sequence has room");
static_assert(BLOCK_M == 32 || BLOCK_M == 64 || BLOCK_M == 128, "BLOCK_M is 32, 64 or 128");
static_assert(STAGES >= 2, "the ring needs two stages");
static_assert(SLICE_D % 64 == 0, "rows of a K slice are multiples of 128 bytes");
static_assert(K_SLOTS * SLICE_D == HEAD_DIM, "HEAD_DIM is a multiple of SLICE_D");
static_assert(WARP_KEYS == 8 || WARP_KEYS == 16 || WARP_KEYS == 32 || WARP_KEYS == 64, "8 to 64 keys per warp");
static_assert(WARPS == 4 || WARPS == 8, "a block has four or eight warps");
__host__ __device__ constexpr bool covered(int rows) {
    return rows % 16 == 0 && (rows < COPY_ROWS || rows % COPY_ROWS == 0);
}
static_assert(covered(BLOCK_KEYS) && covered(SLICE_KEYS), "threads cover the rows of a slice");
static_assert(V_SLOTS / SLICE_PARTS * SLICE_KEYS == BLOCK_N, "BLOCK_N is a multiple of SLICE_KEYS");
static_assert(PART_UNITS * SLICE_PARTS * COLUMN_GROUPS * 16 * CLUSTER == HEAD_DIM_V, "the columns of O divide evenly");
static_assert(PART_COLUMNS % 64 == 0, "rows of a V slice are multiples of 128 bytes");

/* Scores are in log2 units; with a bias in natural ones, where every finite bias stays finite and exact. */
constexpr float SCORE_UNIT = BIAS ? 1.0f : LOG2_E;
constexpr bool SCALED = SCORES_BARE && !MASK && !INTERVALS; /* between ends and windows there is only the scale */
/* Where features need no registers, a thread keeps the addresses of its chunks: 1.1 to 1.2 x the speed at D 512. */
constexpr bool KEEP_CHUNKS = SCALED && !VARLEN && !PAGED && CLUSTER == 1;
constexpr float SUM_MAX = 4096.0f; /* of a lane's P of one row and step: none overflows float16 */

/* What one block works on. */
struct work : sequence {
    int32_t head, row0;            /* row0: first query row of the block */
    int32_t first_tile, last_tile; /* key tiles [first, last) that some row sees */
    int32_t full_first, full_last; /* keys [first, last) that every row sees */
    int32_t padding, list;         /* CACHE: keys before the first; the row of the cache */
};

__device__ __forceinline__ int32_t clamp_to_keys(int64_t key, int32_t seqlen_k) {
    return (int32_t)(key < 0 ? 0 : key > seqlen_k ? seqlen_k : key);
}
/* The keys [first, last) that causal and window leave to row i. */
__device__ __forceinline__ int32_t first_key(const gpu_forward_params &a, const work &w, int32_t i) {
    if (a.window_left == UNBOUNDED)
        return 0;
    return clamp_to_keys((int64_t)i + w.seqlen_k - w.seqlen_q - a.window_left, w.seqlen_k);
}
__device__ __forceinline__ int32_t last_key(const gpu_forward_params &a, const work &w, int32_t i) {
    if (a.window_right == UNBOUNDED)
        return w.seqlen_k;
    return clamp_to_keys((int64_t)i + w.seqlen_k - w.seqlen_q + a.window_right + 1, w.seqlen_k);
}

/* Blocks of one head are neighbours, so that those that run together read the same K and V. Where blocks differ in
 * length, the heads of an L2 group are interleaved, and the longest blocks (late rows) come first. */
__device__ __forceinline__ work find_work(const gpu_forward_params &a, int32_t block) {
    const int32_t row_blocks = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M;
    const int32_t l2_group_blocks = row_blocks * a.heads_per_l2_group;
    const int32_t l2_group = block / CLUSTER / l2_group_blocks;
    const int32_t index = block / CLUSTER % l2_group_blocks;
    const int32_t left = a.heads * a.batch - l2_group * a.heads_per_l2_group;
    const int32_t l2_group_heads = left < a.heads_per_l2_group ? left : a.heads_per_l2_group;
    const int32_t head = l2_group * a.heads_per_l2_group + index % l2_group_heads;
    work w = {find_sequence(a, head / a.heads), head % a.heads, (row_blocks - 1 - index / l2_group_heads) * BLOCK_M};
    const int32_t last_row = min(w.row0 + BLOCK_M, w.seqlen_q) - 1;
    int32_t first = first_key(a, w, w.row0);
    const int32_t last = last_key(a, w, last_row);
    w.full_first = first_key(a, w, last_row);
    if (CACHE) {
        const cached_keys in_cache = find_cached_keys(a, w.batch);
        w.padding = in_cache.first_key;
        w.list = in_cache.list;
        first = max(first, w.padding);
        w.full_first = max(w.full_first, w.padding);
    }
    w.full_last = last_key(a, w, w.row0);
    w.first_tile = first / BLOCK_N;
    w.last_tile = first < last ? (last + BLOCK_N - 1) / BLOCK_N : w.first_tile;
    return w;
}

#include "families/mma/forward_d1024/mma_forward_d1024_group.cuh"
#include "families/mma/forward_d1024/mma_forward_d1024_ring.cuh"

/* The scores and accumulators that a thread holds. They are computed at each use, and not kept in registers. */
struct place {
    int32_t quad_row, quad_column; /* in an accumulator tile */
    int32_t column_group;
    int32_t block_row;   /* of the block's rows; the others are 8, 16 and 24 below */
    int32_t warp_key;    /* first key of the warp in a step */
    uint32_t p_store;    /* byte in P of row block_row, apart from the chunk */
    uint32_t statistics; /* byte of this warp's number on row block_row */
};
__device__ __forceinline__ place find_place(uint32_t rank) {
    const int32_t thread = (int32_t)tid_x_reread(), lane = thread & 31, warp = thread >> 5;
    place p;
    p.quad_row = lane >> 2;
    p.quad_column = (lane & 3) * 2;
    p.column_group = warp % COLUMN_GROUPS;
    p.block_row = warp / COLUMN_GROUPS * 32 + p.quad_row;
    p.warp_key = (int32_t)rank * BLOCK_KEYS + p.column_group * WARP_KEYS;
    p.p_store = (uint32_t)(P_OFFSET + p.block_row * P_PITCH + p.quad_column * 2);
    p.statistics =
        (uint32_t)(STATISTICS_OFFSET + (((int32_t)rank * COLUMN_GROUPS + p.column_group) * BLOCK_M + p.block_row) * 4);
    return p;
}

/* exp(x * unit - reference), in units of scores. */
__device__ __forceinline__ float weight(float x, float unit, float reference) {
    return ex2_approx(BIAS ? (x - reference) * LOG2_E : __fmaf_rn(x, unit, -reference));
}

/* Whether the cache has no page for a key. */
__device__ __forceinline__ bool is_missing(const gpu_forward_params &a, const char *shared_memory, int32_t key) {
    const cached_keys &sequence = *(const cached_keys *)(shared_memory + SEQUENCE_OFFSET);
    return has_no_page(a.cache, find_page_row(a.cache, sequence, key));
}
/* Whether it has none for some of the warp's keys, from `key` on. A warp calls it. */
__device__ __forceinline__ bool any_missing(const gpu_forward_params &a, const char *shared_memory, int32_t key) {
    bool missing = false;
#pragma unroll 1
    for (int n = (int)threadIdx.x & 31; n < WARP_KEYS; n += 32)
        missing = missing || is_missing(a, shared_memory, key + n);
    return __any_sync(0xffffffff, missing);
}

/* Turns products into scores, and invisible ones into -inf. Returns the factor that is still to be applied: where
 * scaling is all that is left to do, weight() does it. */
__device__ __forceinline__ float finish_scores(const gpu_forward_params &a, const work &w, int32_t tile, uint32_t rank,
                                               const char *shared_memory, float (&s)[2][KEY_TILES][4]) {
    const float factor = SOFTCAP ? a.scale * a.softcap_inverse : a.scale * SCORE_UNIT;
    const bool missing =
        PAGED && any_missing(a, shared_memory, tile * BLOCK_N + find_place(rank).warp_key); /* of the cache's pages */
    const bool partial = missing || tile * BLOCK_N < w.full_first || (tile + 1) * BLOCK_N > w.full_last;
    if (SCALED && !partial)
        return factor;

    const char *const mask = MASK ? mask_of(a, w.batch, w.head) : 0, *bias = 0;
    const int32_t *start = 0, *end = 0;
    if (BIAS)
        bias = a.bias.data + (w.batch * a.bias.batch + (w.head / a.bias.group) * a.bias.head) * BIAS_BYTES;
    if (INTERVALS) {
        const int32_t head = w.head / a.intervals.group;
        start = a.intervals.start + w.batch * a.intervals.start_batch + head * a.intervals.start_head +
                (int64_t)w.k_begin * a.intervals.start_key;
        end = a.intervals.end + w.batch * a.intervals.end_batch + head * a.intervals.end_head +
              (int64_t)w.k_begin * a.intervals.end_key;
    }
    /* Goes over key tiles one after the other. The loop is not unrolled but rotates the scores, so that addresses
     * take few registers. */
#pragma unroll 1
    for (int n = 0; n < KEY_TILES; ++n) {
        const place at = find_place(rank); /* computed here, so that no address outlives the iteration */
        const int32_t key0 = tile * BLOCK_N + at.warp_key + at.quad_column;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int32_t i = w.row0 + at.block_row + m * 16 + half * 8;
                const int32_t from = first_key(a, w, i), first = CACHE ? max(from, w.padding) : from;
                const int32_t last = last_key(a, w, i);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int32_t j = key0 + n * 8 + e;
                    float &x = s[m][0][half * 2 + e];
                    x *= factor;
                    if (SOFTCAP)
                        x = a.softcap * SCORE_UNIT * tanh_accurate(x);
                    bool visible = j >= first && j < last;
                    if (PAGED && missing)
                        visible = visible && !is_missing(a, shared_memory, j);
                    if (INTERVALS || MASK || BIAS)
                        visible = visible && i < w.seqlen_q;
                    if (INTERVALS && visible)
                        visible = i >= start[j * a.intervals.start_key] && i < end[j * a.intervals.end_key];
                    /* A pair that is not seen reads the first mask and bias: a branch would wait for each load. */
                    if (MASK)
                        visible = mask[visible ? i * a.mask.row + j * a.mask.key : 0] && visible;
                    if (BIAS)
                        x += bias_value(bias + (visible ? (i * a.bias.row + j * a.bias.key) * BIAS_BYTES : 0));
                    if (!visible)
                        x = MINUS_INF;
                }
            }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float done = s[m][0][e];
#pragma unroll
                for (int t = 1; t < KEY_TILES; ++t)
                    s[m][t - 1][e] = s[m][t][e];
                s[m][KEY_TILES - 1][e] = done;
            }
    }
    return 1.0f;
}

/* The two operands of S of a 16-column step, and those of the step after it. */
struct qk_operands {
    uint32_t q[2][2][4], k[2][(KEY_TILES + 1) / 2][4];

    __device__ __forceinline__ void load(uint32_t q_slice, uint32_t k_slice, int buffer, int step) {
        const uint32_t q_at = (q_slice ^ (uint32_t)((step & 3) * 32)) + (step >> 2) * 128;
        const uint32_t k_at = (k_slice ^ (uint32_t)((step & 3) * 32)) + (step >> 2) * 128;
        ldmatrix_x4(q[buffer][0], q_at);
        ldmatrix_x4(q[buffer][1], q_at + 16 * Q_PITCH);
        if (WARP_KEYS == 8) {
            uint32_t pair[2];
            ldmatrix_x2(pair, k_at);
            k[buffer][0][0] = pair[0];
            k[buffer][0][1] = pair[1];
        } else {
#pragma unroll
            for (int n = 0; n < KEY_TILES / 2; ++n)
                ldmatrix_x4(k[buffer][n], k_at + n * 16 * K_PITCH);
        }
    }
};

/* What a warp computes: S, O and the running softmax of rows block_row + 16 m + 8 half. */
struct warp_rows {
    const gpu_forward_params &a;
    const work w;
    const uint32_t shared, peer, rank;
    loader l;
    ring r;
    group g;
    uint32_t q_lane, k_lane, p_lane, v_lane; /* addresses of this lane; k_lane and v_lane in a slice */
    uint32_t p_free, p_free_parity;
    bool settled; /* every row of this lane has a reference */
    float s[2][KEY_TILES][4], o[2][UNITS * 2][4];
    float reference[2][2], sum[2][2], tile_sum[2][2]; /* sums of this lane alone */

    /* ldmatrix x4 reads rows lane & 15, 16-byte halves lane >> 4 of a 16 x 16 tile; the tile in chunk pair p of its row
     * lies at (p * 32) ^ lane_chunk, and rows begin at multiples of 128. */
    __device__ __forceinline__ warp_rows(const gpu_forward_params &params, const work &own, const loader &loading,
                                         uint32_t peer_distance)
        : a(params), w(own), shared(loading.shared), peer(peer_distance), rank(loading.rank),
          l(loading), r{loading.shared, 0, 0}, p_free_parity(1), settled(false) {
        const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
        const int row_group = warp / COLUMN_GROUPS, column_group = warp % COLUMN_GROUPS;
        const uint32_t lane_row = lane & 15, lane_chunk = ((lane >> 4) ^ (lane & 7)) << 4;
        q_lane = shared + (row_group * 32 + lane_row) * Q_PITCH + lane_chunk;
        p_lane = shared + P_OFFSET + (row_group * 32 + lane_row) * P_PITCH + lane_chunk;
        /* Of K, so that the two registers of an operand are neighbours: rows (lane & 7) + 8 (lane >> 4), halves bit 3.
         */
        k_lane = (column_group * WARP_KEYS + (lane & 7) + (WARP_KEYS == 8 ? 0 : lane >> 4 << 3)) * K_PITCH +
                 ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
        v_lane = lane_row * V_PITCH + (column_group % 4 * 32 ^ lane_chunk) +
                 (COLUMN_GROUPS == 8 ? column_group / 4 * 128 : 0);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int n = 0; n < UNITS * 2; ++n)
                o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
            reference[m][0] = reference[m][1] = MINUS_INF;
            sum[m][0] = sum[m][1] = 0.0f;
        }
        g = {shared, peer, (uint32_t)row_group, 0, 0};
        p_free = shared + P_FREE_OFFSET + row_group * 8;
    }

    /* Makes S = Q K^T, with operands loaded one step ahead of the products. */
    __device__ __forceinline__ void multiply_qk() {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n)
                s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
        qk_operands x;
        uint32_t q_slice = q_lane;
        r.wait();
        uint32_t k_slice = r.slice() + k_lane;
        x.load(q_slice, k_slice, 0, 0);
#pragma unroll 1
        for (int slot = 0; slot < K_SLOTS; ++slot) {
#pragma unroll
            for (int step = 0; step < SLICE_D / 16; ++step) {
                if (step + 1 < SLICE_D / 16) {
                    x.load(q_slice, k_slice, (step + 1) & 1, step + 1);
                } else {
                    r.release();
                    if (slot + 1 < K_SLOTS) {
                        r.wait();
                        q_slice += SLICE_D * 2;
                        k_slice = r.slice() + k_lane;
                        x.load(q_slice, k_slice, 0, 0);
                    }
                    l.load_next();
                }
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
                    for (int m = 0; m < 2; ++m)
                        mma_16x8x16(s[m][n], x.q[step & 1][m], x.k[step & 1][n / 2][n % 2 * 2],
                                    x.k[step & 1][n / 2][n % 2 * 2 + 1]);
            }
        }
    }

    /* Stores P = exp(S - reference) to shared memory, and adds to its sums. A row that has seen no key yet has no
     * reference. */
    __device__ __forceinline__ void publish_p(const place &at, float unit) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float base = reference[m][half] == MINUS_INF ? 0.0f : reference[m][half];
                const uint32_t row_store = shared + at.p_store + (m * 16 + half * 8) * P_PITCH;
                float total = 0.0f;
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) {
                    const float p0 = weight(s[m][n][half * 2], unit, base);
                    const float p1 = weight(s[m][n][half * 2 + 1], unit, base);
                    total += p0 + p1;
                    const uint32_t chunk = (uint32_t)(at.warp_key / 8 + n);
                    publish(row_store + ((chunk ^ at.quad_row) << 4), peer, pack(p0, p1));
                }
                tile_sum[m][half] = total;
            }
    }

    /* Raises references to the maxima over all warps that see the rows, and rescales what depends on them. */
    __device__ __forceinline__ void raise_references(const place &at, float unit, const char *shared_memory) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float largest = MINUS_INF;
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n)
                    largest = fmaxf(largest, fmaxf(s[m][n][half * 2] * unit, s[m][n][half * 2 + 1] * unit));
                largest = quad_max(largest);
                if (at.quad_column == 0)
                    publish(shared + at.statistics + (m * 16 + half * 8) * 4, peer, __float_as_uint(largest));
            }
        group_meet(g);
        settled = true;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *of_row =
                    (const float *)(shared_memory + STATISTICS_OFFSET) + at.block_row + m * 16 + half * 8;
                float largest = reference[m][half];
#pragma unroll
                for (int i = 0; i < STATISTICS; ++i)
                    largest = fmaxf(largest, of_row[i * BLOCK_M]);
                const float factor = largest == reference[m][half] ? 1.0f : weight(reference[m][half], 1.0f, largest);
                settled = settled && largest != MINUS_INF;
                reference[m][half] = largest;
                sum[m][half] *= factor;
#pragma unroll
                for (int n = 0; n < UNITS * 2; ++n) {
                    o[m][n][half * 2] *= factor;
                    o[m][n][half * 2 + 1] *= factor;
                }
            }
    }

    /* Publishes P together with the vote on whether some reference must be raised; if one must, publishes it once
     * more with the raised one. */
    __device__ __forceinline__ void scores_to_p(int32_t tile, const char *shared_memory) {
        const place at = find_place(rank);
        const float unit = finish_scores(a, w, tile, rank, shared_memory, s);
        group_wait(p_free, p_free_parity); /* all have read the P before this one */
        p_free_parity ^= 1;
        publish_p(at, unit);
        bool raise = !settled;
#pragma unroll
        for (int m = 0; m < 2; ++m)
            raise = raise || !(tile_sum[m][0] <= SUM_MAX) || !(tile_sum[m][1] <= SUM_MAX);
        if (group_meet_or(g, raise)) {
            raise_references(at, unit, shared_memory);
            publish_p(at, unit);
            group_meet(g);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            sum[m][0] += tile_sum[m][0];
            sum[m][1] += tile_sum[m][1];
        }
    }

    __device__ __forceinline__ void load_p(uint32_t (&p)[2][4], int step) const { /* of BLOCK_N / 16 */
        const uint32_t pair = (uint32_t)step, from = (p_lane ^ (pair % 4 * 32)) + pair / 4 * 128;
        ldmatrix_x4(p[0], from);
        ldmatrix_x4(p[1], from + 16 * P_PITCH);
    }
    static __device__ __forceinline__ void load_v(uint32_t (&v)[4], uint32_t v_slice, int load) {
        const int step = load / PART_UNITS, unit = load % PART_UNITS;
        ldmatrix_x4_trans(v, (v_slice ^ (uint32_t)(unit * COLUMN_GROUPS % 4 * 32)) + unit * COLUMN_GROUPS / 4 * 128 +
                                 step * 16 * V_PITCH);
    }
    /* O += P V, operands one unit ahead. */
    __device__ __forceinline__ void multiply_pv() {
        constexpr int STEPS = SLICE_KEYS / 16, LOADS = STEPS * PART_UNITS;
#pragma unroll 1
        for (int slice = 0; slice < BLOCK_N / SLICE_KEYS; ++slice) {
#pragma unroll
            for (int part = 0; part < SLICE_PARTS; ++part) {
                uint32_t p[2][2][4], v[2][4];
                r.wait();
                const uint32_t v_slice = r.slice() + v_lane;
                load_p(p[0], slice * STEPS);
                load_v(v[0], v_slice, 0);
#pragma unroll
                for (int load = 0; load < LOADS; ++load) {
                    const int step = load / PART_UNITS, unit = part * PART_UNITS + load % PART_UNITS;
                    if (load + 1 < LOADS) {
                        if ((load + 1) % PART_UNITS == 0)
                            load_p(p[(step + 1) & 1], slice * STEPS + step + 1);
                        load_v(v[(load + 1) & 1], v_slice, load + 1);
                    }
                    const uint32_t(&b)[4] = v[load & 1];
                    mma_16x8x16(o[0][unit * 2], p[step & 1][0], b[0], b[1]);
                    mma_16x8x16(o[1][unit * 2], p[step & 1][1], b[0], b[1]);
                    mma_16x8x16(o[0][unit * 2 + 1], p[step & 1][0], b[2], b[3]);
                    mma_16x8x16(o[1][unit * 2 + 1], p[step & 1][1], b[2], b[3]);
                }
                r.release();
                l.load_next();
            }
        }
        group_arrive(p_free, peer);
    }

    /* Ends the rows: sums over all warps that see a row, lse, and O to shared memory. */
    __device__ __forceinline__ void end_rows(const work &done, const char *shared_memory) {
        const place at = find_place(rank);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                sum[m][half] = quad_sum(sum[m][half]);
                if (at.quad_column == 0)
                    publish(shared + at.statistics + (m * 16 + half * 8) * 4, peer, __float_as_uint(sum[m][half]));
            }
        group_meet(g);
        if (!OUT_OVER_Q)
            __syncthreads();
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int32_t row = at.block_row + m * 16 + half * 8;
                const float *of_row = (const float *)(shared_memory + STATISTICS_OFFSET) + row;
                float total = 0.0f;
#pragma unroll
                for (int i = 0; i < STATISTICS; ++i)
                    total += of_row[i * BLOCK_M];
                const bool writes =
                    rank == 0 && at.column_group == 0 && at.quad_column == 0 && done.row0 + row < done.seqlen_q;
                const float inverse = end_softmax(
                    a, writes, done.batch, done.head, done.q_begin + done.row0 + row, total,
                    [&] { return reference[m][half] * (BIAS ? 1.0f : LN_2); },
                    [&](float x) { return lg2_approx(x) * LN_2; });
#pragma unroll
                for (int n = 0; n < UNITS * 2; ++n) {
                    const uint32_t chunk = (uint32_t)((n / 2 * COLUMN_GROUPS + at.column_group) * 2 + n % 2);
                    st_shared_4(shared + row * OUT_PITCH + ((chunk ^ (row & 7)) << 4) + at.quad_column * 2,
                                pack(o[m][n][half * 2] * inverse, o[m][n][half * 2 + 1] * inverse));
                }
            }
        barrier_sync(1 + g.index, GROUP_THREADS);
    }
};

__device__ __forceinline__ void init_barriers(uint32_t shared) {
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(shared + FULL_OFFSET + i * 8, THREADS);
        mbarrier_init(shared + EMPTY_OFFSET + i * 8, WARPS);
    }
    for (int i = 0; i < 4; ++i) {
        mbarrier_init(shared + P_FREE_OFFSET + i * 8, STATISTICS);
        mbarrier_init(shared + EXCHANGE_OFFSET + i * 8, STATISTICS);
    }
    for (int i = 0; i < 12; ++i)
        st_shared_4(shared + VOTES_OFFSET + i * 4, 0);
}

__device__ __forceinline__ void load_q(const gpu_forward_params &a, const work &w, uint32_t shared) {
    const char *q = a.q.data + (w.batch * a.q.batch + (w.q_begin + w.row0) * a.q.row + w.head * a.q.head) * 2;
    uint32_t q_chunk = shared;
    place_chunk<BLOCK_M, Q_PITCH>(q, q_chunk, a.q.row * 2);
    if (w.first_tile >= w.last_tile)
        return;
    if (w.row0 + BLOCK_M <= w.seqlen_q && a.head_dim == HEAD_DIM)
        copy_chunks<BLOCK_M, HEAD_DIM>(q_chunk, q, a.q.row * 2);
    else
        copy_cut_chunks<BLOCK_M, HEAD_DIM>(q_chunk, q, a.q.row * 2, w.seqlen_q - w.row0, a.head_dim);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS)
#if CLUSTER == 2
    __cluster_dims__(2, 1, 1)
#endif
        mma_forward_d1024(const __grid_constant__ struct gpu_forward_params a) {
    extern __shared__ __align__(128) char shared_memory[];
    const uint32_t shared = shared_address(shared_memory);
    const uint32_t rank = CLUSTER == 2 ? blockIdx.x % CLUSTER : 0;
    /* what to add to an address to reach the other block */
    const uint32_t peer = CLUSTER == 2 ? mapa_shared(shared, rank ^ 1) - shared : 0;
    const work w = find_work(a, (int32_t)blockIdx.x);
    if (w.row0 == 0 && rank == 0)
        clear_unused_of_forward(a, w.batch, w.head, threadIdx.x, THREADS);
    if ((VARLEN || SEQUSED) && w.row0 >= w.seqlen_q)
        return;

    loader l(a, w, shared_memory, rank);
    if (threadIdx.x == 0)
        init_barriers(shared);
    if (PAGED && threadIdx.x == 0)
        keep_cached_keys((cached_keys *)(shared_memory + SEQUENCE_OFFSET), find_cached_keys(a, w.batch));
    meet_cluster();
    load_q(a, w, shared);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        l.load_next();

    warp_rows rows(a, w, l, peer);
    for (int32_t tile = w.first_tile; tile < w.last_tile; ++tile) {
        rows.multiply_qk();
        rows.scores_to_p(tile, shared_memory);
        rows.multiply_pv();
    }
    const work done = REDO ? find_work(a, (int32_t)ctaid_x_reread()) : w; /* registers are short in the loop */
    rows.end_rows(done, shared_memory);
    store_out(a, done, rows.g, (int)(threadIdx.x >> 5) % COLUMN_GROUPS, rank);
    if (CLUSTER == 2)
        meet_cluster(); /* the other block may still write here */
}
