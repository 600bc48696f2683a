/* planted.h: kernels with one fault each, by the constant FAULT (0: none), and what they are given; for C and CUDA C.
 */
#ifndef FDM_PLANTED_H
#define FDM_PLANTED_H

#include "cuda/tensor_map.h"
#ifdef __CUDACC__
#    include "cuda/ptx/types.cuh"
#else
#    include <stdint.h>
#endif

#define PLANTED_THREADS        128 /* planted_block, planted_stale */
#define PLANTED_RING_THREADS   256
#define PLANTED_ROWS           64
#define PLANTED_STEPS          6 /* of planted_ring, 64 elements of K each */
#define PLANTED_TILES          8 /* of planted_stale */
#define PLANTED_TENSOR_THREADS 192
#define PLANTED_TENSOR_TILES   5 /* of planted_tensor, 128 keys each */

struct planted_arguments {
    /* planted_ring: bfloat16 [64][K], [64][K], float32 [64][64]; planted_tensor: bfloat16 k [keys][64], v [keys][128]
     */
    struct cuda_tensor_map a, b, c;
    const float *in;
    float *out;
    int32_t *flags;
    int32_t count, reserved;
};

#endif
