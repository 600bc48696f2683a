/* finite.cuh: which 16-bit numbers are NaN or inf. */
#ifndef FDM_FINITE_CUH
#define FDM_FINITE_CUH

#include "cuda/ptx/types.cuh"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

#define NOT_A_NUMBER (__int_as_float(0x7fffffff))

/* Not 0 where one of a word's two numbers is not finite. The exponent of such a number has all bits set: their
 * complement is 0, and the subtraction borrows the bit above. */
__device__ __forceinline__ uint32_t not_finite(uint32_t word) {
    constexpr uint32_t exponents = DTYPE == GPU_BFLOAT16 ? 0x7f807f80u : 0x7c007c00u;
    return ((~word & exponents) - 0x00010001u) & 0x80008000u;
}
/* Not 0 where one of eight numbers is NaN. Without its sign, a NaN is above inf. */
__device__ __forceinline__ uint32_t holds_nan(const uint32_t (&word)[4]) {
    constexpr uint32_t above_inf = DTYPE == GPU_BFLOAT16 ? 0x007f007fu : 0x03ff03ffu; /* carries past the highest bit */
    uint32_t nan = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        nan |= (word[i] & 0x7fff7fffu) + above_inf;
    return nan & 0x80008000u;
}
/* Bit n, where one of the eight numbers is NaN. */
__device__ __forceinline__ uint32_t nan_bit(const uint32_t (&word)[4], int n) {
    return (uint32_t)(holds_nan(word) != 0) << n;
}
__device__ __forceinline__ uint32_t not_finite(const uint32_t (&word)[4]) {
    return not_finite(word[0]) | not_finite(word[1]) | not_finite(word[2]) | not_finite(word[3]);
}

#endif
