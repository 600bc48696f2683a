/* merge_check.c: fdm_merge() on a CUDA device, or on the emulated one, against the CPU: dtypes, row lengths around what
 * a block takes, strides, rows without keys, low parts, NaN, the result in either part's place, and nothing written
 * beside it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "device_check.h"
#include "flash_dmattn.h"
#include "subjects.h"

enum { BATCH = 2, SEQLEN = 19, HEADS = 3, ROWS = BATCH * SEQLEN * HEADS, GUARD = 64 };
/* Rows one after the other; apart and off 16 bytes; apart by 16 bytes; heads before rows; a last axis of steps of 2. */
enum layout { DENSE, ODD, APART, HEADS_FIRST, STEPS, NUM_LAYOUTS };

/* The tensors of a part. */
enum { OUT, LSE, LSE_LOW, NUM_OF_PART };
/* A part or the result: its tensors' bytes on the host, and where the device has them. */
struct part {
    size_t bytes[NUM_OF_PART];
    char *here[NUM_OF_PART];
    void *there[NUM_OF_PART];
    int64_t shape[4], strides[4], rows[3];
};

static void set(char *p, fdm_dtype dtype, double x) {
    if (dtype == FDM_FLOAT32)
        *(float *)(void *)p = (float)x;
    else
        *(uint16_t *)(void *)p = dtype == FDM_FLOAT16 ? float_to_float16((float)x) : float_to_bfloat16((float)x);
}

static double get(const char *p, fdm_dtype dtype) {
    if (dtype == FDM_FLOAT32)
        return *(const float *)(const void *)p;
    const uint16_t x = *(const uint16_t *)(const void *)p;
    return dtype == FDM_FLOAT16 ? float16_to_float(x) : bfloat16_to_float(x);
}

static int64_t offset_of(const struct part *p, int64_t row, int64_t d) {
    return row / (SEQLEN * HEADS) * p->strides[0] + row / HEADS % SEQLEN * p->strides[1] + row % HEADS * p->strides[2] +
           d * p->strides[3];
}
static int64_t lse_offset_of(int64_t row) {
    return (row / (SEQLEN * HEADS) * HEADS + row % HEADS) * SEQLEN + row / HEADS % SEQLEN;
}

static void make(struct part *p, fdm_dtype dtype, int64_t dim, enum layout layout) {
    const int64_t bytes = fdm_dtype_bytes(dtype), step = layout == STEPS ? 2 : 1;
    const int64_t pitch = dim * step + (layout == ODD ? 1 : layout == APART ? 16 / bytes : 0);
    *p = (struct part){.shape = {BATCH, SEQLEN, HEADS, dim}, .rows = {BATCH, HEADS, SEQLEN}};
    const int64_t rows_first[4] = {SEQLEN * HEADS * pitch, HEADS * pitch, pitch, step};
    const int64_t heads_first[4] = {SEQLEN * HEADS * pitch, pitch, SEQLEN * pitch, step};
    memcpy(p->strides, layout == HEADS_FIRST ? heads_first : rows_first, sizeof p->strides);
    for (int n = 0; n < NUM_OF_PART; n++) {
        p->bytes[n] = (size_t)(n == OUT ? ROWS * pitch * bytes : ROWS * (int64_t)sizeof(float)) + 2 * GUARD;
        p->here[n] = malloc(p->bytes[n]);
        if (!p->here[n] || fdm_memory_allocate(cuda, p->bytes[n], &p->there[n]))
            fail("allocating");
        memset(p->here[n], 0xff, p->bytes[n]); /* NaN, also between rows */
    }
}

static float *row_of(struct part *p, int n, int64_t row) {
    return (float *)(void *)(p->here[n] + GUARD) + lse_offset_of(row);
}

/* The logarithm of a sum, as far as a float holds it, and the rest. */
static void set_lse(struct part *p, int64_t row, double bias, double of_sum) {
    *row_of(p, LSE, row) = (float)(bias + of_sum);
    *row_of(p, LSE_LOW, row) = (float)(bias - *row_of(p, LSE, row) + of_sum);
}

/* Rows without keys, whose number may be what it likes; rows with a NaN; beside biases of one size in both parts. */
static void fill(struct part *p, fdm_dtype dtype, int64_t dim) {
    static const double biases[] = {0, 0, -1e4, -1e6, -1e9, -3e38};
    for (int64_t row = 0; row < ROWS; row++) {
        const double kind = random_number();
        set_lse(p, row, (double)(float)biases[row % 6], 9 * random_number());
        for (int64_t d = 0; d < dim; d++)
            set(p->here[OUT] + GUARD + offset_of(p, row, d) * fdm_dtype_bytes(dtype), dtype, 3 * random_number());
        if (kind < -0.6) {
            *row_of(p, LSE, row) = kind < -0.9 ? -INFINITY : INFINITY;
            *row_of(p, LSE_LOW, row) = NAN;
            for (int64_t d = 0; d < dim; d++)
                set(p->here[OUT] + GUARD + offset_of(p, row, d) * fdm_dtype_bytes(dtype), dtype, NAN);
        }
        if (kind > 0.9)
            *row_of(p, kind > 0.95 ? LSE : LSE_LOW, row) = NAN;
        else if (kind > 0.8 && dim > 0)
            set(p->here[OUT] + GUARD + offset_of(p, row, row % dim) * fdm_dtype_bytes(dtype), dtype, NAN);
        if (kind > 0.6 && row % 6 == 0) /* no float is its share in the other's sum */
            *row_of(p, LSE, row) -= 1000;
    }
}

static void copy(struct part *p, int back) {
    const fdm_device_id to = back ? host : cuda, from = back ? cuda : host;
    for (int n = 0; n < NUM_OF_PART; n++)
        if (fdm_memory_copy(back ? (void *)p->here[n] : p->there[n], to, back ? p->there[n] : (void *)p->here[n], from,
                            p->bytes[n]))
            fail("copying");
}

static void release(struct part *p) {
    for (int n = 0; n < NUM_OF_PART; n++) {
        fdm_memory_release(cuda, p->there[n]);
        free(p->here[n]);
    }
}

/* lows: which low parts there are: bit i of parts[i]. */
static fdm_status merge(struct part *const *parts, fdm_dtype dtype, int lows, fdm_device_id device) {
    fdm_tensor t[3][NUM_OF_PART];
    for (int i = 0; i < 3 * NUM_OF_PART; i++) {
        struct part *p = parts[i / NUM_OF_PART];
        const int n = i % NUM_OF_PART;
        t[i / NUM_OF_PART][n] = (fdm_tensor){.data = device.type == FDM_CUDA ? p->there[n] : p->here[n],
                                             .device = device,
                                             .ndim = n == OUT ? 4 : 3,
                                             .dtype = fdm_data_type_of(n == OUT ? dtype : FDM_FLOAT32),
                                             .shape = n == OUT ? p->shape : p->rows,
                                             .strides = n == OUT ? p->strides : NULL,
                                             .byte_offset = GUARD};
    }
    const fdm_merge_tensors tensors = {.struct_bytes = sizeof tensors,
                                       .out1 = &t[0][OUT],
                                       .lse1 = &t[0][LSE],
                                       .lse_low1 = lows & 1 ? &t[0][LSE_LOW] : NULL,
                                       .out2 = &t[1][OUT],
                                       .lse2 = &t[1][LSE],
                                       .lse_low2 = lows & 2 ? &t[1][LSE_LOW] : NULL,
                                       .out = &t[2][OUT],
                                       .lse = &t[2][LSE],
                                       .lse_low = lows & 4 ? &t[2][LSE_LOW] : NULL};
    return fdm_merge(&tensors, NULL);
}

/* Whether the device's number is the CPU's: within a rounding, NaN where it is NaN, else bit for bit, as what neither
 * has written. */
static int is_number(const char *have, const char *want, size_t bytes, double a, double b, double eps) {
    static const unsigned char unwritten[4] = {0xff, 0xff, 0xff, 0xff};
    if (memcmp(have, want, bytes) == 0)
        return 1;
    return isnan(b) ? isnan(a) && memcmp(want, unwritten, bytes) != 0 : fabs(a - b) <= eps * (1 + fabs(b));
}

static int is_right(const struct part *have, const struct part *want, fdm_dtype dtype) {
    const size_t bytes = (size_t)fdm_dtype_bytes(dtype);
    const double eps = dtype == FDM_FLOAT32 ? 1e-6 : dtype == FDM_FLOAT16 ? 0x1p-10 : 0x1p-7;
    for (size_t at = 0; at < want->bytes[OUT]; at += bytes)
        if (!is_number(have->here[OUT] + at, want->here[OUT] + at, bytes, get(have->here[OUT] + at, dtype),
                       get(want->here[OUT] + at, dtype), eps))
            return 0;
    for (size_t at = 0; at < want->bytes[LSE]; at += sizeof(float)) {
        const char *const a[2] = {have->here[LSE] + at, have->here[LSE_LOW] + at};
        const char *const b[2] = {want->here[LSE] + at, want->here[LSE_LOW] + at};
        const double lse[2] = {get(a[0], FDM_FLOAT32), get(b[0], FDM_FLOAT32)},
                     low[2] = {get(a[1], FDM_FLOAT32), get(b[1], FDM_FLOAT32)};
        if (!is_number(a[0], b[0], sizeof(float), lse[0], lse[1], 2e-6))
            return 0;
        /* lse may be rounded to either side; beside a finite one, the low number says the rest. */
        const int finite = isfinite(lse[1]) && isfinite(low[1]);
        if (!is_number(a[1], b[1], sizeof(float), finite ? lse[0] - lse[1] + low[0] : low[0], low[1], 2e-6 * 10))
            return 0;
    }
    return 1;
}

/* place: which of the parts the result replaces, 2 = none. */
static int check(fdm_dtype dtype, int64_t dim, enum layout layout, int place, int lows) {
    static const char *const names[] = {"dense", "odd", "apart", "heads first", "steps"};
    struct part one, two, three, *parts[3] = {&one, &two, &three};
    make(&one, dtype, dim, layout);
    make(&two, dtype, dim, place == 2 ? DENSE : layout);
    make(&three, dtype, dim, layout);
    fill(&one, dtype, dim);
    fill(&two, dtype, dim);
    for (int i = 0; i < 3; i++)
        copy(parts[i], 0);
    parts[2] = parts[place];
    if (merge(parts, dtype, lows, cuda) || fdm_synchronize(cuda) || merge(parts, dtype, lows, host))
        fail("merging");
    struct part back = *parts[2];
    for (int n = 0; n < NUM_OF_PART; n++)
        if (!(back.here[n] = malloc(back.bytes[n])))
            fail("allocating");
    copy(&back, 1);
    const int right = is_right(&back, parts[2], dtype);
    printf("%s %s, dim %lld, %s, result in place of %s, low parts %d\n", right ? "right" : "WRONG",
           fdm_dtype_name(dtype), (long long)dim, names[layout],
           place == 2 ? "neither"
           : place    ? "the second"
                      : "the first",
           lows);
    for (int n = 0; n < NUM_OF_PART; n++)
        free(back.here[n]);
    release(&one);
    release(&two);
    release(&three);
    return !right;
}

int merge_checks(const struct options *o) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    static const int64_t dims[] = {1, 5, 8, 64, 100, 130, 255, 256, 1024, 2048, 2064};
    if (!has_device())
        return EXIT_NO_DEVICE;
    int wrong = 0, n = 0;
    for (int i = 0; i < 3; i++)
        for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++)
            for (int layout = 0; layout < NUM_LAYOUTS; layout++)
                for (int place = 0; place < 3; place++, n++)
                    if (dims[d] < 200 || place == layout % 3) /* of long rows a part */
                        wrong += check(dtypes[i], dims[d], (enum layout)layout, place, n % 2 ? 7 : n / 2 % 8);
    return wrong > 0;
}
