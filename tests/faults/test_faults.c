/* test_faults.c: every allocation fails once, every caller's allocator may refuse, and no output is written then. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "flash_dmattn.h"

enum { B = 2, SQ = 5, SK = 9, H = 4, HKV = 2, D = 8, ROOM = 1024 };

/* One small problem with everything: GQA, bias, lse, all gradients. */
struct call {
    float q[ROOM], k[ROOM], v[ROOM], bias[ROOM], dout[ROOM];
    float out[ROOM], lse[ROOM], dq[ROOM], dk[ROOM], dv[ROOM], dbias[ROOM];
    int64_t q_shape[4], k_shape[4], lse_shape[3], bias_shape[4];
    fdm_tensor tensor[11];
    fdm_tensors all;
};

static fdm_tensor *describe(struct call *c, int n, float *data, int32_t ndim, int64_t *shape) {
    c->tensor[n] = (fdm_tensor){
        .data = data, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(FDM_FLOAT32), .shape = shape};
    return &c->tensor[n];
}

static struct call *make_call(void) {
    struct call *c = test_malloc(sizeof *c);
    *c = (struct call){
        .q_shape = {B, SQ, H, D}, .k_shape = {B, SK, HKV, D}, .lse_shape = {B, H, SQ}, .bias_shape = {1, HKV, SQ, SK}};
    for (int i = 0; i < ROOM; i++) {
        c->q[i] = (float)(i % 7) - 3, c->k[i] = (float)(i % 5) / 4, c->v[i] = (float)(i % 11) / 8;
        c->bias[i] = (float)(i % 3), c->dout[i] = (float)(i % 13) / 9 - 0.5f;
    }
    memset(c->out, 0xa5, sizeof c->out);
    memset(c->lse, 0xa5, sizeof c->lse);
    memset(c->dq, 0xa5, 4 * sizeof c->dq); /* dq, dk, dv and dbias follow each other */
    c->all = (fdm_tensors){.struct_bytes = sizeof(fdm_tensors),
                           .q = describe(c, 0, c->q, 4, c->q_shape),
                           .k = describe(c, 1, c->k, 4, c->k_shape)};
    c->all.v = describe(c, 2, c->v, 4, c->k_shape);
    c->all.bias = describe(c, 3, c->bias, 4, c->bias_shape);
    c->all.out = describe(c, 4, c->out, 4, c->q_shape);
    c->all.lse = describe(c, 5, c->lse, 3, c->lse_shape);
    c->all.dout = describe(c, 6, c->dout, 4, c->q_shape);
    c->all.dq = describe(c, 7, c->dq, 4, c->q_shape);
    c->all.dk = describe(c, 8, c->dk, 4, c->k_shape);
    c->all.dv = describe(c, 9, c->dv, 4, c->k_shape);
    c->all.dbias = describe(c, 10, c->dbias, 4, c->bias_shape);
    return c;
}

static int untouched(const float *data) {
    for (size_t i = 0; i < ROOM * sizeof *data; i++)
        if (((const unsigned char *)data)[i] != 0xa5)
            return 0;
    return 1;
}

static void outputs_are_untouched(const struct call *c, fdm_pass pass) {
    if (pass == FDM_FORWARD) {
        assert_true(untouched(c->out) && untouched(c->lse));
    } else {
        assert_true(untouched(c->dq) && untouched(c->dk) && untouched(c->dv) && untouched(c->dbias));
    }
}

static fdm_status call_pass(struct call *c, fdm_pass pass, const fdm_options *options, const fdm_allocator *allocator) {
    return pass == FDM_FORWARD ? fdm_attention_forward(&c->all, options, allocator)
                               : fdm_attention_backward(&c->all, options, allocator);
}

/* The n-th allocation fails, for every n until a call needs fewer; returns how many it needed. */
static int fail_every_allocation(fdm_pass pass, const fdm_options *options) {
    struct call *c = make_call();
    if (pass == FDM_BACKWARD)
        assert_int_equal(fdm_attention_forward(&c->all, options, NULL), FDM_OK);
    int64_t live = memory_live();
    int n = 1;
    for (;; n++) {
        memory_fail_at(n);
        fdm_status status = call_pass(c, pass, options, NULL);
        memory_fail_at(0);
        assert_int_equal(memory_live(), live);
        if (status == FDM_OK)
            break;
        assert_int_equal(status, FDM_ERROR_OUT_OF_MEMORY);
        assert_non_null(strstr(fdm_last_error(), "workspace"));
        outputs_are_untouched(c, pass);
        assert_true(n < 1000);
    }
    test_free(c);
    return n - 1;
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    int injected = 0;
    const char *const families[] = {"cpu", "reference"};
    for (int f = 0; f < 2; f++)
        for (int threads = 1; threads <= 2; threads++)
            for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++) {
                fdm_options options = fdm_options_default();
                options.family = families[f];
                options.num_threads = threads;
                injected += fail_every_allocation((fdm_pass)pass, &options);
            }
    assert_true(injected > 0);
}

struct budget {
    int asked, released, refuse;
    void *given;
};

static void *lend(void *context, size_t bytes) {
    struct budget *b = context;
    b->asked++;
    b->given = b->refuse ? NULL : aligned_alloc(64, (bytes + 63) / 64 * 64);
    return b->given;
}

static void take_back(void *context, void *memory) {
    struct budget *b = context;
    b->released++;
    assert_ptr_equal(memory, b->given);
    free(memory);
}

static void the_callers_allocator_is_the_only_one(void **state) {
    (void)state;
    for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++) {
        struct call *c = make_call();
        if (pass == FDM_BACKWARD)
            assert_int_equal(fdm_attention_forward(&c->all, NULL, NULL), FDM_OK);
        struct budget refusing = {.refuse = 1}, giving = {.refuse = 0};
        fdm_allocator allocator = {&refusing, lend, take_back};
        fdm_status status = call_pass(c, (fdm_pass)pass, NULL, &allocator);
        assert_int_equal(status, refusing.asked ? FDM_ERROR_OUT_OF_MEMORY : FDM_OK);
        assert_int_equal(refusing.released, 0);
        if (status)
            outputs_are_untouched(c, (fdm_pass)pass);
        allocator.context = &giving;
        memory_fail_at(1);
        assert_int_equal(call_pass(c, (fdm_pass)pass, NULL, &allocator), FDM_OK);
        memory_fail_at(0);
        assert_int_equal(giving.released, giving.asked);
        test_free(c);
    }
}

/* describe, plan and execute allocate nothing at all. */
static void execute_does_not_allocate(void **state) {
    (void)state;
    for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++) {
        struct call *c = make_call();
        fdm_device device = {.struct_bytes = sizeof device};
        fdm_problem problem;
        fdm_plan plan = {.struct_bytes = sizeof plan};
        memory_fail_at(1);
        assert_int_equal(fdm_device_query(FDM_CPU, 0, &device), FDM_OK);
        assert_int_equal(fdm_describe((fdm_pass)pass, &c->all, NULL, &problem), FDM_OK);
        assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &plan), FDM_OK);
        size_t bytes = (size_t)plan.workspace_bytes;
        char *workspace = aligned_alloc(64, (bytes + 64) / 64 * 64);
        assert_non_null(workspace);
        assert_int_equal(fdm_execute(&plan, &c->all, workspace, bytes, NULL), FDM_OK);
        memory_fail_at(0);
        free(workspace);
        test_free(c);
    }
}

static void topk_survives_a_failed_allocation(void **state) {
    (void)state;
    float bias[SK] = {3, 1, 2};
    int32_t start[SK], end[SK];
    int64_t bias_shape[3] = {1, 1, SK}, shape[3] = {1, 1, SK};
    fdm_tensor b = {bias, {FDM_CPU, 0}, 3, fdm_data_type_of(FDM_FLOAT32), bias_shape, NULL, 0};
    fdm_tensor s = {start, {FDM_CPU, 0}, 3, fdm_data_type_of(FDM_INT32), shape, NULL, 0}, e = s;
    e.data = end;
    memset(start, 0xa5, sizeof start);
    int64_t live = memory_live();
    memory_fail_at(1);
    assert_int_equal(fdm_topk_intervals(&b, NULL, 2, SK, &s, &e, NULL, 0, NULL), FDM_ERROR_OUT_OF_MEMORY);
    memory_fail_at(0);
    for (int j = 0; j < SK; j++)
        assert_int_equal((uint32_t)start[j], 0xa5a5a5a5);
    assert_int_equal(memory_live(), live);
    assert_int_equal(fdm_topk_intervals(&b, NULL, 2, SK, &s, &e, NULL, 0, NULL), FDM_OK);
    assert_int_equal(memory_live(), live);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(the_callers_allocator_is_the_only_one),
        cmocka_unit_test(execute_does_not_allocate),
        cmocka_unit_test(topk_survives_a_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
