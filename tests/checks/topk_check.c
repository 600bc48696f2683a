/* topk_check.c: fdm_topk_intervals() on a CUDA device, or on the emulated one, against the CPU, bit for bit, and on few
 * keys against the definition too: dtypes, ties, NaN, infinities, zeros of both signs, padding, strides, windows above
 * and below the number of keys, Sq != Sk, and heads cut into chunks and spans of all sizes. Nothing is written beside
 * the intervals, and the inputs stay as they were. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "device_check.h"
#include "flash_dmattn.h"
#include "masks/topk/topk_on_device.h"
#include "subjects.h"

/* Memory on the host, and the same bytes on the device. */
struct buffer {
    size_t bytes;
    char *here, *back;
    void *there;
};
enum { BIAS, PADDING, START, END, WORKSPACE, NUM_BUFFERS };
enum { USUAL_KEYS = 3000, SELDOM = 16 }; /* more keys in one case of so many */

struct topk_case {
    int64_t batch, heads, num_keys, seqlen_q, window;
    int bias_batches, has_padding, flat; /* flat: bias [B, h, 1, Sk] */
    fdm_dtype dtype;
    struct topk_cut cut;
    struct buffer buffers[NUM_BUFFERS];
    int64_t shape[NUM_BUFFERS][4], strides[NUM_BUFFERS][4];
    fdm_tensor tensor[NUM_BUFFERS];
};

/* ---- making a case ---- */

static void make_buffer(struct buffer *b, size_t bytes, int fill) {
    *b = (struct buffer){bytes, malloc(bytes + 1), malloc(bytes + 1), NULL};
    if (!b->here || !b->back || fdm_memory_allocate(cuda, bytes + 1, &b->there))
        fail("allocating");
    memset(b->here, fill, bytes);
}

/* Axes with room between them, and heads before keys or behind them. */
static void make_tensor(struct topk_case *c, int n, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    int64_t *stride = c->strides[n], step = 1;
    memcpy(c->shape[n], shape, (size_t)ndim * sizeof *shape);
    const int turned = ndim == 3 && below(4) == 0;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        const int32_t axis = turned ? (i + 1) % ndim : i; /* turned: the keys' stride is the largest but one */
        stride[axis] = step * (below(6) ? 1 : 2);
        step = stride[axis] * (shape[axis] > 0 ? shape[axis] : 1) + (below(3) ? 0 : below(9));
    }
    make_buffer(&c->buffers[n], (size_t)(step * fdm_dtype_bytes(dtype)), 0xa5);
    c->tensor[n] = (fdm_tensor){
        .device = host, .ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = c->shape[n], .strides = stride};
}

static void set(char *at, fdm_dtype dtype, float x) {
    if (dtype == FDM_FLOAT32)
        memcpy(at, &x, sizeof x);
    else {
        const uint16_t half = dtype == FDM_FLOAT16 ? float_to_float16(x) : float_to_bfloat16(x);
        memcpy(at, &half, sizeof half);
    }
}

static float drawn_bias(int kind, int64_t j) {
    static const float odd[] = {INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 1e-42f, -1e-42f, 3e38f};
    if (kind < 6 && below(40) == 0)
        return below(9) ? odd[below(8)] : -NAN;
    switch (kind) {
    case 0: return (float)(below(1 << 24) - (1 << 23)) * 0x1p-20f;
    case 1: return (float)below(4);
    case 2: return (float)j;
    case 3: return -(float)j;
    case 4: return below(2) ? 0.0f : (float)below(1000) / 100; /* of a relu */
    case 5: return ldexpf((float)below(1 << 12), (int)below(60) - 40);
    case 6: return 1.0f;
    default: return (float)(j % 97) + (float)(below(3) - 1) * 0x1p-12f;
    }
}

static void fill_inputs(struct topk_case *c) {
    const int kind = (int)below(8), per_real = (int)below(5);
    const int64_t bytes = fdm_dtype_bytes(c->dtype), *s = c->strides[BIAS];
    for (int64_t b = 0; b < c->bias_batches; b++)
        for (int64_t h = 0; h < c->heads; h++)
            for (int64_t j = 0; j < c->num_keys; j++)
                set(c->buffers[BIAS].here + (b * s[0] + h * s[1] + j * s[c->flat ? 3 : 2]) * bytes, c->dtype,
                    drawn_bias(kind, j));
    for (int64_t b = 0; c->has_padding && b < c->batch; b++)
        for (int64_t j = 0; j < c->num_keys; j++)
            c->buffers[PADDING].here[b * c->strides[PADDING][0] + j * c->strides[PADDING][1]] =
                (char)(per_real && below(per_real + 1));
}

static void draw_case(struct topk_case *c, int64_t keys_max) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    static const int64_t tops[] = {3, 40, 300, INT32_MAX};
    const int64_t top = tops[below(4)], most = below(SELDOM) && keys_max > USUAL_KEYS ? USUAL_KEYS : keys_max;
    memset(c, 0, sizeof *c);
    c->num_keys = below(50) ? 1 + below(top < most ? top : most) : 0;
    c->seqlen_q = below(3) ? c->num_keys : below(2 * c->num_keys + 2);
    c->window = 1 + (below(4) ? below(c->num_keys / 2 + 1) : below(c->num_keys + 3));
    if (below(30) == 0)
        c->window = INT64_MAX;
    c->dtype = dtypes[below(3)];
    c->batch = 1 + below(2);
    c->heads = 1 + below(3);
    c->has_padding = below(3) == 0;
    c->bias_batches = c->has_padding && below(2) ? 1 : (int)c->batch;
    c->flat = below(4) == 0;
    c->cut = topk_cut_of(c->num_keys);
    if (below(3)) { /* blocks of all sizes, and spans, for few keys too */
        c->cut.chunk = 32 << (below(4) ? below(3) : below(6));
        c->cut.span = below(2) ? INT32_MAX : (int32_t)(c->cut.chunk * (1 + below(6)));
    }
    const int64_t flat[4] = {c->bias_batches, c->heads, 1, c->num_keys},
                  bias[3] = {c->bias_batches, c->heads, c->num_keys}, padding[2] = {c->batch, c->num_keys},
                  shape[3] = {c->batch, c->heads, c->num_keys};
    make_tensor(c, BIAS, c->dtype, c->flat ? 4 : 3, c->flat ? flat : bias);
    make_tensor(c, PADDING, FDM_BOOL, 2, padding);
    make_tensor(c, START, FDM_INT32, 3, shape);
    make_tensor(c, END, FDM_INT32, 3, shape);
    make_buffer(&c->buffers[WORKSPACE], topk_workspace_on_device(c->batch * c->heads, c->num_keys, c->cut), 0xff);
    fill_inputs(c);
}

static void release_case(struct topk_case *c) {
    for (int n = 0; n < NUM_BUFFERS; n++) {
        fdm_memory_release(cuda, c->buffers[n].there);
        free(c->buffers[n].here);
        free(c->buffers[n].back);
    }
}

/* ---- running it ---- */

static void place(struct topk_case *c, fdm_device_id device) {
    for (int n = 0; n < WORKSPACE; n++) {
        c->tensor[n].device = device;
        c->tensor[n].data = device.type == FDM_CUDA ? c->buffers[n].there : c->buffers[n].here;
    }
}

static void run_on_device(struct topk_case *c) {
    const struct topk_cut usual = topk_cut_of(c->num_keys);
    const fdm_tensor *padding = c->has_padding ? &c->tensor[PADDING] : NULL;
    struct buffer *w = &c->buffers[WORKSPACE];
    fdm_status status;
    for (int n = 0; n < NUM_BUFFERS; n++)
        if (fdm_memory_copy(c->buffers[n].there, cuda, c->buffers[n].here, host, c->buffers[n].bytes))
            fail("copying");
    place(c, cuda);
    if (c->cut.chunk == usual.chunk && c->cut.span == usual.span)
        status = fdm_topk_intervals(&c->tensor[BIAS], padding, c->window, c->seqlen_q, &c->tensor[START],
                                    &c->tensor[END], w->there, w->bytes, NULL);
    else
        status = topk_on_device(&c->tensor[BIAS], padding, c->window, c->seqlen_q, &c->tensor[START], &c->tensor[END],
                                c->cut, w->there, NULL);
    if (status || fdm_synchronize(cuda))
        fail("on the device");
    for (int n = 0; n < WORKSPACE; n++)
        if (fdm_memory_copy(c->buffers[n].back, host, c->buffers[n].there, cuda, c->buffers[n].bytes))
            fail("copying back");
}

static void run_on_cpu(struct topk_case *c) {
    place(c, host);
    if (fdm_topk_intervals(&c->tensor[BIAS], c->has_padding ? &c->tensor[PADDING] : NULL, c->window, c->seqlen_q,
                           &c->tensor[START], &c->tensor[END], NULL, 0, NULL))
        fail("on the CPU");
}

/* ---- the definition ---- */

static float bias_at(const struct topk_case *c, int64_t b, int64_t h, int64_t j) {
    const int64_t *s = c->strides[BIAS];
    const char *at =
        c->buffers[BIAS].here +
        ((c->bias_batches > 1 ? b * s[0] : 0) + h * s[1] + j * s[c->flat ? 3 : 2]) * fdm_dtype_bytes(c->dtype);
    float x;
    uint16_t half;
    memcpy(&x, at, c->dtype == FDM_FLOAT32 ? sizeof x : 0);
    memcpy(&half, at, sizeof half);
    if (c->dtype != FDM_FLOAT32)
        x = c->dtype == FDM_FLOAT16 ? float16_to_float(half) : bfloat16_to_float(half);
    return isnan(x) ? -INFINITY : x;
}

static int is_real(const struct topk_case *c, int64_t b, int64_t j) {
    return !c->has_padding || c->buffers[PADDING].here[b * c->strides[PADDING][0] + j * c->strides[PADDING][1]];
}

/* Whether the CPU's intervals are those of the definition. */
static int is_defined_so(const struct topk_case *c) {
    const int64_t shift = c->num_keys - c->seqlen_q;
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t h = 0; h < c->heads; h++)
            for (int64_t j = 0; j < c->num_keys; j++) {
                int64_t larger = 0, end = INT32_MAX;
                for (int64_t k = 0; k < c->num_keys && larger < c->window; k++) {
                    const float mine = bias_at(c, b, h, j), other = bias_at(c, b, h, k);
                    larger += is_real(c, b, k) && (other > mine || (other == mine && k < j));
                    if (larger == c->window)
                        end = (k < j ? j : k) - shift;
                }
                if (!is_real(c, b, j))
                    end = j - shift;
                const int64_t *s = c->strides[START], *e = c->strides[END];
                const int32_t *starts = (const int32_t *)(void *)c->buffers[START].here,
                              *ends = (const int32_t *)(void *)c->buffers[END].here;
                if (starts[b * s[0] + h * s[1] + j * s[2]] != j - shift || ends[b * e[0] + h * e[1] + j * e[2]] != end)
                    return 0;
            }
    return 1;
}

static const char *fault_of(struct topk_case *c) {
    static const char *const names[] = {"bias was changed", "padding was changed", "start is not the CPU's",
                                        "end is not the CPU's"};
    run_on_device(c);
    run_on_cpu(c);
    for (int n = 0; n < WORKSPACE; n++)
        if (memcmp(c->buffers[n].here, c->buffers[n].back, c->buffers[n].bytes) != 0)
            return names[n];
    return c->num_keys <= 300 && !is_defined_so(c) ? "the CPU's intervals are not the definition's" : NULL;
}

static const char *check(const struct options *o, char *about, size_t bytes) {
    struct topk_case c;
    draw_case(&c, (int64_t)given_or(o->keys, 10000));
    snprintf(about, bytes,
             "%s, batch %lld (bias %d), heads %lld, keys %lld, rows %lld, W %lld, %s, chunks of %d, spans of %d",
             fdm_dtype_name(c.dtype), (long long)c.batch, c.bias_batches, (long long)c.heads, (long long)c.num_keys,
             (long long)c.seqlen_q, (long long)c.window, c.has_padding ? "padding" : "no padding", c.cut.chunk,
             c.cut.span);
    const char *fault = fault_of(&c);
    release_case(&c);
    return fault;
}

int topk_checks(const struct options *o) { return has_device() ? run_cases(o, 300, check) : EXIT_NO_DEVICE; }
