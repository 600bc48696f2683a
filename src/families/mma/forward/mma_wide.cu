/* mma_wide.cu: attention forward for head dims up to 1024, float16 and bfloat16, on mma.sync.
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
 * Shared memory: mma_wide.h. Rows of every tile are multiples of 128 bytes; the 16-byte chunk c of row r lies at
 * c ^ (r & 7), so that eight rows of one chunk column (ldmatrix, cp.async, stores of P) touch all 32 banks once.
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
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/special.cuh"
#include "families/mma/forward/mma_wide.h"
#include "gpu/convert.cuh"
#include "gpu/numbers.h"
#include "gpu/packed.cuh"
#include "gpu/quad.cuh"

MMA_WIDE_CONSTANTS(GPU_CONSTANT_GIVEN)

#include "gpu/finite.cuh"
#include "gpu/redo.cuh"
#include "gpu/rest.cuh"
#include "gpu/scores.cuh"

namespace {

constexpr int THREADS = WARPS * 32;
constexpr int COPY_ROWS = THREADS / 8; /* rows of a panel that the block copies at a time */
constexpr int COLUMN_GROUPS = MMA_WIDE_COLUMN_GROUPS(WARPS, BLOCK_M);
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
constexpr int P_PITCH = MMA_WIDE_P_PITCH(BLOCK_N);
/* A row group's part of O takes the place of its rows of Q where it fits there, else that of everything. */
constexpr bool OUT_OVER_Q = BLOCK_COLUMNS <= HEAD_DIM;
constexpr int OUT_PITCH = OUT_OVER_Q ? Q_PITCH : BLOCK_COLUMNS * 2;
constexpr int GROUP_THREADS = COLUMN_GROUPS * 32;
constexpr int STAGE_BYTES = MMA_WIDE_STAGE_BYTES(BLOCK_N, SLICE_D, SLICE_KEYS, SLICE_PARTS, HEAD_DIM_V, CLUSTER);
constexpr int P_OFFSET = MMA_WIDE_Q_BYTES(BLOCK_M, HEAD_DIM);
constexpr int RING_OFFSET = P_OFFSET + MMA_WIDE_P_BYTES(BLOCK_M, BLOCK_N);
constexpr int SHARED_BYTES = MMA_WIDE_SHARED_BYTES(HEAD_DIM, HEAD_DIM_V, WARPS, BLOCK_M, BLOCK_N, SLICE_D, SLICE_KEYS,
                                                   SLICE_PARTS, STAGES, CLUSTER);
constexpr int BARRIERS_OFFSET = SHARED_BYTES - MMA_WIDE_BARRIER_BYTES(STAGES);
constexpr int FULL_OFFSET = BARRIERS_OFFSET;             /* [STAGES]: the slice has arrived */
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;   /* [STAGES]: all warps have read it */
constexpr int P_FREE_OFFSET = EMPTY_OFFSET + STAGES * 8; /* [row group]: all its warps have read P */
constexpr int EXCHANGE_OFFSET = P_FREE_OFFSET + 4 * 8;   /* [row group], cluster: all its warps have published */
constexpr int VOTES_OFFSET = EXCHANGE_OFFSET + 4 * 8;    /* [row group][3], cluster */
constexpr int STATISTICS_OFFSET = BARRIERS_OFFSET - MMA_WIDE_STATISTICS_BYTES(WARPS, CLUSTER);
constexpr int AHEAD = (STAGES * 2 + 2) / 3; /* slots that are loaded ahead; the other stages let warps drift apart */

static_assert(DTYPE == GPU_FLOAT16 || DTYPE == GPU_BFLOAT16, "mma_wide.cu takes float16 and bfloat16");
static_assert(CLUSTER == 1 || CLUSTER == 2, "a cluster has one or two blocks");
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
constexpr bool KEEP_CHUNKS = SCALED && !VARLEN && CLUSTER == 1;
constexpr float SUM_MAX = 4096.0f; /* of a lane's P of one row and step: none overflows float16 */
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

/* What one block works on. */
struct work {
    int32_t batch, head, row0;     /* row0: first query row of the block */
    int32_t seqlen_q, seqlen_k;    /* of this sequence */
    int64_t q_begin, k_begin;      /* first row of the sequence in packed tensors; 0 when dense */
    int32_t first_tile, last_tile; /* key tiles [first, last) that some row sees */
    int32_t full_first, full_last; /* keys [first, last) that every row sees */
};

__device__ __forceinline__ int32_t clamp_to_keys(int64_t key, int32_t seqlen_k) {
    return (int32_t)(key < 0 ? 0 : key > seqlen_k ? seqlen_k : key);
}
/* Keys [first, last) that causal and window leave to row i. */
__device__ __forceinline__ int32_t first_key(const gpu_forward_params &a, const work &w, int32_t i) {
    if (a.window_left == 0x7fffffff)
        return 0;
    return clamp_to_keys((int64_t)i + w.seqlen_k - w.seqlen_q - a.window_left, w.seqlen_k);
}
__device__ __forceinline__ int32_t last_key(const gpu_forward_params &a, const work &w, int32_t i) {
    if (a.window_right == 0x7fffffff)
        return w.seqlen_k;
    return clamp_to_keys((int64_t)i + w.seqlen_k - w.seqlen_q + a.window_right + 1, w.seqlen_k);
}

/* Blocks of one head are neighbours, so that those that run together read the same K and V; where blocks differ in
 * length, the heads of an L2 group take turns, the longest blocks (late rows) first. */
__device__ __forceinline__ work find_work(const gpu_forward_params &a, int32_t block) {
    work w;
    const int32_t row_blocks = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M;
    const int32_t l2_group_blocks = row_blocks * a.heads_per_l2_group;
    const int32_t l2_group = block / CLUSTER / l2_group_blocks;
    const int32_t index = block / CLUSTER % l2_group_blocks;
    const int32_t left = a.heads * a.batch - l2_group * a.heads_per_l2_group;
    const int32_t l2_group_heads = left < a.heads_per_l2_group ? left : a.heads_per_l2_group;
    const int32_t head = l2_group * a.heads_per_l2_group + index % l2_group_heads;
    w.row0 = (row_blocks - 1 - index / l2_group_heads) * BLOCK_M;
    w.head = head % a.heads;
    w.batch = head / a.heads;
    const struct sequence s = find_sequence(a, w.batch);
    w.seqlen_q = s.seqlen_q;
    w.seqlen_k = s.seqlen_k;
    w.q_begin = s.q_begin;
    w.k_begin = s.k_begin;
    const int32_t end = w.row0 + BLOCK_M < w.seqlen_q ? w.row0 + BLOCK_M : w.seqlen_q;
    const int32_t first = first_key(a, w, w.row0), last = last_key(a, w, end - 1);
    w.full_first = first_key(a, w, end - 1);
    w.full_last = last_key(a, w, w.row0);
    w.first_tile = first / BLOCK_N;
    w.last_tile = first < last ? (last + BLOCK_N - 1) / BLOCK_N : w.first_tile;
    return w;
}

/* Which chunk of a tile of ROWS rows a thread copies: 16 bytes of a row, and the same of every panel of 64 columns and
 * of every COPY_ROWS-th row. Where there are fewer rows, the other threads take every other panel. */
struct chunk_place {
    int32_t row, panel, chunk;
};
template <int ROWS> __device__ __forceinline__ chunk_place find_chunk() {
    const int32_t thread = (int32_t)tid_x_reread();
    return {(thread >> 3) % (ROWS < COPY_ROWS ? ROWS : COPY_ROWS), ROWS < COPY_ROWS ? (thread >> 3) / ROWS : 0,
            thread & 7};
}
/* Bytes of that chunk in a swizzled tile, and in global memory. */
template <int PITCH> __device__ __forceinline__ uint32_t chunk_shared(chunk_place p) {
    return (uint32_t)(p.row * PITCH + p.panel * 128 + ((p.chunk ^ (p.row & 7)) << 4));
}
__device__ __forceinline__ int64_t chunk_global(chunk_place p, int64_t row_bytes) {
    return p.row * row_bytes + p.panel * 128 + p.chunk * 16;
}

/* From the first chunk of a tile to that of this thread. */
template <int ROWS, int PITCH>
__device__ __forceinline__ void place_chunk(const char *&global, uint32_t &shared, int64_t row_bytes) {
    const chunk_place p = find_chunk<ROWS>();
    global += chunk_global(p, row_bytes);
    shared += chunk_shared<PITCH>(p);
}

/* Copies a thread's chunks of ROWS rows of COLUMNS elements into a swizzled tile. */
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void copy_chunks(uint32_t shared, const char *global, int64_t row_bytes) {
    constexpr int PANELS = COLUMNS / 64, STEP = ROWS < COPY_ROWS ? COPY_ROWS / ROWS : 1;
#pragma unroll
    for (int i = 0; i < ROWS; i += COPY_ROWS) {
#pragma unroll
        for (int panel = 0; panel < PANELS; panel += STEP) {
            if (panel + STEP > PANELS && panel + find_chunk<ROWS>().panel >= PANELS)
                continue;
            cp_async_16(shared + (uint32_t)(i * COLUMNS * 2 + panel * 128), global + panel * 128);
        }
        global += COPY_ROWS * row_bytes;
    }
}
/* The same, with zeros beyond `rows` and `columns`. */
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void copy_cut_chunks(uint32_t shared, const char *global, int64_t row_bytes, int32_t rows,
                                                int32_t columns) {
    constexpr int PANELS = COLUMNS / 64, STEP = ROWS < COPY_ROWS ? COPY_ROWS / ROWS : 1;
    const chunk_place p = find_chunk<ROWS>();
#pragma unroll 1
    for (int i = 0; i < ROWS; i += COPY_ROWS) {
#pragma unroll 1
        for (int panel = 0; panel + p.panel < PANELS; panel += STEP)
            cp_async_16_fill(shared + (uint32_t)(i * COLUMNS * 2 + panel * 128), global + panel * 128,
                             p.row + i < rows && (p.panel + panel) * 64 + p.chunk * 8 < columns ? 16 : 0);
        global += COPY_ROWS * row_bytes;
    }
}

/* The producer's side of the ring: every thread copies its share of each slot. */
struct loader {
    const char *k, *v;   /* row 0 of the sequence, this block's columns of v; KEEP_CHUNKS: this thread's chunk of it */
    uint32_t k_to, v_to; /* KEEP_CHUNKS: its bytes in a slice */
    int64_t k_row_bytes, v_row_bytes;
    int32_t seqlen_k, head_dim, columns_v;
    uint32_t shared, rank;
    int32_t tile, last_tile, slot, stage;
    uint32_t parity; /* of the phase of the stage's "empty" that must have ended */
};

__device__ __forceinline__ void load_next(loader &l) {
    if (l.tile >= l.last_tile)
        return;
    mbarrier_wait(l.shared + EMPTY_OFFSET + l.stage * 8, l.parity);
    const uint32_t stage = l.shared + RING_OFFSET + (uint32_t)(l.stage * STAGE_BYTES);
    if (l.slot < K_SLOTS) {
        const int32_t key = l.tile * BLOCK_N + (int32_t)l.rank * BLOCK_KEYS, d = l.slot * SLICE_D;
        const int32_t rows = l.seqlen_k - key, columns = l.head_dim - d;
        const char *from = l.k + (key * l.k_row_bytes + d * 2);
        uint32_t to = stage + l.k_to;
        if (!KEEP_CHUNKS)
            place_chunk<BLOCK_KEYS, K_PITCH>(from, to, l.k_row_bytes);
        if (rows >= BLOCK_KEYS && columns >= SLICE_D)
            copy_chunks<BLOCK_KEYS, SLICE_D>(to, from, l.k_row_bytes);
        else
            copy_cut_chunks<BLOCK_KEYS, SLICE_D>(to, from, l.k_row_bytes, rows, columns);
    } else {
        const int32_t slice = l.slot - K_SLOTS;
        const int32_t key = l.tile * BLOCK_N + slice / SLICE_PARTS * SLICE_KEYS;
        const int32_t column = slice % SLICE_PARTS * PART_COLUMNS;
        const int32_t rows = l.seqlen_k - key, columns = l.columns_v - column;
        const char *from = l.v + (key * l.v_row_bytes + column * 2);
        uint32_t to = stage + l.v_to;
        if (!KEEP_CHUNKS)
            place_chunk<SLICE_KEYS, V_PITCH>(from, to, l.v_row_bytes);
        if (rows >= SLICE_KEYS && columns >= PART_COLUMNS)
            copy_chunks<SLICE_KEYS, PART_COLUMNS>(to, from, l.v_row_bytes);
        else
            copy_cut_chunks<SLICE_KEYS, PART_COLUMNS>(to, from, l.v_row_bytes, rows, columns);
    }
    cp_async_mbarrier_arrive_noinc(l.shared + FULL_OFFSET + l.stage * 8);
    if (++l.slot == SLOTS) {
        l.slot = 0;
        ++l.tile;
    }
    if (++l.stage == STAGES) {
        l.stage = 0;
        l.parity ^= 1;
    }
}

/* The consumer's side. */
struct ring {
    uint32_t shared;
    int32_t stage;
    uint32_t parity;
};
__device__ __forceinline__ void ring_wait(const ring &r) {
    mbarrier_wait(r.shared + FULL_OFFSET + r.stage * 8, r.parity);
}
__device__ __forceinline__ uint32_t ring_slice(const ring &r) {
    return r.shared + RING_OFFSET + (uint32_t)(r.stage * STAGE_BYTES);
}
/* After the warp's last load from the slice. */
__device__ __forceinline__ void ring_release(ring &r) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0)
        mbarrier_arrive(r.shared + EMPTY_OFFSET + r.stage * 8);
    if (++r.stage == STAGES) {
        r.stage = 0;
        r.parity ^= 1;
    }
}

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (DTYPE == GPU_FLOAT16)
        mma_m16n8k16_f16(c, a, b0, b1);
    else
        mma_m16n8k16_bf16(c, a, b0, b1);
}

/* Which scores and which accumulators a thread holds. Found anew where it is needed, rather than kept in registers. */
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

/* Products to scores; invisible ones to -inf. Returns what the numbers are still to be multiplied by: where nothing is
 * to be done but scaling, that is left to weight(). */
__device__ __forceinline__ float finish_scores(const gpu_forward_params &a, const work &w, int32_t tile, uint32_t rank,
                                               float (&s)[2][KEY_TILES][4]) {
    const float factor = SOFTCAP ? a.scale * a.softcap_inverse : a.scale * SCORE_UNIT;
    const bool partial = tile * BLOCK_N < w.full_first || (tile + 1) * BLOCK_N > w.full_last;
    if (SCALED && !partial)
        return factor;

    const char *mask = 0, *bias = 0;
    const int32_t *start = 0, *end = 0;
    if (MASK)
        mask = a.mask.data + w.batch * a.mask.batch + (w.head / a.mask.group) * a.mask.head;
    if (BIAS)
        bias = a.bias.data + (w.batch * a.bias.batch + (w.head / a.bias.group) * a.bias.head) * BIAS_BYTES;
    if (INTERVALS) {
        const int32_t head = w.head / a.intervals.group;
        start = a.intervals.start + w.batch * a.intervals.start_batch + head * a.intervals.start_head +
                w.k_begin * a.intervals.start_key;
        end = a.intervals.end + w.batch * a.intervals.end_batch + head * a.intervals.end_head +
              w.k_begin * a.intervals.end_key;
    }
    /* Key tiles one after the other: the loop is not unrolled but turns the scores round, which keeps the registers
     * that addresses take few. */
#pragma unroll 1
    for (int n = 0; n < KEY_TILES; ++n) {
        const place at = find_place(rank); /* here, so that no address outlives the turn */
        const int32_t key0 = tile * BLOCK_N + at.warp_key + at.quad_column;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int32_t i = w.row0 + at.block_row + m * 16 + half * 8;
                const int32_t first = first_key(a, w, i), last = last_key(a, w, i);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int32_t j = key0 + n * 8 + e;
                    float &x = s[m][0][half * 2 + e];
                    x *= factor;
                    if (SOFTCAP)
                        x = a.softcap * SCORE_UNIT * tanh_accurate(x);
                    bool visible = j >= first && j < last;
                    if (INTERVALS || MASK || BIAS)
                        visible = visible && i < w.seqlen_q;
                    if (INTERVALS && visible)
                        visible = i >= start[j * a.intervals.start_key] && i < end[j * a.intervals.end_key];
                    if (MASK && visible)
                        visible = mask[i * a.mask.row + j * a.mask.key] != 0;
                    if (BIAS && visible) {
                        const char *from = bias + (i * a.bias.row + j * a.bias.key) * BIAS_BYTES;
                        x += BIAS == 2 ? *(const float *)from : unpack(*(const uint16_t *)from);
                    }
                    if (!visible)
                        x = -infinity();
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

/* Stores one word in this block's shared memory and, in a cluster, at the same place of the other block. */
__device__ __forceinline__ void publish(uint32_t shared, uint32_t peer, uint32_t word) {
    st_shared_4(shared, word);
    if (CLUSTER == 2)
        st_cluster_4(shared + peer, word);
}
/* One warp's arrival at a barrier of its row group, in both blocks of a cluster. */
__device__ __forceinline__ void group_arrive(uint32_t barrier, uint32_t peer) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        mbarrier_arrive(barrier);
        if (CLUSTER == 2)
            mbarrier_arrive_cluster(barrier + peer);
    }
}
__device__ __forceinline__ void group_wait(uint32_t barrier, uint32_t parity) {
    if (CLUSTER == 2)
        mbarrier_wait_cluster(barrier, parity);
    else
        mbarrier_wait(barrier, parity);
}

/* All threads of the block, or of both. */
__device__ __forceinline__ void meet_cluster() {
    if (CLUSTER == 2) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    } else {
        __syncthreads();
    }
}

/* Rows of a row group that a key which they do not see has spoiled, a bit each: columns first .. end - 1 of them. */
__device__ __forceinline__ void redo_rows(const gpu_forward_params &a, const work &w, int row_group, uint32_t spoiled,
                                          int first, int end) {
    for_each_bit(spoiled, [&](int n) {
        redo_columns(a, find_sequence(a, w.batch), w.head, w.head / a.group, w.row0 + row_group * 32 + n,
                     w.first_tile * BLOCK_N, w.seqlen_k, first, end);
    });
}

/* Meetings of the warps that share 32 rows: what was published before is seen after. */
struct group {
    uint32_t shared, peer, index; /* index: row group */
    uint32_t parity, vote;        /* cluster: of the exchange's phase; the slot of the next vote */
};
__device__ __forceinline__ void group_meet(group &g) {
    if (CLUSTER == 1) {
        barrier_sync(1 + g.index, GROUP_THREADS);
    } else {
        const uint32_t barrier = g.shared + EXCHANGE_OFFSET + g.index * 8;
        group_arrive(barrier, g.peer);
        group_wait(barrier, g.parity);
        g.parity ^= 1;
    }
}
/* The same; true for all when `condition` is true for one. */
__device__ __forceinline__ bool group_meet_or(group &g, bool condition) {
    if (CLUSTER == 1)
        return barrier_red_or(1 + g.index, GROUP_THREADS, condition);
    const uint32_t votes = g.shared + VOTES_OFFSET + g.index * 12;
    const bool any = __any_sync(0xffffffff, condition), first = (threadIdx.x & 31) == 0;
    if (any && first)
        publish(votes + g.vote * 4, g.peer, 1);
    group_meet(g);
    const bool result = ld_shared_4(votes + g.vote * 4) != 0;
    /* The slot two votes ahead was last read before this meeting and is not written before the next one. */
    g.vote = g.vote == 2 ? 0 : g.vote + 1;
    const uint32_t ahead = g.vote == 2 ? 0 : g.vote + 1;
    if (first)
        st_shared_4(votes + ahead * 4, 0);
    return result;
}

/* O in 16-byte stores, each row group its own rows: eight neighbouring threads write 128 bytes of a row. */
struct out_place {
    uint32_t row; /* in shared memory: the group's first */
    int32_t first, step, chunk;
};
__device__ __forceinline__ out_place find_out(const group &g) {
    const int32_t thread = (int32_t)threadIdx.x % GROUP_THREADS;
    return {g.shared + g.index * 32 * OUT_PITCH, thread >> 3, GROUP_THREADS / 8, thread & 7};
}
__device__ __forceinline__ void load_out(uint32_t (&words)[4], const out_place &p, int i, int panel) {
    ld_shared_16(words, p.row + i * OUT_PITCH + panel * 128 + ((p.chunk ^ (i & 7)) << 4));
}

/* Out is to take the place of q: rows that are done again need theirs, so both blocks of a cluster leave the rows that
 * one of them has spoiled: a bit each. */
__device__ __forceinline__ uint32_t agree_on_spoiled(const out_place &p, group &g, int rows, int statistics) {
    uint32_t spoiled = 0;
#pragma unroll 1
    for (int i = p.first; i < rows; i += p.step)
#pragma unroll 1
        for (int panel = 0; panel < BLOCK_COLUMNS / 64; ++panel) {
            uint32_t words[4];
            load_out(words, p, i, panel);
            spoiled |= nan_bit(words, i);
        }
    spoiled = redo_or(spoiled);
    group_meet(g); /* all have read the statistics */
    const uint32_t masks = g.shared + STATISTICS_OFFSET + g.index * 32 * 4;
    if (threadIdx.x % 32 == 0)
        publish(masks + statistics * BLOCK_M * 4, g.peer, spoiled);
    group_meet(g);
#pragma unroll
    for (int i = 0; i < STATISTICS; ++i)
        spoiled |= ld_shared_4(masks + i * BLOCK_M * 4);
    return (uint32_t)redo_uniform((int)spoiled);
}

__device__ __forceinline__ void store_out(const gpu_forward_params &a, const work &w, group &g, int column_group,
                                          uint32_t rank) {
    const out_place p = find_out(g);
    const int block_column = (int)rank * BLOCK_COLUMNS, first_row = w.row0 + (int)g.index * 32;
    const int rows = min(w.seqlen_q - first_row, 32);
    char *out = a.out.data +
                (w.batch * a.out.batch + (w.q_begin + first_row) * a.out.row + w.head * a.out.head + block_column) * 2;
    const bool over_q = REDO && out_over_q(a);
    uint32_t spoiled = over_q ? agree_on_spoiled(p, g, rows, (int)rank * COLUMN_GROUPS + column_group) : 0;
#pragma unroll 1
    for (int i = p.first; i < rows; i += p.step) {
        if (over_q && spoiled >> i & 1)
            continue;
#pragma unroll 4
        for (int panel = 0; panel < BLOCK_COLUMNS / 64; ++panel)
            if (panel * 64 + p.chunk * 8 < a.head_dim_v - block_column) {
                uint32_t words[4];
                load_out(words, p, i, panel);
                if (REDO)
                    spoiled |= nan_bit(words, i);
                *(uint4 *)(out + i * a.out.row * 2 + panel * 128 + p.chunk * 16) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
    }
    if (REDO && !over_q)
        redo_rows(a, w, (int)g.index, redo_or(spoiled), block_column, block_column + BLOCK_COLUMNS);
    else if (REDO && rank == 0 && column_group == 0)
        redo_rows(a, w, (int)g.index, spoiled, 0, HEAD_DIM_V);
}

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS)
#if CLUSTER == 2
    __cluster_dims__(2, 1, 1)
#endif
        mma_wide(const __grid_constant__ struct gpu_forward_params a) {
    extern __shared__ __align__(128) char shared_memory[];
    const uint32_t shared = shared_address(shared_memory);
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const int row_group = warp / COLUMN_GROUPS, column_group = warp % COLUMN_GROUPS;
    const uint32_t rank = CLUSTER == 2 ? blockIdx.x % CLUSTER : 0;
    /* what to add to an address to reach the other block */
    const uint32_t peer = CLUSTER == 2 ? mapa_shared(shared, rank ^ 1) - shared : 0;
    const work w = find_work(a, (int32_t)blockIdx.x);
    if (w.row0 == 0 && rank == 0)
        clear_rest_of_forward(a, w.batch, w.head, threadIdx.x, THREADS);
    if (VARLEN && w.row0 >= w.seqlen_q)
        return;

    loader l;
    const int32_t block_column = (int32_t)rank * BLOCK_COLUMNS;
    l.k_row_bytes = a.k.row * 2;
    l.v_row_bytes = a.v.row * 2;
    l.k = a.k.data + (w.batch * a.k.batch + w.k_begin * a.k.row + (w.head / a.group) * a.k.head) * 2;
    l.v = a.v.data + (w.batch * a.v.batch + w.k_begin * a.v.row + (w.head / a.group) * a.v.head + block_column) * 2;
    l.k_to = l.v_to = 0;
    if (KEEP_CHUNKS) {
        place_chunk<BLOCK_KEYS, K_PITCH>(l.k, l.k_to, l.k_row_bytes);
        place_chunk<SLICE_KEYS, V_PITCH>(l.v, l.v_to, l.v_row_bytes);
    }
    l.seqlen_k = w.seqlen_k;
    l.head_dim = a.head_dim;
    l.columns_v = a.head_dim_v - block_column;
    l.shared = shared;
    l.rank = rank;
    l.tile = w.first_tile;
    l.last_tile = w.last_tile;
    l.slot = 0;
    l.stage = 0;
    l.parity = 1;

    if (threadIdx.x == 0) {
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
    meet_cluster();

    const char *q = a.q.data + (w.batch * a.q.batch + (w.q_begin + w.row0) * a.q.row + w.head * a.q.head) * 2;
    uint32_t q_chunk = shared;
    place_chunk<BLOCK_M, Q_PITCH>(q, q_chunk, a.q.row * 2);
    if (w.first_tile < w.last_tile) {
        if (w.row0 + BLOCK_M <= w.seqlen_q && a.head_dim == HEAD_DIM)
            copy_chunks<BLOCK_M, HEAD_DIM>(q_chunk, q, a.q.row * 2);
        else
            copy_cut_chunks<BLOCK_M, HEAD_DIM>(q_chunk, q, a.q.row * 2, w.seqlen_q - w.row0, a.head_dim);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        load_next(l);

    /* Addresses of this lane. ldmatrix x4 reads rows lane & 15, 16-byte halves lane >> 4 of a 16 x 16 tile; the tile in
     * chunk pair p of its row lies at (p * 32) ^ lane_chunk, and rows begin at multiples of 128. */
    const uint32_t lane_row = lane & 15, lane_chunk = ((lane >> 4) ^ (lane & 7)) << 4;
    const uint32_t q_lane = shared + (row_group * 32 + lane_row) * Q_PITCH + lane_chunk;
    const uint32_t p_lane = shared + P_OFFSET + (row_group * 32 + lane_row) * P_PITCH + lane_chunk;
    /* Of K, so that the two registers of an operand are neighbours: rows (lane & 7) + 8 (lane >> 4), halves bit 3. */
    const uint32_t k_lane = (column_group * WARP_KEYS + (lane & 7) + (WARP_KEYS == 8 ? 0 : lane >> 4 << 3)) * K_PITCH +
                            ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
    const uint32_t v_lane =
        lane_row * V_PITCH + (column_group % 4 * 32 ^ lane_chunk) + (COLUMN_GROUPS == 8 ? column_group / 4 * 128 : 0);

    float o[2][UNITS * 2][4];
    float reference[2][2], sum[2][2]; /* of rows block_row + 16 m + 8 half; the sums of this lane alone */
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < UNITS * 2; ++n)
            o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
        reference[m][0] = reference[m][1] = -infinity();
        sum[m][0] = sum[m][1] = 0.0f;
    }

    ring r = {shared, 0, 0};
    group g = {shared, peer, (uint32_t)row_group, 0, 0};
    const uint32_t p_free = shared + P_FREE_OFFSET + row_group * 8;
    uint32_t p_free_parity = 1;
    bool settled = false; /* every row of this lane has a reference */

    for (int32_t tile = w.first_tile; tile < w.last_tile; ++tile) {
        /* S = Q K^T, operands one 16-column step ahead of the multiplications. */
        float s[2][KEY_TILES][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n)
                s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
        {
            uint32_t qa[2][2][4], kb[2][(KEY_TILES + 1) / 2][4];
            uint32_t q_slice = q_lane, k_slice = 0;
            const auto load_step = [&](int buffer, int step) {
                const uint32_t q_at = (q_slice ^ (uint32_t)((step & 3) * 32)) + (step >> 2) * 128;
                const uint32_t k_at = (k_slice ^ (uint32_t)((step & 3) * 32)) + (step >> 2) * 128;
                ldmatrix_x4(qa[buffer][0], q_at);
                ldmatrix_x4(qa[buffer][1], q_at + 16 * Q_PITCH);
                if (WARP_KEYS == 8) {
                    uint32_t pair[2];
                    ldmatrix_x2(pair, k_at);
                    kb[buffer][0][0] = pair[0];
                    kb[buffer][0][1] = pair[1];
                } else {
#pragma unroll
                    for (int n = 0; n < KEY_TILES / 2; ++n)
                        ldmatrix_x4(kb[buffer][n], k_at + n * 16 * K_PITCH);
                }
            };
            ring_wait(r);
            k_slice = ring_slice(r) + k_lane;
            load_step(0, 0);
#pragma unroll 1
            for (int slot = 0; slot < K_SLOTS; ++slot) {
#pragma unroll
                for (int step = 0; step < SLICE_D / 16; ++step) {
                    if (step + 1 < SLICE_D / 16) {
                        load_step((step + 1) & 1, step + 1);
                    } else {
                        ring_release(r);
                        if (slot + 1 < K_SLOTS) {
                            ring_wait(r);
                            q_slice += SLICE_D * 2;
                            k_slice = ring_slice(r) + k_lane;
                            load_step(0, 0);
                        }
                        load_next(l);
                    }
#pragma unroll
                    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
                        for (int m = 0; m < 2; ++m)
                            multiply(s[m][n], qa[step & 1][m], kb[step & 1][n / 2][n % 2 * 2],
                                     kb[step & 1][n / 2][n % 2 * 2 + 1]);
                }
            }
        }

        /* P = exp(S - reference), published together with the vote on whether some reference must be raised; if so,
         * once more with the raised one. Rows that have seen no key yet have no reference. */
        const place at = find_place(rank);
        const float unit = finish_scores(a, w, tile, rank, s);
        float tile_sum[2][2];
        const auto publish_weights = [&]() {
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float base = reference[m][half] == -infinity() ? 0.0f : reference[m][half];
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
        };
        group_wait(p_free, p_free_parity); /* all have read the P before this one */
        p_free_parity ^= 1;
        publish_weights();
        bool raise = !settled;
#pragma unroll
        for (int m = 0; m < 2; ++m)
            raise = raise || !(tile_sum[m][0] <= SUM_MAX) || !(tile_sum[m][1] <= SUM_MAX);
        if (group_meet_or(g, raise)) {
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float largest = -infinity();
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
                    const float factor =
                        largest == reference[m][half] ? 1.0f : weight(reference[m][half], 1.0f, largest);
                    settled = settled && largest != -infinity();
                    reference[m][half] = largest;
                    sum[m][half] *= factor;
#pragma unroll
                    for (int n = 0; n < UNITS * 2; ++n) {
                        o[m][n][half * 2] *= factor;
                        o[m][n][half * 2 + 1] *= factor;
                    }
                }
            publish_weights();
            group_meet(g);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            sum[m][0] += tile_sum[m][0];
            sum[m][1] += tile_sum[m][1];
        }

        /* O += P V, operands one unit ahead. */
#pragma unroll 1
        for (int slice = 0; slice < BLOCK_N / SLICE_KEYS; ++slice) {
#pragma unroll
            for (int part = 0; part < SLICE_PARTS; ++part) {
                constexpr int LOADS = SLICE_KEYS / 16 * PART_UNITS;
                uint32_t pa[2][2][4], vb[2][4];
                ring_wait(r);
                const uint32_t v_slice = ring_slice(r) + v_lane;
                const auto load_p = [&](int step) {
                    const uint32_t pair = (uint32_t)(slice * (SLICE_KEYS / 16) + step);
                    const uint32_t from = (p_lane ^ (pair % 4 * 32)) + pair / 4 * 128;
                    ldmatrix_x4(pa[step & 1][0], from);
                    ldmatrix_x4(pa[step & 1][1], from + 16 * P_PITCH);
                };
                const auto load_v = [&](int load) {
                    const int step = load / PART_UNITS, unit = load % PART_UNITS;
                    const uint32_t from = (v_slice ^ (uint32_t)(unit * COLUMN_GROUPS % 4 * 32)) +
                                          unit * COLUMN_GROUPS / 4 * 128 + step * 16 * V_PITCH;
                    ldmatrix_x4_trans(vb[load & 1], from);
                };
                load_p(0);
                load_v(0);
#pragma unroll
                for (int load = 0; load < LOADS; ++load) {
                    const int step = load / PART_UNITS, unit = part * PART_UNITS + load % PART_UNITS;
                    if (load + 1 < LOADS) {
                        if ((load + 1) % PART_UNITS == 0)
                            load_p(step + 1);
                        load_v(load + 1);
                    }
                    const uint32_t(&b)[4] = vb[load & 1];
                    multiply(o[0][unit * 2], pa[step & 1][0], b[0], b[1]);
                    multiply(o[1][unit * 2], pa[step & 1][1], b[0], b[1]);
                    multiply(o[0][unit * 2 + 1], pa[step & 1][0], b[2], b[3]);
                    multiply(o[1][unit * 2 + 1], pa[step & 1][1], b[2], b[3]);
                }
                ring_release(r);
                load_next(l);
            }
        }
        group_arrive(p_free, peer);
    }

    /* Row sums over all warps that see a row. */
    const place at = find_place(rank);
    const work done = REDO ? find_work(a, (int32_t)ctaid_x_reread()) : w; /* registers are short in the loop */
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
                [&] { return reference[m][half] * (BIAS ? 1.0f : LN_2); }, [&] { return lg2_approx(total) * LN_2; });
#pragma unroll
            for (int n = 0; n < UNITS * 2; ++n) {
                const uint32_t chunk = (uint32_t)((n / 2 * COLUMN_GROUPS + at.column_group) * 2 + n % 2);
                st_shared_4(shared + row * OUT_PITCH + ((chunk ^ (row & 7)) << 4) + at.quad_column * 2,
                            pack(o[m][n][half * 2] * inverse, o[m][n][half * 2 + 1] * inverse));
            }
        }
    barrier_sync(1 + row_group, GROUP_THREADS);

    store_out(a, done, g, column_group, rank);
    if (CLUSTER == 2)
        meet_cluster(); /* the other block may still write here */
}
