/* test_cuda_limits.c: more heads and batches than the second and third dimension of a grid may have (65535), on the
 * pretended driver, which refuses such grids as devices do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cuda/loaded_kernels.h"
#include "cuda_call.h"
#include "families/families.h"
#include "gpu/backward_params.h"
#include "problem_tensors.h"
#include "scenario.h"

/* No kernel runs, and only what the tests touch takes memory. */
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
    {FDM_FORWARD, FDM_BFLOAT16, 70000, 2, 1, 8, 16, {0}, {0}, {0}, 0, 0, 0, "mma.forward_d1024", "mma_forward_d1024"},
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

enum { HEAD_DIM = 16 };

static fdm_problem problem_of(const struct limits_call *c) {
    fdm_problem p = fdm_problem_default();
    p.pass = c->pass;
    p.dtype = p.bias_dtype = c->dtype;
    p.batch = c->batch, p.heads = c->heads, p.heads_kv = c->heads_kv;
    p.seqlen_q = c->seqlen_q, p.seqlen_k = c->seqlen_k;
    p.head_dim = p.head_dim_v = HEAD_DIM;
    p.softmax_scale = 0.25;
    p.varlen = c->varlen;
    p.total_q = c->varlen ? c->batch * c->seqlen_q : 0;
    p.total_k = c->varlen ? c->batch * c->seqlen_k : 0;
    p.deterministic = c->deterministic;
    p.needs_dv = 0;
    p.has_mask = c->mask[0] > 0, p.has_bias = c->bias[0] > 0, p.has_intervals = c->intervals[0] > 0;
    p.needs_dbias = p.has_bias && c->pass == FDM_BACKWARD;
    const int64_t mask[4] = {c->mask[0], c->mask[1], c->seqlen_q, c->seqlen_k};
    const int64_t bias[4] = {c->bias[0], c->bias[1], c->bias_rows ? c->seqlen_q : 1, c->seqlen_k};
    if (p.has_mask)
        memcpy(p.mask_shape, mask, sizeof mask);
    if (p.has_bias)
        memcpy(p.bias_shape, bias, sizeof bias);
    if (p.has_intervals)
        p.interval_batch = c->intervals[0], p.interval_heads = c->intervals[1];
    return p;
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
    static struct problem_tensors t;
    const fdm_allocator allocator = {NULL, lend, take_back};
    use_fake_compiler();
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        const struct limits_call *c = &calls[i];
        const fdm_problem problem = problem_of(c);
        problem_tensors_make(&t, &problem, device);
        t.options.kernel = c->kernel;
        const int64_t before = fake_driver()->num_launches();
        const fdm_status status = c->pass == FDM_FORWARD ? fdm_attention_forward(&t.all, &t.options, &allocator)
                                                         : fdm_attention_backward(&t.all, &t.options, &allocator);
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
}

/* ---- grids ---- */

enum { LAUNCHES_MAX = 8, LAST_UNFOLDED = 65535 };
static struct grid {
    const char *entry;
    uint32_t blocks[3], grid_x, grid_y; /* what the launch has, and what its kernel is told */
} grids[LAUNCHES_MAX];
static int32_t num_grids;

fdm_status __real_cuda_launch(const struct cuda_launch *launch);
fdm_status __wrap_cuda_launch(const struct cuda_launch *launch);
fdm_status __wrap_cuda_launch(const struct cuda_launch *launch) {
    const int of_backward = strstr(launch->kernel->entry, "backward") != NULL;
    struct grid *g = &grids[num_grids++ % LAUNCHES_MAX];
    *g = (struct grid){.entry = launch->kernel->entry};
    memcpy(g->blocks, launch->grid, sizeof g->blocks);
    if (of_backward) { /* struct gpu_backward_params comes first */
        g->grid_x = ((const struct gpu_backward_params *)launch->arguments)->grid_x;
        g->grid_y = ((const struct gpu_backward_params *)launch->arguments)->grid_y;
    }
    return __real_cuda_launch(launch);
}

/* Executes the call, and says of each kernel that has one what its constant FOLDED is. */
static int32_t run_folding(const struct limits_call *c, int32_t *folded) {
    struct problem_tensors *t = test_malloc(sizeof *t);
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    fdm_device facts = {.struct_bytes = sizeof facts};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    void *workspace = NULL;
    const fdm_problem wanted = problem_of(c);
    assert_int_equal(fdm_device_query(FDM_CUDA, 0, &facts), FDM_OK);
    problem_tensors_make(t, &wanted, device);
    t->options.kernel = c->kernel;
    assert_int_equal(fdm_describe(c->pass, &t->all, &t->options, &problem), FDM_OK);
    if (fdm_plan_attention(&facts, &problem, &t->options, &plan))
        fail_msg("%s: %s", c->kernel, fdm_last_error());
    const int32_t count = family_mma.launches(&family_mma, &plan, requests);
    for (int32_t i = 0; i < count; i++) {
        folded[i] = -1;
        for (int32_t n = 0; n < requests[i].num_constants; n++)
            if (strcmp(requests[i].constants[n].name, "FOLDED") == 0)
                folded[i] = (int32_t)requests[i].constants[n].value;
    }
    num_grids = 0;
    assert_int_equal(fdm_memory_allocate(device, (size_t)plan.workspace_bytes, &workspace), FDM_OK);
    assert_int_equal(fdm_execute(&plan, &t->all, workspace, (size_t)plan.workspace_bytes, NULL), FDM_OK);
    assert_int_equal(fdm_memory_release(device, workspace), FDM_OK);
    test_free(t);
    return count;
}

/* From 65536 heads or batches on x y z blocks stand in one dimension, and the kernel is told x and y; up to 65535 the
 * grid has them. */
static void grids_fold_past_the_last_that_fits(void) {
    static const struct limits_call folding[] = {
        {FDM_BACKWARD, FDM_BFLOAT16, 0, 2, 1, 9, 40, {0}, {0}, {0}, 0, 0, 0, "mma.backward", NULL},
        {FDM_BACKWARD, FDM_BFLOAT16, 1, 0, 0, 9, 40, {0}, {0}, {0}, 0, 0, 1, "mma.backward", NULL},
        {FDM_BACKWARD, FDM_BFLOAT16, 1, 0, 0, 9, 40, {0}, {1, 1}, {0}, 1, 0, 0, "mma.backward", NULL},
        {FDM_BACKWARD, FDM_FLOAT32, 0, 2, 2, 9, 40, {0}, {0}, {0}, 0, 0, 0, "mma.backward32", NULL},
        {FDM_BACKWARD, FDM_FLOAT32, 1, 0, 0, 9, 40, {0}, {0}, {0}, 0, 0, 0, "mma.backward32", NULL},
    };
    use_fake_compiler();
    for (size_t i = 0; i < sizeof folding / sizeof folding[0]; i++) {
        struct limits_call c = folding[i];
        struct grid unfolded[LAUNCHES_MAX];
        int32_t constants[FAMILY_LAUNCHES_MAX], launches = 0;
        for (int64_t n = LAST_UNFOLDED; n <= LAST_UNFOLDED + 1; n++) {
            c.batch = folding[i].batch ? folding[i].batch : n;
            c.heads = folding[i].heads ? folding[i].heads : n;
            c.heads_kv = folding[i].heads_kv ? folding[i].heads_kv : n;
            const int32_t count = run_folding(&c, constants), is_folded = n > LAST_UNFOLDED;
            int32_t told = 0;
            for (int32_t k = 0; k < count; k++) {
                assert_true(constants[k] == -1 || constants[k] == is_folded);
                told += constants[k] >= 0;
            }
            assert_true(told >= 2);
            assert_true(num_grids >= 3 && num_grids <= LAUNCHES_MAX && (launches == 0 || launches == num_grids));
            launches = num_grids;
            if (!is_folded)
                memcpy(unfolded, grids, sizeof unfolded);
        }
        int wide = 0;
        for (int32_t k = 0; k < launches; k++) {
            uint32_t *const u = unfolded[k].blocks, *const f = grids[k].blocks;
            if (u[1] == 1 && u[2] == 1) /* of one dimension in any case */
                continue;
            assert_string_equal(unfolded[k].entry, grids[k].entry);
            assert_int_equal(unfolded[k].grid_x, u[0]);
            assert_int_equal(unfolded[k].grid_y, u[1]);
            for (int axis = 1; axis < 3; axis++)
                if (u[axis] == LAST_UNFOLDED)
                    u[axis]++, wide++;
            assert_int_equal(f[0], (uint64_t)u[0] * u[1] * u[2]);
            assert_true(f[1] == 1 && f[2] == 1);
            assert_int_equal(grids[k].grid_x, u[0]);
            assert_int_equal(grids[k].grid_y, u[1]);
        }
        assert_true(wide >= 2);
    }
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
    fdm_device h200 = {.struct_bytes = sizeof h200};
    fdm_options options = fdm_options_default();
    options.family = "mma";
    assert_int_equal(fdm_device_from_name("sm_90", &h200), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = fdm_problem_default();
        fdm_plan plan = {.struct_bytes = sizeof plan};
        p.pass = cases[i].pass;
        p.dtype = FDM_BFLOAT16;
        p.batch = cases[i].batch;
        p.heads = p.heads_kv = cases[i].heads;
        p.seqlen_q = cases[i].rows;
        p.seqlen_k = cases[i].keys;
        assert_refused(fdm_plan_attention(&h200, &p, &options, &plan), FDM_ERROR_UNSUPPORTED, cases[i].words);
    }
}

#define UNTOUCHED "MALLOC_PERTURB_=0" /* workspaces of gigabytes that nobody reads */
static const struct scenario scenarios[] = {
    {"many_heads_and_batches", many_heads_and_batches, UNTOUCHED, 0},
    {"grids_fold_past_the_last_that_fits", grids_fold_past_the_last_that_fits, UNTOUCHED, 0},
    {"limits_are_in_the_plan", limits_are_in_the_plan, NULL, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
