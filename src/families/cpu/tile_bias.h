/* tile_bias.h: natural scores of a tile whose bias differs from row to row: rows of the bias are transposed in
 * registers and added in the pass that finds the maximum, so that no tile of them is written. */
#ifndef FDM_CPU_TILE_BIAS_H
#define FDM_CPU_TILE_BIAS_H

#include "families/cpu/tile_pack.h"

/* Which scores there are, known when compiled: scale and bias alone, those under visibility, or any. */
enum bias_mode { BIAS_PLAIN, BIAS_MASKED, BIAS_ANY };

/* Score of one key in lanes lane .., written back; raises top. */
INLINE vec bias_score(const struct cpu_softmax_step *step, int32_t key, int32_t lane, vec bias, vec top,
                      enum bias_mode mode) {
    float *s = step->s + (size_t)key * CPU_LANES + lane;
    vec x = vec_load(s);
    if (mode == BIAS_ANY && step->softcap > 0) {
        x = vec_mul(vec_mul(x, vec_set(step->scale)), vec_set(1 / step->softcap));
        x = vec_fma(vec_tanh(x), vec_set(step->softcap), bias);
    } else {
        x = vec_fma(x, vec_set(step->scale), bias);
    }
    if (mode == BIAS_ANY)
        x = vec_select(vec_barred(bias), bias, x);
    if (mode == BIAS_MASKED || (mode == BIAS_ANY && step->visible))
        x = vec_select(vec_bits(step->visible[key], lane), x, vec_set(-INFINITY));
    vec_store(s, x);
    return vec_max(x, top);
}

/* The scores of up to VECTOR_WIDTH neighbouring keys from columns of the bias; two maxima, so that neither waits. */
INLINE void bias_columns(const struct cpu_softmax_step *step, int32_t key, int32_t count, int32_t lane,
                         const vec columns[VECTOR_WIDTH], vec top[2], enum bias_mode mode) {
#pragma GCC unroll 16
    for (int32_t c = 0; c < count; c++)
        top[c % 2] = bias_score(step, key + c, lane, columns[c], top[c % 2], mode);
}

/* Two neighbouring bfloat16 elements of each row are moved as one: half the transposing, and whole cache lines. */
INLINE void bias_pairs(const struct cpu_softmax_step *step, int32_t key, int32_t lane, vec top[2],
                       enum bias_mode mode) {
    vec pairs[VECTOR_WIDTH];
#pragma GCC unroll 16
    for (int32_t r = 0; r < VECTOR_WIDTH; r++)
        pairs[r] = vec_load_pairs((const char *)step->bias_rows[lane + r] + (size_t)step->keys[key] * 2);
    vec_transpose(pairs);
#pragma GCC unroll 16
    for (int32_t c = 0; c < VECTOR_WIDTH; c++) {
        top[0] = bias_score(step, key + 2 * c, lane, vec_low_bf16(pairs[c]), top[0], mode);
        top[1] = bias_score(step, key + 2 * c + 1, lane, vec_high_bf16(pairs[c]), top[1], mode);
    }
}

/* One key, or keys that are not neighbours in memory. */
INLINE vec bias_gather(const struct cpu_softmax_step *step, int32_t key, int32_t lane, fdm_dtype dtype) {
    const int64_t at = step->keys[key] * step->bias_key_stride * (dtype == FDM_FLOAT32 ? 4 : 2);
    float lanes[VECTOR_WIDTH] = {0};
    for (int32_t l = 0; l < least(VECTOR_WIDTH, step->num_lanes - lane); l++)
        lanes[l] = load_scalar_as((const char *)step->bias_rows[lane + l] + at, dtype);
    return vec_load(lanes);
}

/* How many keys from `key` on, at most `most`, are neighbours. */
INLINE int32_t bias_run(const struct cpu_softmax_step *step, int32_t key, int32_t most) {
    const int32_t *keys = step->keys + key;
    int32_t count = least(most, step->num_keys - key);
    if (step->bias_key_stride != 1)
        return 1;
    while (keys[count - 1] - keys[0] != count - 1)
        count--;
    return count;
}

/* Writes the scores of lanes lane .. lane + VECTOR_WIDTH - 1 and returns their maximum. */
INLINE vec bias_raise(const struct cpu_softmax_step *step, int32_t lane, fdm_dtype dtype, enum bias_mode mode) {
    const int32_t here = step->num_lanes - lane;
    const int32_t most = dtype == FDM_BFLOAT16 && here >= VECTOR_WIDTH ? 2 * VECTOR_WIDTH : VECTOR_WIDTH;
    vec top[2] = {vec_set(-INFINITY), vec_set(-INFINITY)};
    for (int32_t key = 0, count; key < step->num_keys; key += count) {
        vec columns[VECTOR_WIDTH];
        count = bias_run(step, key, most);
        if (count == 2 * VECTOR_WIDTH) {
            bias_pairs(step, key, lane, top, mode);
            continue;
        }
        count = least(count, VECTOR_WIDTH);
        if (count == 1) {
            columns[0] = bias_gather(step, key, lane, dtype);
            bias_columns(step, key, 1, lane, columns, top, mode);
        } else if (count == VECTOR_WIDTH && here >= VECTOR_WIDTH) {
            load_columns(columns, step->bias_rows + lane, VECTOR_WIDTH, step->keys[key], VECTOR_WIDTH, dtype);
            bias_columns(step, key, VECTOR_WIDTH, lane, columns, top, mode);
        } else {
            load_columns(columns, step->bias_rows + lane, here, step->keys[key], count, dtype);
            bias_columns(step, key, count, lane, columns, top, BIAS_ANY);
        }
    }
    return vec_max(top[0], top[1]);
}

INLINE vec bias_raise_as(const struct cpu_softmax_step *step, int32_t lane, enum bias_mode mode) {
    return step->bias_dtype == FDM_FLOAT32   ? bias_raise(step, lane, FDM_FLOAT32, mode)
           : step->bias_dtype == FDM_FLOAT16 ? bias_raise(step, lane, FDM_FLOAT16, mode)
                                             : bias_raise(step, lane, FDM_BFLOAT16, mode);
}

static __attribute__((noinline)) vec tile_bias_raise(const struct cpu_softmax_step *step, int32_t lane) {
    if (step->softcap > 0 || step->careful)
        return bias_raise_as(step, lane, BIAS_ANY);
    return step->visible ? bias_raise_as(step, lane, BIAS_MASKED) : bias_raise_as(step, lane, BIAS_PLAIN);
}

#endif
