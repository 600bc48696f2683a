/* convert.cuh: float32 to and from the 16-bit dtype that DTYPE names, for kernels that define it before including this.
 */
#ifndef FDM_CONVERT_CUH
#define FDM_CONVERT_CUH

#include "cuda/ptx/math.cuh"
#include "gpu/forward_params.h"

/* Two floats to one register, `low` in the lower half; round to nearest even. */
__device__ __forceinline__ uint32_t pack(float low, float high) {
#if DTYPE == GPU_BFLOAT16
    return cvt_bf16x2(low, high);
#else
    return cvt_f16x2(low, high);
#endif
}
__device__ __forceinline__ float unpack(uint16_t x) {
#if DTYPE == GPU_BFLOAT16
    return cvt_f32_bf16(x);
#else
    return cvt_f32_f16(x);
#endif
}

#endif
