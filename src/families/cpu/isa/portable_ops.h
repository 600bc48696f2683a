/* portable_ops.h: the vector operations in plain C over the compiler's own vectors of 4 floats: any machine has them.
 * See vector_ops.h for what each means. */
#ifndef FDM_CPU_PORTABLE_OPS_H
#define FDM_CPU_PORTABLE_OPS_H

#include <stdint.h>
#include <string.h>

enum { VECTOR_WIDTH = 4, TILE_ACCUMULATORS = 8, TILE_VECTORS = 2 }; /* of 16 registers, as a rule */

typedef float vec __attribute__((vector_size(16)));
typedef int32_t vec_mask __attribute__((vector_size(16))); /* -1 or 0 */

static inline vec vec_set(float x) { return (vec){x, x, x, x}; }
static inline vec vec_load(const float *p) {
    vec a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline void vec_store(float *p, vec a) { memcpy(p, &a, sizeof a); }
static inline vec vec_load_partial(const float *p, int32_t count) {
    float t[VECTOR_WIDTH] = {0};
    for (int32_t i = 0; i < count; i++)
        t[i] = p[i];
    return vec_load(t);
}
static inline void vec_store_partial(float *p, vec a, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        p[i] = a[i];
}

static inline vec vec_select(vec_mask m, vec a, vec b) { return (vec)((m & (vec_mask)a) | (~m & (vec_mask)b)); }
static inline vec_mask vec_less(vec a, vec b) { return a < b; }
static inline vec_mask vec_bits(uint64_t bits, int32_t first) {
    const vec_mask lane = {1, 2, 4, 8};
    int32_t b = (int32_t)(bits >> first & 15);
    return ((vec_mask){b, b, b, b} & lane) == lane;
}
static inline int vec_any(vec_mask m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }

static inline vec vec_add(vec a, vec b) { return a + b; }
static inline vec vec_sub(vec a, vec b) { return a - b; }
static inline vec vec_mul(vec a, vec b) { return a * b; }
static inline vec vec_div(vec a, vec b) { return a / b; }
static inline vec vec_fma(vec a, vec b, vec c) { return a * b + c; } /* rounds twice: no FMA is assumed */
static inline vec vec_max(vec a, vec b) { return vec_select(b < a, a, b); }
static inline vec vec_min(vec a, vec b) { return vec_select(a < b, a, b); }
/* Adding 1.5 * 2^23 leaves no fraction bits; larger arguments are whole already. */
static inline vec vec_round(vec a) {
    const vec magic = vec_set(12582912.0f), limit = vec_set(4194304.0f);
    vec rounded = (a + magic) - magic;
    return vec_select((a < limit) & (-limit < a), rounded, a);
}
/* n + 127 becomes the exponent field; 0 below -126, where n may be -inf. */
static inline vec vec_ldexp(vec a, vec n) {
    const vec lowest = vec_set(-126.0f), highest = vec_set(127.0f);
    vec whole = vec_min(highest, vec_max(lowest, n));
    vec_mask exponent;
    for (int i = 0; i < VECTOR_WIDTH; i++)
        exponent[i] = whole[i] == whole[i] ? (int32_t)whole[i] + 127 : 127;
    vec power = (vec)(exponent << 23);
    return vec_select(n < lowest, vec_set(0.0f), a * power);
}

static inline float vec_sum(vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }

static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* The exponent of a half sits 112 below a float's; multiplying by 2^112 shifts it, subnormals included. */
static inline float half_to_float(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    if (magnitude >= 0x7c00)
        return bits_float(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
    return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}
/* Round to nearest even; above 65520 is inf. Subnormals: adding 0.5 aligns the last bit to 2^-24. */
static inline uint16_t float_to_half(float x) {
    uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u)
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u)
        return (uint16_t)(sign | (float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f)));
    magnitude += 0xfffu + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude >> 13) - (112u << 10)));
}
/* Round to nearest even by adding half an ulp less the parity; NaN becomes the quiet NaN. */
static inline uint16_t float_to_bf16(float x) {
    uint32_t bits = float_bits(x);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static inline vec vec_load_f16(const uint16_t *p) {
    return (vec){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
static inline void vec_store_f16(uint16_t *p, vec a) {
    for (int i = 0; i < VECTOR_WIDTH; i++)
        p[i] = float_to_half(a[i]);
}
static inline vec vec_load_bf16(const uint16_t *p) {
    return (vec){bits_float((uint32_t)p[0] << 16), bits_float((uint32_t)p[1] << 16), bits_float((uint32_t)p[2] << 16),
                 bits_float((uint32_t)p[3] << 16)};
}
static inline void vec_store_bf16(uint16_t *p, vec a) {
    for (int i = 0; i < VECTOR_WIDTH; i++)
        p[i] = float_to_bf16(a[i]);
}

static inline void vec_transpose(vec rows[VECTOR_WIDTH]) {
    vec a = rows[0], b = rows[1], c = rows[2], d = rows[3];
    for (int i = 0; i < VECTOR_WIDTH; i++)
        rows[i] = (vec){a[i], b[i], c[i], d[i]};
}

static inline uint64_t bytes_nonzero(const uint8_t *p) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; i++)
        bits |= (uint64_t)(p[i] != 0) << i;
    return bits;
}

#endif
