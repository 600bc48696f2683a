/* decode.h: the pointer table between the decode pass and its instruction sets.
 *
 * Decode is bound by memory: few query rows, many keys. Unlike in kernels.h nothing is packed or transposed: vectors
 * lie along head_dim, K and V are read once, where the caller has them, and converted in registers.
 *
 * A "slot" is one vector of a row. A row of `depth` elements has ceil(depth / lanes) of them; where depth is not a
 * multiple of lanes the last slot holds the row's last `lanes` elements, so that it overlaps the one before it and
 * nothing past the row is read. A bfloat16 row is read by pairs of slots, 2 * lanes elements in one vector, as long as
 * a whole pair is left: a shift gives the even elements, a mask the odd ones, and these are the pair's two slots. */
#ifndef FDM_CPU_DECODE_H
#define FDM_CPU_DECODE_H

#include "families/cpu/kernels.h"

enum {
    DECODE_ROWS = 8,       /* query rows of one step, at most */
    DECODE_KEYS = 64,      /* keys of one step, at most */
    DECODE_LANES_MAX = 16, /* floats of a slot, at most */
    DECODE_ROW_MAX = CPU_HEAD_DIM_MAX + DECODE_LANES_MAX
};

/* Memory that later steps read, in the order of memory: runs of `run` bytes, `skip` bytes apart or where `starts` says.
 * A step asks for as many bytes of it as it reads itself. */
struct decode_stream {
    const char *next; /* NULL = nothing to ask for */
    int64_t left;     /* bytes of the present run */
    int64_t run, skip;
    const char *const *starts; /* of the runs after the present one, NULL after the last; NULL: `skip` counts */
};

/* One step of online softmax for some rows and keys of one KV head. Rows: 1, 2, 4 or 8 (at most max_rows of the
 * table); the caller pads with rows of zeros. */
struct decode_step {
    const float *q;                          /* [num_rows][DECODE_ROW_MAX] in slots, zero where the last one overlaps */
    const char *const *k, *const *v;         /* [num_keys] rows of the keys; elements of dtype */
    struct decode_stream *k_ahead, *v_ahead; /* advanced by what is asked for */
    const float *bias; /* [num_keys][num_rows] added to the scores, -inf = not visible; NULL = none. Room for
                          DECODE_KEYS * DECODE_ROWS */
    int32_t num_keys, num_rows, head_dim, head_dim_v;
    fdm_dtype dtype;
    float scale, softcap;
    float *max, *sum; /* [num_rows] running maximum of the scores (-inf at first) and sum of exp(score - max) */
    float *acc;       /* [num_rows][acc_row] sum of exp(score - max) * v, in slots */
    int64_t acc_row;  /* floats from one row to the next */
};

struct decode_kernels {
    int32_t lanes, max_rows;
    void (*step)(const struct decode_step *step);
    /* A row of dtype to floats in slots, zero where the last one overlaps and past a short row. */
    void (*load_row)(float *slots, const void *row, int32_t depth, fdm_dtype dtype);
};

extern const struct decode_kernels decode_kernels_scalar;
extern const struct decode_kernels decode_kernels_avx2;
extern const struct decode_kernels decode_kernels_avx512;
extern const struct decode_kernels decode_kernels_neon;

#endif
