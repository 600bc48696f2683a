/* tile_softmax.h: one step of online softmax over a score tile, and the rescaling of what came before. */
#ifndef FDM_CPU_TILE_SOFTMAX_H
#define FDM_CPU_TILE_SOFTMAX_H

#include "families/cpu/tile_bias.h"

/* Vectors of lanes handled together, so that their dependent chains overlap. A strip is `vectors` of them, 1 or
 * SOFTMAX_VECTORS, known when compiled. */
enum { SOFTMAX_VECTORS = 4 };

/* `max` only has to keep exp() in range: it follows the true maximum when that lies this far above, so that weights
 * stay below 2^12 and accumulators are rarely rescaled. (FlashAttention-4 does the same.) */
#define SOFTMAX_SLACK 8.0f

/* Natural-log scores of one key in lanes lane .. lane + VECTOR_WIDTH - 1: scale, cap, bias of the key; -inf where not
 * visible. */
INLINE vec softmax_score(const struct cpu_softmax_step *step, int32_t key, int32_t lane) {
    vec x = vec_mul(vec_load(step->s + (size_t)key * CPU_LANES + lane), vec_set(step->scale));
    if (step->softcap > 0)
        x = vec_mul(vec_tanh(vec_mul(x, vec_set(1 / step->softcap))), vec_set(step->softcap));
    if (step->bias_keys)
        x = vec_add(x, vec_set(step->bias_keys[key]));
    if (step->visible)
        x = vec_select(vec_bits(step->visible[key], lane), x, vec_set(-INFINITY));
    return x;
}

/* Scores that are nothing but scale * raw are never written back: where all are visible, and where the bits of
 * visibility can be applied to the maximum and the weights. */
enum softmax_mode { SOFTMAX_ANY, SOFTMAX_MASKED, SOFTMAX_PLAIN };

INLINE enum softmax_mode softmax_mode(const struct cpu_softmax_step *step) {
    if (step->softcap > 0 || step->bias_keys || step->bias_rows || step->scale < 0)
        return SOFTMAX_ANY;
    return step->visible ? SOFTMAX_MASKED : SOFTMAX_PLAIN;
}

/* The larger of x and the largest so far, where the key is visible. */
INLINE vec softmax_higher(const struct cpu_softmax_step *step, int32_t key, int32_t lane, vec x, vec top,
                          enum softmax_mode mode) {
    vec higher = vec_max(x, top);
    return mode == SOFTMAX_MASKED ? vec_select(vec_bits(step->visible[key], lane), higher, top) : higher;
}

/* What exp() is relative to from now on: the largest score of the tile where that is far above what it was. */
INLINE vec softmax_raised(const struct cpu_softmax_step *step, int32_t lane, vec top, enum softmax_mode mode) {
    vec natural = mode == SOFTMAX_ANY ? top : vec_mul(top, vec_set(step->scale));
    vec old = vec_load(step->max + lane);
    return vec_select(vec_less(vec_add(old, vec_set(SOFTMAX_SLACK)), natural), natural, old);
}

/* max = the running maximum, raised to the tile's where that is far above, for the strip that starts at lane. In
 * SOFTMAX_ANY, s holds natural scores after. */
INLINE void softmax_raise_max(const struct cpu_softmax_step *step, int32_t lane, int vectors, enum softmax_mode mode,
                              vec *max) {
    vec top[SOFTMAX_VECTORS];
    for (int v = 0; v < vectors; v++)
        top[v] = mode == SOFTMAX_ANY && step->bias_rows ? tile_bias_raise(step, lane + v * VECTOR_WIDTH)
                                                        : vec_set(-INFINITY);
    const int32_t num_keys = mode == SOFTMAX_ANY && step->bias_rows ? 0 : step->num_keys;
    for (int32_t key = 0; key < num_keys; key++) {
        float *s = step->s + (size_t)key * CPU_LANES + lane;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const int32_t column = lane + v * VECTOR_WIDTH;
            vec x = mode == SOFTMAX_ANY ? softmax_score(step, key, column) : vec_load(s + v * VECTOR_WIDTH);
            if (mode == SOFTMAX_ANY)
                vec_store(s + v * VECTOR_WIDTH, x);
            top[v] = softmax_higher(step, key, column, x, top[v], mode);
        }
    }
    for (int v = 0; v < vectors; v++)
        max[v] = softmax_raised(step, lane + v * VECTOR_WIDTH, top[v], mode);
}

/* What to subtract: the maximum, or 0 in a lane that has seen no key, whose scores are all -inf. */
INLINE vec softmax_origin(vec max) { return vec_select(vec_less(vec_set(-INFINITY), max), max, vec_set(0.0f)); }

/* exp(old max - new max), and 1 where there was no key before; the new max is kept. */
INLINE vec softmax_shrink(const struct cpu_softmax_step *step, int32_t lane, vec max) {
    vec old = vec_load(step->max + lane);
    vec shrink = vec_exp2(vec_mul(vec_sub(old, softmax_origin(max)), vec_set(LOG2_E)));
    shrink = vec_select(vec_less(vec_set(-INFINITY), old), shrink, vec_set(1.0f));
    vec_store(step->shrink + lane, shrink);
    vec_store(step->max + lane, max);
    return shrink;
}

/* The sum of all weights so far, those before the tile shrunk to the new maximum. */
INLINE void softmax_finish(const struct cpu_softmax_step *step, int32_t lane, vec max, vec sum) {
    vec shrink = softmax_shrink(step, lane, max);
    vec_store(step->sum + lane, vec_fma(vec_load(step->sum + lane), shrink, sum));
}

/* (score - origin) log2(e). One FMA takes a raw score there; factor = scale log2(e), base = -origin log2(e). Of a
 * natural score the difference is taken first: it may be the lowest finite number, which times log2(e) would overflow.
 */
INLINE vec softmax_exponent(vec s, vec origin, vec factor, vec base, enum softmax_mode mode) {
    return mode == SOFTMAX_ANY ? vec_mul(vec_sub(s, origin), vec_set(LOG2_E)) : vec_fma(s, factor, base);
}

/* The weight of a key in lanes lane .. that do not see it is 0; elsewhere its score has seen to that. */
INLINE vec softmax_hide(const struct cpu_softmax_step *step, int32_t key, int32_t lane, vec weight,
                        enum softmax_mode mode) {
    return mode == SOFTMAX_MASKED ? vec_select(vec_bits(step->visible[key], lane), weight, vec_set(0.0f)) : weight;
}

INLINE void softmax_strip(const struct cpu_softmax_step *step, int32_t lane, int vectors, enum softmax_mode mode) {
    vec max[SOFTMAX_VECTORS], sum[SOFTMAX_VECTORS], origin[SOFTMAX_VECTORS], base[SOFTMAX_VECTORS];
    const vec factor = vec_set(step->scale * LOG2_E);
    softmax_raise_max(step, lane, vectors, mode, max);
    for (int v = 0; v < vectors; v++) {
        origin[v] = softmax_origin(max[v]);
        base[v] = vec_mul(origin[v], vec_set(-LOG2_E));
        sum[v] = vec_set(0.0f);
    }
    for (int32_t key = 0; key < step->num_keys; key++) {
        float *s = step->s + (size_t)key * CPU_LANES + lane;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec weight = vec_exp2(softmax_exponent(vec_load(s + v * VECTOR_WIDTH), origin[v], factor, base[v], mode));
            weight = softmax_hide(step, key, lane + v * VECTOR_WIDTH, weight, mode);
            vec_store(s + v * VECTOR_WIDTH, weight);
            sum[v] = vec_add(sum[v], weight);
        }
    }
    for (int v = 0; v < vectors; v++)
        softmax_finish(step, lane + v * VECTOR_WIDTH, max[v], sum[v]);
}

INLINE void softmax_lanes(const struct cpu_softmax_step *step, enum softmax_mode mode) {
    int32_t lane = 0;
    for (; lane + (SOFTMAX_VECTORS - 1) * VECTOR_WIDTH < step->num_lanes; lane += SOFTMAX_VECTORS * VECTOR_WIDTH)
        softmax_strip(step, lane, SOFTMAX_VECTORS, mode);
    for (; lane < step->num_lanes; lane += VECTOR_WIDTH)
        softmax_strip(step, lane, 1, mode);
}

/* Lanes are rounded up to whole vectors. */
TILE_ENTRY void tile_softmax(const struct cpu_softmax_step *step) {
    switch (softmax_mode(step)) {
    case SOFTMAX_PLAIN: softmax_lanes(step, SOFTMAX_PLAIN); break;
    case SOFTMAX_MASKED: softmax_lanes(step, SOFTMAX_MASKED); break;
    case SOFTMAX_ANY: softmax_lanes(step, SOFTMAX_ANY); break;
    }
}

/* acc [depth][CPU_LANES] *= shrink[lane]; nothing to do where no maximum rose. */
TILE_ENTRY void tile_shrink(float *acc, const float *shrink, int32_t num_lanes, int32_t depth) {
    for (int32_t lane = 0; lane < num_lanes; lane += VECTOR_WIDTH) {
        vec factor = vec_load(shrink + lane);
        if (!vec_any(vec_less(factor, vec_set(1.0f))))
            continue;
        for (int32_t d = 0; d < depth; d++) {
            float *at = acc + (size_t)d * CPU_LANES + lane;
            vec_store(at, vec_mul(vec_load(at), factor));
        }
    }
}

#endif
