/* fuzz_problem.c: tensors and options made from bytes: describe, plan and, where memory backs them, execute. */
#include <stdlib.h>
#include <string.h>

#include "flash_dmattn.h"

enum { AXES = 5, TENSORS = 19, EXTENT_MAX = 40, SPAN_MAX = 1 << 18, PAIRS_MAX = 1 << 15 };

struct bytes {
    const uint8_t *data;
    size_t size;
};

static uint8_t take(struct bytes *b) {
    if (b->size == 0)
        return 0;
    b->size--;
    return *b->data++;
}

static int64_t take_wild(struct bytes *b) {
    static const int64_t odd[] = {-1,        0,        1, 2, 64, INT32_MAX, INT64_MAX, INT64_MIN, INT64_MAX / 3,
                                  1LL << 31, 1LL << 40};
    uint8_t choice = take(b);
    return choice < 128 ? choice : odd[choice % (sizeof odd / sizeof odd[0])];
}

struct subject {
    fdm_tensor tensor[TENSORS];
    int64_t shape[TENSORS][AXES], strides[TENSORS][AXES];
    char *memory[TENSORS]; /* NULL: the tensor has an address nobody may read */
    int used;
};

/* Elements from the first to one past the last, or -1 when that is not small. */
static int64_t span_of(const fdm_tensor *t) {
    int64_t span = 1, dense = 1;
    if (t->ndim < 0 || t->ndim > AXES)
        return -1;
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        int64_t stride = t->strides ? t->strides[i] : dense;
        if (t->shape[i] == 0)
            return 0;
        if (t->shape[i] < 0 || t->shape[i] > EXTENT_MAX * EXTENT_MAX || stride < 0 || stride > SPAN_MAX)
            return -1;
        span += (t->shape[i] - 1) * stride;
        dense *= t->shape[i];
        if (span > SPAN_MAX || dense > SPAN_MAX)
            return -1;
    }
    return span;
}

static const fdm_tensor *add(struct subject *s, struct bytes *b, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    int n = s->used++;
    fdm_tensor *t = &s->tensor[n];
    *t = (fdm_tensor){.data = (void *)64, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(dtype)};
    t->shape = s->shape[n];
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    if (take(b) % 4 == 0) { /* rows wider than they need be, or wild strides */
        int64_t stride = 1, gap = take(b) % 4;
        t->strides = s->strides[n];
        for (int32_t i = ndim - 1; i >= 0; i--) {
            t->strides[i] = stride;
            stride = (t->shape[i] > 0 ? t->shape[i] : 1) * stride + gap;
        }
    }
    switch (take(b)) { /* one thing in a few tensors is wrong */
    case 1: t->ndim = (int32_t)(take(b) % (AXES + 2)) - 1; break;
    case 2: t->shape[take(b) % AXES] = take_wild(b); break;
    case 3: t->strides ? (void)(t->strides[take(b) % AXES] = take_wild(b)) : (void)0; break;
    case 4: t->dtype.code = take(b); break;
    case 5: t->dtype.bits = take(b); break;
    case 6: t->device.type = take(b); break;
    case 7: t->dtype.lanes = take(b); break;
    case 8: t->byte_offset = take(b) % 8; break;
    case 9: t->data = NULL; break;
    case 10: t->shape = NULL; break;
    case 11: t->device.index = (int32_t)take_wild(b); break;
    }
    return t;
}

/* Memory of exactly the tensor's span, so that the sanitizer sees every step outside. */
static void back(struct subject *s, int n, struct bytes *b, const fdm_tensors *all) {
    fdm_tensor *t = &s->tensor[n];
    int64_t span = t->shape && t->data ? span_of(t) : -1, bytes = fdm_dtype_bytes(fdm_dtype_of(t));
    if (span < 0 || bytes == 0)
        return;
    size_t size = (size_t)(span * bytes) + (size_t)t->byte_offset;
    s->memory[n] = malloc(size ? size : 1);
    if (!s->memory[n])
        abort();
    t->data = s->memory[n];
    for (size_t i = 0; i < size; i++)
        s->memory[n][i] = (char)(i % 4 == 3 ? 0x3c + take(b) % 8 : take(b));
    if ((t == all->cu_seqlens_q || t == all->cu_seqlens_k) && bytes == 4 && t->byte_offset == 0) {
        int32_t at = 0, *cu = (int32_t *)t->data;
        for (int64_t i = 0; i < span; i++, at += take(b) % 8)
            cu[i] = i + 1 == span && i > 0 ? (t == all->cu_seqlens_q ? 16 : 24) : at;
    }
}

static fdm_options options_from(struct bytes *b) {
    fdm_options o = fdm_options_default();
    uint8_t flags = take(b);
    o.causal = flags & 1;
    if (flags & 2)
        o.window_left = take_wild(b);
    if (flags & 4)
        o.window_right = take_wild(b);
    if (flags & 8) {
        o.has_softmax_scale = 1;
        uint64_t bits = 0;
        for (int i = 0; i < 8; i++)
            bits = bits << 8 | take(b);
        memcpy(&o.softmax_scale, &bits, sizeof bits);
    }
    if (flags & 16)
        o.softcap = take(b) / 8.0 - 1;
    if (flags & 32)
        o.max_seqlen_q = take_wild(b);
    o.num_threads = flags & 64 ? 2 : 1;
    static const char *const families[] = {NULL, NULL, "cpu", "reference", "cuda"};
    o.family = families[take(b) % 5];
    return o;
}

static fdm_tensors tensors_from(struct subject *s, struct bytes *b, fdm_pass pass) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16, FDM_FLOAT64};
    const uint8_t features = take(b), packed = take(b) % 3 == 0;
    const fdm_dtype dtype = dtypes[take(b) % 4], row_dtype = dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    int64_t batch = take(b) % 3, hkv = 1 + take(b) % 2, h = hkv * (1 + take(b) % 3);
    int64_t sq = packed ? 16 : take(b) % EXTENT_MAX, sk = packed ? 24 : take(b) % EXTENT_MAX;
    int64_t d = 1 + take(b) % 70, dv = features & 1 ? d : 1 + take(b) % 70;
    const int64_t qs[] = {batch, sq, h, d}, ks[] = {batch, sk, hkv, d}, vs[] = {batch, sk, hkv, dv};
    const int64_t os[] = {batch, sq, h, dv}, ls[] = {batch, h, sq}, cus[] = {batch + 1};
    const int64_t is[] = {features & 2 ? 1 : batch, features & 4 ? 1 : h, sk};
    const int64_t ms[] = {features & 2 ? 1 : batch, features & 4 ? hkv : h, features & 8 ? 1 : sq,
                          features & 16 ? 1 : sk};
    const int p = packed;
    fdm_tensors t = {
        .struct_bytes = sizeof t, .q = add(s, b, dtype, 4 - p, qs + p), .k = add(s, b, dtype, 4 - p, ks + p)};
    t.v = add(s, b, dtype, 4 - p, vs + p);
    t.out = (fdm_tensor *)add(s, b, dtype, 4 - p, os + p);
    t.lse = (fdm_tensor *)add(s, b, row_dtype, 3 - p, ls + p);
    if (packed) {
        t.cu_seqlens_q = add(s, b, FDM_INT32, 1, cus);
        t.cu_seqlens_k = add(s, b, FDM_INT32, 1, cus);
    }
    if (features & 32)
        t.mask = add(s, b, FDM_BOOL, 4, ms);
    if (features & 64)
        t.bias = add(s, b, take(b) % 2 ? dtype : FDM_FLOAT32, 4, ms);
    if (features & 128) {
        t.interval_start = add(s, b, FDM_INT32, 3 - p, is + p);
        t.interval_end = add(s, b, FDM_INT32, 3 - p, is + p);
    }
    if (pass == FDM_BACKWARD) {
        t.dout = add(s, b, dtype, 4 - p, os + p);
        t.dlse = take(b) % 2 ? add(s, b, row_dtype, 3 - p, ls + p) : NULL;
        t.dq = (fdm_tensor *)add(s, b, dtype, 4 - p, qs + p);
        t.dk = (fdm_tensor *)add(s, b, dtype, 4 - p, ks + p);
        t.dv = (fdm_tensor *)add(s, b, dtype, 4 - p, vs + p);
        if (t.bias && take(b) % 2)
            t.dbias = (fdm_tensor *)add(s, b, fdm_dtype_of(t.bias), 4, ms);
    }
    if (take(b) % 4 == 1) {
        const int64_t sinks[] = {1 + take(b) % 3, h};
        const int one = take(b) % 2;
        const fdm_dtype sink_dtype = dtypes[take(b) % 4];
        t.sink = add(s, b, sink_dtype, 2 - one, sinks + one);
        if (pass == FDM_BACKWARD && take(b) % 2)
            t.dsink = (fdm_tensor *)add(s, b, sink_dtype, 2 - one, sinks + one);
    }
    for (int n = 0; n < s->used; n++)
        back(s, n, b, &t);
    return t;
}

/* A plan survives the way through its own JSON, and a call with it stays inside its tensors and workspace. */
static void run_plan(const struct subject *s, const fdm_plan *plan, const fdm_tensors *t) {
    char json[4096];
    size_t needed;
    fdm_plan again = {.struct_bytes = sizeof again};
    if (fdm_plan_to_json(plan, json, sizeof json, &needed) || needed > sizeof json ||
        fdm_plan_from_json(json, needed - 1, &again))
        abort();
    for (int n = 0; n < s->used; n++)
        if (!s->memory[n] || s->tensor[n].device.index != 0) /* the plan is for the first device */
            return;
    const fdm_problem *p = &plan->problem;
    if (p->batch * p->heads * p->seqlen_q * p->seqlen_k > PAIRS_MAX || plan->workspace_bytes > 1 << 26)
        return;
    size_t bytes = (size_t)plan->workspace_bytes;
    char *workspace = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
    if (fdm_execute(plan, t, workspace, bytes, NULL) != FDM_OK)
        abort();
    free(workspace);
}

static void fuzz_tensors(struct bytes *b) {
    struct subject subject = {.used = 0};
    fdm_pass pass = take(b) % 2 ? FDM_BACKWARD : FDM_FORWARD;
    fdm_options options = options_from(b);
    fdm_tensors tensors = tensors_from(&subject, b, pass);
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    /* cu_seqlens are read while describing: the caller owes memory for them. */
    int readable = 1;
    for (int n = 0; n < subject.used; n++)
        if ((&subject.tensor[n] == tensors.cu_seqlens_q || &subject.tensor[n] == tensors.cu_seqlens_k) &&
            !subject.memory[n] && subject.tensor[n].data)
            readable = 0;
    if (readable && fdm_device_query(FDM_CPU, 0, &device) == FDM_OK &&
        fdm_describe(pass, &tensors, &options, &problem) == FDM_OK &&
        fdm_plan_attention(&device, &problem, &options, &plan) == FDM_OK)
        run_plan(&subject, &plan, &tensors);
    for (int n = 0; n < subject.used; n++)
        free(subject.memory[n]);
}

/* A problem filled by hand: validated and planned for without tensors. */
static void fuzz_problem(struct bytes *b) {
    fdm_problem p = fdm_problem_default();
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    int64_t *numbers[] = {&p.batch,         &p.heads,          &p.heads_kv,       &p.seqlen_q,      &p.seqlen_k,
                          &p.head_dim,      &p.head_dim_v,     &p.total_q,        &p.total_k,       &p.window_left,
                          &p.window_right,  &p.interval_batch, &p.interval_heads, &p.mask_shape[0], &p.mask_shape[1],
                          &p.mask_shape[3], &p.bias_shape[0],  &p.bias_shape[2]};
    for (size_t i = take(b) % 8; i > 0; i--) {
        int64_t *number = numbers[take(b) % (sizeof numbers / sizeof numbers[0])];
        *number = take_wild(b);
    }
    uint8_t flags = take(b);
    p.pass = flags & 1 ? FDM_BACKWARD : FDM_FORWARD;
    p.varlen = flags >> 1 & 1;
    p.has_mask = flags >> 2 & 1;
    p.has_bias = flags >> 3 & 1;
    p.needs_dbias = flags >> 4 & 1;
    p.has_intervals = flags >> 5 & 1;
    p.has_sink = flags >> 6 & 1;
    p.needs_dsink = flags >> 7 & 1;
    p.dtype = (fdm_dtype)(take(b) % 9 - 2);
    p.bias_dtype = (fdm_dtype)(take(b) % 9 - 2);
    fdm_options options = options_from(b);
    if (fdm_device_query(FDM_CPU, 0, &device) == FDM_OK && fdm_plan_attention(&device, &p, &options, &plan) == FDM_OK &&
        plan.workspace_bytes < 0)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct bytes bytes = {data, size};
    take(&bytes) % 4 ? fuzz_tensors(&bytes) : fuzz_problem(&bytes);
    return 0;
}
