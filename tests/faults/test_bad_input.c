/* test_bad_input.c: one wrong thing at a time: the status, a sentence that names the argument, and unwritten outputs.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "flash_dmattn.h"

enum { B = 2, SQ = 5, SK = 9, H = 4, HKV = 2, D = 8, TQ = 10, TK = 18, ROOM = 4096 };
enum argument {
    Q,
    K,
    V,
    MASK,
    BIAS,
    START,
    END,
    ROW_START,
    ROW_END,
    BLOCKS,
    TREE,
    CU_Q,
    CU_K,
    SINK,
    OUT,
    LSE,
    DOUT,
    DLSE,
    DQ,
    DK,
    DV,
    DBIAS,
    DSINK,
    ARGUMENTS
};
static const char *const argument_names[ARGUMENTS] = {
    "q",       "k",          "v",    "mask",         "bias",         "interval_start", "interval_end", "row_start",
    "row_end", "block_mask", "tree", "cu_seqlens_q", "cu_seqlens_k", "sink",           "out",          "lse",
    "dout",    "dlse",       "dq",   "dk",           "dv",           "dbias",          "dsink"};

struct subject {
    fdm_tensor tensor[ARGUMENTS];
    int64_t shape[ARGUMENTS][5], strides[ARGUMENTS][5];
    char memory[ARGUMENTS][ROOM];
    int present[ARGUMENTS];
    fdm_options options;
    fdm_tensors all;
};

static void set(struct subject *s, enum argument n, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    s->tensor[n] = (fdm_tensor){.data = s->memory[n],
                                .device = {FDM_CPU, 0},
                                .ndim = ndim,
                                .dtype = fdm_data_type_of(dtype),
                                .shape = s->shape[n],
                                .strides = s->strides[n]};
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        s->shape[n][i] = shape[i];
        s->strides[n][i] = stride;
        stride *= shape[i];
    }
    s->present[n] = 1;
}

static int is_output(enum argument n, fdm_pass pass) { return pass == FDM_FORWARD ? n == OUT || n == LSE : n >= DQ; }

/* A right call of batch 2, dense or packed, with every tensor that the pass takes. */
static struct subject *make(int packed, fdm_pass pass) {
    struct subject *s = test_calloc(1, sizeof *s);
    const int64_t q[] = {B, packed ? TQ : SQ, H, D}, k[] = {B, packed ? TK : SK, HKV, D}, lse[] = {B, H, q[1]};
    const int64_t pairs[] = {1, HKV, SQ, SK}, keys[] = {1, HKV, k[1]}, cu[] = {B + 1}, sinks[] = {2, H};
    const int64_t blocks[] = {B, H, (SQ + 63) / 64, (SK + 63) / 64};
    const int64_t ranges[] = {B, H, 2, q[1]}, tree[] = {B, q[1], (SQ + 31) / 32};
    for (int n = Q; n <= DV; n++)
        if (n < MASK || n == OUT || n == DOUT || n >= DQ)
            set(s, n, FDM_FLOAT32, 4 - packed, (n == K || n == V || n >= DK ? k : q) + packed);
    set(s, LSE, FDM_FLOAT32, 3 - packed, lse + packed);
    set(s, DLSE, FDM_FLOAT32, 3 - packed, lse + packed);
    set(s, MASK, FDM_BOOL, 4, pairs);
    set(s, BLOCKS, FDM_BOOL, 4, blocks);
    set(s, BIAS, FDM_FLOAT32, 4, pairs);
    if (pass == FDM_FORWARD)
        set(s, TREE, FDM_UINT32, 3 - packed, tree + packed);
    set(s, DBIAS, FDM_FLOAT32, 4, pairs);
    set(s, SINK, FDM_FLOAT32, 2, sinks);
    set(s, DSINK, FDM_FLOAT32, 2, sinks);
    set(s, START, FDM_INT32, 3 - packed, keys + packed);
    set(s, END, FDM_INT32, 3 - packed, keys + packed);
    set(s, ROW_START, FDM_INT32, 4 - packed, ranges + packed);
    set(s, ROW_END, FDM_INT32, 4 - packed, ranges + packed);
    if (packed) {
        set(s, CU_Q, FDM_INT32, 1, cu);
        set(s, CU_K, FDM_INT32, 1, cu);
        memcpy(s->memory[CU_Q], (int32_t[]){0, SQ, TQ}, 3 * sizeof(int32_t));
        memcpy(s->memory[CU_K], (int32_t[]){0, SK, TK}, 3 * sizeof(int32_t));
    }
    for (int n = 0; n < ARGUMENTS; n++)
        if (is_output(n, pass))
            memset(s->memory[n], 0xa5, ROOM);
    s->options = fdm_options_default();
    return s;
}

static void gather(struct subject *s) {
    fdm_tensor *t[ARGUMENTS];
    for (int n = 0; n < ARGUMENTS; n++)
        t[n] = s->present[n] ? &s->tensor[n] : NULL;
    s->all = (fdm_tensors){.struct_bytes = sizeof(fdm_tensors),
                           .q = t[Q],
                           .k = t[K],
                           .v = t[V],
                           .mask = t[MASK],
                           .bias = t[BIAS],
                           .interval_start = t[START]};
    s->all.row_start = t[ROW_START], s->all.row_end = t[ROW_END], s->all.block_mask = t[BLOCKS];
    s->all.interval_end = t[END], s->all.cu_seqlens_q = t[CU_Q], s->all.cu_seqlens_k = t[CU_K];
    s->all.out = t[OUT], s->all.lse = t[LSE], s->all.dout = t[DOUT], s->all.dlse = t[DLSE];
    s->all.dq = t[DQ], s->all.dk = t[DK], s->all.dv = t[DV], s->all.dbias = t[DBIAS];
    s->all.sink = t[SINK], s->all.dsink = t[DSINK], s->all.tree = t[TREE];
}

static fdm_status run(struct subject *s, fdm_pass pass) {
    gather(s);
    return pass == FDM_FORWARD ? fdm_attention_forward(&s->all, &s->options, NULL)
                               : fdm_attention_backward(&s->all, &s->options, NULL);
}

/* The call fails as invalid, names the argument, and writes nothing. Frees the subject. */
static void refuses(struct subject *s, fdm_pass pass, const char *name, const char *what) {
    fdm_status status = run(s, pass);
    if (status != FDM_ERROR_INVALID_ARGUMENT || !strstr(fdm_last_error(), name))
        fail_msg("%s, %s: status %d, sentence '%s'", name, what, status, status ? fdm_last_error() : "");
    for (int n = 0; n < ARGUMENTS; n++)
        for (int i = 0; i < ROOM && is_output(n, pass); i++)
            if ((unsigned char)s->memory[n][i] != 0xa5)
                fail_msg("%s, %s: %s was written", name, what, argument_names[n]);
    test_free(s);
}

static void a_right_call_is_right(void **state) {
    (void)state;
    for (int packed = 0; packed < 2; packed++)
        for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++) {
            struct subject *s = make(packed, (fdm_pass)pass);
            assert_int_equal(run(s, (fdm_pass)pass), FDM_OK);
            test_free(s);
        }
}

/* A pass that takes the argument: the backward, but of a tree. */
static fdm_pass pass_of(enum argument n) { return n == TREE ? FDM_FORWARD : FDM_BACKWARD; }

static int takes_part(enum argument n, int packed, fdm_pass pass) {
    if (n == TREE)
        return pass == FDM_FORWARD;
    return pass == FDM_BACKWARD || n <= LSE ? packed || (n != CU_Q && n != CU_K) : 0;
}

enum damage {
    NDIM,
    NEGATIVE_EXTENT,
    NEGATIVE_STRIDE,
    DTYPE,
    LANES,
    DEVICE,
    MISALIGNED,
    NO_DATA,
    NO_SHAPE,
    HUGE,
    DAMAGES
};
static const char *const damage_names[] = {"ndim",   "negative extent",    "negative stride", "dtype",    "lanes",
                                           "device", "misaligned address", "no data",         "no shape", "huge"};

static void inflict(struct subject *s, enum argument n, enum damage d) {
    fdm_tensor *t = &s->tensor[n];
    switch (d) {
    case NDIM: t->ndim = t->ndim == 4 ? 3 : 4; break;
    case NEGATIVE_EXTENT: s->shape[n][0] = -2; break;
    case NEGATIVE_STRIDE:
        for (int i = 0; i < t->ndim; i++)
            s->strides[n][i] = -s->strides[n][i];
        break;
    case DTYPE: t->dtype = (fdm_data_type){5, 128, 1}; break;
    case LANES: t->dtype.lanes = 2; break;
    case DEVICE: t->device = (fdm_device_id){FDM_CUDA, n == Q}; break;
    case MISALIGNED: t->byte_offset = 1; break;
    case NO_DATA: t->data = NULL; break;
    case NO_SHAPE: t->shape = NULL; break;
    default: s->strides[n][0] = INT64_MAX / 2;
    }
}

/* Every argument, damaged in every way. */
static void damaged_tensors(void **state) {
    (void)state;
    int count = 0;
    for (int packed = 0; packed < 2; packed++)
        for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++)
            for (int n = 0; n < ARGUMENTS; n++)
                for (int d = 0; d < DAMAGES && takes_part(n, packed, (fdm_pass)pass); d++) {
                    if ((n == MASK || n == BLOCKS) && d == MISALIGNED) /* bytes are always aligned */
                        continue;
                    struct subject *s = make(packed, (fdm_pass)pass);
                    inflict(s, n, d);
                    if (d == HUGE && s->shape[n][0] == 1)
                        s->strides[n][1] = INT64_MAX / 2;
                    /* q is what the others' devices are compared with. */
                    refuses(s, (fdm_pass)pass, n == Q && d == DEVICE ? "q is on" : argument_names[n], damage_names[d]);
                    count++;
                }
    assert_true(count > 400);
}

/* q, k and v set the extents that the others must have, so that the sentence may name another of the three. */
static void wrong_shapes(void **state) {
    (void)state;
    for (int n = 0; n < ARGUMENTS; n++)
        for (int axis = 0; n != CU_Q && n != CU_K && axis < 4; axis++) {
            struct subject *s = make(0, pass_of(n));
            if (axis < s->tensor[n].ndim) {
                s->shape[n][axis] += 3;
                refuses(s, pass_of(n),
                        n <= V                           ? ""
                        : n == START || n == END         ? "interval"
                        : n == ROW_START || n == ROW_END ? "row"
                                                         : argument_names[n],
                        "extent");
            } else {
                test_free(s);
            }
        }
}

static void wrong_dtypes(void **state) {
    (void)state;
    for (int n = K; n < ARGUMENTS; n++)
        for (int dtype = FDM_FLOAT32; dtype <= FDM_INT32; dtype++) {
            int packed = n == CU_Q || n == CU_K;
            struct subject *s = make(packed, pass_of(n));
            if (n == TREE && dtype == FDM_INT32) { /* its words are of either sign */
                test_free(s);
                continue;
            }
            if (fdm_dtype_of(&s->tensor[n]) == (fdm_dtype)dtype) {
                test_free(s);
                continue;
            }
            s->tensor[n].dtype = fdm_data_type_of((fdm_dtype)dtype);
            refuses(s, pass_of(n), argument_names[n], fdm_dtype_name((fdm_dtype)dtype));
        }
}

static void wrong_strides(void **state) {
    (void)state;
    for (int n = 0; n < ARGUMENTS; n++) {
        if (n <= V || n == OUT || n == DOUT || (n >= DQ && n <= DV)) {
            struct subject *s = make(0, FDM_BACKWARD);
            s->strides[n][3] = 2;
            refuses(s, FDM_BACKWARD, argument_names[n], "last axis not contiguous");
        }
        if (is_output(n, FDM_BACKWARD)) {
            struct subject *s = make(0, FDM_BACKWARD);
            s->strides[n][1] = 0;
            refuses(s, FDM_BACKWARD, argument_names[n], "broadcast output");
        }
        if (is_output(n, FDM_FORWARD)) {
            struct subject *s = make(0, FDM_FORWARD);
            s->strides[n][1] = s->strides[n][2] - 1;
            refuses(s, FDM_FORWARD, argument_names[n], "overlapping output");
        }
    }
}

static void missing_tensors(void **state) {
    (void)state;
    const struct {
        enum argument gone;
        const char *named;
        int packed, backward_only;
    } rows[] = {{Q, "q", 0, 0},
                {K, "k", 0, 0},
                {V, "v", 0, 0},
                {OUT, "out", 0, 0},
                {LSE, "lse", 0, 1},
                {DOUT, "dout", 0, 1},
                {BIAS, "dbias", 0, 1},
                {SINK, "dsink", 0, 1},
                {START, "interval_start", 0, 0},
                {END, "interval_end", 0, 0},
                {ROW_START, "row_start", 0, 0},
                {ROW_END, "row_end", 0, 0},
                {CU_Q, "cu_seqlens_q", 1, 0},
                {CU_K, "cu_seqlens_k", 1, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int pass = rows[i].backward_only ? FDM_BACKWARD : FDM_FORWARD; pass <= FDM_BACKWARD; pass++) {
            struct subject *s = make(rows[i].packed, (fdm_pass)pass);
            s->present[rows[i].gone] = 0;
            refuses(s, (fdm_pass)pass, rows[i].named, "missing");
        }
}

static void trees_beside_what_they_replace(void **state) {
    (void)state;
    struct subject *s = make(0, FDM_FORWARD);
    s->options.causal = 1;
    refuses(s, FDM_FORWARD, "tree is given beside a causal mask", "causal");
    s = make(0, FDM_BACKWARD);
    const int64_t shape[] = {B, SQ, (SQ + 31) / 32};
    set(s, TREE, FDM_UINT32, 3, shape);
    refuses(s, FDM_BACKWARD, "tree is given to a backward call", "backward");
}

static void wrong_options(void **state) {
    (void)state;
    const struct {
        const char *named;
        double scale, softcap;
        int64_t left, right, max_seqlen_q, max_seqlen_k;
        const char *kernel, *family;
    } rows[] = {
        {"softmax_scale", NAN, 0, -1, -1, 0, 0, NULL, NULL},
        {"softmax_scale", INFINITY, 0, -1, -1, 0, 0, NULL, NULL},
        {"softmax_scale", 1e300, 0, -1, -1, 0, 0, NULL, NULL},
        {"softcap", 1, -1, -1, -1, 0, 0, NULL, NULL},
        {"softcap", 1, NAN, -1, -1, 0, 0, NULL, NULL},
        {"softcap", 1, INFINITY, -1, -1, 0, 0, NULL, NULL},
        {"window", 1, 0, -2, -1, 0, 0, NULL, NULL},
        {"window", 1, 0, -1, -2, 0, 0, NULL, NULL},
        {"window", 1, 0, -1, INT64_MIN, 0, 0, NULL, NULL},
        {"max_seqlen_q", 1, 0, -1, -1, SQ - 1, 0, NULL, NULL},
        {"max_seqlen_k", 1, 0, -1, -1, 0, SK - 1, NULL, NULL},
        {"max_seqlen_q", 1, 0, -1, -1, -1, 0, NULL, NULL},
        {"nobody", 1, 0, -1, -1, 0, 0, NULL, "nobody"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct subject *s = make(1, FDM_FORWARD);
        s->options.has_softmax_scale = 1;
        s->options.softmax_scale = rows[i].scale;
        s->options.softcap = rows[i].softcap;
        s->options.window_left = rows[i].left;
        s->options.window_right = rows[i].right;
        s->options.max_seqlen_q = rows[i].max_seqlen_q;
        s->options.max_seqlen_k = rows[i].max_seqlen_k;
        s->options.family = rows[i].family;
        refuses(s, FDM_FORWARD, rows[i].named, "option");
    }
}

static void wrong_cu_seqlens(void **state) {
    (void)state;
    const int32_t rows[][3] = {{-1, SQ, TQ},    {0, -1, TQ},        {0, TQ + 1, TQ},   {TQ, SQ, TQ},
                               {0, SQ, TK + 1}, {0, INT32_MIN, TQ}, {0, INT32_MAX, TQ}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int n = CU_Q; n <= CU_K; n++) {
            struct subject *s = make(1, FDM_BACKWARD);
            memcpy(s->memory[n], rows[i], sizeof rows[i]);
            refuses(s, FDM_BACKWARD, argument_names[n], "contents");
        }
}

static void impossible_kernels(void **state) {
    (void)state;
    struct subject *s = make(0, FDM_FORWARD);
    s->options.kernel = "cpu.forward.abacus";
    assert_int_equal(run(s, FDM_FORWARD), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "cpu.forward.abacus"));
    for (int i = 0; i < ROOM; i++)
        assert_int_equal((unsigned char)s->memory[OUT][i], 0xa5);
    test_free(s);
}

static void plan_for(struct subject *s, fdm_pass pass, fdm_plan *plan) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    gather(s);
    assert_int_equal(fdm_device_query(FDM_CPU, 0, &device), FDM_OK);
    assert_int_equal(fdm_describe(pass, &s->all, &s->options, &problem), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &problem, &s->options, plan), FDM_OK);
}

static void wrong_workspaces(void **state) {
    (void)state;
    const char *const families[] = {"cpu", "reference"};
    for (int f = 0; f < 2; f++) {
        struct subject *s = make(0, FDM_BACKWARD);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        s->options.family = families[f];
        plan_for(s, FDM_BACKWARD, &plan);
        assert_true(plan.workspace_bytes > 0);
        size_t bytes = (size_t)plan.workspace_bytes;
        char *workspace = aligned_alloc(64, (bytes + 127) / 64 * 64);
        assert_non_null(workspace);
        const struct {
            void *address;
            size_t bytes;
        } rows[] = {{NULL, bytes}, {workspace, bytes - 1}, {workspace, 0}, {workspace + 8, bytes}};
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            assert_int_equal(fdm_execute(&plan, &s->all, rows[i].address, rows[i].bytes, NULL), FDM_ERROR_WORKSPACE);
            assert_non_null(strstr(fdm_last_error(), "workspace"));
            for (int j = 0; j < ROOM; j++)
                assert_int_equal((unsigned char)s->memory[DQ][j], 0xa5);
        }
        assert_int_equal(fdm_execute(&plan, &s->all, workspace, bytes, NULL), FDM_OK);
        free(workspace);
        test_free(s);
    }
}

/* A problem filled by hand, without tensors that would say otherwise. */
static void problems_by_hand(void **state) {
    (void)state;
    const fdm_problem good = fdm_problem_default();
    const struct {
        size_t offset;
        const char *named;
        int64_t value;
    } rows[] = {{offsetof(fdm_problem, batch), "batch", -1},
                {offsetof(fdm_problem, seqlen_q), "query length", -1},
                {offsetof(fdm_problem, seqlen_k), "key length", INT64_C(1) << 31},
                {offsetof(fdm_problem, head_dim), "head_dim of q", 0},
                {offsetof(fdm_problem, total_q), "packed length of q", -1},
                {offsetof(fdm_problem, total_k), "packed length of k", -1},
                {offsetof(fdm_problem, total_k), "packed length of k", INT64_C(1) << 31}};
    assert_int_equal(fdm_problem_validate(&good), FDM_OK);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fdm_problem bad = good;
        bad.varlen = 1;
        memcpy((char *)&bad + rows[i].offset, &rows[i].value, sizeof rows[i].value);
        assert_int_equal(fdm_problem_validate(&bad), FDM_ERROR_INVALID_ARGUMENT);
        assert_non_null(strstr(fdm_last_error(), rows[i].named));
    }
}

/* A plan executes only the problem it was made for, and only when it is whole. */
static void foreign_plans(void **state) {
    (void)state;
    struct subject *s = make(0, FDM_FORWARD);
    fdm_plan plan = {.struct_bytes = sizeof plan}, changed = {.struct_bytes = sizeof changed};
    plan_for(s, FDM_FORWARD, &plan);
    char *workspace = aligned_alloc(64, ((size_t)plan.workspace_bytes + 64) / 64 * 64);
    assert_non_null(workspace);
    for (int i = 0; i < 6; i++) {
        changed = plan;
        switch (i) {
        case 0: changed.problem.seqlen_k++; break;
        case 1: changed.problem.has_mask = 0; break;
        case 2: changed.problem.needs_lse = 0; break;
        case 3: changed.kernel_index = 1000; break;
        case 4: strcpy(changed.family, "nobody"); break;
        default: strcpy(changed.kernel, "cpu.forward.abacus");
        }
        fdm_status status = fdm_execute(&changed, &s->all, workspace, (size_t)plan.workspace_bytes, NULL);
        assert_int_equal(status, FDM_ERROR_INVALID_ARGUMENT);
        for (int j = 0; j < ROOM; j++)
            assert_int_equal((unsigned char)s->memory[OUT][j], 0xa5);
    }
    assert_int_equal(fdm_execute(NULL, &s->all, workspace, 0, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_execute(&plan, NULL, workspace, 0, NULL), FDM_ERROR_INVALID_ARGUMENT);
    free(workspace);
    test_free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_right_call_is_right),
        cmocka_unit_test(damaged_tensors),
        cmocka_unit_test(wrong_shapes),
        cmocka_unit_test(wrong_dtypes),
        cmocka_unit_test(wrong_strides),
        cmocka_unit_test(missing_tensors),
        cmocka_unit_test(trees_beside_what_they_replace),
        cmocka_unit_test(wrong_options),
        cmocka_unit_test(wrong_cu_seqlens),
        cmocka_unit_test(impossible_kernels),
        cmocka_unit_test(wrong_workspaces),
        cmocka_unit_test(problems_by_hand),
        cmocka_unit_test(foreign_plans),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
