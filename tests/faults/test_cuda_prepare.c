/* test_cuda_prepare.c: fdm_prepare makes ready exactly what fdm_execute launches: random problems whose tensors lie in
 * every way that is allowed, on pretended devices, which look at no tensor. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_call.h"
#include "scenario.h"

enum { PROBLEMS = 1500, NUM_TENSORS = 16 };

static uint64_t state_of_draws;
static int64_t draw(int64_t count) { /* 0 .. count - 1 */
    state_of_draws = state_of_draws * 6364136223846793005ull + 1442695040888963407ull;
    return (int64_t)((state_of_draws >> 33) % (uint64_t)count);
}
static int one_in(int64_t n) { return draw(n) == 0; }

/* ---- tensors, of which only addresses and strides matter ---- */

enum layout { CONTIGUOUS, HEADS_FIRST, GAPS, ODD_GAPS, FAR_APART, BROADCAST, ODD_ADDRESS, NUM_LAYOUTS };
struct place {
    char *memory; /* of no device: nothing looks there */
    int64_t shape[4], strides[4];
    fdm_tensor tensor;
};

/* last: the last axis' stride is 1. An output is no broadcast. */
static fdm_tensor *lay_out(struct place *p, fdm_dtype dtype, int32_t ndim, enum layout layout, int output) {
    const int32_t middle = ndim == 4 && layout == HEADS_FIRST; /* [B, S, H, D] in the order B, H, S, D */
    int64_t reach = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        const int32_t axis = middle && i == 2 ? 1 : middle && i == 1 ? 2 : i;
        p->strides[axis] = reach;
        reach *= p->shape[axis] > 0 ? p->shape[axis] : 1;
        if (i == ndim - 1 && (layout == GAPS || layout == ODD_GAPS))
            reach += layout == GAPS ? 64 : 3;
        if (i == 1 && layout == FAR_APART)
            reach = (1ll << 39) + 64; /* elements of 2 bytes: more than TMA takes */
    }
    if (layout == BROADCAST && !output)
        p->strides[draw(ndim - 1)] = 0;
    p->tensor = (fdm_tensor){.data = p->memory + (layout == ODD_ADDRESS ? fdm_dtype_bytes(dtype) : 0),
                             .device = {FDM_CUDA, 0},
                             .ndim = ndim,
                             .dtype = fdm_data_type_of(dtype),
                             .shape = p->shape,
                             .strides = p->strides};
    return &p->tensor;
}

struct call {
    struct place places[NUM_TENSORS];
    int32_t used;
    fdm_dtype dtype;
    int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
    int32_t varlen, plain; /* plain: every tensor contiguous, from an address that is a multiple of 256 */
    fdm_tensors tensors;
    fdm_options options;
    fdm_pass pass;
};

/* Apart from all others, however far its strides reach. */
static struct place *next_place(struct call *c) {
    struct place *p = &c->places[c->used++];
    p->memory = (char *)((uintptr_t)c->used << 56);
    return p;
}

static enum layout draw_layout(const struct call *c) {
    return c->plain || one_in(2) ? CONTIGUOUS : (enum layout)draw(NUM_LAYOUTS);
}

static fdm_tensor *matrix(struct call *c, int64_t rows, int64_t heads, int64_t columns, int output) {
    struct place *p = next_place(c);
    const int64_t dense[4] = {c->batch, rows, heads, columns}, packed[4] = {c->batch * rows, heads, columns};
    memcpy(p->shape, c->varlen ? packed : dense, sizeof p->shape);
    return lay_out(p, c->dtype, 4 - c->varlen, draw_layout(c), output);
}
static fdm_tensor *rows(struct call *c) {
    struct place *p = next_place(c);
    const int64_t dense[4] = {c->batch, c->heads, c->seqlen_q}, packed[4] = {c->heads, c->batch * c->seqlen_q};
    memcpy(p->shape, c->varlen ? packed : dense, sizeof p->shape);
    return lay_out(p, FDM_FLOAT32, 3 - c->varlen, CONTIGUOUS, 1);
}
static fdm_tensor *scores(struct call *c, fdm_dtype dtype, const int64_t *shape, int output) {
    struct place *p = next_place(c);
    memcpy(p->shape, shape, sizeof p->shape);
    const enum layout layout = draw_layout(c);
    return lay_out(p, dtype, 4, layout == FAR_APART ? GAPS : layout, output);
}
static fdm_tensor *ends(struct call *c) {
    struct place *p = next_place(c);
    const int64_t dense[4] = {c->batch, c->heads_kv, c->seqlen_k}, packed[4] = {c->heads_kv, c->batch * c->seqlen_k};
    memcpy(p->shape, c->varlen ? packed : dense, sizeof p->shape);
    return lay_out(p, FDM_INT32, 3 - c->varlen, CONTIGUOUS, 1);
}
static fdm_tensor *cu_seqlens(struct call *c) {
    struct place *p = next_place(c);
    p->shape[0] = c->batch + 1;
    return lay_out(p, FDM_INT32, 1, CONTIGUOUS, 1);
}

static void draw_scores(struct call *c) {
    const int64_t heads[3] = {1, c->heads_kv, c->heads};
    const int64_t mask[4] = {one_in(2) ? 1 : c->batch, heads[draw(3)], one_in(2) ? 1 : c->seqlen_q,
                             one_in(4) ? 1 : c->seqlen_k};
    const int64_t bias[4] = {one_in(2) ? 1 : c->batch, heads[draw(3)], one_in(2) ? 1 : c->seqlen_q,
                             one_in(4) ? 1 : c->seqlen_k};
    const fdm_dtype dtype = one_in(2) ? FDM_FLOAT32 : c->dtype;
    fdm_tensors *t = &c->tensors;
    if (one_in(3))
        t->mask = scores(c, FDM_BOOL, mask, 0);
    if (one_in(3))
        t->bias = scores(c, dtype, bias, 0);
    if (t->bias && c->pass == FDM_BACKWARD && one_in(2))
        t->dbias = scores(c, dtype, bias, 1);
    if (one_in(3)) {
        t->interval_start = ends(c);
        t->interval_end = ends(c);
    }
}

/* The tensors of the sizes that were drawn before. */
static void draw_tensors(struct call *c) {
    fdm_tensors *t = &c->tensors;
    c->used = 0;
    *t = (fdm_tensors){.struct_bytes = sizeof(fdm_tensors),
                       .q = matrix(c, c->seqlen_q, c->heads, c->head_dim, 0),
                       .k = matrix(c, c->seqlen_k, c->heads_kv, c->head_dim, 0),
                       .v = matrix(c, c->seqlen_k, c->heads_kv, c->head_dim_v, 0),
                       .out = matrix(c, c->seqlen_q, c->heads, c->head_dim_v, c->pass == FDM_FORWARD)};
    if (c->pass == FDM_BACKWARD || one_in(2))
        t->lse = rows(c);
    if (c->varlen) {
        t->cu_seqlens_q = cu_seqlens(c);
        t->cu_seqlens_k = cu_seqlens(c);
    }
    if (c->pass == FDM_BACKWARD) {
        t->dout = matrix(c, c->seqlen_q, c->heads, c->head_dim_v, 0);
        t->dq = one_in(4) ? NULL : matrix(c, c->seqlen_q, c->heads, c->head_dim, 1);
        t->dk = one_in(4) ? NULL : matrix(c, c->seqlen_k, c->heads_kv, c->head_dim, 1);
        t->dv = one_in(4) ? NULL : matrix(c, c->seqlen_k, c->heads_kv, c->head_dim_v, 1);
        t->dlse = one_in(4) ? rows(c) : NULL;
    }
    draw_scores(c);
}

static void draw_call(struct call *c, uint64_t seed) {
    static const int64_t head_dims[] = {64, 128, 32, 96, 256, 8, 40, 100, 192, 512},
                         lengths[] = {1, 2, 16, 65, 256, 1024, 3000};
    state_of_draws = seed * 0x9e3779b97f4a7c15ull + 1;
    draw(2);
    memset(c, 0, sizeof *c);
    c->pass = one_in(2) ? FDM_FORWARD : FDM_BACKWARD;
    c->dtype = one_in(4) ? FDM_FLOAT32 : one_in(2) ? FDM_FLOAT16 : FDM_BFLOAT16;
    c->batch = 1 + draw(3);
    c->heads_kv = 1 + draw(3);
    c->heads = c->heads_kv * (1 + draw(4));
    c->seqlen_q = lengths[draw(7)];
    c->seqlen_k = lengths[draw(7)];
    c->head_dim = head_dims[draw(c->pass == FDM_FORWARD ? 10 : 9)];
    c->head_dim_v = one_in(3) ? head_dims[draw(9)] : c->head_dim;
    c->varlen = one_in(4);
    c->options = fdm_options_default();
    c->options.causal = (int32_t)draw(2);
    c->options.window_left = one_in(4) ? 100 : -1;
    c->options.softcap = one_in(4) ? 30 : 0;
    c->options.deterministic = one_in(3);
    c->options.max_seqlen_q = c->varlen ? c->seqlen_q : 0;
    c->options.max_seqlen_k = c->varlen ? c->seqlen_k : 0;
    draw_tensors(c);
}

/* ---- what must hold ---- */

static int failed(const char *what, uint64_t seed, fdm_status status) {
    print_error("seed %llu: %s: %s\n", (unsigned long long)seed, what,
                status ? fdm_last_error() : "compiled or loaded");
    return 1;
}

static void *workspaces[3]; /* one for each device; launches do nothing, only zeros of plans of tiles lie in it */
enum { WORKSPACE_BYTES = 16 << 20 };

static fdm_status run(const fdm_plan *plan, const fdm_tensors *tensors) {
    void **workspace = &workspaces[plan->device.index];
    if (!*workspace)
        assert_int_equal(fdm_memory_allocate(plan->device, WORKSPACE_BYTES, workspace), FDM_OK);
    return fdm_execute(plan, tensors, *workspace, (size_t)plan->workspace_bytes, NULL);
}

/* 0 where it holds; *planned counts what some kernel takes. */
static int check(uint64_t seed, int64_t *planned, int64_t *mapped) {
    static struct call c;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    draw_call(&c, seed);
    assert_int_equal(fdm_device_query(FDM_CUDA, (int32_t)(seed % 3), &device), FDM_OK);
    for (int32_t i = 0; i < c.used; i++)
        c.places[i].tensor.device.index = device.id.index;
    fdm_status status = fdm_describe(c.pass, &c.tensors, &c.options, &problem);
    if (status)
        return failed("describe", seed, status);
    if (fdm_plan_attention(&device, &problem, &c.options, &plan))
        return 0;
    ++*planned;
    *mapped += strstr(plan.reason, "by TMA") != NULL;
    if ((status = fdm_prepare(&plan)))
        return failed("prepare", seed, status);
    const int64_t compiled = fake_compiler()->num_compiled(), loaded = fake_driver()->count("cuModuleLoadData");
    if ((status = run(&plan, &c.tensors)) && status != FDM_ERROR_UNSUPPORTED)
        return failed("execute", seed, status);
    if (fake_compiler()->num_compiled() != compiled || fake_driver()->count("cuModuleLoadData") != loaded)
        return failed("execute", seed, FDM_OK);
    c.plain = 1; /* tensors that lie better than the plan's get the plan's kernels */
    for (int32_t i = 0; i < c.used; i++)
        lay_out(&c.places[i], fdm_dtype_of(&c.places[i].tensor), c.places[i].tensor.ndim, CONTIGUOUS, 1)->device =
            device.id;
    status = run(&plan, &c.tensors);
    if (status &&
        !(status == FDM_ERROR_INVALID_ARGUMENT && strstr(fdm_last_error(), "the plan is for a mask and bias")))
        return failed("execute on contiguous tensors", seed, status);
    if (fake_compiler()->num_compiled() != compiled || fake_driver()->count("cuModuleLoadData") != loaded)
        return failed("execute on contiguous tensors", seed, FDM_OK);
    return 0;
}

static void prepared_is_what_is_launched(void) {
    int64_t planned = 0, mapped = 0;
    int failures = 0;
    use_fake_compiler();
    setenv("FLASH_DMATTN_CACHE_SIZE", "0", 1); /* memory is enough here */
    for (uint64_t seed = 1; seed <= PROBLEMS && failures < 10; seed++)
        failures += check(seed, &planned, &mapped);
    print_message("%lld of %d problems have a plan, %lld of them by TMA\n", (long long)planned, PROBLEMS,
                  (long long)mapped);
    assert_int_equal(failures, 0);
    assert_true(planned > PROBLEMS / 2 && mapped > 20);
    assert_true(fake_driver()->count("cuTensorMapEncodeTiled") > 40);
}

/* Backwards whose rows TMA brings, and the same of tensors that it cannot be told of: mma.backward brings q and dout,
 * and threads can do it; those of hopper bring k and v too, and leave such tensors to mma.backward. */
static void run_without_maps(const char *kernel, int64_t num_maps) {
    const int of_hopper = strncmp(kernel, "hopper", 6) == 0;
    static struct call c;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan}, other = {.struct_bytes = sizeof other};
    fdm_options by_mma = fdm_options_default();
    c = (struct call){.pass = FDM_BACKWARD, .dtype = FDM_BFLOAT16, .batch = 2, .heads = 4, .heads_kv = 4, .plain = 1};
    c.seqlen_q = c.seqlen_k = 1024;
    c.head_dim = c.head_dim_v = 128;
    c.options = fdm_options_default();
    c.options.kernel = kernel;
    by_mma.kernel = "mma.backward";
    state_of_draws = 4;
    do
        draw_tensors(&c);
    while (c.tensors.mask || c.tensors.bias || c.tensors.interval_start || c.tensors.dlse || !c.tensors.dq);
    assert_int_equal(fdm_device_query(FDM_CUDA, 0, &device), FDM_OK);
    assert_int_equal(fdm_describe(c.pass, &c.tensors, &c.options, &problem), FDM_OK);
    assert_int_equal(problem.q_mappable && problem.keys_mappable, 1);
    assert_int_equal(fdm_plan_attention(&device, &problem, &c.options, &plan), FDM_OK);
    const int64_t before_all = fake_driver()->count("cuTensorMapEncodeTiled");
    assert_int_equal(run(&plan, &c.tensors), FDM_OK);
    assert_int_equal(fake_driver()->count("cuTensorMapEncodeTiled") - before_all, num_maps);
    static const int64_t strides[] = {0, (1ll << 39) + 64};
    const fdm_tensor *const which[] = {c.tensors.q, c.tensors.dout, c.tensors.k, c.tensors.v};
    for (int i = 0; i < 8; i++) {
        int64_t *const stride = &which[i % 4]->strides[i % 3 ? 0 : 2], before = *stride;
        *stride = strides[i / 4];
        assert_int_equal(fdm_describe(c.pass, &c.tensors, &c.options, &problem), FDM_OK);
        assert_int_equal(problem.q_mappable, i % 4 >= 2);
        assert_int_equal(problem.keys_mappable, i % 4 < 2);
        if (of_hopper) {
            assert_refused(fdm_plan_attention(&device, &problem, &c.options, &other), FDM_ERROR_UNSUPPORTED, "TMA");
        } else {
            assert_int_equal(fdm_plan_attention(&device, &problem, &by_mma, &other), FDM_OK);
            assert_int_equal(strstr(other.reason, "by TMA") != NULL, i % 4 >= 2);
            assert_int_equal(run(&other, &c.tensors), FDM_OK);
        }
        assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &other), FDM_OK);
        assert_string_equal(other.kernel, "mma.backward");
        if (of_hopper || i % 4 < 2)
            assert_refused(run(&plan, &c.tensors), FDM_ERROR_INVALID_ARGUMENT, "that a tensor map can describe");
        *stride = before;
    }
}
static void tensors_that_no_map_describes(void) {
    use_fake_compiler();
    run_without_maps("mma.backward", 2);
    run_without_maps("hopper.backward", 4);
    run_without_maps("hopper.backward_2pass", 4);
}

#define DEVICES "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912,9.0:232448 FAKE_CUDA_NO_STRIDE_0=1"
static const struct scenario scenarios[] = {
    {"prepared_is_what_is_launched", prepared_is_what_is_launched, DEVICES, 0},
    {"tensors_that_no_map_describes", tensors_that_no_map_describes, DEVICES, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
