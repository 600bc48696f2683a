/* key_bias_check.c: fdm_key_bias() and its backward on a CUDA device, or on the emulated one, against the CPU: all
 * dtypes, axes in any order, broadcast gradients, padding, odd numbers. Nothing is written beside the outputs, and the
 * same call gives the same bits. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "device_check.h"
#include "flash_dmattn.h"
#include "subjects.h"

enum { DT, A, PADDING, BIAS, DDT, DA, NUM_TENSORS };

/* A tensor on the host, on the device, and what came back from there; `bytes` with what lies between its rows. */
struct both {
    char *here, *there, *back, *again;
    int64_t shape[3], strides[3], elements, bytes;
    fdm_dtype dtype;
    fdm_tensor tensor;
};
static struct both t[NUM_TENSORS];

/* Axes in any order, with room between them; `broadcast`: some have a stride of 0. */
static void make(int n, fdm_dtype dtype, int32_t ndim, const int64_t *shape, int broadcast) {
    int32_t order[3] = {0, 1, 2};
    int64_t elements = 1;
    for (int32_t i = ndim - 1; i > 0; i--) {
        const int32_t other = (int32_t)below(i + 1), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
    for (int32_t i = ndim - 1; i >= 0; i--) {
        const int32_t axis = order[i];
        t[n].shape[axis] = shape[axis];
        t[n].strides[axis] = broadcast && below(3) == 0 ? 0 : elements;
        elements = t[n].strides[axis] ? elements * (shape[axis] > 0 ? shape[axis] : 1) + below(3) : elements;
    }
    t[n].dtype = dtype;
    t[n].elements = elements;
    t[n].bytes = elements * fdm_dtype_bytes(dtype);
    char **copies[] = {&t[n].here, &t[n].back, &t[n].again};
    for (int i = 0; i < 3; i++)
        if (!(*copies[i] = malloc((size_t)t[n].bytes)))
            fail("allocating");
    if (fdm_memory_allocate(cuda, (size_t)t[n].bytes, (void **)&t[n].there))
        fail("allocating");
    memset(t[n].here, 0xa5, (size_t)t[n].bytes);
    t[n].tensor =
        (fdm_tensor){.ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = t[n].shape, .strides = t[n].strides};
}

static double value_of(fdm_dtype dtype, const char *at) {
    float wide;
    uint16_t half;
    memcpy(&half, at, sizeof half);
    if (dtype == FDM_FLOAT32)
        return (double)*(const float *)memcpy(&wide, at, sizeof wide);
    return (double)(dtype == FDM_FLOAT16 ? float16_to_float(half) : bfloat16_to_float(half));
}

static void draw(int n, double scale) {
    static const float odd[] = {NAN, -INFINITY, INFINITY, 0.0f, -0.0f, -20.0f, -90.0f};
    for (int64_t i = 0; i < t[n].elements; i++) {
        const float x = n != A && below(60) == 0 ? odd[below(7)] : (float)(((double)below(2001) - 1000) / 1000 * scale);
        const float drawn = n == BIAS && below(3) == 0 ? 0.0f : x;
        const uint16_t half = t[n].dtype == FDM_FLOAT16 ? float_to_float16(drawn) : float_to_bfloat16(drawn);
        memcpy(t[n].here + i * fdm_dtype_bytes(t[n].dtype), t[n].dtype == FDM_FLOAT32 ? (const void *)&drawn : &half,
               (size_t)fdm_dtype_bytes(t[n].dtype));
    }
}

static void move(int up) {
    for (int n = 0; n < NUM_TENSORS; n++)
        if (up ? fdm_memory_copy(t[n].there, cuda, t[n].here, host, (size_t)t[n].bytes)
               : fdm_memory_copy(t[n].back, host, t[n].there, cuda, (size_t)t[n].bytes))
            fail("copying");
}

static void place(fdm_device_id device) {
    for (int n = 0; n < NUM_TENSORS; n++) {
        t[n].tensor.device = device;
        t[n].tensor.data = device.type == FDM_CUDA ? t[n].there : t[n].here;
    }
}

/* Within a rounding or two of the dtype and of the exponential's argument, and `more` beside; NaN where it is NaN. What
 * lies between the elements is compared too: 0xa5 is a small number of every dtype. */
static int is_close(int n, double more) {
    const double step = t[n].dtype == FDM_FLOAT32 ? 0x1p-19 : t[n].dtype == FDM_FLOAT16 ? 0x1p-9 : 0x1p-6;
    const int64_t size = fdm_dtype_bytes(t[n].dtype);
    for (int64_t i = 0; i < t[n].elements; i++) {
        const double want = value_of(t[n].dtype, t[n].here + i * size);
        const double have = value_of(t[n].dtype, t[n].back + i * size);
        if (!(isnan(want) && isnan(have)) && want != have && !(fabs(want - have) <= step * fabs(want) + more)) {
            printf("element %lld is %g, should be %g\n", (long long)i, have, want);
            return 0;
        }
    }
    return 1;
}

static const char *fault_of_case(void) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    const int64_t batch = 1 + below(3), heads = 1 + below(below(2) ? 3 : 20), keys = below(below(2) ? 70 : 900);
    const int64_t dt[3] = {batch, keys, heads}, bias[3] = {batch, heads, keys};
    const fdm_dtype of_dt = dtypes[below(3)], of_a = dtypes[below(3)], of_bias = dtypes[below(3)];
    const int with_padding = (int)below(2), exponential = (int)below(2), backward = (int)below(2);
    const int no_ddt = below(5) == 0, no_da = below(5) == 0;
    make(DT, of_dt, 3, dt, 1);
    make(A, of_a, 1, &heads, 1);
    make(PADDING, FDM_BOOL, 2, dt, 0);
    make(BIAS, of_bias, 3, bias, backward);
    make(DDT, of_dt, 3, dt, 0);
    make(DA, of_a, 1, &heads, 0);
    draw(DT, 4);
    draw(A, 1);
    for (int64_t i = 0; i < t[PADDING].bytes; i++)
        t[PADDING].here[i] = (char)(below(4) != 0);
    if (backward)
        draw(BIAS, 1);
    move(1);
    const fdm_tensor *padding = with_padding ? &t[PADDING].tensor : NULL;
    for (int n = 0; n < 3; n++) { /* twice on the device */
        place(n == 2 ? host : cuda);
        if (backward ? fdm_key_bias_backward(&t[DT].tensor, &t[A].tensor, padding, exponential, &t[BIAS].tensor,
                                             no_ddt ? NULL : &t[DDT].tensor, no_da ? NULL : &t[DA].tensor, NULL)
                     : fdm_key_bias(&t[DT].tensor, &t[A].tensor, padding, exponential, &t[BIAS].tensor, NULL))
            fail("running");
        if (n == 2)
            break;
        move(0);
        for (int i = 0; i < NUM_TENSORS; i++) {
            if (n == 1 && memcmp(t[i].back, t[i].again, (size_t)t[i].bytes) != 0)
                return "another result the second time";
            memcpy(t[i].again, t[i].back, (size_t)t[i].bytes);
        }
    }
    for (int n = 0; n < NUM_TENSORS; n++) {
        const double sums = n == DA ? 1e-6 * (double)(batch * keys + 1) * (exponential ? 60 : 1) : 1e-7;
        if (n >= BIAS && !is_close(n, sums))
            return n == BIAS ? "the bias" : n == DDT ? "ddt" : "da";
        if (n < BIAS && memcmp(t[n].back, t[n].here, (size_t)t[n].bytes) != 0)
            return "an input";
    }
    return NULL;
}

static const char *check(const struct options *o, char *about, size_t bytes) {
    const char *fault = fault_of_case();
    snprintf(about, bytes, "%s", fdm_dtype_name(t[DT].dtype));
    for (int i = 0; i < NUM_TENSORS; i++) {
        fdm_memory_release(cuda, t[i].there);
        free(t[i].here);
        free(t[i].back);
        free(t[i].again);
    }
    return fault;
}

int key_bias_checks(const struct options *o) { return has_device() ? run_cases(o, 300, check) : EXIT_NO_DEVICE; }
