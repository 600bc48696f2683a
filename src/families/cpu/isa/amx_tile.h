/* amx_tile.h: the contractions on AMX tiles of bfloat16, for values that are sums of PARTS bfloat16 numbers.
 *
 * The operands are those of bfloat16_operands.h. A product of two sums of parts is computed as the partial products
 * that matter, small ones first, into one float32 accumulator: 1 for bfloat16, 3 of 4 for float16, 6 of 9 for float32;
 * what is left out is below 2^-14 and 2^-21 of the product, on average 2^-17 and 2^-24. Scores of float16 take all 4:
 * exp() turns their absolute error into a relative one, and 2^-14 of a large score is more than float16 shows. Weights
 * need no more than their own rounding. Tiles multiply at 15 to 29 times the rate of float32 FMA on the processor this
 * was measured on, so 6 products still gain.
 *
 * _tile_dpbf16ps treats subnormal numbers as 0: parts below 2^-126 are lost. A float32 value below 2^-110 in magnitude
 * therefore has fewer digits here than in the float32 kernels.
 *
 * PARTS is defined by the file that includes this. Intel, "Architecture Instruction Set Extensions", chapter on AMX. */
#ifndef FDM_CPU_AMX_TILE_H
#define FDM_CPU_AMX_TILE_H

#include <stdatomic.h>

#include "families/cpu/isa/bfloat16_operands.h"

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

/* Part pa of A is multiplied by this part of B, then by the larger ones. */
INLINE int least_part(const struct multiplication *m, int pa) { return PARTS == 2 && m->exact ? 1 : PARTS - 1 - pa; }

/* C += A B for up to 32 x 32 of C. Partial products with the smaller factors come first. */
INLINE void multiply(const struct multiplication *m, const char *a, const char *b, int two_rows, int two_columns) {
    for (int pa = PARTS - 1; pa >= 0; pa--)
        for (int32_t step = 0; step < m->steps; step++) {
            const char *a_at = a + (size_t)pa * m->a_plane + (size_t)step * TILE_STEP * 2;
            _tile_loadd(4, a_at, m->a_stride);
            if (two_rows)
                _tile_loadd(5, a_at + TILE_SIDE * m->a_stride, m->a_stride);
            for (int pb = least_part(m, pa); pb >= 0; pb--) {
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

INLINE struct multiplication score_multiplication(int32_t num_keys, int32_t depth) {
    const int32_t padded = round_up(depth, TILE_STEP);
    return (struct multiplication){(size_t)padded * 2, CPU_LANES * 4,      keys_plane(num_keys, depth),
                                   panel_plane(depth), padded / TILE_STEP, 1};
}

INLINE struct multiplication accumulate_multiplication(int32_t num_keys, int32_t depth) {
    const int32_t padded = round_up(num_keys, TILE_STEP);
    return (struct multiplication){(size_t)padded * 2,      CPU_LANES * 4,      values_plane(num_keys, depth),
                                   weights_plane(num_keys), padded / TILE_STEP, 0};
}

static void amx_score(float *s, const void *keys, const void *panel, int32_t num_keys, int32_t num_lanes,
                      int32_t depth) {
    const struct multiplication m = score_multiplication(num_keys, depth);
    blocks_of(&m, s, CPU_LANES * sizeof(float), keys, panel, 0, tiles_of(num_keys), tiles_of(num_lanes));
}

static void amx_accumulate(float *acc, const void *values, const void *weights, int32_t num_keys, int32_t num_lanes,
                           int32_t depth) {
    const int32_t whole = depth / TILE_SIDE, left = depth % TILE_SIDE;
    const size_t stride = CPU_LANES * sizeof(float);
    const struct multiplication m = accumulate_multiplication(num_keys, depth);
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

/* Bytes from each row to the next, or 0 where they differ: keys that were dropped leave gaps. */
static size_t common_stride(float *const *rows, int32_t count) {
    const intptr_t stride = (intptr_t)rows[1] - (intptr_t)rows[0];
    for (int32_t i = 2; i < count; i++)
        if ((intptr_t)rows[i] - (intptr_t)rows[i - 1] != stride)
            return 0;
    return (size_t)stride;
}

/* Where 32 keys lie evenly, the rows themselves are C. Not in float32: each pair of products would be rounded to the
 * magnitude of the whole sum. */
static void amx_outer(float *const *acc_rows, const void *weights, const void *rows, int32_t num_keys,
                      int32_t num_lanes, int32_t depth, float factor) {
    enum { WIDTH = 2 * TILE_SIDE };
    const struct multiplication m = {
        CPU_LANES * 2,     (size_t)round_up(depth, TILE_SIDE) * 4,  weights_plane(num_keys),
        rows_plane(depth), (num_lanes + TILE_STEP - 1) / TILE_STEP, 0};
    float c[WIDTH * WIDTH] __attribute__((aligned(64)));
    for (int32_t key = 0; key < num_keys; key += WIDTH) {
        const char *a = (const char *)weights + (size_t)key * m.a_stride;
        const int direct = PARTS < 3 && factor == 1 && key + WIDTH <= num_keys;
        const size_t stride = direct ? common_stride(acc_rows + key, WIDTH) : 0;
        for (int32_t d = 0; d < depth; d += WIDTH) {
            const char *b = (const char *)rows + (size_t)d * 4;
            if (stride && d + WIDTH <= depth) {
                blocks_of(&m, acc_rows[key] + d, stride, a, b, 1, 2, 2);
                continue;
            }
            blocks_of(&m, c, WIDTH * sizeof(float), a, b, 0, least(2, tiles_of(num_keys - key)),
                      least(2, tiles_of(depth - d)));
            add_rows(acc_rows + key, c, least(WIDTH, num_keys - key), WIDTH, d, depth, factor);
        }
    }
}

#endif
