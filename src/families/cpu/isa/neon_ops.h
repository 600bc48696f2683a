/* neon_ops.h: the vector operations over AArch64's Advanced SIMD, 4 floats. See vector_ops.h for what each means. */
#ifndef FDM_CPU_NEON_OPS_H
#define FDM_CPU_NEON_OPS_H

#include <arm_neon.h>
#include <stdint.h>

enum { VECTOR_WIDTH = 4, TILE_ACCUMULATORS = 24, TILE_VECTORS = 4 }; /* of 32 registers */

typedef float32x4_t vec;
typedef uint32x4_t vec_mask; /* all bits of an element set or clear */

static inline vec vec_set(float x) { return vdupq_n_f32(x); }
static inline vec vec_load(const float *p) { return vld1q_f32(p); }
static inline void vec_store(float *p, vec a) { vst1q_f32(p, a); }
static inline vec vec_load_partial(const float *p, int32_t count) {
    float t[VECTOR_WIDTH] = {0};
    for (int32_t i = 0; i < count; i++)
        t[i] = p[i];
    return vld1q_f32(t);
}
static inline void vec_store_partial(float *p, vec a, int32_t count) {
    float t[VECTOR_WIDTH];
    vst1q_f32(t, a);
    for (int32_t i = 0; i < count; i++)
        p[i] = t[i];
}

static inline vec vec_add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec vec_sub(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec vec_mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec vec_div(vec a, vec b) { return vdivq_f32(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
static inline vec_mask vec_less(vec a, vec b) { return vcltq_f32(a, b); }
static inline vec_mask vec_bits(uint64_t bits, int32_t first) {
    const uint32x4_t lane = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32((uint32_t)(bits >> first)), lane);
}
static inline vec vec_select(vec_mask m, vec a, vec b) { return vbslq_f32(m, a, b); }
static inline int vec_any(vec_mask m) { return vmaxvq_u32(m) != 0; }
static inline vec vec_max(vec a, vec b) { return vec_select(vcgtq_f32(a, b), a, b); }
static inline vec vec_min(vec a, vec b) { return vec_select(vcltq_f32(a, b), a, b); }
#define vec_shift_left(a, count) vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a), count))

static inline float vec_sum(vec a) { return vaddvq_f32(a); }

static inline vec vec_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline void vec_store_f16(uint16_t *p, vec a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
static inline vec vec_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline vec vec_load_pairs(const void *p) { return vreinterpretq_f32_u16(vld1q_u16(p)); }
static inline vec vec_high_bf16(vec a) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0xffff0000u)));
}
/* Round to nearest even by adding half an ulp less the parity; NaN becomes the quiet NaN. */
static inline void vec_store_bf16(uint16_t *p, vec a) {
    uint32x4_t bits = vreinterpretq_u32_f32(a);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    rounded = vbslq_u32(vceqq_f32(a, a), rounded, vdupq_n_u32(0x7fc00000));
    vst1_u16(p, vshrn_n_u32(rounded, 16));
}

static inline void vec_transpose(vec rows[VECTOR_WIDTH]) {
    float32x4x2_t a = vtrnq_f32(rows[0], rows[1]), b = vtrnq_f32(rows[2], rows[3]);
    rows[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    rows[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    rows[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    rows[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

/* Bits of 8 bytes: each set byte keeps one bit, and the sum across gathers them. */
static inline uint64_t bytes_nonzero(const uint8_t *p) {
    const uint8x8_t lane = {1, 2, 4, 8, 16, 32, 64, 128};
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) {
        uint8x8_t bytes = vld1_u8(p + 8 * i);
        bits |= (uint64_t)vaddv_u8(vand_u8(vtst_u8(bytes, bytes), lane)) << (8 * i);
    }
    return bits;
}

#endif
