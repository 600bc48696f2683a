/* problem_constants.h: the constants by which every attention kernel is specialised for a problem, from one list.
 *
 * X(NAME, value for a problem p, the value where a kernel has one text for all problems). A kernel gets all of them
 * beside the constants of its tile. Where it
 * does not tell the values apart (GPU_ALIKE_*) it gets the third one, so that it is compiled once for all. For C and
 * CUDA C. */
#ifndef FDM_PROBLEM_CONSTANTS_H
#define FDM_PROBLEM_CONSTANTS_H

#define GPU_PROBLEM_CONSTANTS(X)                                                                                     \
    X(DTYPE, gpu_dtype(p->dtype), 0) /* GPU_FLOAT32, GPU_FLOAT16 or GPU_BFLOAT16 */                                  \
    X(ALIGNED, p->aligned, 0)        /* addresses and strides are multiples of 16 bytes */                           \
    X(WINDOW, gpu_bounded(p), 1)     /* causal or window; 1: windows are tested, be they unbounded */                \
    X(MASK, p->has_mask, 0)                                                                                          \
    X(MASK_ROWS, gpu_mask_rows(p), 1)           /* 0: the mask is the same for all rows; 1: its stride is used */    \
    X(BIAS, gpu_bias_constant(p), 0)            /* GPU_BIAS_* */                                                     \
    X(BIAS_ROWS, gpu_bias_rows(p), 1)           /* 0: the bias is the same for all rows; 1: its stride is used */    \
    X(SCORES_ALIGNED, gpu_scores_aligned(p), 0) /* rows of mask and bias are contiguous, at multiples of 16 bytes */ \
    X(INTERVALS, p->has_intervals, 0)                                                                                \
    X(ROW_INTERVALS, p->has_row_intervals, 0)                                                                        \
    X(BLOCKS, p->block_mask_size > 0, 0) /* there is a block mask */                                                 \
    X(TREE, p->has_tree, 0)                                                                                          \
    X(VARLEN, p->varlen, 0)                                                                                          \
    X(SEQUSED, gpu_used_constant(p), 0) /* lengths of sequences are lists of the call, beside those of a cache */    \
    X(CACHE, gpu_cache_constant(p), 0)  /* GPU_CACHE_* */                                                            \
    X(SOFTCAP, p->softcap > 0, 0)                                                                                    \
    X(SINK, p->has_sink && p->pass == FDM_FORWARD, 0) /* heads have sinks; a backward's kernels know lse alone */    \
    X(POSITIVE_SCALE, (float)p->softmax_scale > 0, 0) /* the maximum may be taken of the bare products */

#ifdef __CUDACC__
#    define GPU_PROBLEM_CONSTANT_GIVEN(name, value, alike) static_assert((name) >= 0, #    name);
GPU_PROBLEM_CONSTANTS(GPU_PROBLEM_CONSTANT_GIVEN)
#else
enum {
#    define GPU_PROBLEM_CONSTANT_NUMBER(name, value, alike) GPU_CONSTANT_NUMBER_##name,
    GPU_PROBLEM_CONSTANTS(GPU_PROBLEM_CONSTANT_NUMBER)
#    undef GPU_PROBLEM_CONSTANT_NUMBER
        GPU_NUM_PROBLEM_CONSTANTS
};
/* Sets of names: GPU_ALIKE_WINDOW and so on. */
enum {
#    define GPU_PROBLEM_CONSTANT_BIT(name, value, alike) GPU_ALIKE_##name = 1 << GPU_CONSTANT_NUMBER_##name,
    GPU_PROBLEM_CONSTANTS(GPU_PROBLEM_CONSTANT_BIT)
#    undef GPU_PROBLEM_CONSTANT_BIT
        GPU_ALIKE_ALL = (1 << GPU_NUM_PROBLEM_CONSTANTS) - 1
};
#endif

#endif
