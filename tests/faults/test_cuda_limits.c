/* test_cuda_limits.c: more heads and batches than the second and third dimension of a grid may have (65535), on the
 * pretended driver, which refuses such grids as devices do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_call.h"
#include "scenario.h"

/* A call whose tensors all lie at the same place, inputs with strides of 0: no kernel runs. */
struct limits_call {
    fdm_pass pass;
    fdm_dtype dtype;
    int64_t batch, heads, heads_kv, seqlen_q, seqlen_k;
    int64_t mask[2], bias[2], intervals[2]; /* batch and heads; 0 = none */
    int bias_rows, varlen, deterministic;
    const char *kernel, *launches; /* entries that it must launch, in this order */
};

static const struct limits_call calls[] = {
    {FDM_FORWARD, FDM_BFLOAT16, 70000, 2, 1, 1, 16, {70000, 2}, {0}, {0}, 0, 0, 0, "mma.forward", "mma_forward"},
    {FDM_FORWARD,
     FDM_BFLOAT16,
     4097,
     16,
     16,
     64,
     64,
     {4097, 16},
     {0},
     {0},
     0,
     0,
     0,
     "mma.forward",
     "block_mask mma_forward"},
    {FDM_FORWARD,
     FDM_FLOAT32,
     4097,
     16,
     16,
     64,
     64,
     {4097, 16},
     {0},
     {0},
     0,
     0,
     0,
     "mma.forward32",
     "block_mask mma_forward32"},
    {FDM_FORWARD, FDM_BFLOAT16, 70000, 2, 1, 8, 16, {0}, {0}, {0}, 0, 0, 0, "mma.decode", "mma_decode"},
    {FDM_FORWARD, FDM_BFLOAT16, 70000, 2, 1, 8, 2048, {0}, {0}, {0}, 0, 0, 0, "mma.decode", "mma_decode"},
    {FDM_FORWARD, FDM_BFLOAT16, 70000, 2, 1, 8, 16, {0}, {0}, {0}, 0, 0, 0, "mma.wide", "mma_wide"},
    {FDM_FORWARD, FDM_BFLOAT16, 70000, 2, 1, 8, 16, {0}, {0}, {0}, 0, 0, 0, "mma.split-q", "mma_textbook"},
    {FDM_BACKWARD,
     FDM_BFLOAT16,
     70000,
     2,
     1,
     1,
     16,
     {0},
     {0},
     {0},
     0,
     0,
     0,
     "mma.backward",
     "backward_prepare mma_backward backward_finish"},
    {FDM_BACKWARD,
     FDM_BFLOAT16,
     1,
     70000,
     70000,
     1,
     16,
     {0},
     {0},
     {0},
     0,
     0,
     1,
     "mma.backward",
     "backward_prepare mma_backward backward_finish"},
    {FDM_BACKWARD,
     FDM_BFLOAT16,
     70000,
     2,
     1,
     1,
     16,
     {70000, 2},
     {70000, 1},
     {0},
     0,
     0,
     0,
     "mma.backward",
     "backward_prepare mma_backward backward_finish backward_dbias"},
    {FDM_BACKWARD,
     FDM_BFLOAT16,
     4097,
     16,
     16,
     2,
     512,
     {4097, 16},
     {4097, 16},
     {0},
     1,
     0,
     0,
     "mma.backward",
     "backward_prepare block_mask mma_backward backward_finish"},
    {FDM_BACKWARD,
     FDM_BFLOAT16,
     4097,
     16,
     16,
     2,
     512,
     {0},
     {0},
     {4097, 16},
     0,
     0,
     0,
     "mma.backward",
     "backward_prepare key_sort mma_backward backward_finish"},
    {FDM_BACKWARD,
     FDM_BFLOAT16,
     70000,
     2,
     1,
     1,
     16,
     {0},
     {1, 1},
     {0},
     1,
     1,
     0,
     "mma.backward",
     "backward_prepare mma_backward backward_finish backward_dbias"},
    {FDM_BACKWARD,
     FDM_FLOAT32,
     70000,
     2,
     1,
     1,
     16,
     {70000, 2},
     {1, 1},
     {0},
     0,
     0,
     0,
     "mma.backward32",
     "backward_prepare mma_backward32 mma_backward32 backward_dbias"},
    {FDM_BACKWARD,
     FDM_FLOAT32,
     4097,
     16,
     16,
     2,
     64,
     {4097, 16},
     {0},
     {0},
     0,
     0,
     0,
     "mma.backward32",
     "backward_prepare block_mask mma_backward32 mma_backward32"},
};

enum { HEAD_DIM = 16, MEMORY = 1 << 24 };

struct tensors {
    fdm_tensor list[17];
    int64_t shapes[17][4], strides[17][4];
    int count;
};

/* Extents of -1 are left out. `dense`: an output, whose elements must not overlap. */
static fdm_tensor *add(struct tensors *t, void *memory, fdm_dtype dtype, int dense, int64_t a, int64_t b, int64_t c,
                       int64_t d) {
    const int64_t wanted[4] = {a, b, c, d};
    const int n = t->count++;
    int32_t ndim = 0;
    for (int i = 0; i < 4; i++)
        if (wanted[i] >= 0)
            t->shapes[n][ndim++] = wanted[i];
    int64_t span = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        t->strides[n][i] = dense || i == ndim - 1 ? span : 0;
        span *= t->shapes[n][i];
    }
    t->list[n] = (fdm_tensor){memory, {FDM_CUDA, 0}, ndim, fdm_data_type_of(dtype), t->shapes[n], t->strides[n], 0};
    return &t->list[n];
}

static fdm_tensors describe(const struct limits_call *c, struct tensors *t, void *memory, fdm_options *options) {
    const int64_t b = c->varlen ? -1 : c->batch, rows = c->varlen ? c->batch * c->seqlen_q : c->seqlen_q;
    const int64_t keys = c->varlen ? c->batch * c->seqlen_k : c->seqlen_k;
    const int backward = c->pass == FDM_BACKWARD;
    *options = fdm_options_default();
    options->kernel = c->kernel;
    options->deterministic = c->deterministic;
    fdm_tensors all = {.q = add(t, memory, c->dtype, 0, b, rows, c->heads, HEAD_DIM),
                       .k = add(t, memory, c->dtype, 0, b, keys, c->heads_kv, HEAD_DIM),
                       .v = add(t, memory, c->dtype, 0, b, keys, c->heads_kv, HEAD_DIM),
                       .out = add(t, memory, c->dtype, 1, b, rows, c->heads, HEAD_DIM),
                       .lse = add(t, memory, FDM_FLOAT32, 1, b, c->heads, rows, -1)};
    if (c->mask[0])
        all.mask = add(t, memory, FDM_BOOL, 0, c->mask[0], c->mask[1], c->seqlen_q, c->seqlen_k);
    if (c->bias[0])
        all.bias = add(t, memory, c->dtype, 0, c->bias[0], c->bias[1], c->bias_rows ? c->seqlen_q : 1, c->seqlen_k);
    if (c->intervals[0])
        all.interval_start = all.interval_end =
            add(t, memory, FDM_INT32, 0, c->intervals[0], c->intervals[1], c->seqlen_k, -1);
    if (c->varlen) {
        all.cu_seqlens_q = all.cu_seqlens_k = add(t, memory, FDM_INT32, 1, c->batch + 1, -1, -1, -1);
        options->max_seqlen_q = c->seqlen_q;
        options->max_seqlen_k = c->seqlen_k;
    }
    if (backward) {
        all.dout = add(t, memory, c->dtype, 0, b, rows, c->heads, HEAD_DIM);
        all.dq = add(t, memory, c->dtype, 1, b, rows, c->heads, HEAD_DIM);
        all.dk = add(t, memory, c->dtype, 1, b, keys, c->heads_kv, HEAD_DIM);
        if (c->bias[0])
            all.dbias =
                add(t, memory, c->dtype, 1, c->bias[0], c->bias[1], c->bias_rows ? c->seqlen_q : 1, c->seqlen_k);
    }
    return all;
}

static fdm_device_id device = {FDM_CUDA, 0};
static void *lend(void *context, size_t bytes) {
    void *memory = NULL;
    (void)context;
    return fdm_memory_allocate(device, bytes, &memory) ? NULL : memory;
}
static void take_back(void *context, void *memory) {
    (void)context;
    fdm_memory_release(device, memory);
}

static void many_heads_and_batches(void) {
    const fdm_allocator allocator = {NULL, lend, take_back};
    void *memory;
    use_fake_compiler();
    assert_int_equal(fdm_memory_allocate(device, MEMORY, &memory), FDM_OK);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        const struct limits_call *c = &calls[i];
        struct tensors t = {.count = 0};
        fdm_options options;
        const fdm_tensors all = describe(c, &t, memory, &options);
        const int64_t before = fake_driver()->num_launches();
        const fdm_status status = c->pass == FDM_FORWARD ? fdm_attention_forward(&all, &options, &allocator)
                                                         : fdm_attention_backward(&all, &options, &allocator);
        if (status)
            fail_msg("call %d, %s: %s", (int)i, c->kernel, fdm_last_error());
        char launched[256] = "";
        for (int64_t n = before; n < fake_driver()->num_launches(); n++) {
            const struct fake_launch launch = fake_driver()->launch(n);
            if (*launched)
                strcat(launched, " ");
            strcat(launched, launch.entry);
        }
        assert_string_equal(launched, c->launches);
    }
    fdm_memory_release(device, memory);
}

/* What is refused has its limit in the plan. */
static void limits_are_in_the_plan(void) {
    static const struct {
        fdm_pass pass;
        int64_t batch, heads, rows, keys;
        const char *words;
    } cases[] = {
        {FDM_FORWARD, INT32_MAX, 2, 1, 1, "rows of all heads are fewer than 2^35"},
        {FDM_FORWARD, 65536, 65536, 1, 1, "rows of all heads are fewer than 2^35"},
        {FDM_FORWARD, INT32_MAX, INT32_MAX, INT32_MAX - 1, 1, "rows of all heads are fewer than 2^35"},
        {FDM_BACKWARD, 1 << 18, 1 << 10, 1, 1 << 12, "keys are fewer than"},
        {FDM_BACKWARD, 1 << 20, 1 << 9, 1, 1, "query rows of all heads"},
    };
    fdm_device h200;
    fdm_options options = fdm_options_default();
    options.family = "mma";
    assert_int_equal(fdm_device_from_name("sm_90", &h200), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = fdm_problem_default();
        fdm_plan plan;
        p.pass = cases[i].pass;
        p.dtype = FDM_BFLOAT16;
        p.batch = cases[i].batch;
        p.heads = p.heads_kv = cases[i].heads;
        p.seqlen_q = cases[i].rows;
        p.seqlen_k = cases[i].keys;
        assert_refused(fdm_plan_attention(&h200, &p, &options, &plan), FDM_ERROR_UNSUPPORTED, cases[i].words);
    }
}

static const struct scenario scenarios[] = {
    {"many_heads_and_batches", many_heads_and_batches, NULL, 0},
    {"limits_are_in_the_plan", limits_are_in_the_plan, NULL, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
