/* kernels.h: the pointer table between the CPU family's loops and its instruction sets.
 *
 * Everything is computed transposed: query rows lie along vector lanes, keys (or head-dim elements) along rows of a
 * tile. Softmax then needs no horizontal reductions, K and V need no transposition, and no tail along keys or head_dim
 * is padded.
 *
 *     lane        one (query row, query head of the KV group) pair; a panel is up to CPU_LANES = 64 lanes
 *     S, P, dP    [keys][CPU_LANES] float32 scores of one panel, "score tile"
 *     O^T, dQ^T   [depth][CPU_LANES] float32 accumulators of one panel
 *
 * Operands are packed once and used many times. Their format is private to the table ("math"): float32 in the fp32
 * tables, bfloat16 pairs in avx512_bf16, tile-shaped in amx. The loops see opaque bytes and the sizes below. Packing
 * reads rows through an array of row addresses, which is how strides, varlen, GQA stacking and key compaction come for
 * free. Lanes and keys past the given counts are packed as zeros up to CPU_LANES and key_multiple.
 *
 * Contractions, with the operand formats each one takes:
 *
 *     score        S[key][lane]       = sum_d  keys[key][d]    * panel[d][lane]       K Q^T, V dO^T
 *     accumulate   acc[d][lane]      += sum_key values[key][d] * weights[key][lane]   V^T P^T, K^T dS^T
 *     outer        acc[key][d]       += sum_lane weights[key][lane] * rows[lane][d]   P^T dO, dS^T Q
 */
#ifndef FDM_CPU_KERNELS_H
#define FDM_CPU_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "device/isa.h"
#include "flash_dmattn.h"

enum {
    CPU_LANES = 64, /* lanes of a panel: one uint64_t holds the visibility of a key */
    CPU_HEAD_DIM_MAX = 256,
    CPU_BLOCK_KEYS_MAX = 256, /* keys of one step, at most */
    CPU_MASK_KEYS_MAX = 256   /* keys of a mask that are turned into bits at a time */
};

/* One step of online softmax over a score tile. In: s = raw scores K Q^T. Out: weights (the math's operand format; the
 * fp32 math leaves them in s itself), updated max and sum, and the factors by which earlier accumulators shrink. All
 * per lane, base 2. */
struct cpu_softmax_step {
    float *s;                     /* [keys][CPU_LANES] */
    void *weights;                /* weights operand of `accumulate`; == s in fp32 math */
    const uint64_t *visible;      /* [keys] bit l: key visible to lane l; NULL = all */
    const float *bias_keys;       /* [keys] bias of each key, the same for all lanes; NULL = none */
    const void *const *bias_rows; /* [num_lanes] addresses of each lane's bias of key 0; NULL = none */
    const int32_t *keys;          /* [keys] which keys they are, rising; for bias_rows */
    int64_t bias_key_stride;      /* elements from key to key */
    fdm_dtype bias_dtype;
    int32_t careful; /* 1: scores may be NaN where bias_rows hold -inf */
    int32_t num_keys, num_lanes;
    float scale;   /* softmax_scale */
    float softcap; /* 0 = none */
    float *max;    /* [CPU_LANES] what exp() is relative to: the maximum of the natural-log scores so far, or at most a
                      fixed distance below it; -inf while no key was seen */
    float *sum;    /* [CPU_LANES] running sum of exp(score - max), 0 at first */
    float *shrink; /* [CPU_LANES] out: exp(old max - new max), 1 where the lane has seen no key */
};

/* One turn of the overlapped forward (forward_overlap.c): what three panels need that does not depend on each other.
 * The panel `now` has its scores and their maxima and gets its weights; the scores of `next` are computed, with their
 * maxima; the values of the panel before are added to its accumulators. Neither step has a bias or a softcap. */
struct cpu_overlap {
    const struct cpu_softmax_step *now, *next; /* NULL = no such panel; next->s may be now->s */
    const void *keys, *panel;                  /* operands of the scores of next */
    int32_t depth;
    float *acc; /* the arguments of `accumulate` for the panel before; NULL = no such panel */
    const void *values, *weights;
    int32_t acc_keys, acc_lanes, acc_depth;
    /* The table's own, kept from share to share, and `top` from turn to turn. */
    float top[CPU_LANES]; /* largest raw scores: of now before the first share, then of next so far */
    float max[CPU_LANES], base[CPU_LANES], sum[CPU_LANES];
    int32_t weighed;       /* keys of now whose weights are made */
    int32_t scored;        /* keys of next whose scores may be read */
    int32_t raised;        /* keys of next that top knows */
    int32_t places, units; /* places between products, and units of vector work for them */
    int32_t due;           /* units due at this place, times places */
    float *held;           /* where sums belong that still lie in the unit, rows held_stride bytes apart */
    size_t held_stride;
    uint32_t held_tiles; /* bit t: tile t of them is to be stored */
};
enum { CPU_OVERLAP_SHARES = 4 };

/* Scores back to probabilities with the known lse, and dS from dP. */
struct cpu_gradient_step {
    float *s; /* [keys][CPU_LANES] in: raw scores; out: P (fp32 math: weights of dV) */
    float
        *dp; /* [keys][CPU_LANES] in: dP = V dO^T; out: dS, natural units, before softmax_scale, after the softcap's own
                gradient (fp32 math: weights of dK and dQ). dbias takes its dS before the softcap gradient: see dbias */
    void *p_weights, *ds_weights; /* operands for `outer` (lane contraction) */
    void *ds_values_weights;      /* operand for `accumulate` (key contraction) */
    float *dbias; /* [keys][CPU_LANES] out: dS with respect to score + bias, 0 where not visible; NULL = not wanted */
    const uint64_t *visible;
    const float *bias_keys, *bias;
    const float *lse;     /* [CPU_LANES] natural log; +inf = a row without keys: P = 0 */
    const float *lse_low; /* [CPU_LANES] what lse has rounded away; read where there is a bias */
    const float *delta;   /* [CPU_LANES] rowsum(dO O) - dlse */
    int32_t careful; /* 1: some lse is NaN or some delta not finite, and P and dS may be NaN where the bias is -inf */
    int32_t num_keys, num_lanes;
    float scale, softcap;
    float ds_factor; /* ds_weights hold dS times this; 1 where they are dp itself (fp32 math) */
};

struct decode_kernels;

struct cpu_kernels {
    const char *isa;       /* "scalar", "avx2", "avx512", "avx512_bf16", "amx", "neon" */
    uint32_t dtypes;       /* bit d: fdm_dtype d is taken */
    int32_t key_multiple;  /* packed keys are padded with zero rows to this */
    int32_t lane_multiple; /* num_lanes may be rounded up to this, at most CPU_LANES; the lanes beyond hold zeros */

    /* Before and after the contractions of one thread's share of a pass: unit state such as tile shapes. NULL = none.
     */
    void (*begin)(void);
    void (*end)(void);

    /* Bytes of a packed operand, multiples of 64. */
    size_t (*panel_bytes)(int32_t depth);                  /* [depth][CPU_LANES] */
    size_t (*keys_bytes)(int32_t num_keys, int32_t depth); /* keys operand of score */
    size_t (*values_bytes)(int32_t num_keys,
                           int32_t depth);     /* values operand of accumulate; 0 = the keys format serves */
    size_t (*rows_bytes)(int32_t depth);       /* rows operand of outer, CPU_LANES rows */
    size_t (*weights_bytes)(int32_t num_keys); /* weights operands; 0 = the float32 score tile itself serves */

    /* Packing. rows[i] is the address of row i: `depth` contiguous elements of dtype, element-aligned. */
    void (*pack_panel)(void *panel, const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype);
    void (*pack_keys)(void *keys, const void *const *rows, int32_t num_keys, int32_t depth, fdm_dtype dtype);
    void (*pack_values)(void *values, const void *const *rows, int32_t num_keys, int32_t depth, fdm_dtype dtype);
    void (*pack_rows)(void *out, const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype);
    /* Whether rows, as above but not packed, hold neither NaN nor inf. */
    int (*all_finite)(const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype);

    /* Contractions (see above). scratch-free; num_lanes is rounded up to lane_multiple. */
    void (*score)(float *s, const void *keys, const void *panel, int32_t num_keys, int32_t num_lanes, int32_t depth);
    void (*accumulate)(float *acc, const void *values, const void *weights, int32_t num_keys, int32_t num_lanes,
                       int32_t depth);
    /* acc_rows[key] is the address of the float32 row [depth] to which key's sum is added, times factor. */
    void (*outer)(float *const *acc_rows, const void *weights, const void *rows, int32_t num_keys, int32_t num_lanes,
                  int32_t depth, float factor);

    /* Vector steps. */
    void (*softmax)(const struct cpu_softmax_step *step);
    void (*gradient)(const struct cpu_gradient_step *step);
    /* A share of a turn; all shares in order make a turn. Every sum is formed in the order in which score, softmax and
     * accumulate form it, so the bits are theirs. NULL = there is none. */
    void (*overlap)(struct cpu_overlap *turn, int32_t share);
    void (*shrink)(float *acc, const float *shrink, int32_t num_lanes,
                   int32_t depth); /* acc[d][lane] *= shrink[lane] */
    /* out[lane][d] = acc[d][lane] * factor[lane], rounded to dtype: rows[lane] is the address of lane's output row. */
    void (*store_panel)(void *const *rows, const float *acc, const float *factor, int32_t num_lanes, int32_t depth,
                        fdm_dtype dtype);
    /* Bits of up to CPU_LANES mask rows: visible[j] bit l = rows[l][j * key_stride] != 0, for j < num_keys, at most
     * CPU_MASK_KEYS_MAX. */
    void (*mask_bits)(uint64_t *visible, const uint8_t *const *rows, int64_t key_stride, int32_t num_keys,
                      int32_t num_lanes);
    /* bias[j][l] = rows[l][j * key_stride] as float32. */
    void (*load_bias)(float *bias, const void *const *rows, int64_t key_stride, int32_t num_keys, int32_t num_lanes,
                      fdm_dtype dtype);
    /* Sum over d of a[d] * b[d] in float32: delta. */
    float (*dot)(const void *a, const void *b, int32_t depth, fdm_dtype dtype);
    /* out[d] = (dtype)in[d], for gradients that were accumulated in float32. */
    void (*round_row)(void *out, const float *in, int32_t depth, fdm_dtype dtype);

    const struct decode_kernels *decode; /* NULL: no decode of its own; see decode.h */
};

static inline void cpu_kernels_begin(const struct cpu_kernels *kernels) {
    if (kernels->begin)
        kernels->begin();
}
static inline void cpu_kernels_end(const struct cpu_kernels *kernels) {
    if (kernels->end)
        kernels->end();
}

/* A row that is read in the place of one that must have no effect. */
extern const float cpu_zero_row[CPU_HEAD_DIM_MAX];

/* The table for a dtype, NULL when this build has none (NEON on x86). AMX has one for each dtype. */
const struct cpu_kernels *cpu_isa_kernels(enum cpu_isa isa, fdm_dtype dtype);

extern const struct cpu_kernels cpu_kernels_scalar;
extern const struct cpu_kernels cpu_kernels_avx2;
extern const struct cpu_kernels cpu_kernels_avx512;
extern const struct cpu_kernels cpu_kernels_avx512_bf16;
extern const struct cpu_kernels cpu_kernels_amx; /* bfloat16 */
extern const struct cpu_kernels cpu_kernels_amx_float16;
extern const struct cpu_kernels cpu_kernels_amx_float32;
extern const struct cpu_kernels cpu_kernels_neon;

#endif
