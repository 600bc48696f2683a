/* backward_params.h: what every backward kernel for CUDA devices receives, and what the kernels around it do with the
 * workspace (backward_rows.cu, backward_dbias.cu, backward_dsink.cu); included by C and by CUDA C.
 *
 * A family's own kernels stand between them: what runs before leaves lse and delta of each row, and zeros where sums
 * begin; the family's kernels make dK, dV and what they add to dQ; what runs after rounds the sums. */
#ifndef FDM_BACKWARD_PARAMS_H
#define FDM_BACKWARD_PARAMS_H

#include "cuda/constants.h"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

/* DBIAS: how the gradient of the bias is made. */
#define GPU_DBIAS_NONE   0
#define GPU_DBIAS_KEYS   1 /* the bias has no rows: summed in registers; backward_dbias.cu adds heads and batches */
#define GPU_DBIAS_DIRECT 2 /* every element belongs to one pair: written by the block that owns the key */
#define GPU_DBIAS_SUMS   3 /* added in fp32 in the workspace; backward_dbias.cu converts */
/* One number for all keys of a row: it shifts the row's scores alike, which changes lse alone, and by itself. Its
 * gradient is that of lse; backward_dbias.cu adds heads and batches, and the family's kernels make none. */
#define GPU_DBIAS_ROWS 4

/* Of backward_rows.cu and backward_dbias.cu. */
#define BACKWARD_ROWS_CONSTANTS(X)                                                             \
    X(HEAD_DIM)   /* of q and k, as the family's kernels pad it */                             \
    X(HEAD_DIM_V) /* of v, out and dout */                                                     \
    X(ROW_STEP)   /* rows of the workspace's arrays for a sequence are multiples of */         \
    X(NEEDS_DQ)   /* 1: dQ is summed in the workspace */                                       \
    X(NO_ZEROS)   /* 1: the first that adds to a row of dQ stores */                           \
    X(HEAD_SINKS) /* 1: heads have sinks */                                                    \
    X(FOLDED)     /* the grid has one dimension: there are more heads or batches than 65535 */ \
    X(WIDE_DKV)   /* combine: 1: dK and dV are float32 beside 16 bits; 2: and are added to what is there */

/* Warps of a block of backward_rows.cu, with 16 rows each, of backward_dbias.cu and backward_dsink.cu. */
#define BACKWARD_ROWS_WARPS  4
#define BACKWARD_DBIAS_WARPS 4
#define BACKWARD_DSINK_WARPS 16

/* Workspace: row i of a sequence (dense: of batch b and head h at (b heads + h) rows; varlen: of head h at h rows, plus
 * the sequence's begin, backward_begin()). The last rows of a sequence's ROW_STEP stand for no row.
 *   lse, delta [rows]: lse times lse_factor, with the sinks, and +inf where no key is seen (or weights are below 2^-20
 *              and the row may hold NaN); sum of dO * O minus dlse, 0 where lse is +inf
 *   low        [rows]: beside a bias: what lse has rounded away, times -log2(e); 0 where it is not given
 *   dq         [rows, D]: fp32 sums; 16 rows are D / 8 tiles of 16 x 8, one after the other. A tile is in the order of
 *              the accumulators of mma.sync and of a warp of wgmma: lane l has (l / 4, 2 (l % 4)), its right neighbour,
 *              and both 8 rows down. From 9.0 on lanes lie one after the other, four words each; before, the four
 *              words of a lane 32 words apart.
 *   semaphores [rows / 16]: in order: how many key blocks have added to the rows from there on
 *   tickets    [1]: in order: blocks in the order in which they began
 *   sink_shares [rows]: beside sinks, where dsink or the gradient of a bias that keys share is wanted: what the row
 *              adds to the gradient of the logarithm of its head's sinks; 0 for no row
 *   empty      [rows / 16]: bytes: some of the rows sees no key
 *   order      [interval batches, heads, Sk]: numbers of keys, key_sort.h
 *   block_order [interval batches, heads, 1 + blocks]: block_order.h
 *   dbias      KEYS: [warps that share keys, B, H, Sk]; SUMS: the shape of bias
 *   dbias_semaphores [bias batches, bias heads, key blocks, backward_semaphores(Sq)]: SUMS, in order: the same
 *   dk, dv     [KV heads, parts, keys of all batches, D or Dv]: fp32, where a group of heads is split */
struct gpu_backward_params {
    struct gpu_forward_params in;
    struct gpu_matrix dout, dq, dk, dv;
    struct gpu_rows dlse;
    struct gpu_scores dbias;
    float *lse_rows, *delta_rows, *dq_sums, *dbias_sums, *dk_parts, *dv_parts;
    int32_t *semaphores, *dbias_semaphores, *ticket;
    uint8_t *empty; /* NULL: not wanted */
    const int32_t *order;
    int64_t order_batch, order_head;
    const int32_t *block_order;
    int64_t block_order_batch, block_order_head;
    int64_t rows, num_row_arrays;                               /* rows of one array; arrays: B H, varlen: H */
    int64_t dbias_count;                                        /* words of dbias_sums and dbias_semaphores */
    int64_t key_rows;                                           /* of dk_parts and dv_parts, of one head */
    int64_t dbias_batch, dbias_head, dbias_row, dbias_key;      /* SUMS: strides in dbias_sums */
    int32_t dbias_batches, dbias_heads, dbias_rows, dbias_keys; /* the shape of dbias */
    int32_t dbias_shares, zero_dbias; /* DIRECT: not every element is written by the main kernel */
    int32_t group_parts, part_heads;  /* heads of a group = group_parts * part_heads */
    float lse_factor;                 /* log2(e) where scores stay in units of exp2, else 1 */
    uint32_t grid_x, grid_y;          /* of a folded grid: block n is (n % grid_x, n / grid_x % grid_y, the rest) */
    int32_t mask_row_bytes, bias_row_bytes, dbias_row_bytes; /* from row to row; of dbias or of its sums */
    float *low_rows;
    float *sink_shares; /* NULL: not wanted */
    struct gpu_sink dsink;
    int32_t dbias_of_rows; /* 1: GPU_DBIAS_ROWS */
};

/* Turns of a key block at the gradient of a bias: for at least 32 rows each. */
GPU_INLINE int64_t backward_semaphores(int64_t rows) { return (rows + 31) / 32; }

/* Where the rows of a varlen sequence begin that starts at row cu_seqlens_q[b] of the packed tensor. */
GPU_INLINE int64_t backward_begin(int64_t packed_begin, int64_t b, int32_t row_step) {
    return ((packed_begin + row_step - 1) / row_step + b) * row_step;
}

#endif
