/* append.h: the contract of append.cu: new keys into a KV cache, and keys and queries turned; for C and CUDA C. */
#ifndef FDM_GPU_APPEND_H
#define FDM_GPU_APPEND_H

#include "cuda/constants.h"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

#define APPEND_CONSTANTS(X)                                                                \
    X(VECTOR) /* 1: 16 bytes at a time: rows are aligned, and pairs lie in whole pieces */ \
    X(ROTARY) /* APPEND_*: which dims are pairs */

/* ROTARY. */
#define APPEND_PLAIN       0 /* nothing turns */
#define APPEND_HALVES      1 /* (t, t + dim / 2) */
#define APPEND_INTERLEAVED 2 /* (2t, 2t + 1) */

#define APPEND_THREADS 128

struct append_params {
    struct gpu_forward_params in;
    struct gpu_matrix q_to, k_to; /* turned rows of q and k_new, as those; data NULL: k is turned in the cache alone */
    struct gpu_indices positions; /* of each new key and each row of q; else those of in.rotary */
    struct gpu_indices slots;     /* of each new key; else lengths and tables say where it goes */
    int64_t new_rows, query_rows;
};

#endif
