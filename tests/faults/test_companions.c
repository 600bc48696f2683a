/* test_companions.c: gemm, softmax and top-W on pretended CUDA devices: workspaces that are too small or misaligned,
 * and plans of another problem. Nothing of them is launched. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_call.h"
#include "header_members.h"
#include "scenario.h"

enum { DEVICES = 3, KERNELS_MAX = 32 };

/* An operation's plan, and how it is executed with the tensors of the problem that is tried. */
struct operation {
    fdm_status (*execute)(const void *plan, void *workspace, size_t bytes);
    fdm_companion_choice *(*choice)(void *plan);
    void *(*problem)(void *plan);
};

static char text[200]; /* what is tried */
static fdm_status expect_of(const struct operation *o, const void *plan, void *workspace, size_t bytes,
                            fdm_status wanted, const char *what) {
    const int64_t before = fake_driver()->num_launches();
    const fdm_status status = o->execute(plan, workspace, bytes);
    if (status != wanted)
        fail_msg("%s: %s gives %s, not %s: %s", text, what, fdm_status_name(status), fdm_status_name(wanted),
                 status ? fdm_last_error() : "");
    if (status)
        assert_true(*fdm_last_error());
    if (status && fake_driver()->num_launches() != before)
        fail_msg("%s: %s launches before it is refused", text, what);
    return status;
}

static void expect_workspace(const struct operation *o, void *plan, fdm_device_id device) {
    fdm_companion_choice *choice = o->choice(plan);
    const size_t bytes = (size_t)choice->workspace_bytes;
    void *memory;
    assert_int_equal(fdm_memory_allocate(device, bytes + 64, &memory), FDM_OK);
    char *workspace = memory;
    if (bytes > 0) {
        expect_of(o, plan, workspace, bytes - 1, FDM_ERROR_WORKSPACE, "a workspace a byte short");
        expect_of(o, plan, NULL, bytes, FDM_ERROR_WORKSPACE, "no workspace");
        expect_of(o, plan, workspace + 32, bytes, FDM_ERROR_WORKSPACE, "a workspace 32 bytes on");
        choice->workspace_bytes--;
        expect_of(o, plan, workspace, bytes, FDM_ERROR_INVALID_ARGUMENT, "a plan whose workspace is too small");
        choice->workspace_bytes++;
    }
    expect_of(o, plan, workspace, bytes, FDM_OK, "the workspace that the plan asks for");
    assert_int_equal(fdm_memory_release(device, memory), FDM_OK);
}

/* ---- fields ---- */

struct field {
    const char *name;
    size_t offset, bytes;
    int is_fact; /* of where tensors lie: they may lie better, not worse */
};

/* In the order of the struct, without a gap but that in front of 8 bytes, and no member of the header missing. */
static void expect_all_listed(const char *name, const struct field *fields, int32_t count, size_t size) {
    size_t end = 0;
    for (int32_t i = 0; i < count; i++) {
        const size_t alignment = fields[i].bytes >= 8 ? 8 : 4;
        assert_int_equal(fields[i].offset, (end + alignment - 1) / alignment * alignment);
        end = fields[i].offset + fields[i].bytes;
        if (!header_names(FDM_HEADER, name, fields[i].name))
            fail_msg("%s has no %s", name, fields[i].name);
    }
    assert_int_equal((end + 7) / 8 * 8, size);
    assert_int_equal(header_members(FDM_HEADER, name), count);
}

/* Each field of the plan's problem another, one by one. */
static void expect_fields(const struct operation *o, void *plan, fdm_device_id device, const struct field *fields,
                          int32_t count) {
    const size_t bytes = (size_t)o->choice(plan)->workspace_bytes;
    void *workspace;
    assert_int_equal(fdm_memory_allocate(device, bytes + 64, &workspace), FDM_OK);
    for (int32_t i = 0; i < count; i++) {
        char *at = (char *)o->problem(plan) + fields[i].offset;
        int64_t number = 0, other;
        const size_t size = fields[i].bytes == 4 ? 4 : 8;
        memcpy(&number, at, size);
        other = size == 4 ? number ^ 1 : number + 1;
        memcpy(at, &other, size);
        if (!fields[i].is_fact)
            expect_of(o, plan, workspace, bytes, FDM_ERROR_INVALID_ARGUMENT, fields[i].name);
        memcpy(at, &number, size);
    }
    assert_int_equal(fdm_memory_release(device, workspace), FDM_OK);
}

/* ---- tensors: contiguous but for the order of two axes, in memory of their own ---- */

enum { ROOM = 32 << 20 };
static _Alignas(256) char memory[5][ROOM]; /* takes room where it is touched, and nothing runs */

static fdm_tensor tensor_at(int place, fdm_device_id device, fdm_dtype dtype, int32_t ndim, int64_t *shape,
                            int64_t *strides, int columns_first) {
    int64_t elements = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        const int32_t axis = columns_first && i >= ndim - 2 ? 2 * ndim - 3 - i : i;
        strides[axis] = elements;
        elements *= shape[axis];
    }
    assert_true(elements * fdm_dtype_bytes(dtype) < ROOM);
    return (fdm_tensor){memory[place], device, ndim, fdm_data_type_of(dtype), shape, strides, 0};
}

/* ---- gemm ---- */

#define FIELD(struct_name, name, is_fact) \
    { #name, offsetof(struct_name, name), sizeof(((struct_name *)0)->name), is_fact }
static const struct field gemm_fields[] = {
    FIELD(fdm_gemm_problem, dtype, 0),
    FIELD(fdm_gemm_problem, batch, 0),
    FIELD(fdm_gemm_problem, m, 0),
    FIELD(fdm_gemm_problem, n, 0),
    FIELD(fdm_gemm_problem, k, 0),
    FIELD(fdm_gemm_problem, a_rows_contiguous, 0),
    FIELD(fdm_gemm_problem, b_rows_contiguous, 0),
    FIELD(fdm_gemm_problem, has_c, 0),
    FIELD(fdm_gemm_problem, accumulate_float16, 0),
    FIELD(fdm_gemm_problem, mappable, 1),
    FIELD(fdm_gemm_problem, reserved, 0),
};
enum { NUM_GEMM_FIELDS = sizeof gemm_fields / sizeof gemm_fields[0] };

static struct {
    int64_t shapes[4][3], strides[4][3];
    fdm_tensor a, b, c, out;
    fdm_gemm_tensors tensors;
    fdm_gemm_options options;
} gemm;

static fdm_status execute_gemm(const void *plan, void *workspace, size_t bytes) {
    return fdm_execute_gemm(plan, &gemm.tensors, &gemm.options, workspace, bytes, NULL);
}
static fdm_companion_choice *choice_of_gemm(void *plan) { return &((fdm_gemm_plan *)plan)->choice; }
static void *problem_of_gemm(void *plan) { return &((fdm_gemm_plan *)plan)->problem; }
static const struct operation gemm_operation = {execute_gemm, choice_of_gemm, problem_of_gemm};

static void make_gemm(const fdm_gemm_problem *p, fdm_device_id device) {
    const int64_t shapes[4][3] = {
        {p->batch, p->m, p->k}, {p->batch, p->k, p->n}, {p->batch, p->m, p->n}, {p->batch, p->m, p->n}};
    memcpy(gemm.shapes, shapes, sizeof shapes);
    gemm.options = fdm_gemm_options_default();
    gemm.options.beta = p->has_c ? 0.5 : 0;
    gemm.options.accumulate_float16 = p->accumulate_float16;
    gemm.a = tensor_at(0, device, p->dtype, 3, gemm.shapes[0], gemm.strides[0], !p->a_rows_contiguous);
    gemm.b = tensor_at(1, device, p->dtype, 3, gemm.shapes[1], gemm.strides[1], !p->b_rows_contiguous);
    gemm.c = tensor_at(2, device, p->dtype, 3, gemm.shapes[2], gemm.strides[2], 0);
    gemm.out = tensor_at(3, device, p->dtype, 3, gemm.shapes[3], gemm.strides[3], 0);
    gemm.a.byte_offset = p->mappable ? 0 : 2;
    gemm.tensors = (fdm_gemm_tensors){sizeof(fdm_gemm_tensors), &gemm.a, &gemm.b, p->has_c ? &gemm.c : NULL, &gemm.out};
}

static const fdm_gemm_problem gemm_problems[] = {
    {FDM_FLOAT16, 2, 256, 384, 512, 1, 1, 0, 0, 1, {0}}, {FDM_BFLOAT16, 1, 128, 64, 8192, 1, 0, 1, 0, 1, {0}},
    {FDM_BFLOAT16, 1, 4, 64, 16384, 1, 1, 0, 0, 1, {0}}, {FDM_FLOAT16, 1, 104, 104, 80, 0, 1, 0, 1, 1, {0}},
    {FDM_FLOAT16, 3, 100, 100, 50, 1, 1, 1, 0, 0, {0}},
};

static void plan_gemms(void (*visit)(fdm_gemm_plan *plan, fdm_device_id device, int32_t kernel)) {
    const char *name, *description;
    use_fake_compiler();
    for (int32_t device = 0; device < DEVICES; device++)
        for (size_t n = 0; n < sizeof gemm_problems / sizeof gemm_problems[0]; n++)
            for (int32_t kernel = 0; !fdm_gemm_kernel(kernel, &name, &description); kernel++) {
                fdm_device facts = {.struct_bytes = sizeof facts};
                fdm_gemm_problem problem;
                fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
                assert_int_equal(fdm_device_query(FDM_CUDA, device, &facts), FDM_OK);
                make_gemm(&gemm_problems[n], facts.id);
                assert_int_equal(fdm_describe_gemm(&gemm.tensors, &gemm.options, &problem), FDM_OK);
                assert_memory_equal(&problem, &gemm_problems[n], sizeof problem);
                snprintf(text, sizeof text, "gemm problem %d, %s on device %d", (int)n, name, device);
                if (!fdm_plan_gemm(&facts, &problem, name, &plan))
                    visit(&plan, facts.id, kernel);
            }
}

static int met[KERNELS_MAX], with_workspace[KERNELS_MAX];
static void note(int32_t kernel, int64_t workspace_bytes) {
    met[kernel] = 1;
    with_workspace[kernel] |= workspace_bytes > 0;
}

static void try_gemm_workspace(fdm_gemm_plan *plan, fdm_device_id device, int32_t kernel) {
    note(kernel, plan->choice.workspace_bytes);
    expect_workspace(&gemm_operation, plan, device);
}
static void workspaces_of_gemm(void) {
    const char *name, *description;
    plan_gemms(try_gemm_workspace);
    for (int32_t i = 0; !fdm_gemm_kernel(i, &name, &description); i++) {
        const int splits = strcmp(name, "gemm.hopper") == 0 || strcmp(name, "gemm.skinny") == 0;
        if (!met[i] || with_workspace[i] != splits)
            fail_msg("%s was %s", name, met[i] ? "met with and without a workspace wrongly" : "not met");
    }
}

static void try_gemm_fields(fdm_gemm_plan *plan, fdm_device_id device, int32_t kernel) {
    const size_t bytes = (size_t)plan->choice.workspace_bytes;
    void *workspace;
    (void)kernel;
    expect_fields(&gemm_operation, plan, device, gemm_fields, NUM_GEMM_FIELDS);
    assert_int_equal(fdm_memory_allocate(device, bytes + 64, &workspace), FDM_OK);
    for (int i = 0; i < 3 && plan->problem.mappable; i++) { /* tensors that lie worse */
        fdm_tensor *const moved = i == 0 ? &gemm.a : i == 1 ? &gemm.b : &gemm.out;
        moved->byte_offset = 2;
        expect_of(&gemm_operation, plan, workspace, bytes, FDM_ERROR_INVALID_ARGUMENT, "a tensor moved by an element");
        moved->byte_offset = 0;
    }
    assert_int_equal(fdm_memory_release(device, workspace), FDM_OK);
}
static void fields_of_gemm(void) {
    expect_all_listed("fdm_gemm_problem", gemm_fields, NUM_GEMM_FIELDS, sizeof(fdm_gemm_problem));
    plan_gemms(try_gemm_fields);
}

/* ---- softmax ---- */

static const struct field softmax_fields[] = {
    FIELD(fdm_softmax_problem, pass, 0),
    FIELD(fdm_softmax_problem, dtype, 0),
    FIELD(fdm_softmax_problem, rows, 0),
    FIELD(fdm_softmax_problem, columns, 0),
    FIELD(fdm_softmax_problem, log, 0),
    FIELD(fdm_softmax_problem, has_mask, 0),
    FIELD(fdm_softmax_problem, negative_scale, 0),
    FIELD(fdm_softmax_problem, aligned, 1),
    FIELD(fdm_softmax_problem, reserved, 0),
};
enum { NUM_SOFTMAX_FIELDS = sizeof softmax_fields / sizeof softmax_fields[0] };

static struct {
    int64_t shape[2], strides[5][2];
    fdm_tensor x, mask, out, dout, dx;
    fdm_softmax_tensors tensors;
    fdm_softmax_options options;
} softmax;

static fdm_status execute_softmax(const void *plan, void *workspace, size_t bytes) {
    return fdm_execute_softmax(plan, &softmax.tensors, &softmax.options, workspace, bytes, NULL);
}
static fdm_companion_choice *choice_of_softmax(void *plan) { return &((fdm_softmax_plan *)plan)->choice; }
static void *problem_of_softmax(void *plan) { return &((fdm_softmax_plan *)plan)->problem; }
static const struct operation softmax_operation = {execute_softmax, choice_of_softmax, problem_of_softmax};

static void make_softmax(const fdm_softmax_problem *p, fdm_device_id device) {
    int64_t *const shape = softmax.shape;
    shape[0] = p->rows;
    shape[1] = p->columns;
    softmax.options = fdm_softmax_options_default();
    softmax.options.log = p->log;
    softmax.options.scale = p->negative_scale ? -1 : 1;
    softmax.x = tensor_at(0, device, p->dtype, 2, shape, softmax.strides[0], 0);
    softmax.mask = tensor_at(1, device, FDM_BOOL, 2, shape, softmax.strides[1], 0);
    softmax.out = tensor_at(2, device, p->dtype, 2, shape, softmax.strides[2], 0);
    softmax.dout = tensor_at(3, device, p->dtype, 2, shape, softmax.strides[3], 0);
    softmax.dx = tensor_at(4, device, p->dtype, 2, shape, softmax.strides[4], 0);
    softmax.out.byte_offset = p->aligned ? 0 : (uint64_t)fdm_dtype_bytes(p->dtype);
    softmax.tensors = p->pass == FDM_FORWARD ? (fdm_softmax_tensors){.struct_bytes = sizeof(fdm_softmax_tensors),
                                                                     .x = &softmax.x,
                                                                     .mask = p->has_mask ? &softmax.mask : NULL,
                                                                     .out = &softmax.out}
                                             : (fdm_softmax_tensors){.struct_bytes = sizeof(fdm_softmax_tensors),
                                                                     .out = &softmax.out,
                                                                     .dout = &softmax.dout,
                                                                     .dx = &softmax.dx};
}

static const fdm_softmax_problem softmax_problems[] = {
    {FDM_FORWARD, FDM_FLOAT16, 700, 1024, 0, 1, 0, 2, {0}},   {FDM_FORWARD, FDM_FLOAT32, 3, 200000, 1, 0, 1, 2, {0}},
    {FDM_BACKWARD, FDM_BFLOAT16, 64, 65536, 0, 0, 0, 2, {0}}, {FDM_BACKWARD, FDM_FLOAT32, 5, 24, 1, 0, 0, 0, {0}},
    {FDM_FORWARD, FDM_FLOAT16, 2, 1 << 22, 0, 0, 0, 2, {0}},
};

static void plan_softmaxes(void (*visit)(fdm_softmax_plan *plan, fdm_device_id device, int32_t kernel)) {
    const char *name, *description;
    use_fake_compiler();
    for (int32_t device = 0; device < DEVICES; device++)
        for (size_t n = 0; n < sizeof softmax_problems / sizeof softmax_problems[0]; n++)
            for (int32_t kernel = 0; !fdm_softmax_kernel(kernel, &name, &description); kernel++) {
                const fdm_softmax_problem *wanted = &softmax_problems[n];
                fdm_device facts = {.struct_bytes = sizeof facts};
                fdm_softmax_problem problem;
                fdm_softmax_plan plan = {.struct_bytes = sizeof plan};
                assert_int_equal(fdm_device_query(FDM_CUDA, device, &facts), FDM_OK);
                make_softmax(wanted, facts.id);
                assert_int_equal(fdm_describe_softmax(wanted->pass, &softmax.tensors, &softmax.options, &problem),
                                 FDM_OK);
                assert_memory_equal(&problem, wanted, sizeof problem);
                snprintf(text, sizeof text, "softmax problem %d, %s on device %d", (int)n, name, device);
                if (!fdm_plan_softmax(&facts, &problem, name, &plan))
                    visit(&plan, facts.id, kernel);
            }
}

static void try_softmax_workspace(fdm_softmax_plan *plan, fdm_device_id device, int32_t kernel) {
    note(kernel, plan->choice.workspace_bytes);
    expect_workspace(&softmax_operation, plan, device);
}
static void workspaces_of_softmax(void) {
    const char *name, *description;
    plan_softmaxes(try_softmax_workspace);
    for (int32_t i = 0; !fdm_softmax_kernel(i, &name, &description); i++) {
        const int has_pieces = strcmp(name, "softmax.ring") == 0 || strcmp(name, "softmax.split") == 0;
        if (!met[i] || with_workspace[i] != has_pieces)
            fail_msg("%s was %s", name, met[i] ? "met with and without a workspace wrongly" : "not met");
    }
}

static void try_softmax_fields(fdm_softmax_plan *plan, fdm_device_id device, int32_t kernel) {
    const size_t bytes = (size_t)plan->choice.workspace_bytes;
    void *workspace;
    (void)kernel;
    expect_fields(&softmax_operation, plan, device, softmax_fields, NUM_SOFTMAX_FIELDS);
    assert_int_equal(fdm_memory_allocate(device, bytes + 64, &workspace), FDM_OK);
    if (plan->problem.aligned) {
        softmax.out.byte_offset = 4;
        expect_of(&softmax_operation, plan, workspace, bytes, FDM_ERROR_INVALID_ARGUMENT, "out moved by 4 bytes");
        softmax.out.byte_offset = 0;
    }
    assert_int_equal(fdm_memory_release(device, workspace), FDM_OK);
}
static void fields_of_softmax(void) {
    expect_all_listed("fdm_softmax_problem", softmax_fields, NUM_SOFTMAX_FIELDS, sizeof(fdm_softmax_problem));
    plan_softmaxes(try_softmax_fields);
}

/* ---- top-W ---- */

static void workspaces_of_topk(void) {
    static const int64_t lengths[] = {1, 100, 5000, 20000};
    use_fake_compiler();
    for (int32_t type = FDM_CPU; type <= FDM_CUDA; type++)
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            const fdm_device_id device = {type, 0};
            int64_t shape[3] = {1, 2, lengths[i]}, strides[3][3];
            fdm_tensor bias = tensor_at(0, device, FDM_FLOAT32, 3, shape, strides[0], 0);
            fdm_tensor start = tensor_at(1, device, FDM_INT32, 3, shape, strides[1], 0);
            fdm_tensor end = tensor_at(2, device, FDM_INT32, 3, shape, strides[2], 0);
            const size_t bytes = fdm_topk_intervals_workspace(&bias, NULL);
            void *owned;
            assert_true(bytes > 0);
            assert_int_equal(fdm_memory_allocate(device, bytes + 64, &owned), FDM_OK);
            char *workspace = owned;
            const struct {
                void *address;
                size_t bytes;
            } wrong[] = {{workspace, bytes - 1}, {workspace, 0}, {workspace + 8, bytes}, {workspace + 1, bytes}};
            const int64_t before = fake_driver()->num_launches();
            for (size_t n = 0; n < sizeof wrong / sizeof wrong[0]; n++)
                assert_refused(
                    fdm_topk_intervals(&bias, NULL, 3, shape[2], &start, &end, wrong[n].address, wrong[n].bytes, NULL),
                    FDM_ERROR_WORKSPACE, "workspace");
            assert_int_equal(fake_driver()->num_launches(), before);
            assert_int_equal(fdm_topk_intervals(&bias, NULL, 3, shape[2], &start, &end, workspace, bytes, NULL),
                             FDM_OK);
            assert_int_equal(fdm_memory_release(device, owned), FDM_OK);
        }
}

#define DEVICE_LIST "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912,10.0:232448 FLASH_DMATTN_CACHE_SIZE=0"
static const struct scenario scenarios[] = {
    {"workspaces_of_gemm", workspaces_of_gemm, DEVICE_LIST, 0},
    {"fields_of_gemm", fields_of_gemm, DEVICE_LIST, 0},
    {"workspaces_of_softmax", workspaces_of_softmax, DEVICE_LIST, 0},
    {"fields_of_softmax", fields_of_softmax, DEVICE_LIST, 0},
    {"workspaces_of_topk", workspaces_of_topk, DEVICE_LIST, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
