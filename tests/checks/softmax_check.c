/* softmax_check.c: every softmax kernel on a CUDA device, or on the emulated one, against float64 row by row: both
 * passes, dtypes, lengths around what a shape holds, strides and addresses off 16 bytes, masks, scales, rows of -inf.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_array.h"
#include "device_check.h"
#include "subjects.h"

/* Rows one after the other; apart by 16 bytes; off 16 bytes alike; off 16 bytes in one tensor; four axes, permuted. */
enum layout { DENSE, APART, ODD, UNLIKE, PERMUTED, NUM_LAYOUTS };
static const char *const layout_names[] = {"dense", "apart", "odd", "unlike", "permuted"};
enum mask { NO_MASK, FULL, BY_ROW, BY_COLUMN, NUM_MASKS };
static const char *const mask_names[] = {"no mask", "mask", "mask of rows", "mask of columns"};

struct trial {
    const char *kernel;
    fdm_dtype dtype;
    fdm_pass pass;
    int log;
    int64_t rows, columns;
    enum layout layout;
    enum mask mask;
    double scale;
};

static void make(struct device_array *a, const struct trial *t, fdm_dtype dtype, int first) {
    const int64_t c = t->columns, per16 = 16 / fdm_dtype_bytes(t->dtype);
    const int64_t pitch = t->layout == APART ? (c / per16 + 2) * per16 : t->layout == ODD ? c + 3 : c;
    const int64_t flat[2] = {t->rows, c}, flat_strides[2] = {pitch, 1};
    const int64_t half = t->rows / 2, four[4] = {2, 1, half, c}, four_strides[4] = {c, 7, 2 * c, 1};
    const int64_t offset = t->layout == ODD ? 1 : t->layout == UNLIKE ? first : 0;
    if (t->layout == PERMUTED)
        array_make(a, dtype, 4, four, four_strides, 0);
    else
        array_make(a, dtype, 2, flat, flat_strides, offset);
}

static void make_mask(struct device_array *a, const struct trial *t) {
    const int64_t half = t->rows / 2, rows = t->mask == BY_COLUMN ? 1 : t->rows,
                  columns = t->mask == BY_ROW ? 1 : t->columns;
    const int64_t flat[2] = {rows, columns},
                  four[4] = {t->mask == BY_COLUMN ? 1 : 2, 1, t->mask == BY_COLUMN ? 1 : half, columns};
    array_make(a, FDM_BOOL, t->layout == PERMUTED ? 4 : 2, t->layout == PERMUTED ? four : flat, NULL, 0);
    for (int64_t i = 0; i < array_elements(a); i++)
        array_set(a, i, random_number() < 0.4);
    if (t->mask == FULL) /* a row without elements */
        for (int64_t j = 0; j < columns; j++)
            array_set(a, (rows - 1) * columns + j, 0);
}

static int is_visible(const struct trial *t, const struct device_array *mask, int64_t row, int64_t column) {
    if (t->mask == NO_MASK)
        return 1;
    const int64_t r = t->mask == BY_COLUMN ? 0 : row, c = t->mask == BY_ROW ? 0 : column;
    return array_get(mask, r * (t->mask == BY_ROW ? 1 : t->columns) + c) != 0;
}

/* z of an element, the row's largest and sum. */
static double score(const struct trial *t, const struct device_array *x, const struct device_array *mask, int64_t row,
                    int64_t column) {
    const double value = array_get(x, row * t->columns + column);
    return !is_visible(t, mask, row, column) || (t->scale == 0 && isinf(value)) ? -INFINITY : value * t->scale;
}

static void row_of_x(struct device_array *x, const struct trial *t, int64_t row) {
    for (int64_t j = 0; j < t->columns; j++) {
        double value = 4 * random_number();
        switch (row % 6) {
        case 1: value = j == t->columns / 2 ? 30 : value; break; /* one of all the weight */
        case 2: value = 60 + value; break;                       /* far from 0 */
        case 3: value = t->scale < 0 ? INFINITY : -INFINITY; break;
        case 4: value = j % 3 ? value : t->scale < 0 ? INFINITY : -INFINITY; break;
        case 5: value = 0.125; break; /* equal */
        default: break;
        }
        array_set(x, row * t->columns + j, value);
    }
}

/* The row's forward in float64, into `want`. */
static void forward_row(const struct trial *t, const struct device_array *x, const struct device_array *mask,
                        int64_t row, double *want) {
    double n = -INFINITY, sum = 0;
    for (int64_t j = 0; j < t->columns; j++)
        n = fmax(n, score(t, x, mask, row, j));
    for (int64_t j = 0; j < t->columns; j++)
        sum += n == -INFINITY ? 0 : exp(score(t, x, mask, row, j) - n);
    for (int64_t j = 0; j < t->columns; j++) {
        const double z = score(t, x, mask, row, j);
        want[j] = n == -INFINITY ? (t->log ? -INFINITY : 0) : t->log ? z - n - log(sum) : exp(z - n) / sum;
    }
}

static double eps_of(fdm_dtype dtype) {
    return dtype == FDM_FLOAT32 ? 4e-6 : dtype == FDM_FLOAT16 ? 1.01 * 0x1p-11 : 1.01 * 0x1p-8;
}

/* 1 when the result is within a rounding to the dtype and the errors of float32, which are relative to `size`. */
static int is_near(const struct trial *t, double have, double want, double size) {
    if (isinf(want) || isinf(have))
        return have == want;
    const double tiny = t->dtype == FDM_FLOAT16 ? 0x1p-25 : 0;
    return fabs(have - want) <= eps_of(t->dtype) * fabs(want) + 4e-6 * size + tiny;
}

static int complain(const struct trial *t, const char *what, int64_t row, int64_t column, double have, double want) {
    printf("WRONG %s: row %lld, column %lld is %.9g, should be %.9g\n", what, (long long)row, (long long)column, have,
           want);
    return 0;
}

static int forward_is_right(const struct trial *t, const struct device_array *x, const struct device_array *mask,
                            const struct device_array *out, double *want) {
    for (int64_t row = 0; row < t->rows; row++) {
        forward_row(t, x, mask, row, want);
        for (int64_t j = 0; j < t->columns; j++) {
            const double have = array_get(out, row * t->columns + j);
            /* an exponent's rounding counts as many times as it is large */
            const double size = t->log ? 0.25 : want[j] > 0 ? 0.05 * want[j] * (1 - log(want[j])) : 0;
            if (!is_near(t, have, want[j], size))
                return complain(t, "out", row, j, have, want[j]);
        }
    }
    return 1;
}

static int backward_is_right(const struct trial *t, const struct device_array *out, const struct device_array *dout,
                             const struct device_array *dx) {
    for (int64_t row = 0; row < t->rows; row++) {
        double sum = 0, size = 0;
        for (int64_t j = 0; j < t->columns; j++) {
            const double y = array_get(out, row * t->columns + j), d = array_get(dout, row * t->columns + j);
            const double term = t->log ? (y == -INFINITY ? 0 : d) : y * d;
            sum += term, size += fabs(term);
        }
        for (int64_t j = 0; j < t->columns; j++) {
            const double y = array_get(out, row * t->columns + j), d = array_get(dout, row * t->columns + j);
            const double want =
                t->log ? (y == -INFINITY ? 0 : t->scale * (d - exp(y) * sum)) : t->scale * y * (d - sum);
            const double parts = fabs(t->scale) * (t->log ? fabs(d) + exp(y) * size : y * (fabs(d) + size));
            const double have = array_get(dx, row * t->columns + j);
            if (!is_near(t, have, want, parts))
                return complain(t, "dx", row, j, have, want);
        }
    }
    return 1;
}

/* 1 right, 0 wrong, -1 the kernel refuses. */
static int run(const struct trial *t) {
    const int backward = t->pass == FDM_BACKWARD;
    struct device_array x, mask, out, dout;
    double *want = malloc((size_t)t->columns * sizeof *want + 1);
    make(&x, t, t->dtype, 1); /* backward: dx */
    make(&out, t, t->dtype, 0);
    make(&dout, t, t->dtype, 0);
    make_mask(&mask, t);
    for (int64_t row = 0; row < t->rows; row++) {
        row_of_x(&x, t, row);
        if (!backward)
            continue;
        forward_row(t, &x, &mask, row, want);
        for (int64_t j = 0; j < t->columns; j++) {
            array_set(&out, row * t->columns + j, want[j]);
            array_set(&dout, row * t->columns + j, 2 * random_number());
            array_set(&x, row * t->columns + j, NAN);
        }
    }
    array_upload(&x);
    array_upload(&mask);
    array_upload(&out);
    array_upload(&dout);
    const fdm_softmax_tensors tensors = {.struct_bytes = sizeof tensors,
                                         .x = &x.tensor,
                                         .mask = t->mask ? &mask.tensor : NULL,
                                         .out = &out.tensor,
                                         .dout = &dout.tensor,
                                         .dx = &x.tensor};
    const fdm_softmax_options options = {
        .struct_bytes = sizeof options, .scale = t->scale, .log = t->log, .kernel = t->kernel};
    const fdm_status status = fdm_softmax(t->pass, &tensors, &options, &device_allocator);
    int right = status == FDM_ERROR_UNSUPPORTED ? -1 : !status && fdm_synchronize(cuda) == 0;
    if (right == 0)
        printf("WRONG %s\n", fdm_last_error());
    if (right > 0) {
        right = array_download(backward ? &x : &out);
        if (!right)
            printf("WRONG a byte beside the elements was written\n");
        right =
            right && (backward ? backward_is_right(t, &out, &dout, &x) : forward_is_right(t, &x, &mask, &out, want));
    }
    array_release(&x);
    array_release(&mask);
    array_release(&out);
    array_release(&dout);
    free(want);
    return right;
}

static int counts[3]; /* wrong, right, refused */
static struct share share;
static uint64_t number;

static void check(const struct trial *t) {
    if (number++ % share.parts != share.part)
        return;
    const int right = run(t);
    counts[right < 0 ? 2 : right]++;
    if (right == 0)
        printf("WRONG %s %s %s %s, %lld rows of %lld, %s, %s, scale %g\n", t->kernel ? t->kernel : "chosen",
               t->log ? "log-softmax" : "softmax", t->pass == FDM_BACKWARD ? "backward" : "forward",
               fdm_dtype_name(t->dtype), (long long)t->rows, (long long)t->columns, layout_names[t->layout],
               mask_names[t->mask], t->scale);
    fflush(stdout);
}

/* Every length with every dtype, pass and kind; the other features in turn, so that each meets each kernel. */
static void check_kernel(const char *kernel, const int64_t *columns, int32_t count, int64_t rows) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    static const double scales[] = {1, 0.125, -1.5, 1, 0};
    int turn = 0;
    for (int32_t i = 0; i < count; i++)
        for (int kind = 0; kind < 12; kind++, turn++) {
            const struct trial t = {.kernel = kernel,
                                    .dtype = dtypes[kind % 3],
                                    .pass = (fdm_pass)(kind / 3 % 2),
                                    .log = kind / 6,
                                    .rows = rows > 0            ? rows
                                            : columns[i] > 5000 ? 2
                                            : columns[i] > 300  ? 6
                                                                : 38,
                                    .columns = columns[i],
                                    .layout = (enum layout)((turn + turn / 12) % NUM_LAYOUTS),
                                    .mask = (enum mask)((turn / 3 + turn / 7) % NUM_MASKS),
                                    .scale = scales[(turn / 5 + turn) % 5]};
            check(&t);
        }
}

int softmax_checks(const struct options *o) {
    static const int64_t short_rows[] = {0,   1,   2,    7,    8,    9,    31,   64,   65,    100,  128,
                                         255, 257, 1000, 1024, 2040, 2300, 4099, 8200, 17000, 36001};
    static const int64_t long_rows[] = {65537, 70000, 131072, 140000, 270000, 400003, 530000, 1048576, 1100000};
    static const int64_t longer_rows[] = {9000, 33000, 70000, 135000};
    static const int64_t ring_rows[] = {17000, 36001}; /* several of each group of blocks */
    const char *name, *description;
    share = o->share;
    if (!has_device())
        return EXIT_NO_DEVICE;
    int useless = 0, tried = 0;
    for (int32_t k = -1; k < 0 || fdm_softmax_kernel(k, &name, &description) == FDM_OK; k++) {
        const char *kernel = k < 0 ? NULL : name;
        if (o->kernel && (!kernel || strcmp(kernel, o->kernel) != 0))
            continue;
        memset(counts, 0, sizeof counts);
        tried = 1;
        check_kernel(kernel, short_rows, sizeof short_rows / sizeof short_rows[0], 0);
        if (o->large)
            check_kernel(kernel, long_rows, sizeof long_rows / sizeof long_rows[0], 2);
        else if (!kernel || strcmp(kernel, "softmax.resident") == 0)
            check_kernel(kernel, longer_rows, sizeof longer_rows / sizeof longer_rows[0], 2);
        if (kernel && strcmp(kernel, "softmax.ring") == 0)
            check_kernel(kernel, ring_rows, sizeof ring_rows / sizeof ring_rows[0], 11);
        printf("%s: %d right, %d wrong, %d refused\n", kernel ? kernel : "chosen", counts[1], counts[0], counts[2]);
        if (counts[0] + counts[1] == 0)
            printf("WRONG %s took no problem of this run\n", kernel ? kernel : "chosen");
        useless |= counts[0] > 0 || counts[1] == 0;
    }
    if (!tried)
        printf("WRONG no kernel is named %s\n", o->kernel);
    return useless || !tried;
}
