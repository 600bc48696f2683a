/* test_plans.c: what a plan says against what it is executed with, for every kernel of every family, on the CPU and on
 * pretended CUDA devices: workspaces that are too small or misaligned, and plans that are another problem's or damaged.
 * Nothing of them is launched. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_call.h"
#include "header_members.h"
#include "problem/problem.h"
#include "problem_tensors.h"
#include "scenario.h"

/* ---- problems ---- */

enum {
    CAUSAL = 1,
    PACKED = 2,
    MASK = 4,
    BIAS_KEYS = 8,    /* a bias of each key, shared by batches and heads */
    BIAS_SHARED = 16, /* one of each pair, shared by batches and heads */
    BIAS_OWN = 32,    /* one of each pair, batch and head */
    INTERVALS = 64,
    FIXED_ORDER = 128,
    UNALIGNED = 256,
    NO_BIAS_GRADIENT = 512,
    DLSE = 1024,
    LATENT = 2048 /* v is the first columns of k */
};
static const struct scene {
    fdm_pass pass;
    fdm_dtype dtype;
    int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
    int features;
} scenes[] = {
    {FDM_FORWARD, FDM_FLOAT64, 2, 4, 2, 20, 30, 16, 24, BIAS_SHARED | INTERVALS},
    {FDM_FORWARD, FDM_FLOAT32, 2, 4, 2, 150, 208, 64, 64, CAUSAL},
    {FDM_FORWARD, FDM_FLOAT32, 2, 4, 2, 150, 208, 64, 48, MASK | BIAS_KEYS},
    {FDM_FORWARD, FDM_FLOAT16, 1, 8, 2, 1, 4096, 128, 128, 0},
    {FDM_FORWARD, FDM_BFLOAT16, 1, 8, 2, 1, 65536, 128, 128, 0},
    {FDM_FORWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 64, 64, 0},
    {FDM_FORWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 64, 64, MASK},
    {FDM_FORWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 128, 128, BIAS_SHARED | MASK},
    {FDM_FORWARD, FDM_BFLOAT16, 2, 4, 2, 256, 1024, 128, 128, INTERVALS},
    {FDM_FORWARD, FDM_BFLOAT16, 2, 4, 2, 256, 1024, 64, 64, BIAS_KEYS},
    {FDM_FORWARD, FDM_BFLOAT16, 3, 4, 2, 150, 208, 64, 64, PACKED | CAUSAL},
    {FDM_FORWARD, FDM_FLOAT16, 1, 4, 4, 130, 200, 512, 512, 0},
    {FDM_FORWARD, FDM_FLOAT16, 1, 4, 4, 130, 208, 512, 512, MASK},
    {FDM_FORWARD, FDM_BFLOAT16, 4, 16, 16, 2048, 2048, 72, 72, UNALIGNED},
    {FDM_FORWARD, FDM_BFLOAT16, 1, 8, 1, 16, 16384, 128, 128, 0},
    {FDM_FORWARD, FDM_BFLOAT16, 1, 16, 1, 4, 4096, 576, 512, LATENT},
    {FDM_BACKWARD, FDM_FLOAT64, 2, 4, 2, 20, 30, 16, 24, BIAS_SHARED | INTERVALS | DLSE},
    {FDM_BACKWARD, FDM_FLOAT32, 2, 4, 2, 150, 208, 64, 64, CAUSAL},
    {FDM_BACKWARD, FDM_FLOAT32, 2, 4, 2, 150, 208, 64, 48, MASK | BIAS_SHARED},
    {FDM_BACKWARD, FDM_FLOAT32, 2, 4, 2, 150, 208, 64, 64, BIAS_KEYS | FIXED_ORDER},
    {FDM_BACKWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 64, 64, DLSE},
    {FDM_BACKWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 64, 64, FIXED_ORDER},
    {FDM_BACKWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 128, 128, MASK},
    {FDM_BACKWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 128, 128, BIAS_KEYS},
    {FDM_BACKWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 64, 64, BIAS_SHARED},
    {FDM_BACKWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 64, 64, BIAS_SHARED | FIXED_ORDER},
    {FDM_BACKWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 64, 64, BIAS_OWN | CAUSAL},
    {FDM_BACKWARD, FDM_BFLOAT16, 2, 4, 2, 150, 208, 64, 64, BIAS_OWN | NO_BIAS_GRADIENT},
    {FDM_BACKWARD, FDM_BFLOAT16, 2, 4, 2, 256, 1024, 128, 128, INTERVALS},
    {FDM_BACKWARD, FDM_BFLOAT16, 3, 4, 2, 150, 208, 64, 64, PACKED},
    {FDM_BACKWARD, FDM_BFLOAT16, 1, 16, 1, 256, 512, 256, 256, 0},
    {FDM_BACKWARD, FDM_BFLOAT16, 1, 4, 2, 130, 208, 512, 320, BIAS_SHARED | FIXED_ORDER},
    {FDM_BACKWARD, FDM_FLOAT16, 1, 4, 4, 130, 200, 80, 40, UNALIGNED},
};
enum { NUM_SCENES = sizeof scenes / sizeof scenes[0] };

static void set_bias(const struct scene *s, fdm_problem *p) {
    const int pairs = s->features & (BIAS_SHARED | BIAS_OWN), own = s->features & BIAS_OWN;
    if (!(s->features & (BIAS_KEYS | BIAS_SHARED | BIAS_OWN)))
        return;
    const int64_t shape[4] = {own ? s->batch : 1, own ? s->heads : 1, pairs ? s->seqlen_q : 1, s->seqlen_k};
    p->has_bias = 1;
    p->bias_dtype = s->dtype;
    memcpy(p->bias_shape, shape, sizeof shape);
    p->has_lse_low = s->pass == FDM_BACKWARD;
    p->needs_dbias = s->pass == FDM_BACKWARD && !(s->features & NO_BIAS_GRADIENT);
}

static fdm_problem problem_of(const struct scene *s) {
    fdm_problem p = fdm_problem_default();
    p.pass = s->pass;
    p.dtype = s->dtype;
    p.batch = s->batch, p.heads = s->heads, p.heads_kv = s->heads_kv;
    p.seqlen_q = s->seqlen_q, p.seqlen_k = s->seqlen_k;
    p.head_dim = s->head_dim, p.head_dim_v = s->head_dim_v;
    p.causal = (s->features & CAUSAL) != 0;
    p.varlen = (s->features & PACKED) != 0;
    p.deterministic = (s->features & FIXED_ORDER) != 0;
    p.aligned = !(s->features & UNALIGNED);
    p.has_dlse = (s->features & DLSE) != 0;
    p.value_in_key = (s->features & LATENT) != 0;
    p.total_q = p.varlen ? s->batch * s->seqlen_q - 7 : 0;
    p.total_k = p.varlen ? s->batch * s->seqlen_k - 9 : 0;
    if (s->features & INTERVALS)
        p.has_intervals = 1, p.interval_batch = s->batch, p.interval_heads = s->heads_kv;
    if (s->features & MASK) {
        const int64_t shape[4] = {1, s->heads, s->seqlen_q, s->seqlen_k};
        p.has_mask = 1;
        memcpy(p.mask_shape, shape, sizeof shape);
    }
    set_bias(s, &p);
    return p;
}

/* ---- plans ---- */

/* One way of a kernel to run a scene on a device, and tensors of the scene. */
struct planned {
    fdm_device device;
    struct problem_tensors tensors;
    fdm_plan plan;
    char text[256];
};
enum { DEVICES = 3, VARIANTS = 12, KERNELS_MAX = 64 }; /* at most so many ways of a kernel, and kernels */
static int kernels_met[KERNELS_MAX], kernels_with_workspace[KERNELS_MAX];

static int64_t at_most(int64_t most, int64_t n) { return n < most ? n : most; }

/* A CPU kernel runs, where a device's does not: of fewer rows and keys. */
static struct scene scene_of(int n, int32_t device_type) {
    struct scene s = scenes[n];
    if (device_type == FDM_CPU) {
        s.heads_kv = at_most(2, s.heads_kv);
        s.heads = 2 * s.heads_kv;
        s.seqlen_q = at_most(18, s.seqlen_q);
        s.seqlen_k = at_most(40, s.seqlen_k);
    }
    return s;
}

static void visit_scene(const fdm_kernel_info *kernel, int scene, int32_t device, int32_t variants,
                        void (*visit)(struct planned *x)) {
    static struct planned x;
    const struct scene s = scene_of(scene, kernel->device_type);
    const fdm_problem wanted = problem_of(&s);
    fdm_problem problem;
    x.device.struct_bytes = sizeof x.device;
    x.plan.struct_bytes = sizeof x.plan;
    assert_int_equal(fdm_device_query(kernel->device_type, device, &x.device), FDM_OK);
    problem_tensors_make(&x.tensors, &wanted, x.device.id);
    assert_int_equal(fdm_describe(s.pass, &x.tensors.all, &x.tensors.options, &problem), FDM_OK);
    for (int32_t variant = 0; variant < variants; variant++) {
        if (fdm_plan_variant(&x.device, &problem, kernel->name, variant, &x.plan))
            return;
        snprintf(x.text, sizeof x.text, "scene %d on %s, %s as %s", scene, x.device.name, x.plan.kernel, x.plan.choice);
        visit(&x);
    }
}

static void visit_all(int32_t variants, void (*visit)(struct planned *x)) {
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    use_fake_compiler();
    setenv("FLASH_DMATTN_CACHE_SIZE", "0", 1); /* memory is enough here */
    for (int32_t i = 0; !fdm_kernel_list(i, &kernel); i++)
        for (int n = 0; n < NUM_SCENES; n++) {
            const int32_t devices = kernel.device_type == FDM_CPU ? 1 : DEVICES;
            for (int32_t device = 0; device < devices && kernel.available && kernel.pass == scenes[n].pass; device++)
                visit_scene(&kernel, n, device, variants, visit);
        }
}

/* The first few are told, all count. */
static int64_t failures;
#define COMPLAIN(...)                 \
    do {                              \
        if (failures++ < 20) {        \
            print_error(__VA_ARGS__); \
            print_error("\n");        \
        }                             \
    } while (0)

static void *workspace_of(const struct planned *x, size_t bytes) {
    void *memory = NULL;
    assert_int_equal(fdm_memory_allocate(x->device.id, bytes, &memory), FDM_OK);
    return memory;
}

/* What is refused launches nothing. */
static fdm_status execute(const fdm_plan *plan, const struct planned *x, void *workspace, size_t bytes) {
    const int64_t before = fake_driver()->num_launches();
    const fdm_status status = fdm_execute(plan, &x->tensors.all, workspace, bytes, NULL);
    if (status && fake_driver()->num_launches() != before)
        COMPLAIN("%s: launched before it was refused: %s", x->text, fdm_last_error());
    return status;
}

static void expect(const struct planned *x, fdm_status status, fdm_status wanted, const char *what) {
    if (status != wanted)
        COMPLAIN("%s: %s gives %s, not %s%s%s", x->text, what, fdm_status_name(status), fdm_status_name(wanted),
                 status ? ": " : "", status ? fdm_last_error() : "");
    if (status)
        assert_sentence();
}

/* ---- workspaces ---- */

static void note_kernel(const struct planned *x) {
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    for (int32_t i = 0; !fdm_kernel_list(i, &kernel); i++)
        if (strcmp(kernel.name, x->plan.kernel) == 0) {
            assert_true(i < KERNELS_MAX);
            kernels_met[i] = 1;
            kernels_with_workspace[i] |= x->plan.workspace_bytes > 0;
        }
}

static void expect_workspace(struct planned *x) {
    const size_t bytes = (size_t)x->plan.workspace_bytes;
    char *workspace = workspace_of(x, bytes + 64);
    const struct {
        const char *what;
        void *address;
        size_t bytes;
    } wrong[] = {{"a workspace a byte short", workspace, bytes - 1},
                 {"a workspace of 0 bytes", workspace, 0},
                 {"no workspace", NULL, bytes},
                 {"a workspace a byte on", workspace + 1, bytes},
                 {"a workspace 32 bytes on", workspace + 32, bytes}};
    note_kernel(x);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0] && bytes > 0; i++)
        expect(x, execute(&x->plan, x, wrong[i].address, wrong[i].bytes), FDM_ERROR_WORKSPACE, wrong[i].what);
    fdm_plan less = x->plan;
    less.workspace_bytes--;
    if (bytes > 0)
        expect(x, execute(&less, x, workspace, bytes), FDM_ERROR_INVALID_ARGUMENT,
               "a plan whose workspace is too small");
    expect(x, execute(&x->plan, x, workspace, bytes), FDM_OK, "the workspace that the plan asks for");
    expect(x, fdm_memory_release(x->device.id, workspace), FDM_OK, "giving it back");
}

/* Kernels that never take one. */
static int needs_no_workspace(const char *kernel) {
    return strncmp(kernel, "mma.split", 9) == 0 || strcmp(kernel, "mma.forward_d1024") == 0;
}

static void workspaces_that_are_too_small(void) {
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    visit_all(VARIANTS, expect_workspace);
    for (int32_t i = 0; !fdm_kernel_list(i, &kernel); i++) {
        if (kernel.available && !kernels_met[i])
            COMPLAIN("no scene is for %s", kernel.name);
        if (kernel.available && kernels_with_workspace[i] == needs_no_workspace(kernel.name))
            COMPLAIN("%s has %s workspace in any scene", kernel.name, kernels_with_workspace[i] ? "a" : "no");
    }
    assert_int_equal(failures, 0);
}

/* ---- plans of another problem ---- */

static int kernel_takes(const struct planned *x, const fdm_problem *problem) {
    fdm_plan plan = {.struct_bytes = sizeof plan};
    return fdm_plan_variant(&x->device, problem, x->plan.kernel, 0, &plan) == FDM_OK;
}

/* The value is the plan's own: the same tensors with the plan's options are that problem, and the kernel takes it. */
static void expect_of_plan(const struct planned *x, const struct problem_field *field, const fdm_plan *changed,
                           fdm_status status) {
    const fdm_options options = problem_options(&changed->problem);
    fdm_problem now;
    if (fdm_describe(changed->problem.pass, &x->tensors.all, &options, &now)) /* no such problem */
        expect(x, status, FDM_ERROR_INVALID_ARGUMENT, field->name);
    else if (memcmp((const char *)&now + field->offset, (const char *)&changed->problem + field->offset, field->bytes))
        COMPLAIN("%s: %s is not the plan's", x->text, field->name);
    else if (!status && !kernel_takes(x, &changed->problem))
        COMPLAIN("%s: it takes a plan with another %s, which the kernel refuses: %s", x->text, field->name,
                 fdm_last_error());
}

static void expect_fields(struct planned *x) {
    const size_t bytes = (size_t)x->plan.workspace_bytes;
    void *workspace = workspace_of(x, bytes + 64);
    for (int32_t i = 0; i < num_problem_fields; i++)
        for (int32_t element = 0; element < problem_field_elements(&problem_fields[i]); element++) {
            const struct problem_field *field = &problem_fields[i];
            fdm_plan changed = x->plan;
            problem_field_change(field, element, &changed.problem);
            const fdm_status status = execute(&changed, x, workspace, bytes);
            const int of_plan =
                field->rule == FIELD_OF_PLAN || (field->rule == FIELD_OF_LENGTHS && changed.problem.varlen);
            if (of_plan)
                expect_of_plan(x, field, &changed, status);
            else if (field->rule != FIELD_FACT)
                expect(x, status, FDM_ERROR_INVALID_ARGUMENT, field->name);
        }
    expect(x, fdm_memory_release(x->device.id, workspace), FDM_OK, "giving it back");
}

/* In the order of the struct, without a gap, and no member of the header missing. */
static void every_field_is_listed(void) {
    size_t end = 0;
    for (int32_t i = 0; i < num_problem_fields; i++) {
        assert_int_equal(problem_fields[i].offset, end);
        end = problem_fields[i].offset + problem_fields[i].bytes;
        if (!header_names(FDM_HEADER, "fdm_problem", problem_fields[i].name))
            fail_msg("fdm_problem has no %s", problem_fields[i].name);
    }
    assert_int_equal(end, sizeof(fdm_problem));
    assert_int_equal(header_members(FDM_HEADER, "fdm_problem"), num_problem_fields);
}

static void plans_of_another_problem(void) {
    visit_all(1, expect_fields);
    assert_int_equal(failures, 0);
}

/* ---- tensors that lie worse ---- */

/* One tensor: moved by an element, or every row, head or batch of it the same. What that breaks. */
static const struct worse {
    const char *what;
    size_t tensor; /* in fdm_tensors */
    int spread;    /* 0: it moves; 1: a stride becomes 0 */
    size_t fact;   /* in fdm_problem */
} ways_to_lie[] = {
#define MOVED(name, fact) \
    { #name " moved by an element", offsetof(fdm_tensors, name), 0, offsetof(fdm_problem, fact) }
#define SPREAD(name, fact) \
    { #name " with a stride of 0", offsetof(fdm_tensors, name), 1, offsetof(fdm_problem, fact) }
    MOVED(q, aligned),
    MOVED(k, aligned),
    MOVED(v, aligned),
    MOVED(out, aligned),
    MOVED(dout, aligned),
    MOVED(dq, aligned),
    MOVED(dk, aligned),
    MOVED(dv, aligned),
    MOVED(mask, scores_aligned),
    MOVED(bias, scores_aligned),
    MOVED(dbias, scores_aligned),
    SPREAD(q, q_mappable),
    SPREAD(dout, q_mappable),
    SPREAD(k, keys_mappable),
    SPREAD(v, keys_mappable),
    SPREAD(mask, scores_mappable),
    SPREAD(bias, scores_mappable),
#undef MOVED
#undef SPREAD
};

static int32_t fact_of(const fdm_problem *p, const struct worse *w) {
    int32_t fact;
    memcpy(&fact, (const char *)p + w->fact, sizeof fact);
    return fact;
}

/* 0: its axes before the last have extent 1. */
static int spread(fdm_tensor *tensor) {
    for (int32_t i = 0; i + 1 < tensor->ndim; i++)
        if (tensor->shape[i] > 1) {
            tensor->strides[i] = 0;
            return 1;
        }
    return 0;
}

static void expect_facts(struct planned *x) {
    void *workspace = workspace_of(x, (size_t)x->plan.workspace_bytes + 64);
    const fdm_problem wanted = x->plan.problem;
    for (size_t i = 0; i < sizeof ways_to_lie / sizeof ways_to_lie[0]; i++) {
        const struct worse *w = &ways_to_lie[i];
        fdm_tensor *tensor;
        fdm_problem now;
        problem_tensors_make(&x->tensors, &wanted, x->device.id);
        memcpy(&tensor, (const char *)&x->tensors.all + w->tensor, sizeof tensor);
        if (!tensor || !fact_of(&x->plan.problem, w) || (w->spread && !spread(tensor)))
            continue;
        tensor->byte_offset = w->spread ? 0 : (uint64_t)fdm_dtype_bytes(fdm_dtype_of(tensor));
        expect(x, fdm_describe(wanted.pass, &x->tensors.all, &x->tensors.options, &now), FDM_OK, w->what);
        if (fact_of(&now, w))
            COMPLAIN("%s: %s is not seen", x->text, w->what);
        const int matters = x->device.id.type == FDM_CUDA || w->fact == offsetof(fdm_problem, aligned);
        expect(x, execute(&x->plan, x, workspace, (size_t)x->plan.workspace_bytes),
               matters ? FDM_ERROR_INVALID_ARGUMENT : FDM_OK, w->what);
    }
    expect(x, fdm_memory_release(x->device.id, workspace), FDM_OK, "giving it back");
}

static void tensors_that_lie_worse(void) {
    visit_all(1, expect_facts);
    assert_int_equal(failures, 0);
}

/* ---- damaged plans ---- */

enum { JSON_MAX = 8192 };

/* The plan through JSON with another number behind `name`. */
static fdm_status read_damaged(const char *json, const char *name, int64_t value, fdm_plan *plan) {
    static char damaged[JSON_MAX];
    char key[64];
    snprintf(key, sizeof key, "\"%s\": ", name);
    const char *at = strstr(json, key);
    assert_non_null(at);
    at += strlen(key);
    snprintf(damaged, sizeof damaged, "%.*s%lld%s", (int)(at - json), json, (long long)value, at + strcspn(at, ",}"));
    return fdm_plan_from_json(damaged, strlen(damaged), plan);
}

/* Numbers with which a plan that is changed still runs. */
static const struct free_number {
    const char *kernel, *number; /* kernel: how names begin, "" of all */
    int describes;               /* 1: nobody reads it, and the same is launched. 0: another way, within bounds */
} free_numbers[] = {
    {"mma.backward32", "stages", 1},
    {"mma.backward", "stages", 0}, /* beside a ring another kernel, alike */
    {"", "v_in_registers", 1},
    {"", "stages", 1},
    {"cpu.", "shared_bytes", 1},
    {"reference.", "shared_bytes", 1},
    {"reference.", "block_m", 1},
    {"reference.", "block_n", 1},
    {"cpu.", "num_threads", 0},
    {"", "num_threads", 1},
    {"mma.backward", "STAGED_ROWS", 1},
    {"mma.backward", "TMA", 0},
    {"mma.backward", "GATHER", 0},
    {"mma.backward", "GROUP_PARTS", 0},
    {"mma.backward", "IN_TURN", 0},
    {"mma.backward", "PAIRED", 0},
    {"mma.backward32", "TILE", 0},
    {"mma.forward", "TILE", 0},
    {"mma.split", "VARIANT", 0},
    {"mma.decode", "SPLITS", 0},
    {"mma.decode", "EARLY", 0},
    {"mma.decode", "STAGES", 0},
    {"hopper.", "TILE", 0},
    {"hopper.backward", "IN_TURN", 0},
    {"hopper.backward", "PARTS", 0},
    {"hopper.backward_2pass", "V_STAGES", 0},
    {"hopper.backward_2pass", "P_STAGES", 0},
    {"hopper.", "SCHEDULER", 0},
    {"hopper.", "NUM_SMS", 0},
    {"hopper.", "EXP2_FREQUENCY", 0},
    {"hopper.", "EXP2_RESIDUE", 0},
    {"hopper.", "PACKED_HEADS", 0},
    {"hopper.", "NUM_SPLITS", 0},
    {"hopper.forward", "GATHER", 0},
    {"blackwell.", "SCHEDULER", 0},
    {"blackwell.", "NUM_SMS", 0},
    {"blackwell.", "EXP2_FREQUENCY", 0},
    {"blackwell.", "EXP2_RESIDUE", 0},
    {"blackwell.", "EXP2_DEGREE", 0},
    {"blackwell.", "PARTS", 0},
};
static const struct free_number *find_free(const char *kernel, const char *number) {
    for (size_t i = 0; i < sizeof free_numbers / sizeof free_numbers[0]; i++)
        if (strcmp(free_numbers[i].number, number) == 0 &&
            strncmp(kernel, free_numbers[i].kernel, strlen(free_numbers[i].kernel)) == 0)
            return &free_numbers[i];
    return NULL;
}

/* What an execution launches, of all that plans decide. */
struct launched {
    char text[1024];
    int64_t compiled;
};
static struct launched launches_from(int64_t first) {
    struct launched l = {.compiled = fake_compiler()->num_distinct()};
    for (int64_t n = first; n < fake_driver()->num_launches(); n++) {
        const struct fake_launch x = fake_driver()->launch(n);
        const size_t used = strlen(l.text);
        snprintf(l.text + used, sizeof l.text - used, "%s %u,%u,%u x %u, cluster %u, %u bytes; ", x.entry, x.grid[0],
                 x.grid[1], x.grid[2], x.block[0], x.cluster, x.shared_bytes);
    }
    return l;
}

/* Refused with a sentence of the library, not of the driver; or another number that its kernel leaves free. */
static void damage_number(const struct planned *x, const char *json, const char *name, int64_t value,
                          const struct launched *right, void *workspace) {
    const int64_t others[] = {value - 1, value + 1, 0, -1, INT32_MAX, INT32_MIN};
    const struct free_number *rule = find_free(x->plan.kernel, name);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        fdm_plan plan = {.struct_bytes = sizeof plan};
        if (others[i] == value || read_damaged(json, name, others[i], &plan))
            continue;
        const int64_t first = fake_driver()->num_launches(), other = others[i];
        const fdm_status status = execute(&plan, x, workspace, (size_t)x->plan.workspace_bytes);
        const int is_wild = other < 0 || (other == INT32_MAX && strcmp(name, "NUM_SMS") != 0);
        if (status && status != FDM_ERROR_INVALID_ARGUMENT && status != FDM_ERROR_WORKSPACE &&
            status != FDM_ERROR_UNSUPPORTED)
            COMPLAIN("%s: %s %lld instead of %lld: %s", x->text, name, (long long)other, (long long)value,
                     fdm_last_error());
        else if (!status && (!rule || (!rule->describes && is_wild)))
            COMPLAIN("%s: it runs with %s %lld instead of %lld", x->text, name, (long long)other, (long long)value);
        else if (!status && rule->describes) {
            const struct launched now = launches_from(first);
            if (now.compiled != right->compiled || strcmp(now.text, right->text) != 0)
                COMPLAIN("%s: with %s %lld instead of %lld it launches %snot %s", x->text, name, (long long)other,
                         (long long)value, now.text, right->text);
        }
    }
}

/* Calls damage_number() for every number behind a name. */
static void expect_numbers(struct planned *x) {
    static const char *const numbers[] = {"block_m",      "block_n",         "stages",      "v_in_registers",
                                          "shared_bytes", "workspace_bytes", "num_threads", "kernel_index",
                                          "device.type",  "device.index"};
    static char json[JSON_MAX];
    void *workspace = workspace_of(x, (size_t)x->plan.workspace_bytes + 64);
    const int64_t first = fake_driver()->num_launches();
    expect(x, execute(&x->plan, x, workspace, (size_t)x->plan.workspace_bytes), FDM_OK, "the plan as it is");
    struct launched right = launches_from(first);
    assert_int_equal(fdm_plan_to_json(&x->plan, json, sizeof json, NULL), FDM_OK);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        char key[64];
        snprintf(key, sizeof key, "\"%s\": ", numbers[i]);
        right.compiled = fake_compiler()->num_distinct();
        damage_number(x, json, numbers[i], atoll(strstr(json, key) + strlen(key)), &right, workspace);
    }
    const char *at = strstr(json, "\"parameters\": {");
    for (at = at ? at + strlen("\"parameters\": {") : ""; *at == '"'; at += strspn(at, ", ")) {
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(at + 1, "\""), at + 1);
        at = strchr(at, ':') + 2;
        right.compiled = fake_compiler()->num_distinct();
        damage_number(x, json, name, atoll(at), &right, workspace);
        at += strcspn(at, ",}");
    }
    expect(x, fdm_memory_release(x->device.id, workspace), FDM_OK, "giving it back");
}

static void damaged_plans(void) {
    visit_all(2, expect_numbers);
    assert_int_equal(failures, 0);
}

#define DEVICE_LIST "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912,10.0:232448 MALLOC_PERTURB_=0"
static const struct scenario scenarios[] = {
    {"workspaces_that_are_too_small", workspaces_that_are_too_small, DEVICE_LIST, 0},
    {"every_field_is_listed", every_field_is_listed, NULL, 0},
    {"plans_of_another_problem", plans_of_another_problem, DEVICE_LIST, 0},
    {"tensors_that_lie_worse", tensors_that_lie_worse, DEVICE_LIST, 0},
    {"damaged_plans", damaged_plans, DEVICE_LIST, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
