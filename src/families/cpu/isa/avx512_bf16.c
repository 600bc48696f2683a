/* avx512_bf16.c: the table of the avx512_bf16 instruction set: bfloat16 dot products of pairs, for bfloat16 alone.
 *
 * vdpbf16ps multiplies at twice the rate of float32 FMA on AMD Zen 4 and 5. (On the Intel processors that have it, at
 * half; those have AMX.) It treats subnormal numbers as 0. The three contractions are one product:
 *
 *     C[row][column] = or += sum_step A(row, step) . B[step][column]      of pairs of bfloat16
 *
 * with a pair of A broadcast and vectors of 16 pairs of B, and sums that stay in registers over all steps. */
#define PARTS 1
#include "families/cpu/isa/bfloat16_operands.h"

enum { PRODUCT_ROWS = TILE_ACCUMULATORS / TILE_VECTORS };

struct product {
    const char *a, *b;
    size_t a_stride, b_stride; /* bytes from row to row */
    int32_t steps;
};

INLINE __m512i broadcast_pair(const char *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* sum += the products of `rows` rows with `vectors` vectors of columns, both known when compiled. */
INLINE void multiply_pairs(const struct product *t, int32_t row, int rows, int32_t column, int vectors,
                           vec sum[PRODUCT_ROWS][TILE_VECTORS]) {
    const char *a = t->a + (size_t)row * t->a_stride, *b = t->b + (size_t)column * 4;
    for (int32_t step = 0; step < t->steps; step++, a += 4, b += t->b_stride) {
        __m512i columns[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            columns[v] = _mm512_loadu_si512(b + v * 64);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m512i pair = broadcast_pair(a + (size_t)r * t->a_stride);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)pair, (__m512bh)columns[v]);
        }
    }
}

INLINE void clear_sums(vec sum[PRODUCT_ROWS][TILE_VECTORS], int rows, int vectors) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vec_set(0.0f);
}

/* c [rows][CPU_LANES] = or += the product. */
INLINE void product_tile(const struct product *t, float *c, int add, int32_t row, int rows, int32_t lane, int vectors) {
    vec sum[PRODUCT_ROWS][TILE_VECTORS];
    c += (size_t)row * CPU_LANES + lane;
    clear_sums(sum, rows, vectors);
    multiply_pairs(t, row, rows, lane, vectors, sum);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *at = c + r * CPU_LANES + v * VECTOR_WIDTH;
            vec_store(at, add ? vec_add(vec_load(at), sum[r][v]) : sum[r][v]);
        }
}

INLINE void product_strip(const struct product *t, float *c, int add, int32_t num_rows, int32_t lane, int vectors) {
    int32_t row = 0;
    for (; row + PRODUCT_ROWS <= num_rows; row += PRODUCT_ROWS)
        product_tile(t, c, add, row, PRODUCT_ROWS, lane, vectors);
    for (; row < num_rows; row++)
        product_tile(t, c, add, row, 1, lane, vectors);
}

INLINE void product_lanes(const struct product *t, float *c, int add, int32_t num_rows, int32_t num_lanes) {
    int32_t lane = 0;
    for (; lane + (TILE_VECTORS - 1) * VECTOR_WIDTH < num_lanes; lane += TILE_VECTORS * VECTOR_WIDTH)
        product_strip(t, c, add, num_rows, lane, TILE_VECTORS);
    for (; lane < num_lanes; lane += VECTOR_WIDTH)
        product_strip(t, c, add, num_rows, lane, 1);
}

static void pairs_score(float *s, const void *keys, const void *panel, int32_t num_keys, int32_t num_lanes,
                        int32_t depth) {
    const struct product t = {keys, panel, (size_t)round_up(depth, TILE_STEP) * 2, CPU_LANES * 4, (depth + 1) / 2};
    product_lanes(&t, s, 0, num_keys, num_lanes);
}

static void pairs_accumulate(float *acc, const void *values, const void *weights, int32_t num_keys, int32_t num_lanes,
                             int32_t depth) {
    const struct product t = {values, weights, (size_t)round_up(num_keys, TILE_STEP) * 2, CPU_LANES * 4,
                              (num_keys + 1) / 2};
    product_lanes(&t, acc, 1, depth, num_lanes);
}

/* Rows of the product go to the addresses of their keys, times factor. tail: elements of the last vector in memory. */
INLINE void outer_pairs(const struct product *t, float *const *acc_rows, int32_t key, int keys, int32_t d, int vectors,
                        int32_t tail, float factor) {
    vec sum[PRODUCT_ROWS][TILE_VECTORS];
    clear_sums(sum, keys, vectors);
    multiply_pairs(t, key, keys, d, vectors, sum);
    const vec factors = vec_set(factor);
#pragma GCC unroll 6
    for (int r = 0; r < keys; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *acc = acc_rows[key + r] + d + v * VECTOR_WIDTH;
            if (v == vectors - 1 && tail < VECTOR_WIDTH)
                vec_store_partial(acc, vec_fma(sum[r][v], factors, vec_load_partial(acc, tail)), tail);
            else
                vec_store(acc, vec_fma(sum[r][v], factors, vec_load(acc)));
        }
}

INLINE void outer_pairs_strip(const struct product *t, float *const *acc_rows, int32_t num_keys, int32_t d, int vectors,
                              int32_t tail, float factor) {
    int32_t key = 0;
    for (; key + PRODUCT_ROWS <= num_keys; key += PRODUCT_ROWS)
        outer_pairs(t, acc_rows, key, PRODUCT_ROWS, d, vectors, tail, factor);
    for (; key < num_keys; key++)
        outer_pairs(t, acc_rows, key, 1, d, vectors, tail, factor);
}

static void pairs_outer(float *const *acc_rows, const void *weights, const void *rows, int32_t num_keys,
                        int32_t num_lanes, int32_t depth, float factor) {
    const struct product t = {weights, rows, CPU_LANES * 2, (size_t)round_up(depth, TILE_SIDE) * 4,
                              (num_lanes + 1) / 2};
    int32_t d = 0;
    for (; d + TILE_VECTORS * VECTOR_WIDTH <= depth; d += TILE_VECTORS * VECTOR_WIDTH)
        outer_pairs_strip(&t, acc_rows, num_keys, d, TILE_VECTORS, VECTOR_WIDTH, factor);
    for (; d < depth; d += VECTOR_WIDTH)
        outer_pairs_strip(&t, acc_rows, num_keys, d, 1, least(VECTOR_WIDTH, depth - d), factor);
}

const struct cpu_kernels cpu_kernels_avx512_bf16 = {
    .isa = "avx512_bf16", .score = pairs_score, .accumulate = pairs_accumulate, .outer = pairs_outer, OPERAND_ENTRIES};
