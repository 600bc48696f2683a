/* avx512_ops.h: the vector operations over AVX-512 (F, BW, DQ, VL), 16 floats. See vector_ops.h for what each means. */
#ifndef FDM_CPU_AVX512_OPS_H
#define FDM_CPU_AVX512_OPS_H

#include <immintrin.h>
#include <stdint.h>

enum { VECTOR_WIDTH = 16, TILE_ACCUMULATORS = 24, TILE_VECTORS = 4 }; /* of 32 registers */

typedef __m512 vec;
typedef __mmask16 vec_mask;

/* Masks of the first count elements, count 0..16. */
static inline __mmask16 first_mask(int32_t count) { return (__mmask16)((1u << count) - 1); }

static inline vec vec_set(float x) { return _mm512_set1_ps(x); }
static inline vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vec_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
static inline vec vec_load_partial(const float *p, int32_t count) {
    return _mm512_maskz_loadu_ps(first_mask(count), p);
}
static inline void vec_store_partial(float *p, vec a, int32_t count) { _mm512_mask_storeu_ps(p, first_mask(count), a); }

static inline vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
#define VECTOR_SCALES /* these two take the place of vector_ops.h's */
static inline vec vec_split(vec x, vec *rest) {
    vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *rest = _mm512_sub_ps(x, whole);
    return whole;
}
static inline vec vec_scale(vec a, vec whole) { return _mm512_scalef_ps(a, whole); }
#define vec_shift_left(a, count) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), count))

static inline vec_mask vec_less(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline vec_mask vec_bits(uint64_t bits, int32_t first) { return (__mmask16)(bits >> first); }
static inline vec vec_select(vec_mask m, vec a, vec b) { return _mm512_mask_blend_ps(m, b, a); }
static inline int vec_any(vec_mask m) { return m != 0; }

static inline float vec_sum(vec a) { return _mm512_reduce_add_ps(a); }

static inline vec vec_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
static inline void vec_store_f16(uint16_t *p, vec a) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline vec vec_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline vec vec_load_pairs(const void *p) { return _mm512_loadu_ps(p); }
static inline vec vec_high_bf16(vec a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0xffff0000u)));
}
/* Round to nearest even by adding half an ulp less the parity; NaN becomes the quiet NaN. */
static inline void vec_store_bf16(uint16_t *p, vec a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

/* 16 x 16: pairs of floats, pairs of doubles, then 128-bit quarters. */
static inline void vec_transpose(vec rows[VECTOR_WIDTH]) {
    vec t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 2]);
        __m512d c = _mm512_castps_pd(t[i + 1]), d = _mm512_castps_pd(t[i + 3]);
        rows[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        rows[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        rows[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
        rows[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    }
    /* rows[4g + c] now holds, in quarter x, column 4x + c of source rows 4g .. 4g+3. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        vec a = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0x44), b = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0xee);
        vec d = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0x44);
        vec e = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0xee);
        t[c] = _mm512_shuffle_f32x4(a, d, 0x88);
        t[4 + c] = _mm512_shuffle_f32x4(a, d, 0xdd);
        t[8 + c] = _mm512_shuffle_f32x4(b, e, 0x88);
        t[12 + c] = _mm512_shuffle_f32x4(b, e, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        rows[i] = t[i];
}

static inline uint64_t bytes_nonzero(const uint8_t *p) {
    __m512i bytes = _mm512_loadu_si512((const void *)p);
    return _mm512_test_epi8_mask(bytes, bytes);
}

#endif
