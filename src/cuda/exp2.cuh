/* exp2.cuh: 2^x on the FMA pipe, for kernels that are short of the special function unit.
 *
 * x = n + f with |f| <= 1/2: rounding to an integer is an addition of 1.5 * 2^23, which leaves n in the low bits; 2^f
 * is a cubic, the relative minimax of 2^f with value 1 at f = 0; n is added to the exponent. Relative error at
 * most 1.1e-4 for -126 <= x < 127, small beside the rounding of P to 16 bits (2^-9 for bfloat16, 2^-12 for
 * float16: 2.4e-4). */
#ifndef FDM_EXP2_CUH
#define FDM_EXP2_CUH

/* From -126 down the result is 0; NaN stays NaN; from 128 on, infinity. */
__device__ __forceinline__ float ex2_polynomial(float x) {
    const float bounded = fminf(fmaxf(x, -126.0f), 128.0f);
    const float shifted = __fadd_rn(bounded, 12582912.0f), f = __fadd_rn(bounded, -__fadd_rn(shifted, -12582912.0f));
    const float p = __fmaf_rn(__fmaf_rn(__fmaf_rn(0.055008747f, f, 0.24221076f), f, 0.6932829f), f, 1.0f);
    const float y = __int_as_float((int)((unsigned)__float_as_int(p) + ((unsigned)__float_as_int(shifted) << 23)));
    return x > -126.0f ? y : x == x ? 0.0f : x;
}

#endif
