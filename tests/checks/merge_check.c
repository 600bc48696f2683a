/* merge_check.c: fdm_merge() on a CUDA device, or on the emulated one, against the CPU: dtypes, row lengths around what
 * a block takes, strides, rows without keys, the result in either part's place, and nothing written beside it.
 *
 * Exit code 77: there is no device. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "device_check.h"
#include "flash_dmattn.h"

enum { BATCH = 2, SEQLEN = 19, HEADS = 3, ROWS = BATCH * SEQLEN * HEADS, GUARD = 64 };
/* Rows one after the other; apart and off 16 bytes; apart by 16 bytes; heads before rows; a last axis of steps of 2. */
enum layout { DENSE, ODD, APART, HEADS_FIRST, STEPS, NUM_LAYOUTS };

/* A part or the result: its bytes on the host, and where the device has them. */
struct part {
    size_t out_bytes, lse_bytes;
    char *out, *lse;
    void *out_there, *lse_there;
    int64_t shape[4], strides[4], rows[3], row_strides[3];
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
    p->out_bytes = (size_t)(ROWS * pitch * bytes) + 2 * GUARD;
    p->lse_bytes = ROWS * sizeof(float) + 2 * GUARD;
    p->out = malloc(p->out_bytes);
    p->lse = malloc(p->lse_bytes);
    if (!p->out || !p->lse || fdm_memory_allocate(cuda, p->out_bytes, &p->out_there) ||
        fdm_memory_allocate(cuda, p->lse_bytes, &p->lse_there))
        fail("allocating");
    memset(p->out, 0xff, p->out_bytes); /* NaN, also between rows */
    memset(p->lse, 0xff, p->lse_bytes);
}

static void fill(struct part *p, fdm_dtype dtype, int64_t dim) {
    for (int64_t row = 0; row < ROWS; row++) {
        const int empty = random_number() < -0.6;
        ((float *)(void *)(p->lse + GUARD))[lse_offset_of(row)] = empty ? INFINITY : (float)(9 * random_number());
        for (int64_t d = 0; !empty && d < dim; d++)
            set(p->out + GUARD + offset_of(p, row, d) * fdm_dtype_bytes(dtype), dtype, 3 * random_number());
    }
}

static void copy(struct part *p, int back) {
    const fdm_device_id to = back ? host : cuda, from = back ? cuda : host;
    if (fdm_memory_copy(back ? (void *)p->out : p->out_there, to, back ? p->out_there : (void *)p->out, from,
                        p->out_bytes) ||
        fdm_memory_copy(back ? (void *)p->lse : p->lse_there, to, back ? p->lse_there : (void *)p->lse, from,
                        p->lse_bytes))
        fail("copying");
}

static void release(struct part *p) {
    fdm_memory_release(cuda, p->out_there);
    fdm_memory_release(cuda, p->lse_there);
    free(p->out);
    free(p->lse);
}

static fdm_status merge(struct part *const *parts, fdm_dtype dtype, fdm_device_id device) {
    fdm_tensor t[6];
    for (int i = 0; i < 6; i++) {
        struct part *p = parts[i / 2];
        char *out = device.type == FDM_CUDA ? p->out_there : p->out,
             *lse = device.type == FDM_CUDA ? p->lse_there : p->lse;
        t[i] = (fdm_tensor){.data = i % 2 ? lse : out,
                            .device = device,
                            .ndim = 4 - i % 2,
                            .dtype = fdm_data_type_of(i % 2 ? FDM_FLOAT32 : dtype),
                            .shape = i % 2 ? p->rows : p->shape,
                            .strides = i % 2 ? NULL : p->strides,
                            .byte_offset = GUARD};
    }
    return fdm_merge(&t[0], &t[1], &t[2], &t[3], &t[4], &t[5], NULL);
}

/* Whether the device's bytes are the CPU's: numbers within a rounding, everything else bit for bit. */
static int is_right(const struct part *have, const struct part *want, fdm_dtype dtype) {
    const int64_t bytes = fdm_dtype_bytes(dtype);
    const double eps = dtype == FDM_FLOAT32 ? 1e-6 : dtype == FDM_FLOAT16 ? 0x1p-10 : 0x1p-7;
    for (size_t at = 0; at < want->out_bytes; at += (size_t)bytes) {
        const double a = get(have->out + at, dtype), b = get(want->out + at, dtype);
        if (memcmp(have->out + at, want->out + at, (size_t)bytes) != 0 && !(fabs(a - b) <= eps * (1 + fabs(b))))
            return 0;
    }
    for (size_t at = 0; at < want->lse_bytes; at += sizeof(float)) {
        const double a = get(have->lse + at, FDM_FLOAT32), b = get(want->lse + at, FDM_FLOAT32);
        if (memcmp(have->lse + at, want->lse + at, sizeof(float)) != 0 && !(fabs(a - b) <= 2e-6 * (1 + fabs(b))))
            return 0;
    }
    return 1;
}

/* place: which of the parts the result replaces, 2 = none. */
static int check(fdm_dtype dtype, int64_t dim, enum layout layout, int place) {
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
    if (merge(parts, dtype, cuda) || fdm_synchronize(cuda) || merge(parts, dtype, host))
        fail("merging");
    struct part back = *parts[2];
    back.out = malloc(back.out_bytes);
    back.lse = malloc(back.lse_bytes);
    if (!back.out || !back.lse)
        fail("allocating");
    copy(&back, 1);
    const int right = is_right(&back, parts[2], dtype);
    printf("%s %s, dim %lld, %s, result in place of %s\n", right ? "right" : "WRONG", fdm_dtype_name(dtype),
           (long long)dim, names[layout],
           place == 2 ? "neither"
           : place    ? "the second"
                      : "the first");
    free(back.out);
    free(back.lse);
    release(&one);
    release(&two);
    release(&three);
    return !right;
}

int main(void) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    static const int64_t dims[] = {1, 5, 8, 64, 100, 130, 255, 256, 1024, 2048, 2064};
    if (!has_device())
        return EXIT_NO_DEVICE;
    int wrong = 0;
    for (int i = 0; i < 3; i++)
        for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++)
            for (int layout = 0; layout < NUM_LAYOUTS; layout++)
                for (int place = 0; place < 3; place++)
                    if (dims[d] < 200 || place == layout % 3) /* of long rows a part */
                        wrong += check(dtypes[i], dims[d], (enum layout)layout, place);
    return wrong > 0;
}
