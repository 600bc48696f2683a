/* bfloat16_operands.h: operands of bfloat16 for numbers that are sums of PARTS of them, and the steps that write
 * weights.
 *
 * A float16 number is exactly the sum of 2 bfloat16 numbers, a float32 number of 3 (8 significant bits each, cut off
 * from the top). Layouts, all bfloat16, all padded with zeros (PARTS planes of each, the largest part first):
 *     keys     [keys to 16][depth to 32]             A of score
 *     panel    [depth to 32, pairs][CPU_LANES][2]    B of score
 *     values   [depth to 16][keys to 32]             A of accumulate
 *     weights  [keys to 32, pairs][CPU_LANES][2]     B of accumulate
 *     weights  [keys to 16][CPU_LANES]               A of outer
 *     rows     [CPU_LANES pairs][depth to 16][2]     B of outer
 * They are the tiles of AMX, and pair by pair the operands of vdpbf16ps: a pair of A for all lanes, 16 pairs of B.
 *
 * PARTS is defined by the file that includes this. */
#ifndef FDM_CPU_BFLOAT16_OPERANDS_H
#define FDM_CPU_BFLOAT16_OPERANDS_H

#include "families/cpu/isa/avx512_ops.h"

#include "families/cpu/tile.h"
#include "families/cpu/tile_backward.h"

enum { TILE_SIDE = 16, TILE_STEP = 32 }; /* rows and columns of a tile; depth of one multiplication */

INLINE int32_t round_up(int32_t n, int32_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* ---- sizes: bytes of one plane and of an operand ---- */

INLINE size_t keys_plane(int32_t num_keys, int32_t depth) {
    return (size_t)round_up(num_keys, TILE_SIDE) * (size_t)round_up(depth, TILE_STEP) * 2;
}
INLINE size_t panel_plane(int32_t depth) { return (size_t)round_up(depth, TILE_STEP) * CPU_LANES * 2; }
INLINE size_t values_plane(int32_t num_keys, int32_t depth) {
    return (size_t)round_up(depth, TILE_SIDE) * (size_t)round_up(num_keys, TILE_STEP) * 2;
}
INLINE size_t weights_plane(int32_t num_keys) { return (size_t)round_up(num_keys, TILE_STEP) * CPU_LANES * 2; }
INLINE size_t rows_plane(int32_t depth) { return (size_t)CPU_LANES * (size_t)round_up(depth, TILE_SIDE) * 2; }

static size_t operand_keys_bytes(int32_t num_keys, int32_t depth) { return PARTS * keys_plane(num_keys, depth); }
static size_t operand_panel_bytes(int32_t depth) { return PARTS * panel_plane(depth); }
static size_t operand_values_bytes(int32_t num_keys, int32_t depth) { return PARTS * values_plane(num_keys, depth); }
static size_t operand_weights_bytes(int32_t num_keys) { return PARTS * weights_plane(num_keys); }
static size_t operand_rows_bytes(int32_t depth) { return PARTS * rows_plane(depth); }

/* ---- splitting and storing ---- */

/* Parts but the last are cut off, so that what is left is exact. Each part lies in the upper halves of its elements. */
INLINE void split(vec x, __m512i part[PARTS]) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    for (int p = 0; p < PARTS; p++) {
        part[p] = _mm512_castps_si512(x);
        if (p + 1 < PARTS)
            x = vec_sub(x, _mm512_castsi512_ps(_mm512_and_si512(part[p], upper)));
    }
}

/* out[i] = x[i], i < 16, in each plane. */
INLINE void store_single(char *out, size_t plane, vec x) {
    if (PARTS == 1) {
        _mm256_storeu_si256((__m256i *)(void *)out, (__m256i)_mm512_cvtneps_pbh(x));
        return;
    }
    __m512i part[PARTS];
    split(x, part);
    for (int p = 0; p < PARTS; p++)
        _mm256_storeu_si256((__m256i *)(void *)(out + (size_t)p * plane),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(part[p], 16)));
}

/* out[i] = (x[i], y[i]), i < 16, in each plane. */
INLINE void store_pairs(char *out, size_t plane, vec x, vec y) {
    if (PARTS == 1) {
        const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                    22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(y, x)));
        return;
    }
    __m512i low[PARTS], high[PARTS];
    split(x, low);
    split(y, high);
    for (int p = 0; p < PARTS; p++)
        _mm512_storeu_si512(out + (size_t)p * plane,
                            _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(low[p], 16), high[p]));
}

/* Elements d .. d+15 of a row, zeros past depth. */
INLINE vec load_piece(const void *row, int32_t d, int32_t depth, fdm_dtype dtype) {
    const size_t bytes = dtype == FDM_FLOAT32 ? 4 : 2;
    if (d >= depth)
        return vec_set(0.0f);
    return vec_load_as((const char *)row + (size_t)d * bytes, least(VECTOR_WIDTH, depth - d), dtype);
}

#if PARTS == 1
enum { OPERAND_DTYPE = FDM_BFLOAT16 };
#elif PARTS == 2
enum { OPERAND_DTYPE = FDM_FLOAT16 };
#else
enum { OPERAND_DTYPE = FDM_FLOAT32 };
#endif

static void operand_pack_keys(void *keys, const void *const *rows, int32_t num_keys, int32_t depth, fdm_dtype dtype) {
    (void)dtype;
    const size_t plane = keys_plane(num_keys, depth), stride = (size_t)round_up(depth, TILE_STEP) * 2;
    for (int32_t key = 0; key < round_up(num_keys, TILE_SIDE); key++)
        for (int32_t d = 0; d < round_up(depth, TILE_STEP); d += VECTOR_WIDTH)
            store_single((char *)keys + (size_t)key * stride + (size_t)d * 2, plane,
                         key < num_keys ? load_piece(rows[key], d, depth, (fdm_dtype)OPERAND_DTYPE) : vec_set(0.0f));
}

/* columns[c] = element d + c of up to 16 rows; zeros past num_rows and depth. */
INLINE void columns_of(vec columns[VECTOR_WIDTH], const void *const *rows, int32_t num_rows, int32_t d, int32_t depth) {
    for (int32_t r = 0; r < VECTOR_WIDTH; r++)
        columns[r] = r < num_rows ? load_piece(rows[r], d, depth, (fdm_dtype)OPERAND_DTYPE) : vec_set(0.0f);
    vec_transpose(columns);
}

static void operand_pack_panel(void *panel, const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype) {
    (void)dtype;
    const size_t plane = panel_plane(depth);
    vec columns[VECTOR_WIDTH];
    for (int32_t lane = 0; lane < CPU_LANES; lane += VECTOR_WIDTH)
        for (int32_t d = 0; d < round_up(depth, TILE_STEP); d += VECTOR_WIDTH) {
            columns_of(columns, lane < num_rows ? rows + lane : rows, num_rows - lane, d, depth);
            for (int32_t c = 0; c < VECTOR_WIDTH; c += 2)
                store_pairs((char *)panel + ((size_t)(d + c) / 2 * CPU_LANES + (size_t)lane) * 4, plane, columns[c],
                            columns[c + 1]);
        }
}

static void operand_pack_values(void *values, const void *const *rows, int32_t num_keys, int32_t depth,
                                fdm_dtype dtype) {
    (void)dtype;
    const size_t plane = values_plane(num_keys, depth), stride = (size_t)round_up(num_keys, TILE_STEP) * 2;
    vec columns[VECTOR_WIDTH];
    for (int32_t key = 0; key < round_up(num_keys, TILE_STEP); key += VECTOR_WIDTH)
        for (int32_t d = 0; d < round_up(depth, TILE_SIDE); d += VECTOR_WIDTH) {
            columns_of(columns, key < num_keys ? rows + key : rows, num_keys - key, d, depth);
            for (int32_t c = 0; c < VECTOR_WIDTH; c++)
                store_single((char *)values + (size_t)(d + c) * stride + (size_t)key * 2, plane, columns[c]);
        }
}

static void operand_pack_rows(void *out, const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype) {
    (void)dtype;
    const size_t plane = rows_plane(depth), stride = (size_t)round_up(depth, TILE_SIDE) * 4;
    for (int32_t lane = 0; lane < CPU_LANES; lane += 2)
        for (int32_t d = 0; d < round_up(depth, TILE_SIDE); d += VECTOR_WIDTH)
            store_pairs((char *)out + (size_t)lane / 2 * stride + (size_t)d * 4, plane,
                        lane < num_rows ? load_piece(rows[lane], d, depth, (fdm_dtype)OPERAND_DTYPE) : vec_set(0.0f),
                        lane + 1 < num_rows ? load_piece(rows[lane + 1], d, depth, (fdm_dtype)OPERAND_DTYPE)
                                            : vec_set(0.0f));
}

/* The score tile as B of accumulate; keys past num_keys are zeros. */
INLINE void weights_in_pairs(void *weights, const float *s, int32_t num_keys) {
    const size_t plane = weights_plane(num_keys);
    for (int32_t key = 0; key < round_up(num_keys, TILE_STEP); key += 2)
        for (int32_t lane = 0; lane < CPU_LANES; lane += VECTOR_WIDTH) {
            const float *at = s + (size_t)key * CPU_LANES + lane;
            store_pairs((char *)weights + ((size_t)key / 2 * CPU_LANES + (size_t)lane) * 4, plane,
                        key < num_keys ? vec_load(at) : vec_set(0.0f),
                        key + 1 < num_keys ? vec_load(at + CPU_LANES) : vec_set(0.0f));
        }
}

/* The tile times factor as A of outer; keys past num_keys and lanes past num_lanes are zeros. */
INLINE void weights_in_rows(void *weights, const float *s, int32_t num_keys, int32_t num_lanes, float factor) {
    const size_t plane = weights_plane(num_keys);
    for (int32_t key = 0; key < round_up(num_keys, TILE_SIDE); key++)
        for (int32_t lane = 0; lane < CPU_LANES; lane += VECTOR_WIDTH)
            store_single((char *)weights + ((size_t)key * CPU_LANES + (size_t)lane) * 2, plane,
                         key < num_keys && lane < num_lanes
                             ? vec_mul(vec_load(s + (size_t)key * CPU_LANES + lane), vec_set(factor))
                             : vec_set(0.0f));
}

/* ---- vector steps ---- */

/* 2^x for weights: x is split at whole numbers below it, and vscalefps takes the whole part itself. The least largest
 * relative errors on [0, 1): degree 4, 2.7e-6; float32 takes the common exp2. */
INLINE vec weight_exp2(vec x) {
    if (PARTS == 3)
        return vec_exp2(x);
    vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    vec p = vec_fma(vec_set(0.0135341672f), f, vec_set(0.0520114619f));
    p = vec_fma(p, f, vec_set(0.241442756f));
    p = vec_fma(p, f, vec_set(0.693003835f));
    p = vec_fma(p, f, vec_set(1.00000259f));
    return _mm512_scalef_ps(p, x);
}

/* Two keys' weights from their scores, added to the sums and stored as pairs; the second key is 0 when there is none.
 */
INLINE void softmax_pair(const struct cpu_softmax_step *step, int32_t key, int two, int32_t lane, int vectors,
                         enum softmax_mode mode, const vec *origin, const vec *base, vec *sum) {
    const vec factor = vec_set(step->scale * LOG2_E);
    const float *s = step->s + (size_t)key * CPU_LANES + lane;
    char *out = (char *)step->weights + ((size_t)key / 2 * CPU_LANES + (size_t)lane) * 4;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        vec weight[2] = {vec_set(0.0f), vec_set(0.0f)};
#pragma GCC unroll 2
        for (int i = 0; i < 1 + two; i++) {
            vec x = vec_load(s + i * CPU_LANES + v * VECTOR_WIDTH);
            weight[i] = weight_exp2(softmax_exponent(x, origin[v], factor, base[v], mode));
            weight[i] = softmax_hide(step, key + i, lane + v * VECTOR_WIDTH, weight[i], mode);
            sum[v] = vec_add(sum[v], weight[i]);
        }
        store_pairs(out + v * 64, weights_plane(step->num_keys), weight[0], weight[1]);
    }
}

/* tile_softmax.h's strip with the weights written as the operand: the exponentials never go back to the score tile. */
INLINE void operand_softmax_strip(const struct cpu_softmax_step *step, int32_t lane, int vectors,
                                  enum softmax_mode mode) {
    vec max[SOFTMAX_VECTORS], sum[SOFTMAX_VECTORS], origin[SOFTMAX_VECTORS], base[SOFTMAX_VECTORS];
    softmax_raise_max(step, lane, vectors, mode, max);
    for (int v = 0; v < vectors; v++) {
        origin[v] = softmax_origin(max[v]);
        base[v] = vec_mul(origin[v], vec_set(-LOG2_E));
        sum[v] = vec_set(0.0f);
    }
    int32_t key = 0;
    for (; key + 2 <= step->num_keys; key += 2)
        softmax_pair(step, key, 1, lane, vectors, mode, origin, base, sum);
    if (key < step->num_keys)
        softmax_pair(step, key, 0, lane, vectors, mode, origin, base, sum);
    for (int v = 0; v < vectors; v++)
        softmax_finish(step, lane + v * VECTOR_WIDTH, max[v], sum[v]);
}

INLINE void operand_softmax_lanes(const struct cpu_softmax_step *step, enum softmax_mode mode) {
    int32_t lane = 0;
    for (; lane + (SOFTMAX_VECTORS - 1) * VECTOR_WIDTH < step->num_lanes; lane += SOFTMAX_VECTORS * VECTOR_WIDTH)
        operand_softmax_strip(step, lane, SOFTMAX_VECTORS, mode);
    for (; lane < step->num_lanes; lane += VECTOR_WIDTH)
        operand_softmax_strip(step, lane, 1, mode);
}

/* Zeros for the keys that round the weights up to whole steps of a contraction. */
INLINE void clear_weights_padding(const struct cpu_softmax_step *step) {
    const int32_t last = (step->num_keys + 1) / 2, padded = round_up(step->num_keys, TILE_STEP) / 2;
    for (int p = 0; p < PARTS; p++)
        memset((char *)step->weights + (size_t)p * weights_plane(step->num_keys) + (size_t)last * CPU_LANES * 4, 0,
               (size_t)(padded - last) * CPU_LANES * 4);
}

static void operand_softmax(const struct cpu_softmax_step *step) {
    switch (softmax_mode(step)) {
    case SOFTMAX_PLAIN: operand_softmax_lanes(step, SOFTMAX_PLAIN); break;
    case SOFTMAX_MASKED: operand_softmax_lanes(step, SOFTMAX_MASKED); break;
    case SOFTMAX_ANY: operand_softmax_lanes(step, SOFTMAX_ANY); break;
    }
    clear_weights_padding(step);
}

/* P and dS of two keys, stored as all three operands; the second key is 0 when there is none. */
INLINE void gradient_pair(const struct cpu_gradient_step *step, int32_t key, int two, int32_t lane, int vectors,
                          int masked, const vec *base, const vec *delta) {
    const size_t plane = weights_plane(step->num_keys);
    const vec factor = vec_set(step->scale * LOG2_E), zero = vec_set(0.0f);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        const int32_t column = lane + v * VECTOR_WIDTH;
        vec ds[2] = {zero, zero};
#pragma GCC unroll 2
        for (int i = 0; i < 1 + two; i++) {
            const size_t at = (size_t)(key + i) * CPU_LANES + (size_t)column;
            vec p = weight_exp2(vec_fma(vec_load(step->s + at), factor, base[v]));
            vec difference = vec_sub(vec_load(step->dp + at), delta[v]);
            if (masked) {
                vec_mask seen = vec_bits(step->visible[key + i], column);
                p = vec_select(seen, p, zero);
                difference = vec_select(seen, difference, zero);
            }
            ds[i] = vec_mul(p, difference);
            store_single((char *)step->p_weights + at * 2, plane, p);
            store_single((char *)step->ds_weights + at * 2, plane, vec_mul(ds[i], vec_set(step->ds_factor)));
        }
        store_pairs((char *)step->ds_values_weights + ((size_t)key / 2 * CPU_LANES + (size_t)column) * 4, plane, ds[0],
                    ds[1]);
    }
}

INLINE void operand_gradient_strip(const struct cpu_gradient_step *step, int32_t lane, int vectors, int masked) {
    vec base[SOFTMAX_VECTORS], delta[SOFTMAX_VECTORS];
    for (int v = 0; v < vectors; v++) {
        base[v] = vec_mul(vec_load(step->lse + lane + v * VECTOR_WIDTH), vec_set(-LOG2_E));
        delta[v] = vec_load(step->delta + lane + v * VECTOR_WIDTH);
    }
    int32_t key = 0;
    for (; key + 2 <= step->num_keys; key += 2)
        gradient_pair(step, key, 1, lane, vectors, masked, base, delta);
    if (key < step->num_keys)
        gradient_pair(step, key, 0, lane, vectors, masked, base, delta);
}

INLINE void operand_gradient_lanes(const struct cpu_gradient_step *step, int masked) {
    int32_t lane = 0;
    for (; lane + (SOFTMAX_VECTORS - 1) * VECTOR_WIDTH < step->num_lanes; lane += SOFTMAX_VECTORS * VECTOR_WIDTH)
        operand_gradient_strip(step, lane, SOFTMAX_VECTORS, masked);
    for (; lane < step->num_lanes; lane += VECTOR_WIDTH)
        operand_gradient_strip(step, lane, 1, masked);
}

/* Zeros where the contractions read past the keys, and past the lanes: outer sums over lanes in whole tiles. */
static void clear_gradient_padding(const struct cpu_gradient_step *step) {
    const size_t plane = weights_plane(step->num_keys);
    const int32_t rows = round_up(step->num_keys, TILE_SIDE), lanes = round_up(step->num_lanes, VECTOR_WIDTH);
    const int32_t pairs = (step->num_keys + 1) / 2, pairs_padded = round_up(step->num_keys, TILE_STEP) / 2;
    void *const outer[2] = {step->p_weights, step->ds_weights};
    for (int p = 0; p < PARTS; p++) {
        for (int i = 0; i < 2; i++)
            for (int32_t key = lanes < CPU_LANES ? 0 : step->num_keys; key < rows; key++) {
                const int32_t first = key < step->num_keys ? lanes : 0;
                memset((char *)outer[i] + (size_t)p * plane + ((size_t)key * CPU_LANES + (size_t)first) * 2, 0,
                       (size_t)(CPU_LANES - first) * 2);
            }
        memset((char *)step->ds_values_weights + (size_t)p * plane + (size_t)pairs * CPU_LANES * 4, 0,
               (size_t)(pairs_padded - pairs) * CPU_LANES * 4);
    }
}

static void operand_gradient(const struct cpu_gradient_step *step) {
    if (step->softcap > 0 || step->bias_keys || step->bias || step->dbias) {
        tile_gradient(step);
        weights_in_rows(step->p_weights, step->s, step->num_keys, step->num_lanes, 1.0f);
        weights_in_rows(step->ds_weights, step->dp, step->num_keys, step->num_lanes, step->ds_factor);
        weights_in_pairs(step->ds_values_weights, step->dp, step->num_keys);
        return;
    }
    if (step->visible)
        operand_gradient_lanes(step, 1);
    else
        operand_gradient_lanes(step, 0);
    clear_gradient_padding(step);
}

/* A table's entries but for isa, unit state and contractions. */
#define OPERAND_ENTRIES                                                                                               \
    .dtypes = 1u << OPERAND_DTYPE, .key_multiple = TILE_STEP, .lane_multiple = TILE_SIDE,                             \
    .panel_bytes = operand_panel_bytes, .keys_bytes = operand_keys_bytes, .values_bytes = operand_values_bytes,       \
    .rows_bytes = operand_rows_bytes, .weights_bytes = operand_weights_bytes, .pack_panel = operand_pack_panel,       \
    .pack_keys = operand_pack_keys, .pack_values = operand_pack_values, .pack_rows = operand_pack_rows,               \
    .all_finite = tile_all_finite, .softmax = operand_softmax, .gradient = operand_gradient, .dot = tile_dot,         \
    .round_row = tile_round_row, .shrink = tile_shrink, .store_panel = tile_store_panel, .mask_bits = tile_mask_bits, \
    .load_bias = tile_load_bias

#endif
