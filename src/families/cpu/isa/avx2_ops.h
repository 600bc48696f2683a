/* avx2_ops.h: the vector operations over AVX2, FMA and F16C, 8 floats. See vector_ops.h for what each means. */
#ifndef FDM_CPU_AVX2_OPS_H
#define FDM_CPU_AVX2_OPS_H

#include <immintrin.h>
#include <stdint.h>

enum { VECTOR_WIDTH = 8, TILE_ACCUMULATORS = 12, TILE_VECTORS = 2 }; /* of 16 registers */

typedef __m256 vec;
typedef __m256 vec_mask; /* all bits of an element set or clear */

/* Masks of the first count elements, count 0..8. */
static inline __m256i first_mask(int32_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vec vec_set(float x) { return _mm256_set1_ps(x); }
static inline vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vec_store(float *p, vec a) { _mm256_storeu_ps(p, a); }
static inline vec vec_load_partial(const float *p, int32_t count) { return _mm256_maskload_ps(p, first_mask(count)); }
static inline void vec_store_partial(float *p, vec a, int32_t count) { _mm256_maskstore_ps(p, first_mask(count), a); }

static inline vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }

static inline vec_mask vec_less(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline vec_mask vec_bits(uint64_t bits, int32_t first) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i wanted = _mm256_and_si256(_mm256_set1_epi32((int)(bits >> first & 0xff)), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(wanted, lane));
}
static inline vec vec_select(vec_mask m, vec a, vec b) { return _mm256_blendv_ps(b, a, m); }
static inline int vec_any(vec_mask m) { return _mm256_movemask_ps(m) != 0; }

#define vec_shift_left(a, count) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), count))

static inline float vec_sum(vec a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

static inline vec vec_load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
static inline void vec_store_f16(uint16_t *p, vec a) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline vec vec_load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vec vec_load_pairs(const void *p) { return _mm256_loadu_ps(p); }
static inline vec vec_high_bf16(vec a) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32((int)0xffff0000u)));
}
/* Round to nearest even by adding half an ulp less the parity; NaN becomes the quiet NaN. */
static inline void vec_store_bf16(uint16_t *p, vec a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(packed));
}

/* 8 x 8: pairs of floats, pairs of doubles, then halves. */
static inline void vec_transpose(vec rows[VECTOR_WIDTH]) {
    vec t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        rows[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        rows[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        rows[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        rows[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vec low = rows[i], high = rows[i + 4];
        rows[i] = _mm256_permute2f128_ps(low, high, 0x20);
        rows[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
}

static inline uint64_t bytes_nonzero(const uint8_t *p) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i low = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(const void *)p), zero);
    __m256i high = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(const void *)(p + 32)), zero);
    return ~((uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32 | (uint32_t)_mm256_movemask_epi8(low));
}

#endif
