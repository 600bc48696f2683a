/* dense_on_cpu.c: dense masks out of key intervals and out of biases, and what they show of tiles. */
#include "masks/dense/dense_on_cpu.h"

#include <math.h>
#include <string.h>

#include "base/half.h"
#include "problem/tensor.h"

static uint8_t *mask_row(const fdm_tensor *mask, int64_t b, int64_t h, int64_t i) {
    return (uint8_t *)tensor_data(mask) + b * tensor_stride(mask, 0) + h * tensor_stride(mask, 1) +
           i * tensor_stride(mask, 2);
}

/* ---- out of key intervals ---- */

enum { KEYS_AT_ONCE = 1024 };

/* first and last of `count` keys, beside each other, against each row. */
static void show_keys(const int32_t *first, const int32_t *last, int64_t count, uint8_t *row, int64_t rows,
                      int64_t row_stride, int64_t key_stride) {
    for (int64_t n = 0; n < rows; n++, row += row_stride) {
        const int32_t i = (int32_t)n;
        if (key_stride == 1)
            for (int64_t j = 0; j < count; j++)
                row[j] = (uint8_t)((first[j] <= i) & (i < last[j]));
        else
            for (int64_t j = 0; j < count; j++)
                row[j * key_stride] = (uint8_t)((first[j] <= i) & (i < last[j]));
    }
}

static const int32_t *number_at(const fdm_tensor *t, int64_t b, int64_t h, int64_t j) {
    return (const int32_t *)(void *)tensor_data(t) + b * tensor_stride(t, 0) + h * tensor_stride(t, 1) +
           j * tensor_stride(t, 2);
}

void intervals_to_mask(const fdm_tensor *start, const fdm_tensor *end, const fdm_tensor *mask) {
    int32_t first[KEYS_AT_ONCE], last[KEYS_AT_ONCE];
    const int64_t keys = mask->shape[3], step = tensor_stride(mask, 3);
    for (int64_t b = 0; b < mask->shape[0] && mask->shape[2] > 0; b++)
        for (int64_t h = 0; h < mask->shape[1]; h++)
            for (int64_t from = 0; from < keys; from += KEYS_AT_ONCE) {
                const int64_t count = keys - from < KEYS_AT_ONCE ? keys - from : KEYS_AT_ONCE;
                for (int64_t j = 0; j < count; j++) {
                    first[j] = *number_at(start, b, h, from + j);
                    last[j] = *number_at(end, b, h, from + j);
                }
                show_keys(first, last, count, mask_row(mask, b, h, 0) + from * step, mask->shape[2],
                          tensor_stride(mask, 2), step);
            }
}

/* ---- what of tiles is shown ---- */

void blocks_of_mask(const fdm_tensor *mask, int64_t block_q, int64_t block_k, const fdm_tensor *blocks) {
    const int64_t rows = mask->shape[2], keys = mask->shape[3], step = tensor_stride(mask, 3);
    uint8_t *block = (uint8_t *)tensor_data(blocks);
    for (int64_t b = 0; b < blocks->shape[0]; b++)
        for (int64_t h = 0; h < blocks->shape[1]; h++)
            for (int64_t tile_q = 0; tile_q < blocks->shape[2]; tile_q++)
                for (int64_t tile_k = 0; tile_k < blocks->shape[3]; tile_k++) {
                    const int64_t last = rows - tile_q * block_q < block_q ? rows : (tile_q + 1) * block_q;
                    const int64_t first_key = tile_k * block_k;
                    const int64_t count = keys - first_key < block_k ? keys - first_key : block_k;
                    uint8_t seen = 0, hidden = 0;
                    for (int64_t i = tile_q * block_q; i < last && !(seen && hidden); i++) {
                        const uint8_t *row = mask_row(mask, b, h, i) + first_key * step;
                        for (int64_t j = 0; j < count; j++) {
                            seen |= row[j * step] != 0;
                            hidden |= row[j * step] == 0;
                        }
                    }
                    *block++ = (uint8_t)(!seen ? 0 : hidden ? 1 : 2);
                }
}

/* ---- out of biases ---- */

/* The bits of a float or double in the order of their values; one zero. */
static uint64_t order_of_float(float x) {
    const uint32_t bits = x == 0 ? 0 : float_to_bits(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
static uint64_t order_of_double(double x) {
    uint64_t bits = 0;
    if (x != 0)
        memcpy(&bits, &x, sizeof bits);
    return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}
static uint64_t order_of(double x, fdm_dtype dtype) {
    return dtype == FDM_FLOAT64 ? order_of_double(x) : order_of_float((float)x);
}

/* A row's biases in their order; that of keys that are not shown, and of NaN, is `hidden`. */
static void read_orders(const char *bias, int64_t step, fdm_dtype dtype, const uint8_t *shown, int64_t shown_step,
                        int64_t first_shown, uint64_t hidden, int64_t count, uint64_t *orders) {
    for (int64_t j = 0; j < count; j++) {
        const char *at = bias + j * step * fdm_dtype_bytes(dtype);
        double x;
        if (dtype == FDM_FLOAT32)
            x = *(const float *)(const void *)at;
        else if (dtype == FDM_FLOAT64)
            x = *(const double *)(const void *)at;
        else if (dtype == FDM_FLOAT16)
            x = float16_to_float(*(const uint16_t *)(const void *)at);
        else
            x = bfloat16_to_float(*(const uint16_t *)(const void *)at);
        orders[j] = isnan(x) ? hidden : order_of(x, dtype);
    }
    for (int64_t j = first_shown > 0 ? first_shown : 0; shown && j < count; j++)
        if (!shown[(j - first_shown) * shown_step])
            orders[j] = hidden;
}

/* The wanted-th largest, by radix selection from the highest digit on; *ties: how many of those equal to it belong to
 * the `wanted` largest. 1 <= wanted <= count. */
static uint64_t select_largest(const uint64_t *orders, int64_t count, int bits, int64_t wanted, int64_t *ties) {
    enum { FEW_KEYS = 2048, BITS_OF_FEW = 8, BITS_OF_MANY = 11 };
    const int most_bits = count <= FEW_KEYS ? BITS_OF_FEW : BITS_OF_MANY;
    int32_t bins[1 << BITS_OF_MANY];
    uint64_t prefix = 0; /* digits of the result so far */
    for (int shift = bits; shift > 0;) {
        const int above = shift, digit_bits = shift < most_bits ? shift : most_bits;
        memset(bins, 0, ((size_t)1 << digit_bits) * sizeof *bins);
        shift -= digit_bits;
        for (int64_t j = 0; j < count; j++)
            if (above == bits || orders[j] >> above == prefix)
                bins[orders[j] >> shift & (((uint64_t)1 << digit_bits) - 1)]++;
        int64_t digit = ((int64_t)1 << digit_bits) - 1;
        for (; bins[digit] < wanted; digit--)
            wanted -= bins[digit];
        prefix = prefix << digit_bits | (uint64_t)digit;
    }
    *ties = wanted;
    return prefix;
}

/* A block of keys becomes all 1 where more than half of it is, else all 0. The last may be short. */
static void smooth_blocks(uint8_t *row, int64_t step, int64_t count, int64_t block_size) {
    for (int64_t first = 0; first < count; first += block_size) {
        const int64_t last = count - first < block_size ? count : first + block_size;
        int64_t kept = 0;
        for (int64_t j = first; j < last; j++)
            kept += row[j * step];
        for (int64_t j = first; j < last; j++)
            row[j * step] = 2 * kept > last - first;
    }
}

static void choose_keys(const uint64_t *orders, int64_t count, const struct mask_choice *choice, fdm_dtype dtype,
                        uint8_t *row, int64_t step) {
    const uint64_t hidden = order_of(choice->hidden_bias, dtype);
    uint64_t bound = 0; /* what is above it is kept, and of what equals it the first `ties` */
    int64_t ties = count;
    if (choice->window == 0) {
        bound = order_of(0, dtype);
        ties = 0;
    } else if (choice->window < count)
        bound = select_largest(orders, count, dtype == FDM_FLOAT64 ? 64 : 32, choice->window, &ties);
    for (int64_t j = 0; j < count; j++) {
        const int is_tie = orders[j] == bound;
        row[j * step] = (uint8_t)((orders[j] > bound || (is_tie && ties > 0)) && orders[j] != hidden);
        ties -= is_tie;
    }
    if (choice->block_size > 1)
        smooth_blocks(row, step, count, choice->block_size);
}

void create_mask(const struct mask_source *source, const struct mask_choice *choice, const fdm_tensor *mask,
                 uint64_t *orders) {
    const fdm_dtype dtype = fdm_dtype_of(source->bias);
    const int64_t *t = source->bias_strides, *s = source->shown_strides, count = mask->shape[3];
    const uint64_t hidden = order_of(choice->hidden_bias, dtype);
    for (int64_t b = 0; b < mask->shape[0] && count > 0; b++)
        for (int64_t h = 0; h < mask->shape[1]; h++)
            for (int64_t i = 0; i < mask->shape[2]; i++) {
                const char *bias =
                    tensor_data(source->bias) + (b * t[0] + h * t[1] + i * t[2]) * fdm_dtype_bytes(dtype);
                const uint8_t *shown = NULL;
                if (source->shown)
                    shown = (const uint8_t *)tensor_data(source->shown) + b * s[0] + h * s[1] + i * s[2];
                read_orders(bias, t[3], dtype, shown, s[3], source->first_shown, hidden, count, orders);
                choose_keys(orders, count, choice, dtype, mask_row(mask, b, h, i), tensor_stride(mask, 3));
            }
}
