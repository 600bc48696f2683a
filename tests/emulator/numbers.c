/* numbers.c: float16 and bfloat16, and the approximate functions. */
#include <math.h>
#include <string.h>

#include "state.h"

float half_table[65536];

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float half_value(uint16_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const float sign = h >> 15 ? -1.0f : 1.0f;
    if (exponent == 31)
        return fraction ? float_of(0x7fffffffu) : sign * INFINITY;
    return sign * (exponent ? ldexpf(1.0f + (float)fraction / 1024, exponent - 15) : ldexpf((float)fraction, -24));
}

void numbers_prepare(void) {
    for (uint32_t i = 0; i < 65536; i++)
        half_table[i] = half_value((uint16_t)i);
}

/* To nearest, ties to even. */
EXPORT unsigned short emu_to_f16(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return 0x7fff;
    if (magnitude >= 0x47800000)
        return (unsigned short)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* below 2^-14: a multiple of 2^-24 */
        const float scaled = float_of(magnitude) * 16777216.0f;
        return (unsigned short)(sign | (uint32_t)nearbyintf(scaled));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (unsigned short)(sign | (rounded - 0x38000000) >> 13);
}
EXPORT float emu_from_f16(unsigned short x) { return half_table[x]; }

uint16_t add_bf16(uint16_t a, uint16_t b) {
    const float x = float_of((uint32_t)a << 16) + float_of((uint32_t)b << 16);
    const uint32_t bits = bits_of(x);
    return x != x ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

EXPORT float emu_ex2(float x) {
    if (fabsf(x) < 1.1754943508e-38f)
        return 1;
    const float y = exp2f(x);
    return y < 1.1754943508e-38f ? 0 : y;
}
EXPORT float emu_lg2(float x) { return log2f(x); }

/* add.rm.ftz: to minus infinity; subnormal numbers are 0. */
static float flushed(float x) { return fabsf(x) < 1.1754943508e-38f ? copysignf(0, x) : x; }
EXPORT float emu_add_down(float a, float b) {
    a = flushed(a), b = flushed(b);
    const float sum = a + b, part = sum - a, rest = (a - (sum - part)) + (b - part); /* sum + rest is exact */
    if (a == -b)
        return -0.0f;
    return flushed(isfinite(sum) && rest < 0 ? nextafterf(sum, -INFINITY) : sum);
}
