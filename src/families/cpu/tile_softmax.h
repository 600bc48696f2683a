/* tile_softmax.h: one step of online softmax over a score tile, and the rescaling of what came before. */
#ifndef FDM_CPU_TILE_SOFTMAX_H
#define FDM_CPU_TILE_SOFTMAX_H

#include "vector_ops.h"

/* Vectors of lanes handled together, so that their dependent chains overlap. A strip is `vectors` of them, 1 or
 * SOFTMAX_VECTORS, known when compiled. */
enum { SOFTMAX_VECTORS = 4 };

/* `max` only has to keep exp() in range: it follows the true maximum when that lies this far above, so that weights
 * stay below 2^12 and accumulators are rarely rescaled. (FlashAttention-4 does the same.) */
#define SOFTMAX_SLACK 8.0f

/* Natural-log scores of one key in lanes lane .. lane + VECTOR_WIDTH - 1: scale, cap, bias; -inf where not visible. */
INLINE vec softmax_score(const struct cpu_softmax_step *step, int32_t key, int32_t lane) {
    vec x = vec_mul(vec_load(step->s + (size_t)key * CPU_LANES + lane), vec_set(step->scale));
    if (step->softcap > 0)
        x = vec_mul(vec_tanh(vec_mul(x, vec_set(1 / step->softcap))), vec_set(step->softcap));
    if (step->bias_keys)
        x = vec_add(x, vec_set(step->bias_keys[key]));
    if (step->bias)
        x = vec_add(x, vec_load(step->bias + (size_t)key * CPU_LANES + lane));
    if (step->visible)
        x = vec_select(vec_bits(step->visible[key], lane), x, vec_set(-INFINITY));
    return x;
}

/* Scores that are nothing but scale * raw need no pass of their own. */
INLINE int softmax_is_plain(const struct cpu_softmax_step *step) {
    return !(step->softcap > 0) && !step->bias_keys && !step->bias && !step->visible && step->scale >= 0;
}

/* max = the running maximum, raised to the tile's where that is far above, for the strip that starts at lane. Unless
 * plain, s holds natural scores after. */
INLINE void softmax_raise_max(const struct cpu_softmax_step *step, int32_t lane, int vectors, int plain, vec *max) {
    vec top[SOFTMAX_VECTORS];
    for (int v = 0; v < vectors; v++)
        top[v] = vec_set(-INFINITY);
    for (int32_t key = 0; key < step->num_keys; key++) {
        float *s = step->s + (size_t)key * CPU_LANES + lane;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec x = plain ? vec_load(s + v * VECTOR_WIDTH) : softmax_score(step, key, lane + v * VECTOR_WIDTH);
            if (!plain)
                vec_store(s + v * VECTOR_WIDTH, x);
            top[v] = vec_max(x, top[v]);
        }
    }
    for (int v = 0; v < vectors; v++) {
        vec natural = plain ? vec_mul(top[v], vec_set(step->scale)) : top[v];
        vec old = vec_load(step->max + lane + v * VECTOR_WIDTH);
        max[v] = vec_select(vec_less(vec_add(old, vec_set(SOFTMAX_SLACK)), natural), natural, old);
    }
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

/* exp(score - origin). Plain: one FMA turns a raw score into a base-2 exponent; factor = scale log2(e), base =
 * -origin log2(e). Else the difference is taken first: a score may be the lowest finite number, which times log2(e)
 * would overflow. */
INLINE vec softmax_weight(vec s, vec origin, vec factor, vec base, int plain) {
    return vec_exp2(plain ? vec_fma(s, factor, base) : vec_mul(vec_sub(s, origin), vec_set(LOG2_E)));
}

INLINE void softmax_strip(const struct cpu_softmax_step *step, int32_t lane, int vectors, int plain) {
    vec max[SOFTMAX_VECTORS], sum[SOFTMAX_VECTORS], origin[SOFTMAX_VECTORS], base[SOFTMAX_VECTORS];
    const vec factor = vec_set(step->scale * LOG2_E);
    softmax_raise_max(step, lane, vectors, plain, max);
    for (int v = 0; v < vectors; v++) {
        origin[v] = softmax_origin(max[v]);
        base[v] = vec_mul(origin[v], vec_set(-LOG2_E));
        sum[v] = vec_set(0.0f);
    }
    for (int32_t key = 0; key < step->num_keys; key++) {
        float *s = step->s + (size_t)key * CPU_LANES + lane;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec weight = softmax_weight(vec_load(s + v * VECTOR_WIDTH), origin[v], factor, base[v], plain);
            vec_store(s + v * VECTOR_WIDTH, weight);
            sum[v] = vec_add(sum[v], weight);
        }
    }
    for (int v = 0; v < vectors; v++) {
        int32_t at = lane + v * VECTOR_WIDTH;
        vec shrink = softmax_shrink(step, at, max[v]);
        vec_store(step->sum + at, vec_fma(vec_load(step->sum + at), shrink, sum[v]));
    }
}

INLINE void softmax_lanes(const struct cpu_softmax_step *step, int plain) {
    int32_t lane = 0;
    for (; lane + (SOFTMAX_VECTORS - 1) * VECTOR_WIDTH < step->num_lanes; lane += SOFTMAX_VECTORS * VECTOR_WIDTH)
        softmax_strip(step, lane, SOFTMAX_VECTORS, plain);
    for (; lane < step->num_lanes; lane += VECTOR_WIDTH)
        softmax_strip(step, lane, 1, plain);
}

/* Lanes are rounded up to whole vectors. */
TILE_ENTRY void tile_softmax(const struct cpu_softmax_step *step) {
    if (softmax_is_plain(step))
        softmax_lanes(step, 1);
    else
        softmax_lanes(step, 0);
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
