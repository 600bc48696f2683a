/* topk_order.cuh: biases as integers in the order of the choice. Constant: DTYPE. */
#ifndef FDM_TOPK_ORDER_CUH
#define FDM_TOPK_ORDER_CUH

#include "gpu/forward_params.h"

#define VALUE_BITS (DTYPE == GPU_FLOAT32 ? 32 : 16)

/* Of an infinite bias, without its sign. */
__device__ __forceinline__ uint32_t infinite_bits() {
    return DTYPE == GPU_FLOAT32 ? 0x7f800000u : DTYPE == GPU_FLOAT16 ? 0x7c00u : 0x7f80u;
}

/* Larger is better; NaN as -inf, one zero; never 0. */
__device__ __forceinline__ uint32_t ordered(uint32_t bits) {
    const uint32_t sign = 1u << (VALUE_BITS - 1);
    if ((bits & ~sign) > infinite_bits())
        bits = sign | infinite_bits();
    if (bits == sign)
        bits = 0;
    return bits ^ (bits & sign ? sign | (sign - 1) : sign);
}

#endif
