/* softmax.h: the contract of the softmax kernels: constants, parameters, shared memory; for C and CUDA C. */
#ifndef FDM_SOFTMAX_H
#define FDM_SOFTMAX_H

#include "cuda/constants.h"
#ifdef __CUDACC__
#    include "cuda/ptx/types.cuh"
#else
#    include <stdint.h>
#endif

/* DTYPE: the numbers of fdm_dtype. */
#define SOFTMAX_FLOAT32  0
#define SOFTMAX_FLOAT16  1
#define SOFTMAX_BFLOAT16 2

/* VECTOR: how a thread reads 16 bytes. */
#define SOFTMAX_ELEMENTS 0 /* by elements: rows of the tensors begin differently far from multiples of 16 bytes */
#define SOFTMAX_SHIFTED  1 /* at once, but for a row's ends: rows begin alike */
#define SOFTMAX_WHOLE    2 /* at once: rows begin at multiples of 16 bytes, and are */
#define SOFTMAX_FULL     3 /* the same, and softmax_resident's threads all have as many of them as they can */

/* softmax_resident: blocks of at least this number of threads may begin beside the kernel ahead. Of smaller ones a grid
 * has many, and programmatic dependent launch costs more than it hides: bf16 rows of 1024 are at 0.80 of a copy
 * with it, 0.99 without (an H200). */
#define SOFTMAX_EARLY_THREADS 128

#define SOFTMAX_RING_SHARERS 64 /* softmax_ring: threads besides, of two warps */

/* The constants that specialise every kernel, in the order of the cache's listing. */
#define SOFTMAX_CONSTANTS(X)                                                                                \
    X(DTYPE)    /* of x, out, dout and dx */                                                                \
    X(BACKWARD) /* 0: out from x; 1: dx from out and dout */                                                \
    X(LOG)      /* 1: log-softmax */                                                                        \
    X(MASK)     /* forward: 1: a mask hides elements */                                                     \
    X(FLIP)     /* forward: 1: scale < 0, so that the largest score is the smallest element's */            \
    X(VECTOR)   /* SOFTMAX_* */                                                                             \
    X(THREADS)  /* of a block */                                                                            \
    X(LANES)    /* threads of one row in a block: all, or a power of two up to 32 */                        \
    X(CHUNKS)   /* runs of 16 bytes that a thread has in registers at a time; softmax_resident: of a row */ \
    X(CLUSTER)  /* softmax_resident: 1: the blocks of a cluster share a row */                              \
    X(RING)     /* softmax_ring: pieces of rows that a block has in shared memory; else 0 */                \
    X(LAG)      /* softmax_ring: pieces summed and not written from which on writing comes first */

enum {
    SOFTMAX_ROW_AXES = 3,
    SOFTMAX_MAX_LANES = 512,
    SOFTMAX_CLUSTER_MAX = 16,
    SOFTMAX_PIECES_MAX = 1024,
    SOFTMAX_RING_PIECES_MAX = 192
};

/* Rows are numbered over three axes; strides in elements, 0 on axes that are broadcast. */
struct softmax_rows {
    char *data;
    int64_t stride[SOFTMAX_ROW_AXES];
};
struct softmax_params {
    struct softmax_rows in;   /* forward: x; backward: what the forward wrote */
    struct softmax_rows dout; /* backward */
    struct softmax_rows out;  /* forward: out; backward: dx */
    struct softmax_rows mask; /* bytes, not 0 = counts; MASK */
    float *partials;          /* softmax_split: [rows][pieces][2], maximum in units of log 2, sum; softmax_ring */
    uint32_t rows, columns;   /* rows = product of the three extents */
    uint32_t chunks;          /* softmax_chunks() of a row */
    uint32_t extent[2];       /* of the second and third row axis */
    uint32_t flat;            /* 1: rows are one after the other along one axis */
    uint32_t mask_column;     /* 0: one byte stands for a row */
    uint32_t pieces;          /* softmax_split, softmax_ring: of a row, each a block's */
    float scale;              /* in natural units; not 0 */
};

/* Chunks of 16 bytes that a row may touch: one more than its bytes fill where it may begin off a multiple of 16. */
GPU_INLINE int64_t softmax_chunks(int64_t columns, int64_t element_bytes, int32_t aligned) {
    return (columns * element_bytes + (aligned ? 0 : 16 - element_bytes) + 15) / 16;
}
/* softmax_ring: chunks of a piece; the last pieces may have fewer, or none. */
GPU_INLINE int32_t softmax_share(int32_t chunks, int32_t pieces, int32_t vector) {
    const int32_t unit = vector ? 8 : SOFTMAX_MAX_LANES; /* a cache line; a tile, whose elements are not neighbours */
    return ((chunks + pieces - 1) / pieces + unit - 1) / unit * unit;
}
GPU_INLINE int32_t softmax_shared_bytes(int32_t chunks, int32_t backward) {
    return SOFTMAX_MAX_LANES * chunks * 16 * (backward ? 2 : 1);
}

#endif
