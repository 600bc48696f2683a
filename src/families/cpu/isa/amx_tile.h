/* amx_tile.h: the contractions on AMX tiles of bfloat16, for values that are sums of PARTS bfloat16 numbers.
 *
 * A float16 number is exactly the sum of 2 bfloat16 numbers, a float32 number of 3 (8 significant bits each, cut off
 * from the top). A product of two such sums is computed as the partial products that matter, small ones first, into one
 * float32 accumulator: 1 for bfloat16, 3 of 4 for float16, 6 of 9 for float32; what is left out is below 2^-14 and
 * 2^-21 of the product, on average 2^-17 and 2^-24. Scores of float16 take all 4: exp() turns their absolute error into
 * a relative one, and 2^-14 of a large score is more than float16 shows. Weights need no more than their own rounding.
 * Tiles multiply at up to 29 times the rate of float32 FMA on the processor this was measured on,
 * so 6 products still gain.
 *
 * _tile_dpbf16ps treats subnormal numbers as 0: parts below 2^-126 are lost. A float32 value below 2^-110 in magnitude
 * therefore has fewer digits here than in the float32 kernels.
 *
 * Operands, all bfloat16, all padded with zeros (PARTS planes of each, the largest part first):
 *     keys     [keys to 16][depth to 32]             A of score
 *     panel    [depth to 32, pairs][CPU_LANES][2]    B of score
 *     values   [depth to 16][keys to 32]             A of accumulate
 *     weights  [keys to 32, pairs][CPU_LANES][2]     B of accumulate
 *     weights  [keys to 16][CPU_LANES]               A of outer
 *     rows     [CPU_LANES pairs][depth to 16][2]     B of outer
 *
 * PARTS is defined by the file that includes this. Intel, "Architecture Instruction Set Extensions", chapter on AMX. */
#ifndef FDM_CPU_AMX_TILE_H
#define FDM_CPU_AMX_TILE_H

#include <stdatomic.h>

#include "avx512_ops.h"

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

static size_t amx_keys_bytes(int32_t num_keys, int32_t depth) { return PARTS * keys_plane(num_keys, depth); }
static size_t amx_panel_bytes(int32_t depth) { return PARTS * panel_plane(depth); }
static size_t amx_values_bytes(int32_t num_keys, int32_t depth) { return PARTS * values_plane(num_keys, depth); }
static size_t amx_weights_bytes(int32_t num_keys) { return PARTS * weights_plane(num_keys); }
static size_t amx_rows_bytes(int32_t depth) { return PARTS * rows_plane(depth); }

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
enum { AMX_DTYPE = FDM_BFLOAT16 };
#elif PARTS == 2
enum { AMX_DTYPE = FDM_FLOAT16 };
#else
enum { AMX_DTYPE = FDM_FLOAT32 };
#endif

static void amx_pack_keys(void *keys, const void *const *rows, int32_t num_keys, int32_t depth, fdm_dtype dtype) {
    (void)dtype;
    const size_t plane = keys_plane(num_keys, depth), stride = (size_t)round_up(depth, TILE_STEP) * 2;
    for (int32_t key = 0; key < round_up(num_keys, TILE_SIDE); key++)
        for (int32_t d = 0; d < round_up(depth, TILE_STEP); d += VECTOR_WIDTH)
            store_single((char *)keys + (size_t)key * stride + (size_t)d * 2, plane,
                         key < num_keys ? load_piece(rows[key], d, depth, (fdm_dtype)AMX_DTYPE) : vec_set(0.0f));
}

/* columns[c] = element d + c of up to 16 rows; zeros past num_rows and depth. */
INLINE void columns_of(vec columns[VECTOR_WIDTH], const void *const *rows, int32_t num_rows, int32_t d, int32_t depth) {
    for (int32_t r = 0; r < VECTOR_WIDTH; r++)
        columns[r] = r < num_rows ? load_piece(rows[r], d, depth, (fdm_dtype)AMX_DTYPE) : vec_set(0.0f);
    vec_transpose(columns);
}

static void amx_pack_panel(void *panel, const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype) {
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

static void amx_pack_values(void *values, const void *const *rows, int32_t num_keys, int32_t depth, fdm_dtype dtype) {
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

static void amx_pack_rows(void *out, const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype) {
    (void)dtype;
    const size_t plane = rows_plane(depth), stride = (size_t)round_up(depth, TILE_SIDE) * 4;
    for (int32_t lane = 0; lane < CPU_LANES; lane += 2)
        for (int32_t d = 0; d < round_up(depth, TILE_SIDE); d += VECTOR_WIDTH)
            store_pairs((char *)out + (size_t)lane / 2 * stride + (size_t)d * 4, plane,
                        lane < num_rows ? load_piece(rows[lane], d, depth, (fdm_dtype)AMX_DTYPE) : vec_set(0.0f),
                        lane + 1 < num_rows ? load_piece(rows[lane + 1], d, depth, (fdm_dtype)AMX_DTYPE)
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

/* The tile as A of outer; keys past num_keys and lanes past num_lanes are zeros. */
INLINE void weights_in_rows(void *weights, const float *s, int32_t num_keys, int32_t num_lanes) {
    const size_t plane = weights_plane(num_keys);
    for (int32_t key = 0; key < round_up(num_keys, TILE_SIDE); key++)
        for (int32_t lane = 0; lane < CPU_LANES; lane += VECTOR_WIDTH)
            store_single((char *)weights + ((size_t)key * CPU_LANES + (size_t)lane) * 2, plane,
                         key < num_keys && lane < num_lanes ? vec_load(s + (size_t)key * CPU_LANES + lane)
                                                            : vec_set(0.0f));
}

/* ---- contractions ---- */

/* Tiles 0..3 hold C, 4 and 5 A, 6 and 7 B; all 16 rows of 64 bytes. */
static void amx_begin(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((packed))
    config = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

static void amx_end(void) { _tile_release(); }

struct multiplication {
    size_t a_stride, b_stride; /* bytes from row to row */
    size_t a_plane, b_plane;
    int32_t steps; /* of TILE_STEP */
    int exact;     /* every partial product of float16 */
};

/* C += A B for up to 32 x 32 of C. Partial products with the smaller factors come first. */
INLINE void multiply(const struct multiplication *m, const char *a, const char *b, int two_rows, int two_columns) {
    for (int pa = PARTS - 1; pa >= 0; pa--)
        for (int32_t step = 0; step < m->steps; step++) {
            const char *a_at = a + (size_t)pa * m->a_plane + (size_t)step * TILE_STEP * 2;
            _tile_loadd(4, a_at, m->a_stride);
            if (two_rows)
                _tile_loadd(5, a_at + TILE_SIDE * m->a_stride, m->a_stride);
            for (int pb = PARTS == 2 && m->exact ? 1 : PARTS - 1 - pa; pb >= 0; pb--) {
                const char *b_at = b + (size_t)pb * m->b_plane + (size_t)step * TILE_SIDE * m->b_stride;
                _tile_loadd(6, b_at, m->b_stride);
                _tile_dpbf16ps(0, 4, 6);
                if (two_rows)
                    _tile_dpbf16ps(2, 5, 6);
                if (two_columns) {
                    _tile_loadd(7, b_at + 64, m->b_stride);
                    _tile_dpbf16ps(1, 4, 7);
                    if (two_rows)
                        _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
}

INLINE void zero_c(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void load_c(const float *c, size_t stride, int two_rows, int two_columns) {
    _tile_loadd(0, c, stride);
    if (two_columns)
        _tile_loadd(1, c + TILE_SIDE, stride);
    if (two_rows)
        _tile_loadd(2, (const char *)c + TILE_SIDE * stride, stride);
    if (two_rows && two_columns)
        _tile_loadd(3, (const char *)(c + TILE_SIDE) + TILE_SIDE * stride, stride);
}

INLINE void store_c(float *c, size_t stride, int two_rows, int two_columns) {
    _tile_stored(0, c, stride);
    if (two_columns)
        _tile_stored(1, c + TILE_SIDE, stride);
    if (two_rows)
        _tile_stored(2, (char *)c + TILE_SIDE * stride, stride);
    if (two_rows && two_columns)
        _tile_stored(3, (char *)(c + TILE_SIDE) + TILE_SIDE * stride, stride);
}

/* c (row stride in bytes) = or += A B, for one block of C. */
INLINE void block_of(const struct multiplication *m, float *c, size_t c_stride, const char *a, const char *b, int add,
                     int two_rows, int two_columns) {
    if (add)
        load_c(c, c_stride, two_rows, two_columns);
    else
        zero_c();
    multiply(m, a, b, two_rows, two_columns);
    store_c(c, c_stride, two_rows, two_columns);
}

/* rows and columns of C in tiles; columns lie 64 bytes apart in B. */
INLINE void blocks_of(const struct multiplication *m, float *c, size_t c_stride, const char *a, const char *b, int add,
                      int32_t rows, int32_t columns) {
    /* gcc's intrinsics do not say that they read memory. */
    atomic_signal_fence(memory_order_seq_cst);
    for (int32_t row = 0; row < rows; row += 2) {
        const char *a_at = a + (size_t)row * TILE_SIDE * m->a_stride;
        float *c_row = (float *)(void *)((char *)c + (size_t)row * TILE_SIDE * c_stride);
        for (int32_t column = 0; column < columns; column += 2) {
            float *c_at = c_row + column * TILE_SIDE;
            const char *b_at = b + (size_t)column * 64;
            int two_rows = row + 1 < rows, two_columns = column + 1 < columns;
            if (two_rows && two_columns)
                block_of(m, c_at, c_stride, a_at, b_at, add, 1, 1);
            else if (two_rows)
                block_of(m, c_at, c_stride, a_at, b_at, add, 1, 0);
            else if (two_columns)
                block_of(m, c_at, c_stride, a_at, b_at, add, 0, 1);
            else
                block_of(m, c_at, c_stride, a_at, b_at, add, 0, 0);
        }
    }
    atomic_signal_fence(memory_order_seq_cst);
}

INLINE int32_t tiles_of(int32_t n) { return (n + TILE_SIDE - 1) / TILE_SIDE; }

static void amx_score(float *s, const void *keys, const void *panel, int32_t num_keys, int32_t num_lanes,
                      int32_t depth) {
    const int32_t padded = round_up(depth, TILE_STEP);
    const struct multiplication m = {(size_t)padded * 2, CPU_LANES * 4,      keys_plane(num_keys, depth),
                                     panel_plane(depth), padded / TILE_STEP, 1};
    blocks_of(&m, s, CPU_LANES * sizeof(float), keys, panel, 0, tiles_of(num_keys), tiles_of(num_lanes));
}

static void amx_accumulate(float *acc, const void *values, const void *weights, int32_t num_keys, int32_t num_lanes,
                           int32_t depth) {
    const int32_t padded = round_up(num_keys, TILE_STEP), whole = depth / TILE_SIDE, left = depth % TILE_SIDE;
    const size_t stride = CPU_LANES * sizeof(float);
    const struct multiplication m = {(size_t)padded * 2,      CPU_LANES * 4,      values_plane(num_keys, depth),
                                     weights_plane(num_keys), padded / TILE_STEP, 0};
    blocks_of(&m, acc, stride, values, weights, 1, whole, tiles_of(num_lanes));
    if (left > 0) { /* the last rows of acc go through a whole tile, so that nothing past acc is touched */
        float tail[TILE_SIDE * CPU_LANES] __attribute__((aligned(64))) = {0};
        float *rows = acc + (size_t)whole * TILE_SIDE * CPU_LANES;
        memcpy(tail, rows, (size_t)left * stride);
        blocks_of(&m, tail, stride, (const char *)values + (size_t)whole * TILE_SIDE * m.a_stride, weights, 1, 1,
                  tiles_of(num_lanes));
        memcpy(rows, tail, (size_t)left * stride);
    }
}

/* Adds factor * c (rows of `width` floats) to the gradient rows of keys key .. key+keys-1, columns d .. of depth. */
INLINE void add_rows(float *const *acc_rows, const float *c, int32_t keys, int32_t width, int32_t d, int32_t depth,
                     float factor) {
    const vec factors = vec_set(factor);
    for (int32_t key = 0; key < keys; key++, c += width)
        for (int32_t at = 0; at < width && d + at < depth; at += VECTOR_WIDTH) {
            float *to = acc_rows[key] + d + at;
            int32_t count = least(VECTOR_WIDTH, depth - d - at);
            if (count == VECTOR_WIDTH)
                vec_store(to, vec_fma(vec_load(c + at), factors, vec_load(to)));
            else
                vec_store_partial(to, vec_fma(vec_load(c + at), factors, vec_load_partial(to, count)), count);
        }
}

static void amx_outer(float *const *acc_rows, const void *weights, const void *rows, int32_t num_keys,
                      int32_t num_lanes, int32_t depth, float factor) {
    enum { WIDTH = 2 * TILE_SIDE };
    const struct multiplication m = {
        CPU_LANES * 2,     (size_t)round_up(depth, TILE_SIDE) * 4,  weights_plane(num_keys),
        rows_plane(depth), (num_lanes + TILE_STEP - 1) / TILE_STEP, 0};
    float c[WIDTH * WIDTH] __attribute__((aligned(64)));
    for (int32_t key = 0; key < num_keys; key += WIDTH)
        for (int32_t d = 0; d < depth; d += WIDTH) {
            blocks_of(&m, c, WIDTH * sizeof(float), (const char *)weights + (size_t)key * m.a_stride,
                      (const char *)rows + (size_t)d * 4, 0, least(2, tiles_of(num_keys - key)),
                      least(2, tiles_of(depth - d)));
            add_rows(acc_rows + key, c, least(WIDTH, num_keys - key), WIDTH, d, depth, factor);
        }
}

/* ---- vector steps ---- */

static void amx_softmax(const struct cpu_softmax_step *step) {
    tile_softmax(step);
    weights_in_pairs(step->weights, step->s, step->num_keys);
}

static void amx_gradient(const struct cpu_gradient_step *step) {
    tile_gradient(step);
    if (step->p_weights)
        weights_in_rows(step->p_weights, step->s, step->num_keys, step->num_lanes);
    if (step->ds_weights)
        weights_in_rows(step->ds_weights, step->dp, step->num_keys, step->num_lanes);
    if (step->ds_values_weights)
        weights_in_pairs(step->ds_values_weights, step->dp, step->num_keys);
}

#define AMX_ENTRIES                                                                                     \
    .isa = "amx", .dtypes = 1u << AMX_DTYPE, .key_multiple = TILE_STEP, .lane_multiple = TILE_SIDE,     \
    .begin = amx_begin, .end = amx_end, .panel_bytes = amx_panel_bytes, .keys_bytes = amx_keys_bytes,   \
    .values_bytes = amx_values_bytes, .rows_bytes = amx_rows_bytes, .weights_bytes = amx_weights_bytes, \
    .pack_panel = amx_pack_panel, .pack_keys = amx_pack_keys, .pack_values = amx_pack_values,           \
    .pack_rows = amx_pack_rows, .score = amx_score, .accumulate = amx_accumulate, .outer = amx_outer,   \
    .softmax = amx_softmax, .gradient = amx_gradient, .dot = tile_dot, .round_row = tile_round_row,     \
    .shrink = tile_shrink, .store_panel = tile_store_panel, .mask_bits = tile_mask_bits, .load_bias = tile_load_bias

#endif
