/* mma_backward_shape.cuh: how a block of mma_backward.cu is laid out: what its warps share, and where its tiles lie in
 * shared memory. All of it follows from the constants. */
#ifndef FDM_MMA_BACKWARD_SHAPE_CUH
#define FDM_MMA_BACKWARD_SHAPE_CUH

#include "cuda/ptx/opaque.cuh"
#include "families/mma/backward/mma_backward.h"

MMA_BACKWARD_CONSTANTS(GPU_CONSTANT_GIVEN)

#define WIDEST (HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V)
/* A warp has one or two tiles of 16 keys. */
#define HALF_BLOCK          (BLOCK_N == 128 && WIDEST <= 64 && !V_IN_REGISTERS)
#define KEY_TILES           (HALF_BLOCK || PAIRED ? 2 : 1)
#define WARPS               (HALF_BLOCK ? MMA_BACKWARD_WARPS / 2 : MMA_BACKWARD_WARPS)
#define THREADS             (32 * WARPS)
#define SUB_ROWS            (BLOCK_N == 128 && WIDEST > 96 && !PAIRED ? 32 : 64)
#define WARP_KEYS           (16 * KEY_TILES)
#define KEY_WARPS           (BLOCK_N / WARP_KEYS)
#define WARPS_PER_KEY_GROUP (WARPS / KEY_WARPS) /* warps with the same keys */
#define BY_COLUMNS          (PAIRED || (BLOCK_N < 128 && WIDEST > 128))
#define COLUMN_SHARES       (BY_COLUMNS ? WARPS_PER_KEY_GROUP : 1)
#define WARP_ROWS           (SUB_ROWS / WARPS_PER_KEY_GROUP) /* rows of a sub-tile whose scores a warp makes */
/* These features leave few registers: those of LOW_REGISTERS_WIDE beside wide heads, those of LOW_REGISTERS_FEATURES
 * beside any. More rows or columns at a time than below would spill there. */
#define UNEVEN             (VARLEN || SEQUSED) /* sequences of a batch may have unlike lengths */
#define LOW_REGISTERS_WIDE (WIDEST > 192 && (UNEVEN || BIAS || MASK || ROW_RUNS || DETERMINISTIC))
#define LOW_REGISTERS_FEATURES                                                               \
    (SOFTCAP || (ROW_RUNS && (MASK || BIAS || INTERVALS || UNEVEN)) || (UNEVEN && PAIRED) || \
     (DETERMINISTIC && (MASK || BIAS || INTERVALS || ROW_RUNS || UNEVEN)))
#define ORDERED_DQ    (DETERMINISTIC && NEEDS_DQ)
#define ORDERED_DBIAS (DETERMINISTIC && DBIAS == GPU_DBIAS_SUMS)
/* Rows of WARP_ROWS whose scores are in registers at a time, as many as registers hold. */
#define PART_ROWS                                                                                              \
    (LOW_REGISTERS_WIDE || WARP_ROWS == 16 || ORDERED_DBIAS || (KEY_TILES == 2 && LOW_REGISTERS_FEATURES) ? 16 \
     : WARP_ROWS == 64 && (KEY_TILES == 2 || WIDEST > 64)                                                 ? 32 \
                                                                                                          : WARP_ROWS)
#define ROW_TILES     (PART_ROWS / 8)
#define SUM_COLUMNS_K (BY_COLUMNS ? HEAD_DIM / WARPS_PER_KEY_GROUP : HEAD_DIM) /* of dK and dV that a warp sums */
#define SUM_COLUMNS_V (BY_COLUMNS ? HEAD_DIM_V / WARPS_PER_KEY_GROUP : HEAD_DIM_V)
/* dQ: tiles of 16 rows that a warp makes; groups of them; warps that make the same, each every DQ_SHARE-th 16 columns.
 */
#define DQ_TILES   (KEY_TILES == 2 && HEAD_DIM % (WARPS * 512 / SUB_ROWS) == 0 ? 2 : 1)
#define DQ_GROUPS  (SUB_ROWS / 16 / DQ_TILES)
#define DQ_SHARE   (WARPS / DQ_GROUPS)
#define DQ_COLUMNS (HEAD_DIM / DQ_SHARE)
#define DQ_STEP    (DQ_COLUMNS % 32 || OVERLAY || V_IN_REGISTERS || LOW_REGISTERS_WIDE ? 16 : 32) /* at a time */
#define DQ_PASSES  (DQ_COLUMNS / DQ_STEP)
/* Passes over columns of dQ before the products of other warps' rows, so that not all additions come at once. */
#define DQ_EARLY    (RING && BY_COLUMNS && DQ_PASSES > 1 ? 1 : 0)
#define KEY_BIAS    (BIAS && !BIAS_ROWS)
#define NO_FEATURES (SCORES_BARE && !MASK && !INTERVALS && !ROW_RUNS && !UNEVEN && !DETERMINISTIC)
/* Full sub-tiles take a path without tests of pairs: measured 4 % faster with half blocks, 2 % slower where registers
 * are scarcer. */
#define FULL_TILE_PATH (HALF_BLOCK && NO_FEATURES)
/* Of right operands at a time: two measured 1 % faster, where registers allow. */
#define READS (LOW_REGISTERS_FEATURES || LOW_REGISTERS_WIDE ? 1 : 2)
/* A warp's own rows of bias and mask are copied, a sub-tile ahead, to where it will stage dS or P of them. */
#define CAN_COPY    (WIDE_SCORES && DS_BUFFERS == 2 && PART_ROWS <= 32)
#define BIAS_COPIED (CAN_COPY && BIAS == GPU_BIAS_SAME && BIAS_ROWS)
#define MASK_COPIED (CAN_COPY && MASK_TILE && (!BIAS_COPIED || BY_COLUMNS))
#define COPIED      (BIAS_COPIED || MASK_COPIED)
/* The gradient of a bias is written from the staged dS, 16 bytes a lane. */
#define DBIAS_FROM_DS (DBIAS == GPU_DBIAS_DIRECT && WIDE_SCORES && BIAS == GPU_BIAS_SAME && !SOFTCAP && KEY_TILES == 2)
/* Otherwise pair by pair. */
#define DBIAS_OF_PAIRS ((DBIAS == GPU_DBIAS_DIRECT && !DBIAS_FROM_DS) || DBIAS == GPU_DBIAS_SUMS)
#define NO_ROW         0x7fffffff

#include "families/mma/mma_tile.cuh"
#include "gpu/numbers.h"
#include "gpu/scores.cuh"
#include "gpu/visible.cuh"

static_assert(WARPS == mma_backward_warps(BLOCK_N, WIDEST, V_IN_REGISTERS), "the host launches them");
static_assert(!PAIRED || mma_backward_can_pair(BLOCK_N, HEAD_DIM, HEAD_DIM_V, V_IN_REGISTERS), "for some head dims");
static_assert(!RING || ((PAIRED || HALF_BLOCK) && DS_BUFFERS == 2 && !OVERLAY && (RING == 2 || RING == 3)),
              "a ring is of paired warps or of half blocks");
static_assert(!TMA || (mma_backward_panel(HEAD_DIM) == 8 * panel_chunks<HEAD_DIM / 8> &&
                       mma_backward_panel(HEAD_DIM_V) == 8 * panel_chunks<HEAD_DIM_V / 8>),
              "TMA's panels are the tiles'");
static_assert(!RING || SUB_ROWS == MMA_BACKWARD_STAGE_ROWS, "the host's maps and bytes are of such stages");
static_assert(!GATHER || (INTERVALS && !UNEVEN && !BLOCK_MASKED && !(BIAS && BIAS_ROWS)), "of keys alone");
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
/* The thread's warp, and its offsets in a step where rows have 128 bytes. They are kept through the loop. */
struct self {
    int warp;
    uint32_t rows, chunks;
};
struct tiles {
    struct self self;
    uint32_t q, dout, staged, rows, k, v, keys, barriers;
};
/* Staged rows: addresses of Q, of dO, and of the words of rows, STAGE_ROWS of each; with RING the barrier that ends
 * a phase when they are loaded. */
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

/* The lane's number, opaque to the compiler, so that what follows from it is computed again and not kept in
 * registers through the loop. The spills of all specialisations decided where it is called. */
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

#endif
