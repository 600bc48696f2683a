/* portable_ops.h: the vector operations in plain C over the compiler's own vectors of 4 floats: any machine has them.
 * See vector_ops.h for what each means. */
#ifndef FDM_CPU_PORTABLE_OPS_H
#define FDM_CPU_PORTABLE_OPS_H

#include <stdint.h>
#include <string.h>

#include "base/half.h"

enum { VECTOR_WIDTH = 4, TILE_ACCUMULATORS = 8, TILE_VECTORS = 2 }; /* of 16 registers, as a rule */

typedef float vec __attribute__((vector_size(16)));
typedef int32_t vec_mask __attribute__((vector_size(16))); /* -1 or 0 */
typedef uint32_t vec_unsigned __attribute__((vector_size(16)));

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
#define vec_shift_left(a, count) ((vec)((vec_mask)((vec_unsigned)(vec_mask)(a) << (count))))

static inline float vec_sum(vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }

static inline vec vec_load_f16(const uint16_t *p) {
    return (vec){float16_to_float(p[0]), float16_to_float(p[1]), float16_to_float(p[2]), float16_to_float(p[3])};
}
static inline void vec_store_f16(uint16_t *p, vec a) {
    for (int i = 0; i < VECTOR_WIDTH; i++)
        p[i] = float_to_float16(a[i]);
}
static inline vec vec_load_bf16(const uint16_t *p) {
    return (vec){bfloat16_to_float(p[0]), bfloat16_to_float(p[1]), bfloat16_to_float(p[2]), bfloat16_to_float(p[3])};
}
static inline vec vec_load_pairs(const void *p) { return vec_load(p); }
static inline vec vec_high_bf16(vec a) { return (vec)((vec_mask)a & (vec_mask){-65536, -65536, -65536, -65536}); }
static inline void vec_store_bf16(uint16_t *p, vec a) {
    for (int i = 0; i < VECTOR_WIDTH; i++)
        p[i] = float_to_bfloat16(a[i]);
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
