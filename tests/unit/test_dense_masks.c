/* test_dense_masks.c: dense masks against the definition of what they say, pair by pair. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "flash_dmattn.h"

enum { KEYS = 24, ROWS = 5, LONG = 2100 };

static uint32_t random_state = 1;
static int random_below(int n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (uint32_t)n);
}

static fdm_tensor tensor_of(void *data, int32_t ndim, int64_t *shape, fdm_dtype dtype) {
    return (fdm_tensor){
        .data = data, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = shape};
}

/* ---- out of biases ---- */

/* Key j is among the `window` largest of a row; window 0: it is above 0. */
static int is_kept(const double *bias, int j, int keys, int window, double hidden) {
    int larger = 0;
    if (window == 0)
        return bias[j] > 0 && bias[j] != hidden;
    for (int k = 0; k < keys; k++)
        larger += bias[k] > bias[j] || (bias[k] == bias[j] && k < j);
    return larger < window && bias[j] != hidden;
}

static void want_row(const double *bias, const uint8_t *shown, int keys, int window, int block, double hidden,
                     uint8_t *want) {
    double seen[KEYS];
    for (int j = 0; j < keys; j++)
        seen[j] = !shown[j] || isnan(bias[j]) ? hidden : bias[j];
    for (int j = 0; j < keys; j++)
        want[j] = (uint8_t)is_kept(seen, j, keys, window, hidden);
    for (int first = 0; block > 1 && first < keys; first += block) {
        int last = first + block < keys ? first + block : keys, kept = 0;
        for (int j = first; j < last; j++)
            kept += want[j];
        for (int j = first; j < last; j++)
            want[j] = 2 * kept > last - first;
    }
}

static double drawn(int few_values) {
    static const double odd[] = {NAN, INFINITY, -INFINITY, -0.0, 0.0, -FLT_MAX, -2};
    if (random_below(8) == 0)
        return odd[random_below(7)];
    return few_values ? random_below(4) - 1 : random_below(1 << 20) / 1024.0 - 512;
}

static void case_of(int rows, int keys, int window) {
    double bias[ROWS * KEYS], hidden = random_below(4) ? -FLT_MAX : random_below(2) ? -2 : -INFINITY;
    float narrow[ROWS * KEYS];
    uint8_t shown[ROWS * KEYS], mask[ROWS * KEYS], want[KEYS];
    const int few = random_below(2), bias_rows = random_below(2) ? rows : 1, shown_rows = random_below(2) ? rows : 1;
    const int kind = random_below(4), newest = kind == 2 ? random_below(KEYS + 9) : 0, wide = random_below(2);
    const int block = random_below(2) ? 1 + random_below(6) : 1;
    for (int n = 0; n < ROWS * KEYS; n++) {
        bias[n] = narrow[n] = (float)drawn(few);
        shown[n] = random_below(4) != 0;
    }
    fdm_tensor b = wide ? tensor_of(bias, 4, (int64_t[]){1, 1, bias_rows, keys}, FDM_FLOAT64)
                        : tensor_of(narrow, 4, (int64_t[]){1, 1, bias_rows, keys}, FDM_FLOAT32);
    fdm_tensor s = kind == 2 ? tensor_of(shown, 2, (int64_t[]){1, newest}, FDM_BOOL)
                             : tensor_of(shown, 4, (int64_t[]){1, 1, shown_rows, kind == 3 ? 1 : keys}, FDM_BOOL);
    fdm_tensor m = tensor_of(mask, 4, (int64_t[]){1, 1, rows, keys}, FDM_BOOL);
    assert_int_equal(fdm_create_mask(&b, kind ? &s : NULL, window, hidden, block, &m, NULL), FDM_OK);
    for (int i = 0; i < rows; i++) {
        uint8_t seen[KEYS];
        for (int j = 0; j < keys; j++)
            seen[j] = kind == 0   ? 1
                      : kind == 1 ? shown[(shown_rows > 1 ? i : 0) * keys + j]
                      : kind == 2 ? j < keys - newest || shown[j - (keys - newest)]
                                  : shown[shown_rows > 1 ? i : 0];
        want_row(bias + (bias_rows > 1 ? i : 0) * keys, seen, keys, window, block, hidden, want);
        assert_memory_equal(mask + i * keys, want, (size_t)keys);
    }
}

static void created_masks_are_the_definition(void **state) {
    (void)state;
    for (int round = 0; round < 10000; round++)
        case_of(1 + random_below(ROWS), 1 + random_below(KEYS), random_below(KEYS + 4));
}

static void the_hiding_bias_is_rounded(void **state) {
    (void)state;
    uint16_t bias[4] = {0x3f80, 0xff7f, 0x4000, 0xff80}; /* 1, the lowest, 2, -inf */
    uint8_t mask[4];
    fdm_tensor b = tensor_of(bias, 4, (int64_t[]){1, 1, 1, 4}, FDM_BFLOAT16);
    fdm_tensor m = tensor_of(mask, 4, (int64_t[]){1, 1, 1, 4}, FDM_BOOL);
    assert_int_equal(fdm_create_mask(&b, NULL, 4, -3.3895313892515355e38, 1, &m, NULL), FDM_OK);
    assert_memory_equal(mask, ((uint8_t[]){1, 0, 1, 1}), 4);
    assert_int_equal(fdm_create_mask(&b, NULL, 4, -3.4028234663852886e38, 1, &m, NULL), FDM_OK); /* to -inf */
    assert_memory_equal(mask, ((uint8_t[]){1, 1, 1, 0}), 4);
}

static void created_masks_refuse_bad_input(void **state) {
    (void)state;
    float bias[12] = {0};
    uint8_t mask[12] = {7}, shown[12] = {0};
    fdm_tensor b = tensor_of(bias, 4, (int64_t[]){1, 1, 3, 4}, FDM_FLOAT32), five = b, other = b;
    fdm_tensor m = tensor_of(mask, 4, (int64_t[]){1, 1, 3, 4}, FDM_BOOL);
    fdm_tensor s = tensor_of(shown, 4, (int64_t[]){1, 1, 1, 5}, FDM_BOOL);
    five.shape = (int64_t[]){1, 1, 3, 3};
    other.shape = (int64_t[]){1, 1, 2, 4};
    assert_int_equal(fdm_create_mask(&b, NULL, -1, 0, 1, &m, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "window is -1"));
    assert_int_equal(fdm_create_mask(&b, NULL, 1, 0, 0, &m, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "block_size is 0"));
    assert_int_equal(fdm_create_mask(&b, NULL, 1, NAN, 1, &m, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "min_value is NaN"));
    assert_int_equal(fdm_create_mask(&five, NULL, 1, 0, 1, &m, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "bias has 3 keys, but mask has 4"));
    assert_int_equal(fdm_create_mask(&other, NULL, 1, 0, 1, &m, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "bias has extent 2 on axis 2; it must be 1 or 3"));
    assert_int_equal(fdm_create_mask(&b, &s, 1, 0, 1, &m, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "attention_mask has 5 keys, but mask has 4"));
    assert_int_equal(fdm_create_mask(&b, &b, 1, 0, 1, &m, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "attention_mask is float32"));
    assert_int_equal(fdm_create_mask(&m, NULL, 1, 0, 1, &m, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "bias is bool"));
    assert_int_equal(fdm_create_mask(&b, NULL, 1, 0, 1, &b, NULL), FDM_ERROR_INVALID_ARGUMENT);
    b.dtype = fdm_data_type_of(FDM_FLOAT64);
    b.device = m.device = (fdm_device_id){FDM_CUDA, 0};
    assert_int_equal(fdm_create_mask(&b, NULL, 1, 0, 1, &m, NULL), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "bias is float64"));
    b.dtype = fdm_data_type_of(FDM_FLOAT32);
    b.device = m.device = (fdm_device_id){FDM_CPU, 0};
    memory_fail_at(1);
    assert_int_equal(fdm_create_mask(&b, NULL, 1, 0, 1, &m, NULL), FDM_ERROR_OUT_OF_MEMORY);
    assert_int_equal(mask[0], 7);
    assert_int_equal(memory_live(), 0);
}

/* ---- out of intervals ---- */

static void intervals_become_masks(void **state) {
    (void)state;
    static int32_t start[LONG], end[LONG];
    static uint8_t mask[3 * LONG * 2];
    for (int round = 0; round < 300; round++) {
        const int keys = round % 10 ? random_below(9) : LONG - random_below(3), rows = random_below(4);
        const int step = 1 + random_below(2);
        for (int j = 0; j < keys; j++) {
            start[j] = random_below(6) ? random_below(5) - 1 : INT32_MIN;
            end[j] = random_below(6) ? random_below(5) : INT32_MAX;
        }
        memset(mask, 7, sizeof mask);
        fdm_tensor s = tensor_of(start, 3, (int64_t[]){1, 1, keys}, FDM_INT32), e = s;
        fdm_tensor m = tensor_of(mask, 4, (int64_t[]){1, 1, rows, keys}, FDM_BOOL);
        m.strides = (int64_t[]){1, 1, LONG * 2, step};
        e.data = end;
        assert_int_equal(fdm_intervals_to_mask(&s, &e, &m, NULL), FDM_OK);
        for (int i = 0; i < 3; i++)
            for (int j = 0; j < keys; j++)
                assert_int_equal(mask[i * LONG * 2 + j * step], i < rows ? start[j] <= i && i < end[j] : 7);
    }
    fdm_tensor s = tensor_of(start, 3, (int64_t[]){1, 1, 4}, FDM_INT32);
    fdm_tensor m = tensor_of(mask, 4, (int64_t[]){1, 1, 3, 5}, FDM_BOOL);
    assert_int_equal(fdm_intervals_to_mask(&s, &s, &m, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "start has shape [1, 1, 4]; it must be [1, 1, 5]"));
    assert_int_equal(fdm_intervals_to_mask(&s, &s, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
}

/* ---- what blocks show ---- */

static void blocks_say_what_is_shown(void **state) {
    (void)state;
    int seen[3] = {0};
    for (int round = 0; round < 3000; round++) {
        uint8_t mask[9 * 9], blocks[81];
        const int rows = random_below(10), keys = random_below(10), block_q = 1 + random_below(5),
                  block_k = 1 + random_below(5), rare = 1 + random_below(30), mostly = random_below(2);
        const int tiles_q = (rows + block_q - 1) / block_q, tiles_k = (keys + block_k - 1) / block_k;
        for (int n = 0; n < 81; n++)
            mask[n] = (uint8_t)((random_below(rare) != 0) == mostly ? 1 + random_below(255) : 0);
        fdm_tensor m = tensor_of(mask, 4, (int64_t[]){1, 1, rows, keys}, FDM_BOOL);
        fdm_tensor b = tensor_of(blocks, 4, (int64_t[]){1, 1, tiles_q, tiles_k}, FDM_BOOL);
        assert_int_equal(fdm_mask_blocks(&m, block_q, block_k, &b, NULL), FDM_OK);
        for (int n = 0; n < tiles_q * tiles_k; n++) {
            int shown = 0, all = 0;
            for (int i = n / tiles_k * block_q; i < (n / tiles_k + 1) * block_q && i < rows; i++)
                for (int j = n % tiles_k * block_k; j < (n % tiles_k + 1) * block_k && j < keys; j++, all++)
                    shown += mask[i * keys + j] != 0;
            assert_int_equal(blocks[n], shown == 0 ? 0 : shown == all ? 2 : 1);
            seen[blocks[n]]++;
        }
    }
    assert_true(seen[0] > 1000 && seen[1] > 1000 && seen[2] > 1000);
    uint8_t mask[16], blocks[16];
    fdm_tensor m = tensor_of(mask, 4, (int64_t[]){1, 1, 4, 4}, FDM_BOOL);
    fdm_tensor b = tensor_of(blocks, 4, (int64_t[]){1, 1, 2, 2}, FDM_BOOL);
    assert_int_equal(fdm_mask_blocks(&m, 0, 2, &b, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "blocks are 0 x 2"));
    assert_int_equal(fdm_mask_blocks(&m, 1, 2, &b, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "blocks has shape [1, 1, 2, 2]; it must be [1, 1, 4, 2]"));
    b.strides = (int64_t[]){4, 4, 1, 2};
    assert_int_equal(fdm_mask_blocks(&m, 2, 2, &b, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "not contiguous"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(created_masks_are_the_definition), cmocka_unit_test(the_hiding_bias_is_rounded),
        cmocka_unit_test(created_masks_refuse_bad_input),   cmocka_unit_test(intervals_become_masks),
        cmocka_unit_test(blocks_say_what_is_shown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
