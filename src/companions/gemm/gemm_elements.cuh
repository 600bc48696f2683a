/* gemm_elements.cuh: single elements of matrices, for kernels that define DTYPE before including this. */
#ifndef FDM_GEMM_ELEMENTS_CUH
#define FDM_GEMM_ELEMENTS_CUH

#include "companions/gemm/gemm.h"
#include "cuda/ptx/math.cuh"

__device__ __forceinline__ float widened(uint16_t x) {
    return DTYPE == GEMM_FLOAT16 ? cvt_f32_f16(x) : cvt_f32_bf16(x);
}
/* Two floats to one register, `low` in the lower half. */
__device__ __forceinline__ uint32_t narrowed(float low, float high) {
    return DTYPE == GEMM_FLOAT16 ? cvt_f16x2(low, high) : cvt_bf16x2(low, high);
}

__device__ __forceinline__ uint16_t *element_of(const struct gemm_matrix &x, int batch, int row, int column) {
    return (uint16_t *)x.data + batch * x.batch + row * x.row + column * x.column;
}

/* alpha * sum + beta * C of one element. */
__device__ __forceinline__ float finished(const struct gemm_params &a, float sum, int batch, int row, int column) {
    const float product = a.alpha * sum;
    return HAS_C ? fmaf(a.beta, widened(*element_of(a.c, batch, row, column)), product) : product;
}

#endif
