/* mma_textbook.h: the contract of mma_textbook.cu: constants, layout of shared memory, and which lane touches what; for
 * C and CUDA C. tests/unit/test_bank_conflicts.c proves from these macros that swizzled tiles have no bank conflicts.
 */
#ifndef FDM_MMA_TEXTBOOK_H
#define FDM_MMA_TEXTBOOK_H

#include "cuda/constants.h"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

/* ALGORITHM, by what shared memory holds at a time: each holds less than the one before it. */
#define MMA_SPLIT_KV   0 /* warps split rows and keys; P goes through shared memory */
#define MMA_SPLIT_Q    1 /* warps split rows; Q, K and V each have a place */
#define MMA_SHARE_KV   2 /* K and V share one place */
#define MMA_SHARE_QKV  3 /* and Q was there before them, and is in registers now */
#define MMA_TILING_QK  4 /* Q and K come in slices of the head dim, V in slices of 16 keys */
#define MMA_TILING_QKV 5 /* V comes in slices of its head dim too */

#define MMA_TEXTBOOK_CONSTANTS(X)                                                           \
    X(ALGORITHM)        /* MMA_SPLIT_KV to MMA_TILING_QKV */                                \
    X(HEAD_DIM)         /* D, rounded up to 16 and to whole slices */                       \
    X(SLICE)            /* columns of Q and K that are fetched at a time */                 \
    X(OUT_COLUMNS)      /* columns of O of a block: Dv, or a part of it, rounded up */      \
    X(OUT_SLICE)        /* columns of V that are fetched at a time */                       \
    X(OUT_BLOCKS)       /* blocks that share the rows and split the columns of O */         \
    X(BLOCK_N)          /* keys of a step */                                                \
    X(STAGES)           /* 1 or 2 */                                                        \
    X(SWIZZLED)         /* 1: chunks are permuted; 0: rows are padded */                    \
    X(F16_ACCUMULATION) /* 1: the products of one tile are summed in float16; 0: float32 */ \
    X(CAUSAL)

/* What a plan holds for them (contract/family.h). */
#define MMA_TEXTBOOK_PARAMETERS(X) \
    X(ALGORITHM)                   \
    X(VARIANT) /* of the list in mma_textbook.c */

#define MMA_TEXTBOOK_WARPS   4
#define MMA_TEXTBOOK_BLOCK_M 64
#define MMA_TEXTBOOK_V_KEYS  16 /* keys of a slice of V in split-q+tiling-qk */

/* ---- tiles in shared memory ---- */

/* Rows of a tile are `chunks` (an even number) chunks of 16 bytes. The banks are 128 bytes wide, eight chunks: an
 * ldmatrix reads one chunk of eight neighbouring rows at a time, whose places must differ modulo 8.
 * Swizzled, chunk c of row r lies at c ^ swizzle(r). Where rows start at multiples of 128 bytes (chunks % 8 == 0), the
 * last three bits of the row make all the difference; where two rows start differently modulo 128, the next two bits
 * make the rest of it; where four do, one bit.
 * Padded, rows lie an odd number of places apart, so that eight of them start at eight different ones. */
#define MMA_TEXTBOOK_SWIZZLE(row, chunks) \
    ((chunks) % 8 == 0 ? (row)&7 : (chunks) % 4 == 0 ? (row) >> 1 & 3 : (row) >> 2 & 1)
#define MMA_TEXTBOOK_PITCH(chunks, swizzled) ((swizzled) ? (chunks) : (chunks) + 1)
#define MMA_TEXTBOOK_OFFSET(row, chunk, chunks, swizzled)                     \
    (((row)*MMA_TEXTBOOK_PITCH(chunks, swizzled) +                            \
      ((swizzled) ? (chunk) ^ MMA_TEXTBOOK_SWIZZLE(row, chunks) : (chunk))) * \
     16)
#define MMA_TEXTBOOK_TILE_BYTES(rows, columns, swizzled) ((rows)*MMA_TEXTBOOK_PITCH((columns) / 8, swizzled) * 16)

/* ---- which lane touches what ---- */

/* ldmatrix.x4 of a 16 x 16 left operand (Q, P), or, transposed, of a right operand whose rows are the 16 keys (V):
 * the row and the chunk (of two) whose address a lane gives. */
#define MMA_TEXTBOOK_LEFT_ROW(lane)   ((lane) % 16)
#define MMA_TEXTBOOK_LEFT_CHUNK(lane) ((lane) / 16)
/* The same of a right operand of 16 keys x 16 columns of the head dim (K): each half of the keys gives two matrices. */
#define MMA_TEXTBOOK_RIGHT_ROW(lane)   ((lane) % 8 + (lane) / 16 * 8)
#define MMA_TEXTBOOK_RIGHT_CHUNK(lane) ((lane) / 8 % 2)
/* An accumulator of 16 x 8: a lane holds columns 2 (lane % 4), + 1 of this row and of the row 8 below. */
#define MMA_TEXTBOOK_SUM_ROW(lane)    ((lane) / 4)
#define MMA_TEXTBOOK_SUM_COLUMN(lane) ((lane) % 4 * 2)

/* ---- bytes of shared memory ---- */

#define MMA_TEXTBOOK_MAX(a, b)           ((a) > (b) ? (a) : (b))
#define MMA_TEXTBOOK_IS_TILED(algorithm) ((algorithm) >= MMA_TILING_QK)

/* Places of the ring that parts of K and V go through, one after the other. */
#define MMA_TEXTBOOK_PLACES(algorithm, stages)  ((algorithm) <= MMA_SPLIT_Q ? (stages) + 1 : (stages))
#define MMA_TEXTBOOK_V_ROWS(algorithm, block_n) ((algorithm) == MMA_TILING_QK ? MMA_TEXTBOOK_V_KEYS : (block_n))
#define MMA_TEXTBOOK_K_BYTES(algorithm, slice, block_n, swizzled)                                              \
    ((MMA_TEXTBOOK_IS_TILED(algorithm) ? MMA_TEXTBOOK_TILE_BYTES(MMA_TEXTBOOK_BLOCK_M, slice, swizzled) : 0) + \
     MMA_TEXTBOOK_TILE_BYTES(block_n, slice, swizzled))
#define MMA_TEXTBOOK_PLACE_BYTES(algorithm, slice, out_slice, block_n, swizzled) \
    MMA_TEXTBOOK_MAX(MMA_TEXTBOOK_K_BYTES(algorithm, slice, block_n, swizzled),  \
                     MMA_TEXTBOOK_TILE_BYTES(MMA_TEXTBOOK_V_ROWS(algorithm, block_n), out_slice, swizzled))

/* In this order: Q, where it has a place of its own; the ring; P and row statistics of split-kv. At the end, and
 * with share-qkv at the beginning, other things take their places. */
#define MMA_TEXTBOOK_Q_BYTES(head_dim, swizzled) MMA_TEXTBOOK_TILE_BYTES(MMA_TEXTBOOK_BLOCK_M, head_dim, swizzled)
#define MMA_TEXTBOOK_RING_OFFSET(algorithm, head_dim, swizzled) \
    ((algorithm) <= MMA_SHARE_KV ? MMA_TEXTBOOK_Q_BYTES(head_dim, swizzled) : 0)
#define MMA_TEXTBOOK_P_OFFSET(algorithm, head_dim, slice, out_slice, block_n, stages, swizzled) \
    (MMA_TEXTBOOK_RING_OFFSET(algorithm, head_dim, swizzled) +                                  \
     MMA_TEXTBOOK_PLACES(algorithm, stages) *                                                   \
         MMA_TEXTBOOK_PLACE_BYTES(algorithm, slice, out_slice, block_n, swizzled))
/* Two floats for each row: one for each half of the keys. */
#define MMA_TEXTBOOK_STATISTICS_BYTES (2 * MMA_TEXTBOOK_BLOCK_M * 4)
#define MMA_TEXTBOOK_SPLIT_KV_BYTES(algorithm, block_n, swizzled)                                           \
    ((algorithm) == MMA_SPLIT_KV                                                                            \
         ? MMA_TEXTBOOK_TILE_BYTES(MMA_TEXTBOOK_BLOCK_M, block_n, swizzled) + MMA_TEXTBOOK_STATISTICS_BYTES \
         : 0)
/* The output leaves in panels of 16 rows x 64 columns, one for each warp. */
#define MMA_TEXTBOOK_PANEL_COLUMNS         64
#define MMA_TEXTBOOK_PANEL_BYTES(swizzled) MMA_TEXTBOOK_TILE_BYTES(16, MMA_TEXTBOOK_PANEL_COLUMNS, swizzled)

#define MMA_TEXTBOOK_SHARED_BYTES(algorithm, head_dim, slice, out_slice, block_n, stages, swizzled)                \
    MMA_TEXTBOOK_MAX(                                                                                              \
        MMA_TEXTBOOK_MAX(MMA_TEXTBOOK_P_OFFSET(algorithm, head_dim, slice, out_slice, block_n, stages, swizzled) + \
                             MMA_TEXTBOOK_SPLIT_KV_BYTES(algorithm, block_n, swizzled),                            \
                         (algorithm) == MMA_SHARE_QKV ? MMA_TEXTBOOK_Q_BYTES(head_dim, swizzled) : 0),             \
        MMA_TEXTBOOK_WARPS *MMA_TEXTBOOK_PANEL_BYTES(swizzled))

#endif
