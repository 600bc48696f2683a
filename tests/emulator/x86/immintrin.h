/* immintrin.h: AVX-512, AVX-512-BF16 and AMX for machines that have AVX2, FMA and F16C at most.
 *
 * Where kernels are compiled for the emulated sets this folder is searched before the compiler's own, so that this file
 * is found; it includes the compiler's. Types, names of immediates and 256-bit intrinsics are the compiler's. Each
 * wider intrinsic that a kernel uses is a function of this file, written after the description of its instruction in
 * Intel's manual, volume 2; where AVX2 has the instruction for 256 bits, that does both halves. What a kernel uses and
 * this file lacks is an error when the kernel is compiled. Only payloads of NaN may differ from the processor's. */
#ifndef FDM_EMULATED_IMMINTRIN_H
#define FDM_EMULATED_IMMINTRIN_H

#include_next <immintrin.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EMU static inline __attribute__((unused))
/* Fails to compile where the condition on an immediate does not hold. */
#define EMU_ONLY(condition) ((void)sizeof(char[(condition) ? 1 : -1]))

union emu_wide {
    __m512 f;
    __m512i i;
    __m256 half[2];
    __m256i half_i[2];
    __m128 quarter[4];
    float f32[16];
    uint32_t u32[16];
    uint16_t u16[32];
};

EMU __m256 emu_low(__m512 a) { return ((union emu_wide){.f = a}).half[0]; }
EMU __m256 emu_high(__m512 a) { return ((union emu_wide){.f = a}).half[1]; }
EMU __m512 emu_join(__m256 low, __m256 high) { return ((union emu_wide){.half = {low, high}}).f; }
EMU __m256i emu_low_i(__m512i a) { return ((union emu_wide){.i = a}).half_i[0]; }
EMU __m256i emu_high_i(__m512i a) { return ((union emu_wide){.i = a}).half_i[1]; }
EMU __m512i emu_join_i(__m256i low, __m256i high) { return ((union emu_wide){.half_i = {low, high}}).i; }

/* ---- memory ---- */

EMU __m512 emu_loadu_ps(const void *p) {
    union emu_wide a;
    memcpy(&a, p, sizeof a);
    return a.f;
}
EMU void emu_storeu_ps(void *p, __m512 a) { memcpy(p, &a, sizeof a); }
EMU __m512i emu_loadu_si512(const void *p) { return (__m512i)emu_loadu_ps(p); }
EMU void emu_storeu_si512(void *p, __m512i a) { memcpy(p, &a, sizeof a); }
/* An address that is no multiple of 64 is #GP. */
EMU __m512i emu_load_si512(const void *p) {
    if ((uintptr_t)p % 64) {
        fprintf(stderr, "emulated AVX-512: aligned load at %p\n", p);
        abort();
    }
    return emu_loadu_si512(p);
}
/* Elements outside the mask are not touched: there may be no page. */
EMU __m512 emu_maskz_loadu_ps(__mmask16 mask, const void *p) {
    union emu_wide out = {.f = {0}};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            memcpy(&out.u32[i], (const char *)p + 4 * i, 4);
    return out.f;
}
EMU void emu_mask_storeu_ps(void *p, __mmask16 mask, __m512 a) {
    const union emu_wide in = {.f = a};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            memcpy((char *)p + 4 * i, &in.u32[i], 4);
}

#define _mm512_loadu_ps       emu_loadu_ps
#define _mm512_storeu_ps      emu_storeu_ps
#define _mm512_loadu_si512    emu_loadu_si512
#define _mm512_storeu_si512   emu_storeu_si512
#define _mm512_load_si512     emu_load_si512
#define _mm512_maskz_loadu_ps emu_maskz_loadu_ps
#define _mm512_mask_storeu_ps emu_mask_storeu_ps

/* ---- casts and constants ---- */

EMU __m512 emu_castsi512_ps(__m512i a) { return (__m512)a; }
EMU __m512i emu_castps_si512(__m512 a) { return (__m512i)a; }
EMU __m512d emu_castps_pd(__m512 a) { return (__m512d)a; }
EMU __m512 emu_castpd_ps(__m512d a) { return (__m512)a; }
EMU __m512 emu_set1_ps(float x) { return emu_join(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
EMU __m512i emu_set1_epi32(int x) { return emu_join_i(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
EMU __m512i emu_reversed(const short x[32]) {
    union emu_wide out;
    for (int i = 0; i < 32; i++)
        out.u16[i] = (uint16_t)x[31 - i];
    return out.i;
}

#define _mm512_castsi512_ps   emu_castsi512_ps
#define _mm512_castps_si512   emu_castps_si512
#define _mm512_castps_pd      emu_castps_pd
#define _mm512_castpd_ps      emu_castpd_ps
#define _mm512_set1_ps        emu_set1_ps
#define _mm512_set1_epi32     emu_set1_epi32
#define _mm512_set_epi16(...) emu_reversed((const short[32]){__VA_ARGS__}) /* the highest element comes first */

/* ---- float32 ---- */

EMU __m512 emu_add_ps(__m512 a, __m512 b) {
    return emu_join(_mm256_add_ps(emu_low(a), emu_low(b)), _mm256_add_ps(emu_high(a), emu_high(b)));
}
EMU __m512 emu_sub_ps(__m512 a, __m512 b) {
    return emu_join(_mm256_sub_ps(emu_low(a), emu_low(b)), _mm256_sub_ps(emu_high(a), emu_high(b)));
}
EMU __m512 emu_mul_ps(__m512 a, __m512 b) {
    return emu_join(_mm256_mul_ps(emu_low(a), emu_low(b)), _mm256_mul_ps(emu_high(a), emu_high(b)));
}
EMU __m512 emu_div_ps(__m512 a, __m512 b) {
    return emu_join(_mm256_div_ps(emu_low(a), emu_low(b)), _mm256_div_ps(emu_high(a), emu_high(b)));
}
EMU __m512 emu_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return emu_join(_mm256_fmadd_ps(emu_low(a), emu_low(b), emu_low(c)),
                    _mm256_fmadd_ps(emu_high(a), emu_high(b), emu_high(c)));
}
/* The second operand where either is NaN or both are zeros, as with 256 bits. */
EMU __m512 emu_max_ps(__m512 a, __m512 b) {
    return emu_join(_mm256_max_ps(emu_low(a), emu_low(b)), _mm256_max_ps(emu_high(a), emu_high(b)));
}
EMU __m512 emu_min_ps(__m512 a, __m512 b) {
    return emu_join(_mm256_min_ps(emu_low(a), emu_low(b)), _mm256_min_ps(emu_high(a), emu_high(b)));
}
EMU __mmask16 emu_signs(__m256 low, __m256 high) {
    return (__mmask16)(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}
/* No instruction but a sequence; the order of the additions is that of gcc and clang. */
EMU float emu_reduce_add_ps(__m512 a) {
    union emu_wide x = {.f = a};
    for (int count = 8; count > 0; count /= 2)
        for (int i = 0; i < count; i++)
            x.f32[i] += x.f32[i + count];
    return x.f32[0];
}

#define _mm512_add_ps        emu_add_ps
#define _mm512_sub_ps        emu_sub_ps
#define _mm512_mul_ps        emu_mul_ps
#define _mm512_div_ps        emu_div_ps
#define _mm512_fmadd_ps      emu_fmadd_ps
#define _mm512_max_ps        emu_max_ps
#define _mm512_min_ps        emu_min_ps
#define _mm512_reduce_add_ps emu_reduce_add_ps
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, predicate) \
    emu_signs(_mm256_cmp_ps(emu_low(a), emu_low(b), predicate), _mm256_cmp_ps(emu_high(a), emu_high(b), predicate))

/* ---- float32: rounding, powers of two ---- */

/* VRNDSCALEPS rounds to multiples of 2^-(immediate >> 4); here to whole numbers alone, for which AVX has it. */
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(a, immediate) \
    (EMU_ONLY((immediate) < 16),           \
     emu_join(_mm256_round_ps(emu_low(a), immediate), _mm256_round_ps(emu_high(a), immediate)))

/* VREDUCEPS: x less x rounded down. The difference is rounded down too: it is below 1 where x is a negative number near
 * 0. It is -0 where x is whole (in this direction), 0 of an infinity. */
EMU float emu_above_floor(float x) {
    if (isinf(x))
        return 0.0f;
    const float whole = floorf(x), above = x - whole;
    if (above == 0)
        return -0.0f;
    return above + whole > x ? nextafterf(above, 0.0f) : above;
}
EMU __m512 emu_above_floor_ps(__m512 a) {
    union emu_wide x = {.f = a};
    for (int i = 0; i < 16; i++)
        x.f32[i] = emu_above_floor(x.f32[i]);
    return x.f;
}
#undef _mm512_reduce_ps
#define _mm512_reduce_ps(a, immediate) (EMU_ONLY((immediate) == _MM_FROUND_TO_NEG_INF), emu_above_floor_ps(a))

EMU int emu_signals(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return isnan(x) && !(bits & 0x00400000);
}
/* VSCALEFPS: a * 2^floor(b), rounded once, to subnormal numbers too. A quiet NaN times 2^inf is inf, times 2^-inf 0;
 * 0 * 2^inf and inf * 2^-inf are NaN. */
EMU float emu_scalef(float a, float b) {
    if (isnan(a) && (!isinf(b) || emu_signals(a)))
        return a + a;
    if (isnan(b))
        return b + b;
    if (isinf(b) && b > 0)
        return a == 0 ? NAN : isnan(a) ? INFINITY : copysignf(INFINITY, a);
    if (isinf(b))
        return isinf(a) ? NAN : isnan(a) ? 0 : copysignf(0, a);
    /* The product is exact in double; beyond 2^+-400 every a overflows or vanishes. */
    const double exponent = fmin(fmax(floor((double)b), -400), 400);
    const uint64_t bits = (uint64_t)(1023 + (int)exponent) << 52;
    double power;
    memcpy(&power, &bits, 8);
    return (float)((double)a * power);
}
EMU __m512 emu_scalef_ps(__m512 a, __m512 b) {
    union emu_wide x = {.f = a};
    const union emu_wide y = {.f = b};
    for (int i = 0; i < 16; i++)
        x.f32[i] = emu_scalef(x.f32[i], y.f32[i]);
    return x.f;
}
#define _mm512_scalef_ps emu_scalef_ps

/* ---- integers and bits ---- */

EMU __m512i emu_add_epi32(__m512i a, __m512i b) {
    return emu_join_i(_mm256_add_epi32(emu_low_i(a), emu_low_i(b)), _mm256_add_epi32(emu_high_i(a), emu_high_i(b)));
}
EMU __m512i emu_and_si512(__m512i a, __m512i b) {
    return emu_join_i(_mm256_and_si256(emu_low_i(a), emu_low_i(b)), _mm256_and_si256(emu_high_i(a), emu_high_i(b)));
}
EMU __m512i emu_slli_epi32(__m512i a, unsigned count) {
    return emu_join_i(_mm256_slli_epi32(emu_low_i(a), (int)count), _mm256_slli_epi32(emu_high_i(a), (int)count));
}
EMU __m512i emu_srli_epi32(__m512i a, unsigned count) {
    return emu_join_i(_mm256_srli_epi32(emu_low_i(a), (int)count), _mm256_srli_epi32(emu_high_i(a), (int)count));
}
EMU uint32_t emu_bytes_nonzero(__m256i a) {
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, _mm256_setzero_si256()));
}
EMU __mmask64 emu_test_epi8_mask(__m512i a, __m512i b) {
    const __m512i both = emu_and_si512(a, b);
    return (uint64_t)emu_bytes_nonzero(emu_high_i(both)) << 32 | emu_bytes_nonzero(emu_low_i(both));
}

#undef _mm512_slli_epi32 /* without optimisation some are the compiler's macros */
#undef _mm512_srli_epi32
#define _mm512_add_epi32      emu_add_epi32
#define _mm512_and_si512      emu_and_si512
#define _mm512_slli_epi32     emu_slli_epi32
#define _mm512_srli_epi32     emu_srli_epi32
#define _mm512_test_epi8_mask emu_test_epi8_mask

/* ---- elements by a mask or an index: b where the mask has a bit, else a ---- */

EMU __m256 emu_blend_half(unsigned mask, __m256 a, __m256 b) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)mask), bits), bits);
    return _mm256_blendv_ps(a, b, (__m256)chosen);
}
EMU __m512 emu_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
    return emu_join(emu_blend_half(mask & 0xff, emu_low(a), emu_low(b)),
                    emu_blend_half(mask >> 8, emu_high(a), emu_high(b)));
}
EMU __m512i emu_mask_mov_epi32(__m512i a, __mmask16 mask, __m512i b) {
    return (__m512i)emu_mask_blend_ps(mask, (__m512)a, (__m512)b);
}
EMU __m512i emu_mask_blend_epi16(__mmask32 mask, __m512i a, __m512i b) {
    union emu_wide out = {.i = a};
    const union emu_wide other = {.i = b};
    for (int i = 0; i < 32; i++)
        out.u16[i] = mask >> i & 1 ? other.u16[i] : out.u16[i];
    return out.i;
}
EMU __m512i emu_permutexvar_epi16(__m512i index, __m512i a) {
    const union emu_wide from = {.i = a}, at = {.i = index};
    union emu_wide out;
    for (int i = 0; i < 32; i++)
        out.u16[i] = from.u16[at.u16[i] % 32];
    return out.i;
}
/* Two quarters of a, two of b. */
EMU __m512 emu_shuffle_f32x4(__m512 a, __m512 b, int immediate) {
    const union emu_wide x = {.f = a}, y = {.f = b};
    return ((union emu_wide){.quarter = {x.quarter[immediate & 3], x.quarter[immediate >> 2 & 3],
                                         y.quarter[immediate >> 4 & 3], y.quarter[immediate >> 6 & 3]}})
        .f;
}
/* Within each quarter, as with 256 bits. */
EMU __m512 emu_unpacklo_ps(__m512 a, __m512 b) {
    return emu_join(_mm256_unpacklo_ps(emu_low(a), emu_low(b)), _mm256_unpacklo_ps(emu_high(a), emu_high(b)));
}
EMU __m512 emu_unpackhi_ps(__m512 a, __m512 b) {
    return emu_join(_mm256_unpackhi_ps(emu_low(a), emu_low(b)), _mm256_unpackhi_ps(emu_high(a), emu_high(b)));
}
EMU __m512d emu_unpacklo_pd(__m512d a, __m512d b) {
    const __m512i x = (__m512i)a, y = (__m512i)b;
    return (__m512d)emu_join_i(_mm256_unpacklo_epi64(emu_low_i(x), emu_low_i(y)),
                               _mm256_unpacklo_epi64(emu_high_i(x), emu_high_i(y)));
}
EMU __m512d emu_unpackhi_pd(__m512d a, __m512d b) {
    const __m512i x = (__m512i)a, y = (__m512i)b;
    return (__m512d)emu_join_i(_mm256_unpackhi_epi64(emu_low_i(x), emu_low_i(y)),
                               _mm256_unpackhi_epi64(emu_high_i(x), emu_high_i(y)));
}

#undef _mm512_mask_blend_epi16
#undef _mm512_shuffle_f32x4
#define _mm512_mask_blend_ps     emu_mask_blend_ps
#define _mm512_mask_mov_epi32    emu_mask_mov_epi32
#define _mm512_mask_blend_epi16  emu_mask_blend_epi16
#define _mm512_permutexvar_epi16 emu_permutexvar_epi16
#define _mm512_unpacklo_ps       emu_unpacklo_ps
#define _mm512_unpackhi_ps       emu_unpackhi_ps
#define _mm512_unpacklo_pd       emu_unpacklo_pd
#define _mm512_unpackhi_pd       emu_unpackhi_pd
#define _mm512_shuffle_f32x4     emu_shuffle_f32x4

/* ---- conversions ---- */

EMU __m512 emu_cvtph_ps(__m256i a) {
    return emu_join(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(a, immediate) \
    _mm256_set_m128i(_mm256_cvtps_ph(emu_high(a), immediate), _mm256_cvtps_ph(emu_low(a), immediate))
EMU __m512i emu_cvtepu16_epi32(__m256i a) {
    return emu_join_i(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                      _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
/* Cuts off the upper halves. */
EMU __m256i emu_cvtepi32_epi16(__m512i a) {
    union emu_wide x = {.i = a};
    for (int i = 0; i < 16; i++)
        x.u16[i] = x.u16[2 * i];
    return x.half_i[0];
}

/* To nearest even; subnormal numbers become zeros of their sign, NaN quiet. The same in VCVTNEPS2BF16 and
 * VCVTNE2PS2BF16; neither looks at MXCSR. */
EMU uint16_t emu_bfloat16(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffff, upper = bits >> 16;
    if (magnitude > 0x7f800000)
        return (uint16_t)(upper | 0x40);
    if (magnitude < 0x00800000)
        return upper & 0x8000;
    return (uint16_t)((bits + 0x7fff + (upper & 1)) >> 16);
}
EMU __m256bh emu_cvtneps_pbh(__m512 a) {
    union emu_wide x = {.f = a};
    for (int i = 0; i < 16; i++)
        x.u16[i] = emu_bfloat16(x.u32[i]);
    return (__m256bh)x.half_i[0];
}
/* The second operand is the lower half. */
EMU __m512bh emu_cvtne2ps_pbh(__m512 a, __m512 b) {
    return (__m512bh)emu_join_i((__m256i)emu_cvtneps_pbh(b), (__m256i)emu_cvtneps_pbh(a));
}

#define _mm512_cvtph_ps       emu_cvtph_ps
#define _mm512_cvtepu16_epi32 emu_cvtepu16_epi32
#define _mm512_cvtepi32_epi16 emu_cvtepi32_epi16
#define _mm512_cvtneps_pbh    emu_cvtneps_pbh
#define _mm512_cvtne2ps_pbh   emu_cvtne2ps_pbh

/* ---- products of bfloat16 ---- */

/* MXCSR for them: to nearest even, subnormal operands and results are 0, no traps. They do not look at the program's.
 */
#define EMU_FLUSHING 0x9fc0u
/* The compiler knows nothing of MXCSR; what is computed from a pinned value, and pinned, stays between two of these. */
#define EMU_PIN(value) __asm__ volatile("" : "+x"(value))

EMU __m256 emu_lower_bfloat16(__m256i pairs) { return (__m256)_mm256_slli_epi32(pairs, 16); }
EMU __m256 emu_upper_bfloat16(__m256i pairs) {
    return (__m256)_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u));
}
/* VDPBF16PS, as the manual's operation has it: the product of the odd elements is added first, then that of the even
 * ones, each by an FMA. */
EMU __m256 emu_dot_half(__m256 sum, __m256i a, __m256i b) {
    EMU_PIN(sum);
    EMU_PIN(a);
    EMU_PIN(b);
    sum = _mm256_fmadd_ps(emu_upper_bfloat16(a), emu_upper_bfloat16(b), sum);
    sum = _mm256_fmadd_ps(emu_lower_bfloat16(a), emu_lower_bfloat16(b), sum);
    EMU_PIN(sum);
    return sum;
}
EMU __m512 emu_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const __m512i x = (__m512i)a, y = (__m512i)b;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(EMU_FLUSHING);
    const __m256 low = emu_dot_half(emu_low(sum), emu_low_i(x), emu_low_i(y));
    const __m256 high = emu_dot_half(emu_high(sum), emu_high_i(x), emu_high_i(y));
    _mm_setcsr(before);
    return emu_join(low, high);
}
#define _mm512_dpbf16_ps emu_dpbf16_ps

/* ---- tiles: amx_tiles.c; their state is the thread's ---- */

void emu_tile_loadconfig(const void *config);
void emu_tile_release(void);
void emu_tile_zero(int tile);
void emu_tile_loadd(int tile, const void *base, size_t stride);
void emu_tile_stored(int tile, void *base, size_t stride);
void emu_tile_dpbf16ps(int sums, int a, int b);

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emu_tile_loadconfig
#define _tile_release    emu_tile_release
#define _tile_zero       emu_tile_zero
#define _tile_loadd      emu_tile_loadd
#define _tile_stored     emu_tile_stored
#define _tile_dpbf16ps   emu_tile_dpbf16ps

#endif
