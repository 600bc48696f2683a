/* slots_check.c: fdm_topk_fill() and fdm_topk_append() on a CUDA device, or on the emulated one, against the CPU, bit
 * for bit, prompts in pages too, and the CPU's slots after each token against fdm_topk_intervals() of all tokens so
 * far: the same keys. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "device_check.h"
#include "flash_dmattn.h"
#include "subjects.h"

enum { BATCH = 2, HEADS = 2, TOKENS = 10000, WINDOW = 300, WINDOW_MAX = 9000, DIM = 6 };
enum { KEY, SLOT_BIAS, LENGTH, SLOT_K, SLOT_V, SLOT, BIAS, END, REAL, K, V, TABLE, NUM_TENSORS };

/* A tensor on the host and on the device, contiguous. */
struct both {
    char *here, *there;
    int64_t shape[4];
    size_t bytes;
    fdm_tensor tensor;
};
static struct both t[NUM_TENSORS];

static void make(int n, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    int64_t elements = 1;
    for (int32_t i = 0; i < ndim; i++)
        elements *= t[n].shape[i] = shape[i];
    t[n].bytes = (size_t)(elements * fdm_dtype_bytes(dtype));
    t[n].here = calloc(1, t[n].bytes + 1);
    if (!t[n].here || fdm_memory_allocate(cuda, t[n].bytes + 1, (void **)&t[n].there))
        fail("allocating");
    t[n].tensor = (fdm_tensor){.ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = t[n].shape};
}

static void upload(int n) {
    if (fdm_memory_copy(t[n].there, cuda, t[n].here, host, t[n].bytes))
        fail("copying");
}

static void place(fdm_device_id device) {
    for (int n = 0; n < NUM_TENSORS; n++) {
        t[n].tensor.device = device;
        t[n].tensor.data = device.type == FDM_CUDA ? t[n].there : t[n].here;
    }
}

static void draw_biases(fdm_dtype dtype) {
    static const float odd[] = {NAN, -INFINITY, INFINITY, 0.0f, -0.0f};
    const int64_t elements = t[BIAS].shape[0] * t[BIAS].shape[1] * (t[BIAS].tensor.ndim > 2 ? t[BIAS].shape[2] : 1);
    const int few = (int)below(2);
    for (int64_t n = 0; n < elements; n++) {
        const float x = below(30) == 0 ? odd[below(5)] : few ? (float)below(5) : (float)below(1 << 20) / 1024;
        if (dtype == FDM_FLOAT32)
            ((float *)(void *)t[BIAS].here)[n] = x;
        else
            ((uint16_t *)(void *)t[BIAS].here)[n] = dtype == FDM_FLOAT16 ? float_to_float16(x) : float_to_bfloat16(x);
    }
    for (int n = K; n <= V; n++)
        for (size_t i = 0; i < t[n].bytes; i++)
            t[n].here[i] = (char)below(256);
    upload(BIAS);
    upload(K);
    upload(V);
}

/* Both have run; whether the device's slots are the CPU's. */
static int is_right(void) {
    static char back[BATCH * WINDOW_MAX * HEADS * DIM * 4];
    for (int n = KEY; n <= SLOT; n++)
        if (fdm_memory_copy(back, host, t[n].there, cuda, t[n].bytes) || memcmp(back, t[n].here, t[n].bytes) != 0)
            return 0;
    return 1;
}

/* Biases of all tokens so far, to make the intervals of them all. */
struct history {
    char *bias;
    uint8_t *real;
    int64_t tokens, bytes;
};

static void remember(struct history *h, int64_t tokens, int with_real) {
    for (int64_t row = 0; row < BATCH * HEADS; row++)
        memcpy(h->bias + (row * TOKENS + h->tokens) * h->bytes, t[BIAS].here + row * tokens * h->bytes,
               (size_t)(tokens * h->bytes));
    for (int64_t b = 0; b < BATCH; b++)
        for (int64_t n = 0; n < tokens; n++)
            h->real[b * TOKENS + h->tokens + n] = with_real ? (uint8_t)t[REAL].here[b] : 1;
    h->tokens += tokens;
}

static int holds_the_kept(const struct history *h, fdm_dtype dtype, int64_t window) {
    static int32_t start[BATCH * HEADS * TOKENS], end[BATCH * HEADS * TOKENS];
    int64_t shape[3] = {BATCH, HEADS, h->tokens}, strides[3] = {HEADS * TOKENS, TOKENS, 1};
    int64_t real_shape[2] = {BATCH, h->tokens}, real_strides[2] = {TOKENS, 1};
    const fdm_tensor bias = {h->bias, host, 3, fdm_data_type_of(dtype), shape, strides, 0};
    const fdm_tensor real = {h->real, host, 2, fdm_data_type_of(FDM_BOOL), real_shape, real_strides, 0};
    fdm_tensor first = {start, host, 3, fdm_data_type_of(FDM_INT32), shape, strides, 0}, last = first;
    last.data = end;
    if (fdm_topk_intervals(&bias, &real, window, h->tokens, &first, &last, NULL, 0, NULL))
        fail("intervals");
    for (int64_t row = 0; row < BATCH * HEADS; row++) {
        int64_t kept = 0, held = 0;
        for (int64_t j = 0; j < h->tokens; j++)
            kept += end[row * TOKENS + j] == INT32_MAX;
        for (int64_t n = 0; n < window; n++) {
            const int32_t key = ((const int32_t *)(void *)t[KEY].here)[row * window + n];
            held += key >= 0;
            if (key >= 0 && end[row * TOKENS + key] != INT32_MAX)
                return 0;
        }
        if (held != kept)
            return 0;
    }
    return 1;
}

/* K and V of a prompt in pages, in any order; more of them than are used. Returns the block table. */
static fdm_tensor *make_pages(int64_t prompt) {
    const int64_t page_size = 1 + below(below(2) ? 4 : 70), needed = (prompt + page_size - 1) / page_size;
    const int64_t pages = BATCH * needed + below(4), table[2] = {BATCH, needed + below(2)};
    const int64_t rows[4] = {pages, page_size, HEADS, DIM};
    make(K, FDM_BFLOAT16, 4, rows);
    make(V, FDM_FLOAT32, 4, rows);
    make(TABLE, FDM_INT32, 2, table);
    for (int64_t n = 0; n < table[0] * table[1]; n++)
        ((int32_t *)(void *)t[TABLE].here)[n] = (int32_t)below(pages);
    upload(TABLE);
    return &t[TABLE].tensor;
}

static const char *fault_of(fdm_dtype dtype, int64_t window, int64_t prompt, int64_t steps) {
    const int64_t slots[3] = {BATCH, HEADS, window}, kept[4] = {BATCH, window, HEADS, DIM};
    const int64_t biases[3] = {BATCH, HEADS, prompt}, rows[4] = {BATCH, prompt, HEADS, DIM};
    struct history h = {calloc(BATCH * HEADS * TOKENS, 4), calloc(BATCH, TOKENS), 0, fdm_dtype_bytes(dtype)};
    const char *fault = NULL;
    make(KEY, FDM_INT32, 3, slots);
    make(SLOT_BIAS, dtype, 3, slots);
    make(LENGTH, FDM_INT32, 2, slots);
    make(SLOT_K, FDM_BFLOAT16, 4, kept);
    make(SLOT_V, FDM_FLOAT32, 4, kept);
    make(SLOT, FDM_INT32, 2, slots);
    make(BIAS, dtype, 3, biases);
    make(END, FDM_INT32, 3, biases);
    make(REAL, FDM_BOOL, 1, slots);
    const fdm_tensor *table = below(2) ? make_pages(prompt) : NULL;
    if (!table) {
        make(K, FDM_BFLOAT16, 4, rows);
        make(V, FDM_FLOAT32, 4, rows);
        make(TABLE, FDM_INT32, 1, rows);
    }
    for (int n = KEY; n <= SLOT; n++)
        upload(n);
    const fdm_topk_slots s = {sizeof s,          &t[KEY].tensor,    &t[SLOT_BIAS].tensor,
                              &t[LENGTH].tensor, &t[SLOT_K].tensor, &t[SLOT_V].tensor};
    draw_biases(dtype);
    place(host);
    static int32_t starts[BATCH * HEADS * TOKENS];
    fdm_tensor start = t[END].tensor;
    start.data = starts;
    if (fdm_topk_intervals(&t[BIAS].tensor, NULL, window, prompt, &start, &t[END].tensor, NULL, 0, NULL))
        fail("intervals of the prompt");
    upload(END);
    remember(&h, prompt, 0);
    for (int n = 0; n < 2; n++) {
        place(n ? host : cuda);
        if (fdm_topk_fill(&t[BIAS].tensor, &t[END].tensor, &t[K].tensor, &t[V].tensor, table, &s, NULL))
            fail("filling");
    }
    fault = !is_right() ? "the prompt" : !holds_the_kept(&h, dtype, window) ? "the prompt's keys" : NULL;
    t[BIAS].tensor.ndim = 2;
    t[K].shape[0] = t[V].shape[0] = BATCH;
    t[K].shape[1] = t[V].shape[1] = 1;
    for (int64_t step = 0; step < steps && !fault; step++) {
        const int with_real = (int)below(2);
        for (int b = 0; b < BATCH; b++)
            t[REAL].here[b] = (char)(below(4) != 0);
        upload(REAL);
        draw_biases(dtype);
        for (int n = 0; n < 2; n++) {
            place(n ? host : cuda);
            if (fdm_topk_append(&t[BIAS].tensor, with_real ? &t[REAL].tensor : NULL, &t[K].tensor, &t[V].tensor, &s,
                                &t[SLOT].tensor, NULL))
                fail("appending");
        }
        remember(&h, 1, with_real);
        fault = !is_right() ? "a token" : !holds_the_kept(&h, dtype, window) ? "a token's keys" : NULL;
    }
    for (int n = 0; n < NUM_TENSORS; n++) {
        fdm_memory_release(cuda, t[n].there);
        free(t[n].here);
    }
    free(h.bias);
    free(h.real);
    return fault;
}

static const char *check(const struct options *o, char *about, size_t bytes) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    const int many = below(12) == 0; /* slots: more than threads read in one go, and nearly all of them taken */
    const int64_t window = many ? WINDOW_MAX - below(900) : 1 + below(below(2) ? 12 : WINDOW);
    const int64_t prompt = many ? WINDOW_MAX - 400 + below(900) : 1 + below(below(2) ? 30 : 600);
    snprintf(about, bytes, "%lld slots, a prompt of %lld tokens", (long long)window, (long long)prompt);
    return fault_of(dtypes[below(3)], window, prompt, below(many ? 6 : 80));
}

int slots_checks(const struct options *o) { return has_device() ? run_cases(o, 60, check) : EXIT_NO_DEVICE; }
