/* ranks_problem.h: random problems of test_ranks.c, whole: their tensors, masks and layouts. */
#ifndef FDM_RANKS_PROBLEM_H
#define FDM_RANKS_PROBLEM_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/half.h"
#include "flash_dmattn.h"
#include "thread_ranks.h"

static _Thread_local uint64_t state; /* of each thread: ranks that draw their own problems run at once */
static int64_t draw(int64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)(state >> 33) % below;
}

/* A tensor of the whole problem; rows_axis and keys_axis: which axis is of rows or keys, -1: none. */
struct whole {
    double *data; /* of the dtype, or bytes of a mask */
    fdm_tensor tensor;
    int64_t shape[4];
    int32_t rows_axis, keys_axis;
};
enum { Q, K, V, MASK, BIAS, SINK, OUT, LSE, LSE_LOW, DOUT, DLSE, DQ, DK, DV, DBIAS, START, END, COUNT };
struct problem {
    fdm_options options;
    fdm_pass pass;
    fdm_dtype dtype;
    int32_t ranks;
    fdm_rank_algorithm algorithm;
    int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, dim, dim_v;
    struct whole all[COUNT];
    fdm_rank_mask mask;
    fdm_layout *rows, *keys;
    int other_kernel, same_bits;
};
static const size_t offsets[COUNT] = {offsetof(fdm_tensors, q),           offsetof(fdm_tensors, k),
                                      offsetof(fdm_tensors, v),           offsetof(fdm_tensors, mask),
                                      offsetof(fdm_tensors, bias),        offsetof(fdm_tensors, sink),
                                      offsetof(fdm_tensors, out),         offsetof(fdm_tensors, lse),
                                      offsetof(fdm_tensors, lse_low),     offsetof(fdm_tensors, dout),
                                      offsetof(fdm_tensors, dlse),        offsetof(fdm_tensors, dq),
                                      offsetof(fdm_tensors, dk),          offsetof(fdm_tensors, dv),
                                      offsetof(fdm_tensors, dbias),       offsetof(fdm_tensors, interval_start),
                                      offsetof(fdm_tensors, interval_end)};

static int64_t elements(const fdm_tensor *t) {
    int64_t count = 1;
    for (int32_t axis = 0; axis < t->ndim; axis++)
        count *= t->shape[axis];
    return count;
}

static void set_number(void *data, fdm_dtype dtype, int64_t at, double value) {
    switch (dtype) {
    case FDM_FLOAT64: ((double *)data)[at] = value; break;
    case FDM_FLOAT32: ((float *)data)[at] = (float)value; break;
    case FDM_BFLOAT16: ((uint16_t *)data)[at] = float_to_bfloat16((float)value); break;
    case FDM_INT32: ((int32_t *)data)[at] = (int32_t)value; break;
    default: ((uint8_t *)data)[at] = (uint8_t)value;
    }
}

static double number(const void *data, fdm_dtype dtype, int64_t at) {
    if (dtype == FDM_BFLOAT16)
        return bfloat16_to_float(((const uint16_t *)data)[at]);
    return dtype == FDM_FLOAT64 ? ((const double *)data)[at] : ((const float *)data)[at];
}

static void make(struct problem *p, int which, fdm_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c,
                 int64_t d, int32_t rows_axis, int32_t keys_axis) {
    struct whole *w = &p->all[which];
    const int64_t shape[] = {a, b, c, d};
    memcpy(w->shape, shape, sizeof shape);
    w->rows_axis = rows_axis;
    w->keys_axis = keys_axis;
    w->tensor = (fdm_tensor){NULL, {FDM_CPU, 0}, ndim, fdm_data_type_of(dtype), w->shape, NULL, 0};
    w->data = malloc((size_t)elements(&w->tensor) * 8 + 8);
    w->tensor.data = w->data;
    for (int64_t i = 0; i < elements(&w->tensor); i++) {
        double value = (double)draw(2001) / 1000 - 1;
        if (dtype == FDM_BOOL)
            value = draw(4) != 0;
        if (dtype == FDM_INT32)
            value = which == START ? (double)(draw(p->seqlen_q + 8) - 4)
                                   : ((int32_t *)(void *)p->all[START].data)[i] + (double)draw(p->seqlen_q);
        set_number(w->data, dtype, i, value);
    }
}

static void make_scores(struct problem *p, int which, fdm_dtype dtype, int kind) {
    const int64_t heads[] = {1, p->heads_kv, p->heads}, h = heads[draw(3)], b = draw(2) ? p->batch : 1;
    if (kind == 0)
        make(p, which, dtype, 4, b, h, p->seqlen_q, p->seqlen_k, 2, -1);
    else if (kind == 1)
        make(p, which, dtype, 4, b, h, 1, p->seqlen_k, -1, 3);
    else
        make(p, which, dtype, 4, b, h, p->seqlen_q, 1, 2, -1);
}

static fdm_layout *layout_of(int64_t total, int32_t ranks, fdm_layout_kind kind, int64_t block) {
    fdm_layout_wish wish = {.struct_bytes = sizeof wish, .kind = kind, .ranks = ranks, .total = total, .block = block};
    fdm_range ranges[64];
    int64_t counts[THREAD_RANKS_MAX] = {0}, n = 0;
    if (kind == FDM_LAYOUT_RANGES) { /* blocks in turn, the later ones first */
        for (int32_t r = 0; r < ranks; r++)
            for (int64_t b = 63; b >= 0; b--)
                if (b % ranks == r && b * block < total && n < 64) {
                    const int64_t end = (b + 1) * block;
                    ranges[n++] = (fdm_range){b * block, end < total && b < 63 ? end : total};
                    counts[r]++;
                }
        wish.ranges = ranges;
        wish.range_counts = counts;
    }
    fdm_layout *layout = NULL;
    assert_int_equal(fdm_layout_create(&wish, &layout), FDM_OK);
    return layout;
}

static void draw_mask(struct problem *p) {
    fdm_options *o = &p->options;
    o->causal = draw(2) != 0;
    if (draw(3) == 0)
        o->window_left = draw(p->seqlen_k);
    if (draw(4) == 0)
        o->window_right = draw(p->seqlen_k);
    p->mask = fdm_rank_mask_default();
    if (draw(3) == 0) {
        const int64_t heads[] = {1, p->heads_kv, p->heads}, h = heads[draw(3)], b = draw(2) ? p->batch : 1;
        make(p, START, FDM_INT32, 3, b, h, p->seqlen_k, 0, -1, -1);
        make(p, END, FDM_INT32, 3, b, h, p->seqlen_k, 0, -1, -1);
        p->mask.num_lists = b * h;
        p->mask.interval_start = (const int32_t *)(const void *)p->all[START].data;
        p->mask.interval_end = (const int32_t *)(const void *)p->all[END].data;
    }
    p->mask.seqlen_q = p->seqlen_q;
    p->mask.seqlen_k = p->seqlen_k;
    p->mask.causal = o->causal;
    p->mask.window_left = o->window_left;
    p->mask.window_right = o->window_right;
}

static void draw_sizes(struct problem *p) {
    static const int64_t heads[][2] = {{4, 2}, {2, 2}, {4, 4}, {4, 1}, {8, 4}, {6, 3}};
    const int64_t *h = heads[draw(6)];
    static const fdm_dtype dtypes[] = {FDM_FLOAT64, FDM_FLOAT32, FDM_FLOAT32, FDM_BFLOAT16};
    p->dtype = dtypes[draw(4)];
    p->batch = 1 + draw(2);
    p->heads = h[0];
    p->heads_kv = h[1];
    p->dim = 4 + draw(9);
    p->dim_v = draw(2) ? p->dim : 4 + draw(9);
    p->seqlen_q = 2 + draw(120);
    p->seqlen_k = draw(3) ? p->seqlen_q : 2 + draw(120);
    p->ranks = 1 + (int32_t)draw(4);
    p->options = fdm_options_default();
    p->options.softcap = draw(4) ? 0 : 3;
    p->options.num_threads = 1;
}

/* The tensors of the whole call. */
static void draw_tensors(struct problem *p) {
    const int64_t b = p->batch, h = p->heads, kv = p->heads_kv, sq = p->seqlen_q, sk = p->seqlen_k;
    const int backward = p->pass == FDM_BACKWARD;
    const fdm_dtype lse = p->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    const fdm_dtype bias_dtype = draw(2) ? lse : p->dtype;
    make(p, Q, p->dtype, 4, b, sq, h, p->dim, 1, -1);
    make(p, K, p->dtype, 4, b, sk, kv, p->dim, -1, 1);
    make(p, V, p->dtype, 4, b, sk, kv, p->dim_v, -1, 1);
    make(p, OUT, p->dtype, 4, b, sq, h, p->dim_v, 1, -1);
    make(p, LSE, lse, 3, b, h, sq, 0, 2, -1);
    if (draw(4) == 0)
        make_scores(p, MASK, FDM_BOOL, (int)draw(2));
    if (draw(3) == 0) {
        make_scores(p, BIAS, bias_dtype, (int)draw(3));
        make(p, LSE_LOW, lse, 3, b, h, sq, 0, 2, -1);
    }
    if (!backward && draw(4) == 0)
        make(p, SINK, p->dtype, 2, 1, h, 0, 0, -1, -1);
    p->options.lse_without_sink = p->all[SINK].data && draw(2);
    if (!backward)
        return;
    make(p, DOUT, p->dtype, 4, b, sq, h, p->dim_v, 1, -1);
    if (draw(2))
        make(p, DLSE, lse, 3, b, h, sq, 0, 2, -1);
    if (draw(5))
        make(p, DQ, p->dtype, 4, b, sq, h, p->dim, 1, -1);
    if (draw(5))
        make(p, DK, p->dtype, 4, b, sk, kv, p->dim, -1, 1);
    make(p, DV, p->dtype, 4, b, sk, kv, p->dim_v, -1, 1);
    const struct whole *bias = &p->all[BIAS];
    if (bias->data && draw(3))
        make(p, DBIAS, bias_dtype, 4, bias->shape[0], bias->shape[1], bias->shape[2], bias->shape[3], bias->rows_axis,
             bias->keys_axis);
}

static fdm_tensors tensors_of(struct problem *p) {
    fdm_tensors t = {.struct_bytes = sizeof t};
    for (int n = 0; n < COUNT; n++) {
        const fdm_tensor *tensor = p->all[n].data ? &p->all[n].tensor : NULL;
        memcpy((char *)&t + offsets[n], &tensor, sizeof tensor);
    }
    return t;
}

static fdm_status run_whole(struct problem *p) {
    fdm_tensors t = tensors_of(p);
    if (p->pass == FDM_FORWARD)
        return fdm_attention_forward(&t, &p->options, NULL);
    fdm_tensors forward = t;
    forward.dout = forward.dlse = NULL;
    forward.dq = forward.dk = forward.dv = forward.dbias = NULL;
    const fdm_status status = fdm_attention_forward(&forward, &p->options, NULL);
    return status ? status : fdm_attention_backward(&t, &p->options, NULL);
}

/* ---- where ranks compute ---- */

static int on_cuda(void) { return getenv("FDM_TEST_DEVICE") && strcmp(getenv("FDM_TEST_DEVICE"), "cuda") == 0; }
static fdm_device_id ranks_device(void) { return (fdm_device_id){on_cuda() ? FDM_CUDA : FDM_CPU, 0}; }

static void *device_memory(size_t bytes, const void *content) {
    static const fdm_device_id host = {FDM_CPU, 0};
    void *memory = NULL;
    fdm_status status = fdm_memory_allocate(ranks_device(), bytes, &memory);
    if (!status)
        status = content ? fdm_memory_copy(memory, ranks_device(), content, host, bytes)
                         : fdm_memory_fill(ranks_device(), memory, 0xff, bytes);
    return status ? NULL : memory;
}

struct shard {
    char *data;
    fdm_tensor tensor;
    int64_t shape[4];
};

/* To where the ranks compute; then back to s->data. */
static void send_shard(struct shard *s) {
    s->tensor.device = ranks_device();
    s->tensor.data = device_memory((size_t)elements(&s->tensor) * 8 + 8, s->data);
}
static void fetch_shard(struct shard *s) {
    static const fdm_device_id host = {FDM_CPU, 0};
    fdm_memory_copy(s->data, host, s->tensor.data, ranks_device(), (size_t)elements(&s->tensor) * 8 + 8);
    fdm_memory_release(ranks_device(), s->tensor.data);
}

static void release_problem(struct problem *p) {
    for (int n = 0; n < COUNT; n++)
        free(p->all[n].data);
    if (p->keys != p->rows)
        fdm_layout_release(p->keys);
    fdm_layout_release(p->rows);
}

#endif
