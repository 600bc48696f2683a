/* mma_backward.h: the contract of the mma family's backward: what a tile costs in shared memory and registers, the
 * constants and arguments of its kernels; for C and CUDA C.
 *
 * A block of 8 warps owns block_n keys and walks the queries block_m rows at a time. Shared memory, bytes:
 *
 *     2D (M q + M + N [V not in registers]) + 2D N + 2N MS + 8M                      + 8N or 12N [keys seen one by one]
 *        Q      dO   V                        K      dS       lse, row sum of dO * O   rows that see a key, its bias
 *
 * and 4M beside a bias, for what lse has rounded away,
 *
 * with q = 1 or 2 buffers of Q, and with MS the rows of score tiles that pass through shared memory at a time. Head
 * dims are those of q, k (D) and of v, out (Dv), rounded up as mma_backward_padded() does; dO and V count with Dv. */
#ifndef FDM_MMA_BACKWARD_H
#define FDM_MMA_BACKWARD_H

#include "cuda/tensor_map.h"
#include "gpu/backward_params.h"
#include "gpu/problem_constants.h"

#define MMA_BACKWARD_WARPS 8

/* Accumulators of dK and dV a thread may hold, and those plus the registers of V. More than that spills (N = 128 above
 * head dim 128; 64 keys with V in registers at head dim 256). */
#define MMA_BACKWARD_ACCUMULATORS_MAX 128
#define MMA_BACKWARD_REGISTERS_MAX    160

/* What of these the turns take where the gradient of a shared bias is added in a fixed order. */
#define MMA_BACKWARD_TURN_REGISTERS 24

/* Beside 128 accumulators, rare combinations of features make the assembler spill a few registers of a thread. They
 * are counted (docs/verified.md); this is the limit in bytes. */
#define MMA_BACKWARD_SPILL_BYTES_MAX 224

GPU_INLINE int32_t mma_backward_widest(int32_t head_dim, int32_t head_dim_v) {
    return head_dim > head_dim_v ? head_dim : head_dim_v;
}

/* The kernel's head dim: each warp's share of the columns is a multiple of 16. */
GPU_INLINE int32_t mma_backward_padded(int32_t head_dim, int32_t block_n, int32_t widest) {
    const int32_t step = (block_n == 128 && widest > 96) || (block_n == 32 && widest > 128) ? 64 : 32;
    return (head_dim + step - 1) / step * step;
}

/* Rows whose scores are in registers at a time. */
GPU_INLINE int32_t mma_backward_sub_rows(int32_t block_n, int32_t widest) {
    return block_n == 128 && widest > 96 ? 32 : 64;
}

/* 16-key tiles of a warp. With two, a fragment of Q or dO feeds two products. Up to head dim 64 the registers hold
 * their sums: the block has half the warps, and two blocks share a multiprocessor. Beyond, where the device has room
 * for P beside dS, two or four warps share the keys by columns ("paired"). */
GPU_INLINE int32_t mma_backward_can_pair(int32_t block_n, int32_t head_dim, int32_t head_dim_v,
                                         int32_t v_in_registers) {
    const int32_t widest = mma_backward_widest(head_dim, head_dim_v);
    if (block_n == 64 && widest > 128)
        return !v_in_registers && mma_backward_padded(head_dim, block_n, widest) % 64 == 0 &&
               mma_backward_padded(head_dim_v, block_n, widest) % 64 == 0;
    return block_n == 128 && widest > 64 && widest <= 128 && !v_in_registers;
}
GPU_INLINE int32_t mma_backward_warps(int32_t block_n, int32_t widest, int32_t v_in_registers) {
    return block_n == 128 && widest <= 64 && !v_in_registers ? MMA_BACKWARD_WARPS / 2 : MMA_BACKWARD_WARPS;
}

/* With fewer than 128 keys two or four warps hold the same 16 keys. Up to head dim 128 each takes part of the rows, and
 * the sums of dK and dV are added at the end. Above there are no registers for whole sums: each takes part of the
 * columns of all rows, and P passes through shared memory beside dS. */
GPU_INLINE int32_t mma_backward_shares_columns(int32_t block_n, int32_t widest) {
    return block_n < 128 && widest > 128;
}

/* MS: 64, or 32 above head dim 96 with 128 keys, where 64 would spill. Fewer keys: 64 of P and 64 of dS (up to head dim
 * 128 only half of that is used). */
GPU_INLINE int32_t mma_backward_staged_rows(int32_t block_n, int32_t head_dim, int32_t head_dim_v) {
    if (block_n < 128)
        return 128;
    return mma_backward_widest(head_dim, head_dim_v) > 96 ? 32 : 64;
}

/* 128x64 and 64x128 above head dim 96, single-buffered with V in shared memory, lay what passes over rows of dO that
 * are already consumed, 64 and 32 at a time, where those are wide enough; with that they fit 99 KB. */
GPU_INLINE int32_t mma_backward_overlays(int32_t block_m, int32_t block_n, int32_t stages, int32_t v_in_registers,
                                         int32_t head_dim, int32_t head_dim_v) {
    const int32_t widest = mma_backward_widest(head_dim, head_dim_v);
    return block_m * block_n == 128 * 64 && stages == 1 && !v_in_registers && widest > 96 && widest <= 128 &&
           mma_backward_padded(head_dim_v, block_n, widest) == 128;
}

GPU_INLINE int32_t mma_backward_shared_bytes(int32_t block_m, int32_t block_n, int32_t stages, int32_t v_in_registers,
                                             int32_t head_dim, int32_t head_dim_v) {
    const int32_t widest = mma_backward_widest(head_dim, head_dim_v);
    const int32_t d = mma_backward_padded(head_dim, block_n, widest);
    const int32_t dv = mma_backward_padded(head_dim_v, block_n, widest);
    const int32_t q = 2 * d * block_m * stages, k = 2 * d * block_n;
    const int32_t dout = 2 * dv * block_m, v = v_in_registers ? 0 : 2 * dv * block_n;
    const int32_t staged = 2 * block_n * mma_backward_staged_rows(block_n, head_dim, head_dim_v);
    const int32_t overlay = mma_backward_overlays(block_m, block_n, stages, v_in_registers, head_dim, head_dim_v);
    return q + dout + v + k + (overlay ? 0 : staged) + 8 * block_m;
}

/* Rows of a stage of a ring. */
#define MMA_BACKWARD_STAGE_ROWS 64

/* The same for a kernel whose warps are paired, or whose passing scores have two buffers, so that one barrier a
 * sub-tile is enough; and for paired warps or half blocks with a ring of 2 or 3 stages of 64 rows of Q and dO in place
 * of BLOCK_M rows, a barrier for each and one for the scores. Each is taken where the device has the bytes. */
struct mma_backward_extras {
    int32_t paired, buffers, ring;
};
GPU_INLINE int32_t mma_backward_bytes_with(int32_t block_m, int32_t block_n, int32_t stages, int32_t v_in_registers,
                                           int32_t head_dim, int32_t head_dim_v, struct mma_backward_extras with) {
    const int32_t widest = mma_backward_widest(head_dim, head_dim_v);
    const int32_t d = mma_backward_padded(head_dim, block_n, widest);
    const int32_t dv = mma_backward_padded(head_dim_v, block_n, widest);
    const int32_t passing =
        with.paired ? 128
                    : mma_backward_sub_rows(block_n, widest) * (mma_backward_shares_columns(block_n, widest) ? 2 : 1);
    const int32_t rows_q = with.ring ? MMA_BACKWARD_STAGE_ROWS * with.ring : block_m * stages;
    const int32_t rows = with.ring ? MMA_BACKWARD_STAGE_ROWS * with.ring : block_m;
    if (!with.paired && with.buffers == 1)
        return mma_backward_shared_bytes(block_m, block_n, stages, v_in_registers, head_dim, head_dim_v);
    return 2 * d * (rows_q + block_n) + 2 * dv * (rows + (v_in_registers ? 0 : block_n)) +
           2 * block_n * passing * with.buffers + 8 * rows + (with.ring ? 8 * (with.ring + 1) : 0);
}

/* Besides, where intervals, or a mask or bias without rows, say for each key which rows see it: two words, or three
 * with the bias of the key. */
GPU_INLINE int32_t mma_backward_keys_bytes(int32_t block_n, int32_t key_words) { return 4 * key_words * block_n; }

/* And beside a bias, what lse has rounded away of each staged row; but where a ring of three and the keys' words leave
 * no room for it (head dims above 64): there it is read from global memory. */
GPU_INLINE int32_t mma_backward_stages_low(int32_t ring, int32_t widest, int32_t key_words) {
    return ring < 3 || widest <= 64 || !key_words;
}

/* Columns that TMA brings at a time, of a padded head dim: rows of 128 or 64 bytes. */
GPU_INLINE int32_t mma_backward_panel(int32_t padded) { return padded % 64 ? 32 : 64; }

/* fp32 accumulators of dK and dV a thread. */
GPU_INLINE int32_t mma_backward_accumulators(int32_t block_n, int32_t head_dim, int32_t head_dim_v) {
    const int32_t widest = mma_backward_widest(head_dim, head_dim_v);
    const int32_t columns =
        mma_backward_padded(head_dim, block_n, widest) + mma_backward_padded(head_dim_v, block_n, widest);
    return (mma_backward_shares_columns(block_n, widest) ? block_n
            : 128 < block_n                              ? block_n
                                                         : 128) *
           columns / (32 * MMA_BACKWARD_WARPS);
}

/* Registers of V a thread: each warp holds its 16 keys, two elements a register. */
GPU_INLINE int32_t mma_backward_v_registers(int32_t block_n, int32_t head_dim, int32_t head_dim_v) {
    return mma_backward_padded(head_dim_v, block_n, mma_backward_widest(head_dim, head_dim_v)) / 4;
}

/* ---- the kernels ---- */

#define MMA_BACKWARD_CONSTANTS(X)                                                               \
    X(HEAD_DIM)   /* of q and k, as mma_backward_padded() gives it */                           \
    X(HEAD_DIM_V) /* of v, out and dout */                                                      \
    X(BLOCK_M)                                                                                  \
    X(BLOCK_N)                                                                                  \
    X(STAGES) /* buffers of Q: 1 or 2 */                                                        \
    X(V_IN_REGISTERS)                                                                           \
    X(OVERLAY)     /* dS lies over consumed rows of dO */                                       \
    X(DS_BUFFERS)  /* 2: a warp may make scores while another still reads those before */       \
    X(PAIRED)      /* two key tiles a warp, two warps to the same keys */                       \
    X(RING)        /* 2 or 3: buffers of 64 rows of Q and dO, instead of BLOCK_M rows */        \
    X(TMA)         /* TMA brings them, by tensor maps */                                        \
    X(WIDE_SCORES) /* those of mask, bias and dbias, too, whose rows are contiguous */          \
    X(DBIAS)       /* GPU_DBIAS_* */                                                            \
    X(GATHER)      /* keys in the order that key_sort.cu gives them */                          \
    X(SCRUB)       /* keys may be hidden from every row: what is no number is taken out of K */ \
    X(NEEDS_DQ)                                                                                 \
    X(DETERMINISTIC) /* blocks add to dQ and dbias in order */                                  \
    X(SPLIT)         /* a block takes a part of a group's heads */                              \
    X(FOLDED)        /* the grid has one dimension: there are more heads or batches than 65535 */

/* What a plan holds for it (contract/family.h). */
#define MMA_BACKWARD_PARAMETERS(X)                                                    \
    X(STAGED_ROWS) /* MS, above */                                                    \
    X(OVERLAY)                                                                        \
    X(DS_BUFFERS)                                                                     \
    X(PAIRED)                                                                         \
    X(RING)                                                                           \
    X(TMA)                                                                            \
    X(GATHER)                                                                         \
    X(GROUP_PARTS) /* of the heads of a group: SPLIT where there are more than one */ \
    X(IN_TURN)     /* in a fixed order: heads whose key blocks are interleaved; 0: one */

/* Rows of the workspace's arrays for a sequence are a multiple of this, as every tile divides it. */
#define MMA_BACKWARD_ROW_STEP 128

struct mma_backward_params {
    struct gpu_backward_params shared;
    struct cuda_tensor_map q_map, dout_map; /* TMA: [B, H, S, D], tiles of 64 rows and a panel */
    uint32_t heads_in_turn;                 /* DETERMINISTIC: parts of groups whose key blocks are interleaved */
};

#endif
