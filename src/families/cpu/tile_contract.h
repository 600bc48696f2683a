/* tile_contract.h: score and accumulate in float32: matrix products whose sums stay in registers over the whole depth.
 *
 * Both are C[row][lane] (+)= sum_step A(row, step) * B[step][lane], with B and C rows of CPU_LANES floats:
 *     score        row = key, step = d     A = keys[key][depth], one row apart in steps of 1
 *     accumulate   row = d,   step = key   A = values[key][depth], the other way round
 * A register tile is `rows` rows by up to TILE_VECTORS vectors of lanes: each step loads the vectors of B, and for each
 * row broadcasts one element of A. */
#ifndef FDM_CPU_TILE_CONTRACT_H
#define FDM_CPU_TILE_CONTRACT_H

#include "families/cpu/vector_ops.h"

enum { TILE_ROWS_MAX = 12 };

struct contraction {
    float *c;
    const float *a, *b;
    int32_t row_stride, step_stride; /* of a, in elements */
    int32_t steps;
    int add; /* sums are added to c; else they replace it */
};

/* row_stride and step_stride of 1 are passed as constants, so that addresses fold into the instructions. */
INLINE void contract_tile(const struct contraction *t, int32_t row, int rows, int vectors, int32_t row_stride,
                          int32_t step_stride) {
    vec sum[TILE_ROWS_MAX][TILE_VECTORS];
    float *c = t->c + (size_t)row * CPU_LANES;
    const float *a = t->a + (size_t)row * (size_t)row_stride, *b = t->b;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[r][v] = t->add ? vec_load(c + r * CPU_LANES + v * VECTOR_WIDTH) : vec_set(0.0f);
    for (int32_t step = 0; step < t->steps; step++) {
        vec lanes[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            lanes[v] = vec_load(b + v * VECTOR_WIDTH);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vec element = vec_set(a[(size_t)r * (size_t)row_stride]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[r][v] = vec_fma(element, lanes[v], sum[r][v]);
        }
        a += step_stride;
        b += CPU_LANES;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            vec_store(c + r * CPU_LANES + v * VECTOR_WIDTH, sum[r][v]);
}

/* All rows of one strip of lanes: full tiles, then 4, 2 and 1 rows. */
INLINE void contract_strip(const struct contraction *t, int32_t num_rows, int vectors, int32_t row_stride,
                           int32_t step_stride) {
    const int rows = TILE_ACCUMULATORS / vectors < TILE_ROWS_MAX ? TILE_ACCUMULATORS / vectors : TILE_ROWS_MAX;
    int32_t row = 0;
    for (; row + rows <= num_rows; row += rows)
        contract_tile(t, row, rows, vectors, row_stride, step_stride);
    for (; row + 4 <= num_rows; row += 4)
        contract_tile(t, row, 4, vectors, row_stride, step_stride);
    for (; row + 2 <= num_rows; row += 2)
        contract_tile(t, row, 2, vectors, row_stride, step_stride);
    for (; row < num_rows; row++)
        contract_tile(t, row, 1, vectors, row_stride, step_stride);
}

INLINE void contract(struct contraction t, int32_t num_rows, int32_t num_lanes, int32_t row_stride,
                     int32_t step_stride) {
    int32_t vectors = (num_lanes + VECTOR_WIDTH - 1) / VECTOR_WIDTH;
    for (; vectors >= TILE_VECTORS; vectors -= TILE_VECTORS) {
        contract_strip(&t, num_rows, TILE_VECTORS, row_stride, step_stride);
        t.b += TILE_VECTORS * VECTOR_WIDTH;
        t.c += TILE_VECTORS * VECTOR_WIDTH;
    }
    if (TILE_VECTORS > 3 && vectors == 3)
        contract_strip(&t, num_rows, 3, row_stride, step_stride);
    else if (TILE_VECTORS > 2 && vectors == 2)
        contract_strip(&t, num_rows, 2, row_stride, step_stride);
    else if (vectors == 1)
        contract_strip(&t, num_rows, 1, row_stride, step_stride);
}

/* s [num_keys][CPU_LANES] = keys [num_keys][depth] * panel [depth][CPU_LANES] */
TILE_ENTRY void tile_score(float *s, const void *keys, const void *panel, int32_t num_keys, int32_t num_lanes,
                           int32_t depth) {
    struct contraction t = {.c = s, .a = keys, .b = panel, .steps = depth};
    contract(t, num_keys, num_lanes, depth, 1);
}

/* acc [depth][CPU_LANES] += values [num_keys][depth] ^T * weights [num_keys][CPU_LANES] */
TILE_ENTRY void tile_accumulate(float *acc, const void *values, const void *weights, int32_t num_keys,
                                int32_t num_lanes, int32_t depth) {
    struct contraction t = {.c = acc, .a = values, .b = weights, .steps = num_keys, .add = 1};
    contract(t, depth, num_lanes, 1, depth);
}

#endif
