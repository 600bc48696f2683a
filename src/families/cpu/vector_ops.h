/* vector_ops.h: the vocabulary the tiles are written in, and what follows from it: conversions, exp2, tanh.
 *
 * Each instruction set's header (isa/avx512_ops.h, isa/avx2_ops.h, isa/neon_ops.h, isa/portable_ops.h) is included
 * before this one and defines, for vectors of VECTOR_WIDTH floats:
 *
 *     vec, vec_mask                         a vector; a truth value per element
 *     vec_set(x)                            all elements x
 *     vec_load(p), vec_store(p, a)          any alignment
 *     vec_load_partial(p, count)            elements below count, the others 0; touches nothing else
 *     vec_store_partial(p, a, count)
 *     vec_add, vec_sub, vec_mul, vec_div    of (a, b)
 *     vec_fma(a, b, c)                      a * b + c
 *     vec_max(a, b), vec_min(a, b)          b where either is NaN
 *     vec_shift_left(a, count)              the bits of each element, count a constant
 *     vec_less(a, b)                        a < b; false where either is NaN
 *     vec_bits(bits, first)                 bits first .. first + VECTOR_WIDTH - 1 of an uint64_t
 *     vec_select(mask, a, b)                a where true, else b
 *     vec_any(mask)                         whether any element is true
 *     vec_sum(a)                            the sum of the elements, a float
 *     vec_load_f16(p), vec_load_bf16(p)     VECTOR_WIDTH 16-bit values to float; and vec_store_*(p, a), nearest even
 *     vec_load_pairs(p)                     2 * VECTOR_WIDTH 16-bit values as they are; of bfloat16, to float:
 *     vec_high_bf16(a)                      the odd ones, as vec_low_bf16() gives the even ones
 *     vec_transpose(rows)                   rows[VECTOR_WIDTH] of vec, in place
 *     bytes_nonzero(p)                      bit i = p[i] != 0, for 64 bytes
 *     TILE_VECTORS, TILE_ACCUMULATORS       vectors of lanes in a register tile, and registers for sums
 *     VECTOR_SCALES                         only with vec_split() and vec_scale() of its own, see below
 */
#ifndef FDM_CPU_VECTOR_OPS_H
#define FDM_CPU_VECTOR_OPS_H

#include <float.h>
#include <math.h>
#include <string.h>

#include "families/cpu/kernels.h"

#define INLINE static inline __attribute__((always_inline))
/* A function for the table; a table with operands of its own leaves some unused. */
#define TILE_ENTRY static __attribute__((unused))

#define LOG2_E 1.44269504088896340736f
#define LN_2   0.69314718055994530942f

/* The even ones of bfloat16 pairs: the first of a pair is the low half, little-endian, as every target here is. */
INLINE vec vec_low_bf16(vec pairs) { return vec_shift_left(pairs, 16); }

/* vec_split: x <= 128 as a whole number, to the nearest, and a rest, which takes NaN; gives the former in the form in
 * which vec_scale takes it: a * 2^whole, 0 where x was -inf. Here that form is 2^whole: adding 1.5 * 2^23 leaves no
 * fraction bits; with 127 more the low bits are its exponent field, 0 of what is below -126.5. */
#ifndef VECTOR_SCALES
INLINE vec vec_split(vec x, vec *rest) {
    const vec magic = vec_set(12582912.0f + 127.0f);
    x = vec_max(vec_set(-127.0f), x);
    vec moved = vec_add(x, magic);
    *rest = vec_sub(x, vec_sub(moved, magic));
    return vec_shift_left(moved, 23);
}
INLINE vec vec_scale(vec a, vec power) { return vec_mul(a, power); }
#endif

/* 2^x; -inf gives 0, NaN stays. Degree 6 on [-1/2, 1/2], fitted for the least largest relative error (2e-9) with the
 * constant held at 1, so that 2^0 is 1; in float32 the rounding leaves about 1 ulp. Without vscalefps, results below
 * 2^-126.5 are 0. */
INLINE vec vec_exp2(vec x) {
    vec f, whole = vec_split(x, &f);
    vec p = vec_fma(vec_set(0.00015353362f), f, vec_set(0.0013398875f));
    p = vec_fma(p, f, vec_set(0.009618437f));
    p = vec_fma(p, f, vec_set(0.055503324f));
    p = vec_fma(p, f, vec_set(0.24022648f));
    p = vec_fma(p, f, vec_set(0.6931472f));
    p = vec_fma(p, f, vec_set(1.0f));
    return vec_scale(p, whole);
}

/* tanh: below 0.625 an odd polynomial (relative fit 4e-9), above 1 - 2 / (e^2|x| + 1); NaN stays. */
INLINE vec vec_tanh(vec x) {
    const vec zero = vec_set(0.0f), one = vec_set(1.0f);
    vec magnitude = vec_max(vec_sub(zero, x), x), square = vec_mul(x, x);
    vec p = vec_fma(vec_set(-0.0057049785f), square, vec_set(0.02063908f));
    p = vec_fma(p, square, vec_set(-0.05373971f));
    p = vec_fma(p, square, vec_set(0.13331442f));
    p = vec_fma(p, square, vec_set(-0.3333328f));
    vec small = vec_fma(vec_mul(p, square), x, x);
    vec power = vec_exp2(vec_mul(vec_min(vec_set(10.0f), magnitude), vec_set(2 * LOG2_E)));
    vec large = vec_sub(one, vec_div(vec_set(2.0f), vec_add(power, one)));
    large = vec_select(vec_less(x, zero), vec_sub(zero, large), large);
    return vec_select(vec_less(magnitude, vec_set(0.625f)), small, large);
}

/* Where a bias is -inf: it hides a key whatever the score is, a NaN too. */
INLINE vec_mask vec_barred(vec bias) { return vec_less(bias, vec_set(-FLT_MAX)); }

/* count elements (1 .. VECTOR_WIDTH) of dtype (float32, float16, bfloat16) as float32, the others 0. */
INLINE vec vec_load_as(const void *p, int32_t count, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32)
        return count == VECTOR_WIDTH ? vec_load(p) : vec_load_partial(p, count);
    uint16_t halves[VECTOR_WIDTH];
    if (count < VECTOR_WIDTH) {
        memset(halves, 0, sizeof halves);
        for (int32_t i = 0; i < count; i++)
            memcpy(&halves[i], (const char *)p + 2 * i, 2);
        p = halves;
    }
    return dtype == FDM_FLOAT16 ? vec_load_f16(p) : vec_load_bf16(p);
}

/* The first count elements (1 .. VECTOR_WIDTH), rounded to dtype. */
INLINE void vec_store_as(void *p, vec a, int32_t count, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32) {
        if (count == VECTOR_WIDTH)
            vec_store(p, a);
        else
            vec_store_partial(p, a, count);
        return;
    }
    uint16_t halves[VECTOR_WIDTH], *to = count == VECTOR_WIDTH ? p : halves;
    if (dtype == FDM_FLOAT16)
        vec_store_f16(to, a);
    else
        vec_store_bf16(to, a);
    if (to == halves)
        memcpy(p, halves, 2 * (size_t)count);
}

/* One element of dtype as float32; strided bias is read through it. */
INLINE float load_scalar_as(const void *p, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32)
        return *(const float *)p;
    uint16_t halves[VECTOR_WIDTH] = {*(const uint16_t *)p};
    float wide[VECTOR_WIDTH];
    vec_store(wide, dtype == FDM_FLOAT16 ? vec_load_f16(halves) : vec_load_bf16(halves));
    return wide[0];
}

#endif
