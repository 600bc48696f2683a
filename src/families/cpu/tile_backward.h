/* tile_backward.h: what the backward adds to the float32 kernels: products over lanes, scores to gradients, row sums.
 *
 * `outer` keeps a tile of keys x head-dim elements in registers over all lanes of a panel: each lane loads vectors of
 * its row and broadcasts one weight per key. The sums meet the accumulator rows in memory once per panel. */
#ifndef FDM_CPU_TILE_BACKWARD_H
#define FDM_CPU_TILE_BACKWARD_H

#include "families/cpu/tile_contract.h"
#include "families/cpu/tile_pack.h"
#include "families/cpu/tile_softmax.h"

/* ---- rows ---- */

/* Floats from one packed row to the next: whole vectors, the elements past depth are 0. */
INLINE int32_t packed_row_floats(int32_t depth) { return (depth + VECTOR_WIDTH - 1) / VECTOR_WIDTH * VECTOR_WIDTH; }

TILE_ENTRY size_t tile_rows_bytes(int32_t depth) {
    return (size_t)packed_row_floats(depth) * CPU_LANES * sizeof(float);
}

INLINE void pack_padded_row_as(float *out, const char *row, int32_t depth, fdm_dtype dtype) {
    const size_t bytes = dtype == FDM_FLOAT32 ? 4 : 2;
    for (int32_t d = 0; d < depth; d += VECTOR_WIDTH)
        vec_store(out + d, vec_load_as(row + (size_t)d * bytes, least(VECTOR_WIDTH, depth - d), dtype));
}

/* out [CPU_LANES][packed_row_floats(depth)] = rows, zeros from num_rows on */
TILE_ENTRY void tile_pack_rows(void *out, const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype) {
    const size_t step = (size_t)packed_row_floats(depth);
    float *to = out;
    for (int32_t row = 0; row < num_rows; row++, to += step)
        if (dtype == FDM_FLOAT32)
            pack_padded_row_as(to, rows[row], depth, FDM_FLOAT32);
        else if (dtype == FDM_FLOAT16)
            pack_padded_row_as(to, rows[row], depth, FDM_FLOAT16);
        else
            pack_padded_row_as(to, rows[row], depth, FDM_BFLOAT16);
    memset(to, 0, (size_t)(CPU_LANES - num_rows) * step * sizeof *to);
}

/* Two chains of sums, so that one multiplication need not wait for the last. */
INLINE float dot_as(const char *a, const char *b, int32_t depth, fdm_dtype dtype) {
    const size_t bytes = dtype == FDM_FLOAT32 ? 4 : 2;
    vec even = vec_set(0.0f), odd = vec_set(0.0f);
    for (int32_t d = 0; d < depth; d += 2 * VECTOR_WIDTH) {
        int32_t left = depth - d - VECTOR_WIDTH;
        const char *x = a + (size_t)d * bytes, *y = b + (size_t)d * bytes;
        int32_t count = least(VECTOR_WIDTH, depth - d);
        even = vec_fma(vec_load_as(x, count, dtype), vec_load_as(y, count, dtype), even);
        if (left <= 0)
            break;
        x += VECTOR_WIDTH * bytes;
        y += VECTOR_WIDTH * bytes;
        count = least(VECTOR_WIDTH, left);
        odd = vec_fma(vec_load_as(x, count, dtype), vec_load_as(y, count, dtype), odd);
    }
    return vec_sum(vec_add(even, odd));
}

TILE_ENTRY float tile_dot(const void *a, const void *b, int32_t depth, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32)
        return dot_as(a, b, depth, FDM_FLOAT32);
    return dtype == FDM_FLOAT16 ? dot_as(a, b, depth, FDM_FLOAT16) : dot_as(a, b, depth, FDM_BFLOAT16);
}

INLINE void round_row_as(char *out, const float *in, int32_t depth, fdm_dtype dtype) {
    const size_t bytes = dtype == FDM_FLOAT32 ? 4 : 2;
    for (int32_t d = 0; d < depth; d += VECTOR_WIDTH) {
        int32_t count = least(VECTOR_WIDTH, depth - d);
        vec_store_as(out + (size_t)d * bytes, vec_load_as(in + d, count, FDM_FLOAT32), count, dtype);
    }
}

TILE_ENTRY void tile_round_row(void *out, const float *in, int32_t depth, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32)
        round_row_as(out, in, depth, FDM_FLOAT32);
    else if (dtype == FDM_FLOAT16)
        round_row_as(out, in, depth, FDM_FLOAT16);
    else
        round_row_as(out, in, depth, FDM_BFLOAT16);
}

/* ---- outer ---- */

struct outer_product {
    float *const *acc_rows; /* [num_keys] */
    const float *weights;   /* [num_keys][CPU_LANES] */
    const float *rows;      /* [num_lanes][row_floats] */
    int32_t row_floats, num_lanes, num_keys;
    float factor;
};

/* tail: elements of the last vector that exist in memory; VECTOR_WIDTH where all do. */
INLINE void outer_tile(const struct outer_product *t, int32_t key, int keys, int32_t d, int vectors, int32_t tail) {
    vec sum[TILE_ROWS_MAX][TILE_VECTORS];
    const float *weights = t->weights + (size_t)key * CPU_LANES, *row = t->rows + d;
#pragma GCC unroll 12
    for (int r = 0; r < keys; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vec_set(0.0f);
    for (int32_t lane = 0; lane < t->num_lanes; lane++, row += t->row_floats) {
        vec elements[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            elements[v] = vec_load(row + v * VECTOR_WIDTH);
#pragma GCC unroll 12
        for (int r = 0; r < keys; r++) {
            vec weight = vec_set(weights[r * CPU_LANES + lane]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[r][v] = vec_fma(weight, elements[v], sum[r][v]);
        }
    }
    const vec factor = vec_set(t->factor);
#pragma GCC unroll 12
    for (int r = 0; r < keys; r++) {
        float *acc = t->acc_rows[key + r] + d;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++, acc += VECTOR_WIDTH)
            if (v == vectors - 1 && tail < VECTOR_WIDTH)
                vec_store_partial(acc, vec_fma(sum[r][v], factor, vec_load_partial(acc, tail)), tail);
            else
                vec_store(acc, vec_fma(sum[r][v], factor, vec_load(acc)));
    }
}

enum {
    OUTER_KEYS = TILE_ACCUMULATORS / TILE_VECTORS < TILE_ROWS_MAX ? TILE_ACCUMULATORS / TILE_VECTORS : TILE_ROWS_MAX
};

/* The common tile as a function of its own: inlined among the others, gcc runs out of registers and spills a row. */
static __attribute__((noinline)) void outer_full_tile(const struct outer_product *t, int32_t key, int32_t d) {
    outer_tile(t, key, OUTER_KEYS, d, TILE_VECTORS, VECTOR_WIDTH);
}

INLINE void outer_full_strip(const struct outer_product *t, int32_t d) {
    int32_t key = 0;
    for (; key + OUTER_KEYS <= t->num_keys; key += OUTER_KEYS)
        outer_full_tile(t, key, d);
    for (; key + 4 <= t->num_keys; key += 4)
        outer_tile(t, key, 4, d, TILE_VECTORS, VECTOR_WIDTH);
    for (; key + 2 <= t->num_keys; key += 2)
        outer_tile(t, key, 2, d, TILE_VECTORS, VECTOR_WIDTH);
    for (; key < t->num_keys; key++)
        outer_tile(t, key, 1, d, TILE_VECTORS, VECTOR_WIDTH);
}

INLINE void outer_strip(const struct outer_product *t, int32_t d, int vectors, int32_t tail) {
    const int keys = TILE_ACCUMULATORS / vectors < TILE_ROWS_MAX ? TILE_ACCUMULATORS / vectors : TILE_ROWS_MAX;
    int32_t key = 0;
    for (; key + keys <= t->num_keys; key += keys)
        outer_tile(t, key, keys, d, vectors, tail);
    for (; key + 4 <= t->num_keys; key += 4)
        outer_tile(t, key, 4, d, vectors, tail);
    for (; key + 2 <= t->num_keys; key += 2)
        outer_tile(t, key, 2, d, vectors, tail);
    for (; key < t->num_keys; key++)
        outer_tile(t, key, 1, d, vectors, tail);
}

TILE_ENTRY void tile_outer(float *const *acc_rows, const void *weights, const void *rows, int32_t num_keys,
                           int32_t num_lanes, int32_t depth, float factor) {
    const struct outer_product t = {acc_rows, weights, rows, packed_row_floats(depth), num_lanes, num_keys, factor};
    int32_t d = 0;
    for (; d + TILE_VECTORS * VECTOR_WIDTH <= depth; d += TILE_VECTORS * VECTOR_WIDTH)
        outer_full_strip(&t, d);
    for (; d + 2 * VECTOR_WIDTH <= depth; d += 2 * VECTOR_WIDTH)
        outer_strip(&t, d, 2, VECTOR_WIDTH);
    for (; d < depth; d += VECTOR_WIDTH)
        outer_strip(&t, d, 1, least(VECTOR_WIDTH, depth - d));
}

/* ---- scores to gradients ---- */

/* How much of the step there is, known when compiled. */
enum gradient_form {
    GRADIENT_PLAIN,  /* scale * raw is the score, every key visible */
    GRADIENT_MASKED, /* the same with visibility bits */
    GRADIENT_FULL    /* softcap, bias, bits, dbias: asked for at run time */
};

/* P of one vector of raw scores; *slope is the derivative of the softcap. The difference to lse is taken before the
 * change to base 2: a bias may be the lowest finite number, which times log2(e) would overflow. */
INLINE vec gradient_probability(const struct cpu_gradient_step *step, int32_t key, int32_t lane, vec raw, vec lse,
                                vec *slope) {
    vec x = vec_mul(raw, vec_set(step->scale));
    if (step->softcap > 0) {
        vec t = vec_tanh(vec_mul(x, vec_set(1 / step->softcap)));
        x = vec_mul(t, vec_set(step->softcap));
        *slope = vec_sub(vec_set(1.0f), vec_mul(t, t));
    }
    if (step->bias_keys)
        x = vec_add(x, vec_set(step->bias_keys[key]));
    if (step->bias)
        x = vec_add(x, vec_load(step->bias + (size_t)key * CPU_LANES + lane));
    vec low = step->bias_keys || step->bias ? vec_load(step->lse_low + lane) : vec_set(0.0f);
    return vec_exp2(vec_mul(vec_sub(vec_sub(x, lse), low), vec_set(LOG2_E)));
}

INLINE void gradient_strip(const struct cpu_gradient_step *step, int32_t lane, int vectors, enum gradient_form form) {
    vec lse[SOFTMAX_VECTORS], base[SOFTMAX_VECTORS], delta[SOFTMAX_VECTORS];
    const vec factor = vec_set(step->scale * LOG2_E), zero = vec_set(0.0f);
    for (int v = 0; v < vectors; v++) {
        lse[v] = vec_load(step->lse + lane + v * VECTOR_WIDTH);
        base[v] = vec_mul(lse[v], vec_set(-LOG2_E));
        delta[v] = vec_load(step->delta + lane + v * VECTOR_WIDTH);
    }
    for (int32_t key = 0; key < step->num_keys; key++) {
        const size_t at = (size_t)key * CPU_LANES + (size_t)lane;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *s = step->s + at + v * VECTOR_WIDTH, *dp = step->dp + at + v * VECTOR_WIDTH;
            vec slope = vec_set(1.0f);
            vec p = form == GRADIENT_FULL
                        ? gradient_probability(step, key, lane + v * VECTOR_WIDTH, vec_load(s), lse[v], &slope)
                        : vec_exp2(vec_fma(vec_load(s), factor, base[v]));
            vec ds = vec_sub(vec_load(dp), delta[v]);
            if (form == GRADIENT_MASKED || (form == GRADIENT_FULL && step->visible)) {
                /* Both: scores and dP that nobody sees need not have been computed, and may hold anything. */
                vec_mask seen = vec_bits(step->visible[key], lane + v * VECTOR_WIDTH);
                p = vec_select(seen, p, zero);
                ds = vec_select(seen, ds, zero);
            }
            if (form == GRADIENT_FULL && step->bias && step->careful) {
                const vec_mask barred = vec_barred(vec_load(step->bias + at + v * VECTOR_WIDTH));
                p = vec_select(barred, zero, p);
                ds = vec_select(barred, zero, ds);
            }
            ds = vec_mul(p, ds);
            if (form == GRADIENT_FULL && step->dbias)
                vec_store(step->dbias + at + v * VECTOR_WIDTH, ds);
            vec_store(s, p);
            vec_store(dp, form == GRADIENT_FULL ? vec_mul(ds, slope) : ds);
        }
    }
}

INLINE void gradient_lanes(const struct cpu_gradient_step *step, enum gradient_form form) {
    int32_t lane = 0;
    for (; lane + (SOFTMAX_VECTORS - 1) * VECTOR_WIDTH < step->num_lanes; lane += SOFTMAX_VECTORS * VECTOR_WIDTH)
        gradient_strip(step, lane, SOFTMAX_VECTORS, form);
    for (; lane < step->num_lanes; lane += VECTOR_WIDTH)
        gradient_strip(step, lane, 1, form);
}

/* In place: s becomes P and dp becomes dS, which are the weights themselves. Lanes are rounded up to whole vectors. */
TILE_ENTRY void tile_gradient(const struct cpu_gradient_step *step) {
    if (step->softcap > 0 || step->bias_keys || step->bias || step->dbias)
        gradient_lanes(step, GRADIENT_FULL);
    else if (step->visible)
        gradient_lanes(step, GRADIENT_MASKED);
    else
        gradient_lanes(step, GRADIENT_PLAIN);
}

/* The backward's entries of a table whose operands are float32. */
#define TILE_BACKWARD_FLOAT32_ENTRIES                                                                           \
    .rows_bytes = tile_rows_bytes, .pack_rows = tile_pack_rows, .outer = tile_outer, .gradient = tile_gradient, \
    .dot = tile_dot, .round_row = tile_round_row

#endif
