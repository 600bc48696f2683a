/* tile_pack.h: rows of any dtype into float32 operands, and accumulators, masks and biases across the transposition. */
#ifndef FDM_CPU_TILE_PACK_H
#define FDM_CPU_TILE_PACK_H

#include "families/cpu/vector_ops.h"

TILE_ENTRY size_t tile_panel_bytes(int32_t depth) { return (size_t)depth * CPU_LANES * sizeof(float); }
TILE_ENTRY size_t tile_keys_bytes(int32_t num_keys, int32_t depth) {
    return ((size_t)num_keys * (size_t)depth * sizeof(float) + 63) / 64 * 64;
}
/* 0: the score tile itself is the operand. */
TILE_ENTRY size_t tile_weights_bytes(int32_t num_keys) {
    (void)num_keys;
    return 0;
}

INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* Columns first .. first+count-1 of up to VECTOR_WIDTH rows, transposed: columns[c] holds column first + c. */
INLINE void load_columns(vec columns[VECTOR_WIDTH], const void *const *rows, int32_t num_rows, int32_t first,
                         int32_t count, fdm_dtype dtype) {
    const size_t bytes = dtype == FDM_FLOAT32 ? 4 : 2;
    for (int32_t r = 0; r < VECTOR_WIDTH; r++)
        columns[r] =
            r < num_rows ? vec_load_as((const char *)rows[r] + (size_t)first * bytes, count, dtype) : vec_set(0.0f);
    vec_transpose(columns);
}

INLINE void pack_panel_as(float *panel, const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype) {
    for (int32_t lane = 0; lane < CPU_LANES; lane += VECTOR_WIDTH) {
        int32_t here = num_rows - lane;
        for (int32_t d = 0; d < depth; d += VECTOR_WIDTH) {
            vec columns[VECTOR_WIDTH];
            int32_t count = least(VECTOR_WIDTH, depth - d);
            load_columns(columns, here > 0 ? rows + lane : rows, here, d, count, dtype);
            for (int32_t c = 0; c < count; c++)
                vec_store(panel + (size_t)(d + c) * CPU_LANES + lane, columns[c]);
        }
    }
}

/* panel [depth][CPU_LANES] = rows [num_rows][depth] ^T */
TILE_ENTRY void tile_pack_panel(void *panel, const void *const *rows, int32_t num_rows, int32_t depth,
                                fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32)
        pack_panel_as(panel, rows, num_rows, depth, FDM_FLOAT32);
    else if (dtype == FDM_FLOAT16)
        pack_panel_as(panel, rows, num_rows, depth, FDM_FLOAT16);
    else
        pack_panel_as(panel, rows, num_rows, depth, FDM_BFLOAT16);
}

INLINE void pack_row_as(float *out, const char *row, int32_t depth, fdm_dtype dtype) {
    const int32_t bytes = dtype == FDM_FLOAT32 ? 4 : 2;
    int32_t d = 0;
    for (; d + VECTOR_WIDTH <= depth; d += VECTOR_WIDTH)
        vec_store(out + d, vec_load_as(row + (size_t)d * (size_t)bytes, VECTOR_WIDTH, dtype));
    if (d < depth)
        vec_store_partial(out + d, vec_load_as(row + (size_t)d * (size_t)bytes, depth - d, dtype), depth - d);
}

/* keys [num_keys][depth]: the rows one after another. values and keys share the format. */
TILE_ENTRY void tile_pack_keys(void *keys, const void *const *rows, int32_t num_keys, int32_t depth, fdm_dtype dtype) {
    float *out = keys;
    for (int32_t key = 0; key < num_keys; key++, out += depth)
        if (dtype == FDM_FLOAT32)
            pack_row_as(out, rows[key], depth, FDM_FLOAT32);
        else if (dtype == FDM_FLOAT16)
            pack_row_as(out, rows[key], depth, FDM_FLOAT16);
        else
            pack_row_as(out, rows[key], depth, FDM_BFLOAT16);
}

/* 0 where all elements of the row are finite, else NaN. */
INLINE vec row_times_zero(const char *row, int32_t depth, fdm_dtype dtype) {
    const int32_t bytes = dtype == FDM_FLOAT32 ? 4 : 2;
    const vec zero = vec_set(0.0f);
    vec sum = zero;
    int32_t d = 0;
    for (; d + VECTOR_WIDTH <= depth; d += VECTOR_WIDTH)
        sum = vec_fma(vec_load_as(row + (size_t)d * (size_t)bytes, VECTOR_WIDTH, dtype), zero, sum);
    if (d < depth)
        sum = vec_fma(vec_load_as(row + (size_t)d * (size_t)bytes, depth - d, dtype), zero, sum);
    return sum;
}

INLINE int all_finite_as(const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype) {
    vec sum = vec_set(0.0f);
    for (int32_t row = 0; row < num_rows; row++)
        sum = vec_add(sum, row_times_zero(rows[row], depth, dtype));
    return vec_sum(sum) == 0.0f;
}

TILE_ENTRY int tile_all_finite(const void *const *rows, int32_t num_rows, int32_t depth, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32)
        return all_finite_as(rows, num_rows, depth, FDM_FLOAT32);
    return dtype == FDM_FLOAT16 ? all_finite_as(rows, num_rows, depth, FDM_FLOAT16)
                                : all_finite_as(rows, num_rows, depth, FDM_BFLOAT16);
}

TILE_ENTRY void tile_store_panel(void *const *rows, const float *acc, const float *factor, int32_t num_lanes,
                                 int32_t depth, fdm_dtype dtype) {
    const size_t bytes = dtype == FDM_FLOAT32 ? 4 : 2;
    for (int32_t lane = 0; lane < num_lanes; lane += VECTOR_WIDTH) {
        vec factors = vec_load(factor + lane);
        int32_t here = least(VECTOR_WIDTH, num_lanes - lane);
        for (int32_t d = 0; d < depth; d += VECTOR_WIDTH) {
            vec tile[VECTOR_WIDTH];
            int32_t count = least(VECTOR_WIDTH, depth - d);
            for (int32_t c = 0; c < VECTOR_WIDTH; c++)
                tile[c] =
                    c < count ? vec_mul(vec_load(acc + (size_t)(d + c) * CPU_LANES + lane), factors) : vec_set(0.0f);
            vec_transpose(tile);
            for (int32_t l = 0; l < here; l++)
                vec_store_as((char *)rows[lane + l] + (size_t)d * bytes, tile[l], count, dtype);
        }
    }
}

/* Swaps off-diagonal squares of bits between words `apart` apart in eights of words, a vector at a time. */
INLINE void swap_bits(uint64_t words[64], int apart, int width) {
    const uint64_t keep = ~UINT64_C(0) / ((UINT64_C(1) << width) + 1);
    for (int eight = 0; eight < 8; eight++) {
        if (eight & apart)
            continue;
        uint64_t *low = words + 8 * eight, *high = low + 8 * apart;
        for (int i = 0; i < 8; i++) {
            uint64_t swap = (low[i] >> width ^ high[i]) & keep;
            low[i] ^= swap << width;
            high[i] ^= swap;
        }
    }
}

/* 64 x 64 bits: bit c of word r becomes bit r of out[c]. words[8 * (r % 8) + r / 8] is word r: so each step is between
 * whole eights of words, as 8 x 8 bits first and then, in the common order, as 8 x 8 bytes. */
INLINE void transpose_bits(uint64_t out[64], uint64_t words[64]) {
    swap_bits(words, 4, 4);
    swap_bits(words, 2, 2);
    swap_bits(words, 1, 1);
    for (int r = 0; r < 64; r++)
        out[r] = words[r % 8 * 8 + r / 8];
    swap_bits(out, 4, 32);
    swap_bits(out, 2, 16);
    swap_bits(out, 1, 8);
}

/* Bit k = row[k * stride] != 0, for k < count <= 64. */
INLINE uint64_t row_bits(const uint8_t *row, int64_t stride, int32_t count) {
    if (stride == 1 && count == 64)
        return bytes_nonzero(row);
    uint8_t bytes[64] = {0};
    for (int32_t k = 0; k < count; k++)
        bytes[k] = row[k * stride];
    return bytes_nonzero(bytes);
}

/* A row is read as far as it goes before the next, four cache lines at most: pieces of one line, far apart, come at
 * half the rate. */
TILE_ENTRY void tile_mask_bits(uint64_t *visible, const uint8_t *const *rows, int64_t key_stride, int32_t num_keys,
                               int32_t num_lanes) {
    enum { CHUNKS = CPU_MASK_KEYS_MAX / 64 };
    uint64_t words[CHUNKS][64] = {0}, columns[64], bits[CHUNKS] = {0};
    for (int32_t lane = 0; lane < num_lanes; lane++) {
        const int again = lane > 0 && rows[lane] == rows[lane - 1];
        for (int32_t c = 0; 64 * c < num_keys; c++) {
            if (!again)
                bits[c] = row_bits(rows[lane] + 64 * c * key_stride, key_stride, least(64, num_keys - 64 * c));
            words[c][lane % 8 * 8 + lane / 8] = bits[c];
        }
    }
    for (int32_t c = 0; 64 * c < num_keys; c++) {
        transpose_bits(columns, words[c]);
        memcpy(visible + 64 * c, columns, (size_t)least(64, num_keys - 64 * c) * sizeof *columns);
    }
}

INLINE void load_bias_strided(float *bias, const char *row, int64_t step, int32_t num_keys, fdm_dtype dtype) {
    for (int32_t key = 0; key < num_keys; key++)
        bias[(size_t)key * CPU_LANES] = load_scalar_as(row + key * step, dtype);
}

/* Lanes beyond num_lanes, up to a whole vector, get 0. */
INLINE void load_bias_as(float *bias, const void *const *rows, int64_t key_stride, int32_t num_keys, int32_t num_lanes,
                         fdm_dtype dtype) {
    const int64_t bytes = dtype == FDM_FLOAT32 ? 4 : 2;
    if (key_stride == 1 && num_keys > 1) {
        for (int32_t lane = 0; lane < num_lanes; lane += VECTOR_WIDTH)
            for (int32_t key = 0; key < num_keys; key += VECTOR_WIDTH) {
                vec columns[VECTOR_WIDTH];
                int32_t count = least(VECTOR_WIDTH, num_keys - key);
                for (int32_t r = 0; r < least(VECTOR_WIDTH, num_lanes - lane); r++)
                    __builtin_prefetch((const char *)rows[lane + r] + (key + num_keys) * bytes, 0, 2);
                load_columns(columns, rows + lane, num_lanes - lane, key, count, dtype);
                for (int32_t c = 0; c < count; c++)
                    vec_store(bias + (size_t)(key + c) * CPU_LANES + lane, columns[c]);
            }
        return;
    }
    for (int32_t lane = 0; lane < num_lanes; lane++)
        load_bias_strided(bias + lane, rows[lane], key_stride * bytes, num_keys, dtype);
    for (int32_t lane = num_lanes; lane % VECTOR_WIDTH; lane++)
        for (int32_t key = 0; key < num_keys; key++)
            bias[(size_t)key * CPU_LANES + lane] = 0;
}

TILE_ENTRY void tile_load_bias(float *bias, const void *const *rows, int64_t key_stride, int32_t num_keys,
                               int32_t num_lanes, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32)
        load_bias_as(bias, rows, key_stride, num_keys, num_lanes, FDM_FLOAT32);
    else if (dtype == FDM_FLOAT16)
        load_bias_as(bias, rows, key_stride, num_keys, num_lanes, FDM_FLOAT16);
    else
        load_bias_as(bias, rows, key_stride, num_keys, num_lanes, FDM_BFLOAT16);
}

#endif
