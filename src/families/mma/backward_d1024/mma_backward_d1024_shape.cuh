/* mma_backward_d1024_shape.cuh: how a block of mma_backward_d1024.cu is laid out: its tile, its slices, and where they
 * lie in shared memory. All of it follows from the constants. */
#ifndef FDM_MMA_BACKWARD_D1024_SHAPE_CUH
#define FDM_MMA_BACKWARD_D1024_SHAPE_CUH

#include "families/mma/backward_d1024/mma_backward_d1024.h"

MMA_BACKWARD_D1024_CONSTANTS(GPU_CONSTANT_GIVEN)

#define THREADS     (32 * MMA_D1024_WARPS)
#define OTHERS      mma_d1024_others(OWN)
#define OWNS_KEYS   (MAKES != MMA_D1024_DQ)
#define OF_SCORES   (MAKES != MMA_D1024_DV)
#define MASK_BLOCK  (OWN < OTHERS ? OWN : OTHERS)
#define GROUPS      (OWN / 32)            /* of warps: each has its own */
#define SHARES      mma_d1024_shares(OWN) /* warps with the same own */
#define SUMMED      (MAKES == MMA_D1024_DV ? HEAD_DIM_V : HEAD_DIM)
#define SUM_COLUMNS mma_d1024_sum_columns(OWN, SLICE)
#define SUM_OTHERS  64                          /* others of a slice of sums */
#define UNITS       (SUM_COLUMNS / SHARES / 16) /* 16-column units of a warp in it */
#define SUM_TILES   (SUMMED / SUM_COLUMNS * UNITS * 2)
#define ROW_WORDS   (BIAS ? 3 : 2) /* of a row: lse, delta, and beside a bias what lse has rounded away */

#include "families/mma/backward/mma_owner.cuh"
#include "families/mma/mma_tile.cuh"

/* Slices of a step, in this order. */
#define SLICES1 (HEAD_DIM / SLICE)
#define SLICES2 (OF_SCORES ? HEAD_DIM_V / SLICE : 0)
#define SLICES3 (OTHERS / SUM_OTHERS * (SUMMED / SUM_COLUMNS))
#define SLICES  (SLICES1 + SLICES2 + SLICES3)

static_assert(OWN == 64 || OWN == 32, "OWN is 64 or 32");
static_assert(SLICE == 64 || SLICE == 128, "rows of a slice are 128 or 256 bytes");
static_assert(HEAD_DIM % SUM_COLUMNS == 0 && HEAD_DIM_V % SUM_COLUMNS == 0 && SUM_COLUMNS % SLICE == 0, "whole slices");
static_assert(SUM_OTHERS * SUM_COLUMNS == OTHERS * SLICE, "a stage holds either slice");
static_assert(STAGES >= 2 && SLICES + 1 >= STAGES, "slices are loaded of one step ahead at most");
static_assert(OWNER_ROW_STEP == MMA_D1024_ROW_STEP && OWNER_TURN_KEYS == MMA_D1024_TURN_KEYS, "the host's");

/* Shared memory. */
#define OTHER_BYTES     (OTHERS * SLICE * 2)
#define OWN_SLICE_BYTES (OWN * SLICE * 2)
#define STAGE_BYTES     mma_d1024_stage_bytes(OWN, SLICE, KEPT)
struct tiles {
    uint32_t own1, own2, ring, scores, exchange, words, bounds;
};
__device__ __forceinline__ struct tiles lay_out(uint32_t shared) {
    struct tiles t;
    t.own1 = shared;
    t.own2 = t.own1 + OWN * HEAD_DIM * 2;
    t.ring = shared + mma_d1024_kept_bytes(OWN, KEPT, HEAD_DIM, HEAD_DIM_V);
    t.scores = t.ring + STAGES * STAGE_BYTES;
    t.exchange = t.scores + MMA_D1024_SCORES_BYTES;
    t.words = t.exchange + MMA_D1024_EXCHANGE_BYTES;
    t.bounds = t.words + OWN * 12;
    return t;
}

#endif
