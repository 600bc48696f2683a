/* exp2.cuh: 2^x on the FMA pipe, for kernels that are short of the special function unit.
 *
 * x = n + f with |f| <= 1/2: rounding to an integer is an addition of 1.5 * 2^23, which leaves n in the low bits; 2^f
 * is a polynomial, the relative minimax of 2^f with value 1 at f = 0; n is added to the exponent. Relative error for
 * -126 <= x < 127: of the cubic at most 1.1e-4, small beside the rounding of P to bfloat16 (2^-9 = 2.0e-3), of the
 * quartic at most 3.2e-6, small beside that to float16 (2^-12 = 2.4e-4) too. */
#ifndef FDM_EXP2_CUH
#define FDM_EXP2_CUH

#define EX2_SHIFT 12582912.0f /* 1.5 * 2^23 */
/* Factors of f^1, f^2, ... */
#define EX2_CUBIC_1   0.6932829f
#define EX2_CUBIC_2   0.24221076f
#define EX2_CUBIC_3   0.055008747f
#define EX2_QUARTIC_1 0.693124175f
#define EX2_QUARTIC_2 0.240240991f
#define EX2_QUARTIC_3 0.0559064262f
#define EX2_QUARTIC_4 0.00958285294f

/* p * 2^n, n in the low bits of `shifted`. From -126 down the result is 0; NaN stays NaN. */
__device__ __forceinline__ float ex2_assemble(float x, float p, float shifted) {
    const float y = __int_as_float((int)((unsigned)__float_as_int(p) + ((unsigned)__float_as_int(shifted) << 23)));
    return x > -126.0f ? y : x == x ? 0.0f : x;
}
/* From 128 on, infinity. */
__device__ __forceinline__ float ex2_polynomial(float x) {
    const float bounded = fminf(fmaxf(x, -126.0f), 128.0f);
    const float shifted = __fadd_rn(bounded, EX2_SHIFT), f = __fadd_rn(bounded, -__fadd_rn(shifted, -EX2_SHIFT));
    const float p = __fmaf_rn(__fmaf_rn(__fmaf_rn(EX2_CUBIC_3, f, EX2_CUBIC_2), f, EX2_CUBIC_1), f, 1.0f);
    return ex2_assemble(x, p, shifted);
}
__device__ __forceinline__ float ex2_quartic(float x) {
    const float bounded = fminf(fmaxf(x, -126.0f), 128.0f);
    const float shifted = __fadd_rn(bounded, EX2_SHIFT), f = __fadd_rn(bounded, -__fadd_rn(shifted, -EX2_SHIFT));
    const float high = __fmaf_rn(__fmaf_rn(EX2_QUARTIC_4, f, EX2_QUARTIC_3), f, EX2_QUARTIC_2);
    return ex2_assemble(x, __fmaf_rn(__fmaf_rn(high, f, EX2_QUARTIC_1), f, 1.0f), shifted);
}

#endif
