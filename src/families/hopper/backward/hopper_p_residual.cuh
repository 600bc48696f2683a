/* hopper_p_residual.cuh: P in float32 as two 16-bit parts, its rounded value and the residual, which hopper_backward.cu
 * keeps between its products (DS_FROM_F32_P); and the slope of a softcap, which is computed from P. */
#ifndef FDM_HOPPER_P_RESIDUAL_CUH
#define FDM_HOPPER_P_RESIDUAL_CUH

#include "cuda/ptx/special.cuh"
#include "gpu/convert.cuh"
#include "gpu/numbers.h"

/* split_pair() rounds two floats, which are not negative, to 16 bits in `high`, and puts the residuals in `rest`;
 * join_pair() adds them again. In bfloat16 a residual is the lower half of the number, which join_pair() extends by its
 * sign; bit 0 is set first, so that no number lies midway between two neighbours. In float16 a residual is 4096 times
 * the difference. */
__device__ __forceinline__ void split_pair(uint32_t &high, uint32_t &rest, float x, float y) {
#if DTYPE == GPU_BFLOAT16
    const uint32_t i = __float_as_uint(x) | min(__float_as_uint(x), 1u),
                   j = __float_as_uint(y) | min(__float_as_uint(y), 1u);
    high = pack(__uint_as_float(i), __uint_as_float(j));
    rest = (i & 0xffff) | j << 16;
#else
    high = pack(x, y);
    rest = pack((x - unpack((uint16_t)high)) * 4096, (y - unpack((uint16_t)(high >> 16))) * 4096);
#endif
}
__device__ __forceinline__ void join_pair(float (&x)[2], uint32_t high, uint32_t rest) {
#if DTYPE == GPU_BFLOAT16
    x[0] = __uint_as_float((high << 16) + (uint32_t)((int)(rest << 16) >> 16));
    x[1] = __uint_as_float((high & 0xffff0000u) + (uint32_t)((int)rest >> 16));
#else
    x[0] = __fmaf_rn(unpack((uint16_t)rest), 1.0f / 4096, unpack((uint16_t)high));
    x[1] = __fmaf_rn(unpack((uint16_t)(rest >> 16)), 1.0f / 4096, unpack((uint16_t)(high >> 16)));
#endif
}

/* The derivative of the softcap at a score. The score follows from P = exp(score - lse); where P is 0 any result will
 * do. */
__device__ __forceinline__ float slope_of_cap(float p, float lse, float softcap_inverse) {
    const float t = fmaxf(__fmaf_rn(lg2_approx(p), 1 / LOG2_E, lse) * softcap_inverse, -1.0f);
    return __fmaf_rn(-t, t, 1.0f);
}

#endif
