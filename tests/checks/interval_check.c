/* interval_check.c: builders of key intervals other than top-W on a CUDA device, or on the emulated one, against the
 * CPU, bit for bit: windows, prefixes, documents, and dense masks with strides, broadcast axes and holes. Nothing is
 * written beside the intervals. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_check.h"
#include "flash_dmattn.h"
#include "subjects.h"

enum { KEYS_MAX = 700, ROWS_MAX = 300, HEADS_MAX = 2, ROOM = 4 };

/* start and end, on the host and on the device, for two heads and batches and their strides. */
enum { ELEMENTS = HEADS_MAX * HEADS_MAX * (KEYS_MAX + ROOM) * 2 };
struct pair {
    int32_t here[2][ELEMENTS], back[2][ELEMENTS];
    int32_t *there[2];
    int64_t shape[3], strides[3];
    fdm_tensor tensor[2];
};
static struct pair pair;

static void make_pair(int64_t batch, int64_t heads, int64_t keys) {
    const int64_t step = 1 + below(2), room = below(ROOM);
    const int64_t shape[3] = {batch, heads, keys},
                  strides[3] = {heads * (keys + room) * step, (keys + room) * step, step};
    memcpy(pair.shape, shape, sizeof shape);
    memcpy(pair.strides, strides, sizeof strides);
    memset(pair.here, 0xa5, sizeof pair.here);
    for (int i = 0; i < 2; i++) {
        if (fdm_memory_copy(pair.there[i], cuda, pair.here[i], host, sizeof pair.here[i]))
            fail("copying");
        pair.tensor[i] = (fdm_tensor){.device = host,
                                      .ndim = 3,
                                      .dtype = fdm_data_type_of(FDM_INT32),
                                      .shape = pair.shape,
                                      .strides = pair.strides};
    }
}

static void place(fdm_device_id device) {
    for (int i = 0; i < 2; i++) {
        pair.tensor[i].device = device;
        pair.tensor[i].data = device.type == FDM_CUDA ? pair.there[i] : pair.here[i];
    }
}

/* The device has run; the CPU has too. */
static int is_right(void) {
    for (int i = 0; i < 2; i++)
        if (fdm_memory_copy(pair.back[i], host, pair.there[i], cuda, sizeof pair.back[i]))
            fail("copying back");
    return memcmp(pair.here, pair.back, sizeof pair.here) == 0;
}

static int64_t side(int64_t keys) {
    static const int64_t sides[] = {-1, 0, INT64_MAX, 1};
    return below(2) ? sides[below(4)] : below(keys + 9);
}

static int window_or_prefix(void) {
    const int64_t keys = below(KEYS_MAX), rows = below(3) ? keys : below(2 * KEYS_MAX), left = side(keys),
                  right = side(keys), prefix = below(2 * keys + 2);
    const int causal = (int)below(2), is_window = below(3) != 0;
    make_pair(1 + below(HEADS_MAX), 1 + below(HEADS_MAX), keys);
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        if (is_window ? fdm_window_intervals(rows, causal, left, right, &pair.tensor[0], &pair.tensor[1], NULL)
                      : fdm_prefix_intervals(rows, prefix, &pair.tensor[0], &pair.tensor[1], NULL))
            fail("window or prefix");
    }
    return is_right();
}

static int documents(int32_t *there) {
    int32_t offsets[20] = {0};
    int64_t count = 1 + below(20), stride = 1;
    for (int64_t n = 1; n < count; n++)
        offsets[n] = offsets[n - 1] + (int32_t)below(2 * KEYS_MAX / 40);
    const int64_t keys = offsets[count - 1];
    const int causal = (int)below(2);
    fdm_tensor cu = {
        .device = cuda, .ndim = 1, .dtype = fdm_data_type_of(FDM_INT32), .shape = &count, .strides = &stride};
    make_pair(1, 1 + below(HEADS_MAX), keys);
    if (fdm_memory_copy(there, cuda, offsets, host, sizeof offsets))
        fail("copying");
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        cu.device = n ? host : cuda;
        cu.data = n ? offsets : there;
        if (fdm_document_intervals(&cu, causal, &pair.tensor[0], &pair.tensor[1], NULL))
            fail("documents");
    }
    return is_right();
}

/* Runs, and sometimes a key with two of them. */
static void draw_mask(uint8_t *mask, int64_t columns, int64_t rows, int64_t keys, int64_t row_stride) {
    memset(mask, 0, (size_t)(columns * rows * row_stride));
    const int holes = below(3) == 0;
    for (int64_t c = 0; c < columns; c++)
        for (int64_t j = 0; j < keys; j++) {
            const int64_t first = below(rows + 1), last = below(4) ? first + below(rows + 1 - first) : rows;
            for (int64_t i = first; i < last; i++)
                mask[(c * rows + i) * row_stride + j] = (uint8_t)(1 + below(255));
            if (holes && rows > 0 && below(keys) == 0)
                mask[(c * rows + below(rows)) * row_stride + j] ^= 1;
        }
}

static int dense_mask(int32_t *exact_there, uint8_t *there) {
    static uint8_t mask[HEADS_MAX * ROWS_MAX * (KEYS_MAX + ROOM)];
    const int64_t heads = 1 + below(HEADS_MAX), rows = below(ROWS_MAX), keys = 1 + below(below(2) ? 40 : KEYS_MAX);
    const int64_t row_stride = keys + below(ROOM);
    int64_t shape[4] = {1 + below(2), heads, rows, keys}, strides[4] = {0, rows * row_stride, row_stride, 1};
    int32_t exact_here = 7, exact_back = 7;
    fdm_tensor t = {.ndim = 4, .dtype = fdm_data_type_of(FDM_BOOL), .shape = shape, .strides = strides};
    draw_mask(mask, heads, rows, keys, row_stride);
    make_pair(shape[0], heads, keys);
    if (fdm_memory_copy(there, cuda, mask, host, sizeof mask))
        fail("copying");
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        t.device = n ? host : cuda;
        t.data = n ? mask : there;
        if (fdm_intervals_from_mask(&t, &pair.tensor[0], &pair.tensor[1], n ? &exact_here : exact_there, NULL))
            fail("dense mask");
    }
    if (fdm_memory_copy(&exact_back, host, exact_there, cuda, sizeof exact_back))
        fail("copying back");
    return (exact_back != 0) == (exact_here != 0) && (!exact_here || is_right());
}

static void *mask, *numbers; /* on the device */

static const char *check(const struct options *o, char *about, size_t bytes) {
    static const char *const names[] = {"window or prefix", "documents", "dense mask"};
    const int64_t kind = below(3);
    snprintf(about, bytes, "%s", names[kind]);
    const int right = kind == 0 ? window_or_prefix() : kind == 1 ? documents(numbers) : dense_mask(numbers, mask);
    return right ? NULL : "other intervals than the CPU's";
}

int interval_checks(const struct options *o) {
    if (!has_device())
        return EXIT_NO_DEVICE;
    if (fdm_memory_allocate(cuda, sizeof pair.here[0], (void **)&pair.there[0]) ||
        fdm_memory_allocate(cuda, sizeof pair.here[1], (void **)&pair.there[1]) ||
        fdm_memory_allocate(cuda, HEADS_MAX * ROWS_MAX * (KEYS_MAX + ROOM), &mask) ||
        fdm_memory_allocate(cuda, 100, &numbers))
        fail("allocating");
    const int code = run_cases(o, 400, check);
    fdm_memory_release(cuda, pair.there[0]);
    fdm_memory_release(cuda, pair.there[1]);
    fdm_memory_release(cuda, mask);
    fdm_memory_release(cuda, numbers);
    return code;
}
