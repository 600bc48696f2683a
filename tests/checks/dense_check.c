/* dense_check.c: builders of dense masks on a CUDA device, or on the emulated one, against the CPU, byte for byte:
 * intervals to masks, what masks show of blocks, lists of blocks, and the W largest biases of a row, with ties, NaN,
 * hidden keys, strides and broadcast axes. Nothing is written beside the masks. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "device_check.h"
#include "flash_dmattn.h"
#include "subjects.h"

enum { BYTES = 1 << 20, ROOM = 4 };
enum { BIAS, SHOWN, START, END, MASK, NUM_BUFFERS };

static _Alignas(16) char here[NUM_BUFFERS][BYTES], back[BYTES];
static void *there[NUM_BUFFERS];
static int64_t shapes[NUM_BUFFERS][4], strides[NUM_BUFFERS][4];
static fdm_tensor tensors[NUM_BUFFERS];

/* Room between axes, keys with a stride now and then. 0 where it does not fit. */
static int make(int n, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    int64_t step = below(6) ? 1 : 2;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        shapes[n][i] = shape[i];
        strides[n][i] = step;
        step = step * (shape[i] > 0 ? shape[i] : 1) + (below(3) ? 0 : below(ROOM));
    }
    memset(here[n], 0xa5, BYTES);
    tensors[n] =
        (fdm_tensor){.ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = shapes[n], .strides = strides[n]};
    return step * fdm_dtype_bytes(dtype) <= BYTES;
}

static void send(void) {
    for (int n = 0; n < NUM_BUFFERS; n++)
        if (fdm_memory_copy(there[n], cuda, here[n], host, BYTES))
            fail("copying");
}

static void place(fdm_device_id device) {
    for (int n = 0; n < NUM_BUFFERS; n++) {
        tensors[n].device = device;
        tensors[n].data = device.type == FDM_CUDA ? there[n] : here[n];
    }
}

static int same(int n) {
    if (fdm_memory_copy(back, host, there[n], cuda, BYTES))
        fail("copying back");
    return memcmp(here[n], back, BYTES) == 0;
}

static int64_t few(int64_t most) { return below(12) ? 1 + below(most) : 0; }

/* ---- out of intervals ---- */

static int to_mask(void) {
    const int64_t shape[4] = {1 + below(2), 1 + below(2), few(below(2) ? 9 : 300), few(below(2) ? 30 : 1100)};
    const int64_t pair[3] = {shape[0], shape[1], shape[3]};
    if (!make(START, FDM_INT32, 3, pair) || !make(END, FDM_INT32, 3, pair) || !make(MASK, FDM_BOOL, 4, shape))
        return 1;
    for (size_t n = 0; n < BYTES / sizeof(int32_t); n++) {
        ((int32_t *)(void *)here[START])[n] = below(9) ? (int32_t)below(shape[2] + 2) - 1 : INT32_MIN;
        ((int32_t *)(void *)here[END])[n] = below(9) ? (int32_t)below(shape[2] + 2) : INT32_MAX;
    }
    send();
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        if (fdm_intervals_to_mask(&tensors[START], &tensors[END], &tensors[MASK], NULL))
            fail("intervals to mask");
    }
    return same(MASK);
}

/* ---- what blocks show ---- */

static int mask_blocks(void) {
    const int64_t shape[4] = {1 + below(2), 1 + below(2), few(300), few(below(2) ? 60 : 500)};
    const int64_t block_q = 1 + below(below(2) ? 150 : 20), block_k = below(2) ? 16 * (1 + below(8)) : 1 + below(150);
    const int64_t blocks[4] = {shape[0], shape[1], (shape[2] + block_q - 1) / block_q,
                               (shape[3] + block_k - 1) / block_k};
    if (!make(SHOWN, FDM_BOOL, 4, shape) || !make(MASK, FDM_BOOL, 4, blocks))
        return 1;
    tensors[MASK].strides = NULL;
    const int rare = 1 + (int)below(400), mostly = (int)below(2);
    for (int n = 0; n < BYTES; n++)
        here[SHOWN][n] = (char)(below(rare) ? mostly : !mostly);
    send();
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        if (fdm_mask_blocks(&tensors[SHOWN], block_q, block_k, &tensors[MASK], NULL))
            fail("mask to blocks");
    }
    return same(MASK);
}

/* ---- out of lists ---- */

/* START has the counts, END the indices. */
static int lists(void) {
    const int64_t shape[4] = {1 + below(2), 1 + below(2), few(20), 1 + below(below(2) ? 20 : 90)};
    const int64_t room[4] = {shape[0], shape[1], shape[2], few(below(2) ? 12 : 100)};
    if (!make(START, FDM_INT32, 3, room) || !make(END, FDM_INT32, 4, room) || !make(MASK, FDM_BOOL, 4, shape))
        return 1;
    for (size_t n = 0; n < BYTES / sizeof(int32_t); n++) {
        ((int32_t *)(void *)here[START])[n] = (int32_t)below(room[3] + 1);
        ((int32_t *)(void *)here[END])[n] = (int32_t)below(shape[3]);
    }
    send();
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        if (fdm_blocks_from_lists(&tensors[START], &tensors[END], &tensors[MASK], NULL))
            fail("lists of blocks");
    }
    return same(MASK);
}

/* ---- out of biases ---- */

static void fill_bias(fdm_dtype dtype) {
    static const float odd[] = {INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 1e-42f, -1e-42f, -3.4e38f};
    const int kind = (int)below(4);
    for (size_t n = 0; n < BYTES / (size_t)fdm_dtype_bytes(dtype); n++) {
        float x = kind == 0   ? (float)below(4) - 1
                  : kind == 1 ? 1.0f
                  : kind == 2 ? (float)n
                              : (float)(below(1 << 24) - (1 << 23)) * 0x1p-20f;
        x = below(30) ? x : odd[below(8)];
        if (dtype == FDM_FLOAT32)
            memcpy(here[BIAS] + n * 4, &x, 4);
        else
            ((uint16_t *)(void *)here[BIAS])[n] = dtype == FDM_FLOAT16 ? float_to_float16(x) : float_to_bfloat16(x);
    }
}

static int64_t one_or(int64_t extent) { return below(2) ? extent : 1; }

static int create(void) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    static const double lowest[] = {-3.4028234663852886e38, -65504, -3.3895313892515355e38}, others[] = {-INFINITY, -1};
    const int which = (int)below(3), is_long = below(60) == 0;
    const int64_t rows = is_long ? 1 + below(3) : few(12);
    const int64_t keys = is_long ? 8000 + below(5000) : few(below(2) ? 40 : below(2) ? 900 : 3000);
    const int64_t shape[4] = {1 + below(2), 1 + below(2), rows, keys};
    const int64_t bias[4] = {one_or(shape[0]), one_or(shape[1]), one_or(rows), keys};
    const int64_t flat[2] = {one_or(shape[0]), below(keys + 9)};
    const int64_t full[4] = {one_or(shape[0]), one_or(shape[1]), one_or(rows), below(4) ? keys : 1};
    const int with_shown = below(4) != 0, is_flat = below(2) != 0;
    if (!make(BIAS, dtypes[which], 4, bias) || !make(MASK, FDM_BOOL, 4, shape) ||
        !make(SHOWN, FDM_BOOL, is_flat ? 2 : 4, is_flat ? flat : full))
        return 1;
    fill_bias(dtypes[which]);
    const int visible = 1 + (int)below(8);
    for (int n = 0; n < BYTES; n++)
        here[SHOWN][n] = (char)(below(visible) ? below(255) + 1 : 0);
    const int64_t window = below(5) ? 1 + below(below(3) ? keys / 2 + 1 : keys + 3) : below(2) ? 0 : INT64_MAX;
    const int64_t block_size = below(2) ? 1 : 1 + below(below(2) ? 8 : keys + 2);
    const double min_value = below(4) ? lowest[which] : others[below(2)];
    send();
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        if (fdm_create_mask(&tensors[BIAS], with_shown ? &tensors[SHOWN] : NULL, window, min_value, block_size,
                            &tensors[MASK], NULL))
            fail("creating a mask");
    }
    return same(MASK) && same(BIAS) && same(SHOWN);
}

static const char *check(const struct options *o, char *about, size_t bytes) {
    static const char *const names[] = {"intervals to mask", "mask to blocks", "lists of blocks", "creating a mask",
                                        "creating a mask"};
    static int (*const kinds[])(void) = {to_mask, mask_blocks, lists, create, create};
    const int64_t kind = below(5);
    snprintf(about, bytes, "%s", names[kind]);
    return kinds[kind]() ? NULL : "other bytes than the CPU's";
}

int dense_checks(const struct options *o) {
    if (!has_device())
        return EXIT_NO_DEVICE;
    for (int n = 0; n < NUM_BUFFERS; n++)
        if (fdm_memory_allocate(cuda, BYTES, &there[n]))
            fail("allocating");
    const int code = run_cases(o, 400, check);
    for (int n = 0; n < NUM_BUFFERS; n++)
        fdm_memory_release(cuda, there[n]);
    return code;
}
