/* test_mma_plans.c: what the mma family decides outside of its tables: splits of the keys and how they are merged,
 * which heads take turns, and the forward's tiles that one architecture alone cannot take. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "families/families.h"
#include "families/mma/decode/mma_decode.h"
#include "families/mma/mma_family.h"
#include "problem/problem.h"

PLAN_PARAMETER_STRUCT(MMA_DECODE_PARAMETERS);

static fdm_problem problem_of(int64_t batch, int64_t heads, int64_t heads_kv, int64_t rows, int64_t keys,
                              int64_t head_dim) {
    fdm_problem p = fdm_problem_default();
    p.dtype = FDM_BFLOAT16;
    p.batch = batch;
    p.heads = heads;
    p.heads_kv = heads_kv;
    p.seqlen_q = rows;
    p.seqlen_k = keys;
    p.head_dim = p.head_dim_v = head_dim;
    p.softmax_scale = 0.1;
    p.aligned = p.scores_aligned = 1;
    return p;
}

static void splits(void **state) {
    (void)state;
    static const struct {
        const char *device;
        int64_t batch, heads_kv, keys, head_dim;
        int32_t splits, stages, merge;
    } cases[] = {
        /* one block a multiprocessor, in one wave with 96 KB under way; in waves two, with 64 KB */
        {"sm_90", 16, 8, 32768, 128, 1, 4, MMA_MERGE_NONE},
        {"sm_90", 64, 8, 4096, 128, 1, 2, MMA_MERGE_NONE},
        {"sm_90", 16, 8, 32768, 64, 2, 4, MMA_MERGE_CLUSTER},
        {"sm_90", 8, 8, 16384, 256, 2, 3, MMA_MERGE_CLUSTER},
        /* eight splits are a cluster, more are not; short sequences have few */
        {"sm_90", 1, 8, 131072, 128, 16, 4, MMA_MERGE_WORKSPACE},
        {"sm_90", 2, 1, 2560, 128, 10, 4, MMA_MERGE_WORKSPACE},
        /* clusters that would leave four multiprocessors: twice as many splits; where keys are too few, not */
        {"sm_90", 2, 8, 131072, 128, 16, 3, MMA_MERGE_WORKSPACE},
        {"sm_90", 32, 1, 1515, 256, 4, 3, MMA_MERGE_CLUSTER},
        /* 64 splits have 32 tiles of 64 keys each; with 63 some would have 33 */
        {"sm_90", 1, 2, 131072, 128, 64, 4, MMA_MERGE_WORKSPACE},
        /* in waves there is no cluster */
        {"sm_90", 20, 8, 16384, 128, 8, 2, MMA_MERGE_WORKSPACE},
        /* of at most 2048 keys a split is one tile of 64 or 128, where all are on the device at once */
        {"sm_90", 1, 8, 2048, 128, 16, 1, MMA_MERGE_CLUSTER},
        {"sm_90", 1, 8, 512, 128, 8, 1, MMA_MERGE_CLUSTER},
        {"sm_90", 2, 8, 2048, 128, 16, 1, MMA_MERGE_CLUSTER},
        {"sm_90", 3, 8, 2048, 128, 5, 4, MMA_MERGE_CLUSTER},
        {"sm_90", 1, 8, 2112, 128, 7, 4, MMA_MERGE_CLUSTER},
        {"sm_90", 1, 8, 2048, 256, 8, 3, MMA_MERGE_CLUSTER},
        {"sm_90", 1, 8, 377, 128, 6, 1, MMA_MERGE_CLUSTER},
        /* no clusters */
        {"sm_80", 2, 1, 512, 128, 8, 1, MMA_MERGE_WORKSPACE},
        {"sm_120", 2, 1, 2560, 128, 10, 2, MMA_MERGE_WORKSPACE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int64_t heads_kv = cases[i].heads_kv;
        const fdm_problem p = problem_of(cases[i].batch, 4 * heads_kv, heads_kv, 1, cases[i].keys, cases[i].head_dim);
        fdm_device device = {.struct_bytes = sizeof device};
        fdm_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(fdm_device_from_name(cases[i].device, &device), FDM_OK);
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, "mma.decode");
        assert_int_equal(parameters_of(&plan).SPLITS, cases[i].splits);
        assert_int_equal(plan.stages, cases[i].stages);
        assert_int_equal(parameters_of(&plan).MERGE, cases[i].merge);
        assert_int_equal(plan.workspace_bytes > 0, cases[i].merge == MMA_MERGE_WORKSPACE);
        assert_true(plan.shared_bytes <= device.shared_bytes);
        struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
        assert_int_equal(family_mma.launches(&family_mma, &plan, requests),
                         cases[i].merge == MMA_MERGE_WORKSPACE ? 2 : 1);
    }
}

static int64_t constant_of(const struct cuda_kernel_request *request, const char *name) {
    for (int32_t i = 0; i < request->num_constants; i++)
        if (strcmp(request->constants[i].name, name) == 0)
            return request->constants[i].value;
    return -1;
}

/* Few query rows with whatever hides or changes scores are split along the keys too, and more rows than one tile's. */
static void decode_takes_every_feature(void **state) {
    (void)state;
    enum { MASK = 1, BIAS = 2, INTERVALS = 4, SOFTCAP = 8, WINDOW = 16, OF_HEADS = 32, OF_ROWS = 64 };
    static const struct {
        int features;
        fdm_dtype dtype;
        int64_t heads, heads_kv, rows, head_dim;
        const char *choice, *words;
        int64_t mask, intervals, row_groups;
    } cases[] = {
        {MASK, FDM_BFLOAT16, 32, 8, 1, 128, "MMA_Decode_16x64_W4_S3_X4", "listed first by the mask", 1, 0, 1},
        {MASK | OF_HEADS, FDM_BFLOAT16, 32, 8, 1, 128, "MMA_Decode_16x64_W4_S3_X4", "by the mask", 2, 0, 1},
        {MASK | OF_ROWS, FDM_FLOAT16, 32, 8, 4, 128, "MMA_Decode_16x64_W4_S3_X4", "by the mask", 2, 0, 1},
        {INTERVALS, FDM_BFLOAT16, 32, 8, 1, 128, "MMA_Decode_16x64_W4_S3_X2", "by intervals", 0, 1, 1},
        {INTERVALS, FDM_BFLOAT16, 32, 8, 2, 128, "MMA_Decode_16x64_W4_S3_X2", "by intervals", 0, 2, 1},
        {MASK | INTERVALS, FDM_BFLOAT16, 32, 8, 1, 64, "MMA_Decode_16x64_W4_S4", "by mask and intervals", 1, 1, 1},
        {BIAS, FDM_BFLOAT16, 32, 8, 1, 128, "MMA_Decode_16x64_W4_S3_X4", "a bias of -inf", 0, 0, 1},
        {SOFTCAP | WINDOW, FDM_BFLOAT16, 32, 8, 1, 256, "MMA_Decode_16x64_W4_S3", "fit in one tile of 16", 0, 0, 1},
        {0, FDM_BFLOAT16, 64, 2, 1, 128, "MMA_Decode_32x64_W8_S4", "32 query rows of a KV head fit in one tile of 32",
         0, 0, 2},
        {0, FDM_BFLOAT16, 64, 1, 1, 128, "MMA_Decode_64x64_W8_S4", "fit in one tile of 64", 0, 0, 4},
        {0, FDM_BFLOAT16, 64, 2, 4, 128, "MMA_Decode_128x64_W8_S4",
         "128 query rows of a KV head fit in one tile of 128", 0, 0, 8},
        {0, FDM_FLOAT32, 32, 8, 1, 128, "MMA_Decode_TF32x3_16x64_W4_S2", "2 stages of 64 keys", 0, 0, 1},
        {MASK, FDM_FLOAT32, 32, 8, 1, 256, "MMA_Decode_TF32x3_16x32_W4_S2_X4", "2 stages of 32 keys", 1, 0, 1},
        {0, FDM_FLOAT32, 64, 2, 1, 256, "MMA_Decode_TF32x3_32x32_W8_S2", "fit in one tile of 32", 0, 0, 2},
    };
    fdm_options by_name = fdm_options_default();
    by_name.kernel = "mma.decode";
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int f = cases[i].features;
        fdm_problem p = problem_of(1, cases[i].heads, cases[i].heads_kv, cases[i].rows, 131072, cases[i].head_dim);
        p.dtype = p.bias_dtype = cases[i].dtype;
        p.has_mask = (f & MASK) != 0;
        p.mask_shape[1] = f & OF_HEADS ? p.heads : 1;
        p.mask_shape[2] = f & OF_ROWS ? p.seqlen_q : 1;
        p.mask_shape[3] = p.bias_shape[3] = p.seqlen_k;
        p.has_bias = (f & BIAS) != 0;
        p.has_intervals = (f & INTERVALS) != 0;
        p.interval_heads = p.has_intervals ? p.heads_kv : 1;
        p.softcap = f & SOFTCAP ? 30 : 0;
        p.window_left = f & WINDOW ? 70000 : -1;
        fdm_device device = {.struct_bytes = sizeof device};
        fdm_plan plan = {.struct_bytes = sizeof plan};
        struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
        assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
        assert_int_equal(fdm_plan_attention(&device, &p, &by_name, &plan), FDM_OK);
        assert_string_equal(plan.choice, cases[i].choice);
        assert_non_null(strstr(plan.reason, cases[i].words));
        assert_true(parameters_of(&plan).SPLITS > 1 && plan.shared_bytes <= device.shared_bytes);
        assert_true(family_mma.launches(&family_mma, &plan, requests) >= 1);
        assert_int_equal(requests[0].shared_bytes, plan.shared_bytes);
        assert_int_equal(constant_of(&requests[0], "MASK_PER_ROW"), cases[i].mask);
        assert_int_equal(constant_of(&requests[0], "INTERVALS_PER_ROW"), cases[i].intervals);
        assert_int_equal(constant_of(&requests[0], "ROW_GROUPS"), cases[i].row_groups);
    }
}

/* Hidden keys: more splits than fill the device, so that what is left of them can be shared out; other numbers of them
 * and of stages are other variants. */
static void splits_where_keys_hide(void **state) {
    (void)state;
    fdm_problem p = problem_of(8, 32, 8, 1, 16384, 128);
    p.has_mask = 1;
    p.mask_shape[0] = p.batch;
    p.mask_shape[3] = p.seqlen_k;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
    assert_string_equal(plan.choice, "MMA_Decode_16x64_W4_S3_X4");
    assert_int_equal(parameters_of(&plan).SPLITS, 8);
    assert_int_equal(parameters_of(&plan).MERGE, MMA_MERGE_WORKSPACE);
    assert_non_null(strstr(plan.reason, "see most begin first"));
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    assert_int_equal(family_mma.launches(&family_mma, &plan, requests), 2);
    assert_int_equal(constant_of(&requests[0], "ORDERED"), 1);
    static const int64_t one_order[][2] = {{1, 1}, {8, 1}, {33, 33}}; /* batch, masks: no order, or too long a one */
    for (size_t i = 0; i < sizeof one_order / sizeof one_order[0]; i++) {
        fdm_problem other = problem_of(one_order[i][0], 32, 8, 1, 131072, 128);
        other.has_mask = 1;
        other.mask_shape[0] = one_order[i][1];
        other.mask_shape[3] = other.seqlen_k;
        assert_int_equal(fdm_plan_attention(&device, &other, NULL, &plan), FDM_OK);
        assert_int_equal(family_mma.launches(&family_mma, &plan, requests), 2);
        assert_int_equal(constant_of(&requests[0], "ORDERED"), 0);
    }
    static const struct {
        const char *choice;
        int32_t stages, splits;
    } others[] = {
        {"MMA_Decode_16x64_W4_S2_X4", 2, 8},  {"MMA_Decode_16x64_W4_S4_X4", 4, 8},
        {"MMA_Decode_16x64_W4_S3", 3, 2},     {"MMA_Decode_16x64_W4_S3_X2", 3, 4},
        {"MMA_Decode_16x64_W4_S3_X8", 3, 16}, {"MMA_Decode_16x64_W4_S3_X16", 3, 32},
    };
    int32_t number = 1;
    for (; !fdm_plan_variant(&device, &p, "mma.decode", number, &plan); number++) {
        assert_in_range(number, 1, sizeof others / sizeof others[0]);
        assert_string_equal(plan.choice, others[number - 1].choice);
        assert_int_equal(plan.stages, others[number - 1].stages);
        assert_int_equal(parameters_of(&plan).SPLITS, others[number - 1].splits);
        /* two blocks of a multiprocessor, or more, are no clusters where they look for keys */
        const int is_alone = p.batch * p.heads_kv * others[number - 1].splits <= device.num_sms;
        assert_int_equal(parameters_of(&plan).MERGE, is_alone ? MMA_MERGE_CLUSTER : MMA_MERGE_WORKSPACE);
    }
    assert_int_equal(number, 1 + sizeof others / sizeof others[0]);
}

/* Many rows, short sequences and odd head dims are left to others. */
static void decode_leaves_to_others(void **state) {
    (void)state;
    static const struct {
        int64_t heads, heads_kv, rows, keys, head_dim;
    } cases[] = {
        {32, 8, 1, 60, 128},
        {32, 32, 32, 4096, 128},
        {64, 1, 8, 4096, 128},
        {32, 8, 1, 4096, 100},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fdm_problem p =
            problem_of(1, cases[i].heads, cases[i].heads_kv, cases[i].rows, cases[i].keys, cases[i].head_dim);
        fdm_device device = {.struct_bytes = sizeof device};
        fdm_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_not_equal(plan.kernel, "mma.decode");
    }
}

static int32_t heads_together(const fdm_problem *p) {
    const struct attention attention = {.problem = p};
    struct gpu_forward_params arguments;
    gpu_fill_forward(&attention, &arguments);
    return arguments.heads_per_l2_group;
}

/* L2 groups are as large as the cache allows, and equal to one head. */
static void l2_groups(void **state) {
    (void)state;
    for (int64_t length = 1; length <= 65536; length = length * 3 / 2 + 1)
        for (int64_t batch = 1; batch <= 9; batch += 4) {
            fdm_problem p = problem_of(batch, 16, 16, length, length, 128);
            assert_int_equal(heads_together(&p), 1);
            p.causal = 1;
            const int64_t heads = batch * 16, bytes = length * 512, together = heads_together(&p);
            const int64_t most = bytes <= 32 << 20 ? (32 << 20) / bytes : 1;
            const int64_t count = (heads + together - 1) / together;
            assert_true(together >= 1 && together <= most && together <= heads);
            assert_true(count == (heads + most - 1) / most && heads > (count - 1) * together);
            assert_true(together * count - heads < count);
        }
    fdm_problem p = problem_of(32, 32, 32, 512, 512, 64);
    p.causal = 1;
    assert_int_equal(heads_together(&p), 256);
    p = problem_of(1, 16, 16, 4096, 4096, 128);
    p.has_bias = 1;
    p.bias_shape[1] = 16;
    p.bias_shape[2] = p.bias_shape[3] = 4096;
    assert_int_equal(heads_together(&p), 1); /* each head reads its own */
    p.bias_shape[1] = 1;
    assert_int_equal(heads_together(&p), 16);
    p.bias_shape[2] = 1;
    assert_int_equal(heads_together(&p), 1); /* one row is little to read */
    p.seqlen_q = p.seqlen_k = 0;
    p.causal = 1;
    assert_true(heads_together(&p) >= 1);
}

/* What an algorithm does not name is refused by name, one feature at a time and whatever its own refusal says. */
static const char *takes_all(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    (void)device;
    (void)p;
    (void)text;
    (void)size;
    return NULL;
}
static int fills_one(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    (void)device;
    (void)p;
    plan->block_m = 64;
    return variant == 0;
}
static int chosen_with(uint32_t features, const fdm_problem *p, struct refusals *refusals) {
    const struct gpu_algorithm algorithm = {.info = {"test.forward", "", FDM_FORWARD},
                                            .features = features,
                                            .chosen_freely = 1,
                                            .refusal = takes_all,
                                            .fill = fills_one};
    const struct gpu_algorithm *const algorithms[] = {&algorithm};
    const struct gpu_list list = {.arch_min = 80, .algorithms = algorithms};
    const struct family family = {.name = "test", .num_kernels = 1, .list = &list, GPU_FAMILY_ENTRIES};
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    const struct plan_request request = {.device = &device, .problem = p, .kernel = "test.forward"};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    refusals->count = 0;
    return family.choose(&family, &request, &plan, refusals);
}

static void unnamed_features_are_refused(void **state) {
    (void)state;
    struct refusals refusals;
    fdm_problem p = fdm_problem_default();
    p.batch = 1, p.heads = p.heads_kv = 1, p.seqlen_q = p.seqlen_k = 128, p.head_dim = p.head_dim_v = 64;
    p.aligned = 1;
    assert_true(chosen_with(0, &p, &refusals));
    p.softcap = 3;
    assert_false(chosen_with(GPU_EVERY_FEATURE & ~GPU_FEATURE_SOFTCAP, &p, &refusals));
    assert_non_null(strstr(refusals.list->clause, "it does not take softcap"));
    assert_true(chosen_with(GPU_FEATURE_SOFTCAP, &p, &refusals));
    p.has_mask = 1;
    p.mask_shape[2] = p.seqlen_q;
    p.aligned = 0;
    assert_false(chosen_with(GPU_FEATURE_SOFTCAP | GPU_FEATURE_MASK_KEYS, &p, &refusals));
    assert_non_null(strstr(refusals.list->clause, "it does not take masks with query rows, addresses or strides"));
    assert_true(chosen_with(GPU_FEATURE_SOFTCAP | GPU_FEATURE_MASK_ROWS | GPU_FEATURE_UNALIGNED, &p, &refusals));
    p.mask_shape[2] = 1;
    assert_false(chosen_with(GPU_EVERY_FEATURE & ~GPU_FEATURE_MASK_KEYS, &p, &refusals));
    assert_non_null(strstr(refusals.list->clause, "it does not take masks that query rows share"));
}

/* ---- mma.backward_d1024 ---- */

/* Every head dim above 256 has a backward on every architecture; a launch for each gradient that is wanted. */
/* Kernels that look at each key get a plan of tiles where intervals hide some of many keys, and blocks of rows are
 * there that read it. */
static void many_keys_have_a_plan_of_tiles(void **state) {
    (void)state;
    static const struct {
        const char *kernel;
        fdm_pass pass;
        fdm_dtype dtype;
        int64_t keys, head_dim;
        int intervals, row_intervals, needs_dq, planned;
    } rows[] = {
        {"mma.forward", FDM_FORWARD, FDM_FLOAT16, 8192, 128, 1, 0, 0, 1},
        {"mma.forward", FDM_FORWARD, FDM_FLOAT16, 8191, 128, 1, 0, 0, 0},
        {"mma.forward", FDM_FORWARD, FDM_FLOAT16, 8192, 128, 1, 1, 0, 0},
        {"mma.forward", FDM_FORWARD, FDM_FLOAT16, 8192, 128, 0, 0, 0, 0},
        {"mma.forward32", FDM_FORWARD, FDM_FLOAT32, 8192, 64, 1, 0, 0, 1},
        {"mma.backward32", FDM_BACKWARD, FDM_FLOAT32, 8192, 64, 1, 0, 1, 1},
        {"mma.backward32", FDM_BACKWARD, FDM_FLOAT32, 8192, 64, 1, 0, 0, 0},
        {"mma.backward_d1024", FDM_BACKWARD, FDM_FLOAT16, 8192, 512, 1, 0, 1, 1},
        {"mma.backward", FDM_BACKWARD, FDM_FLOAT16, 8192, 128, 1, 0, 1, 0},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_80", &device), FDM_OK);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fdm_problem p = problem_of(1, 4, 4, 1000, rows[i].keys, rows[i].head_dim);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
        p.pass = rows[i].pass;
        p.dtype = rows[i].dtype;
        p.has_intervals = rows[i].intervals;
        p.interval_batch = p.interval_heads = 1;
        p.has_row_intervals = p.row_ranges = rows[i].row_intervals;
        p.row_interval_batch = p.row_interval_heads = 1;
        p.needs_dq = rows[i].needs_dq;
        p.needs_dk = p.needs_dv = p.pass == FDM_BACKWARD;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, rows[i].kernel);
        int planned = 0;
        const int32_t count = family_mma.launches(&family_mma, &plan, requests);
        for (int32_t n = 0; n < count; n++)
            planned |= strcmp(requests[n].entry, "tile_plan") == 0;
        assert_int_equal(planned, rows[i].planned);
        fdm_plan fewer = plan;
        fewer.workspace_bytes -= planned;
        assert_true(!planned || family_mma.launches(&family_mma, &fewer, requests) == 0);
    }
}

static void wide_head_dims_have_a_backward(void **state) {
    (void)state;
    static const struct {
        const char *arch, *choice;
        int64_t head_dim, head_dim_v;
    } rows[] = {
        {"sm_80", "MMA_Backward_64x64_D64_Kept1_S4", 512, 512},
        {"sm_86", "MMA_Backward_64x64_D64_Kept0_S4", 512, 64},
        {"sm_89", "MMA_Backward_64x64_D64_Kept2_S3", 257, 31},
        {"sm_90", "MMA_Backward_64x64_D128_Kept2_S4", 512, 512},
        {"sm_90", "MMA_Backward_64x64_D64_Kept2_S6", 320, 320},
        {"sm_90", "MMA_Backward_32x128_D64_Kept2_S4", 40, 1024},
        {"sm_80", "MMA_Backward_32x128_D64_Kept1_S3", 1024, 1024},
        {"sm_120", "MMA_Backward_32x128_D64_Kept0_S3", 520, 8},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int needs = 1; needs < 8; needs++) {
            fdm_problem p = problem_of(2, 8, 2, 1000, 1000, rows[i].head_dim);
            fdm_device device = {.struct_bytes = sizeof device};
            fdm_plan plan = {.struct_bytes = sizeof plan};
            struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
            p.pass = FDM_BACKWARD;
            p.head_dim_v = rows[i].head_dim_v;
            p.needs_dq = needs & 1, p.needs_dk = needs >> 1 & 1, p.needs_dv = needs >> 2 & 1;
            assert_int_equal(fdm_device_from_name(rows[i].arch, &device), FDM_OK);
            assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
            assert_string_equal(plan.kernel, "mma.backward_d1024");
            assert_string_equal(plan.choice, rows[i].choice);
            assert_true(plan.shared_bytes > 0 && plan.shared_bytes <= device.shared_bytes);
            int launches = 0;
            for (int32_t n = family_mma.launches(&family_mma, &plan, requests) - 1; n >= 0; n--)
                if (strcmp(requests[n].entry, "mma_backward_d1024") == 0) {
                    assert_int_equal(requests[n].shared_bytes, plan.shared_bytes);
                    launches++;
                }
            assert_int_equal(launches, (needs & 1) + (needs >> 1 & 1) + (needs >> 2 & 1));
            p.head_dim = 1025;
            assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_ERROR_UNSUPPORTED);
            assert_non_null(strstr(fdm_last_error(), "head dims are at most 1024"));
        }
}

/* Compiled for 10.0, steps of 32 keys spill at head dim 256 beside packed sequences or lengths on the device. */
static void forward_of_256_takes_short_steps_where_long_ones_spill(void **state) {
    (void)state;
    static const struct {
        const char *device;
        int64_t head_dim;
        int varlen, seqused_k;
        int32_t block_m, block_n;
    } rows[] = {
        {"sm_80", 256, 1, 0, 128, 32},  {"sm_90", 256, 1, 0, 128, 64}, {"sm_100", 256, 0, 0, 128, 32},
        {"sm_100", 256, 1, 0, 64, 16},  {"sm_100", 256, 0, 1, 64, 16}, {"sm_100", 192, 1, 0, 128, 32},
        {"sm_120", 160, 1, 0, 128, 32}, {"sm_120", 256, 1, 0, 64, 16},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fdm_problem p = problem_of(2, 8, 8, 4096, 4096, rows[i].head_dim);
        p.varlen = rows[i].varlen;
        p.has_seqused_k = rows[i].seqused_k;
        fdm_device device = {.struct_bytes = sizeof device};
        fdm_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(fdm_device_from_name(rows[i].device, &device), FDM_OK);
        assert_int_equal(fdm_plan_variant(&device, &p, "mma.forward", 0, &plan), FDM_OK);
        assert_int_equal(plan.block_m, rows[i].block_m);
        assert_int_equal(plan.block_n, rows[i].block_n);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(wide_head_dims_have_a_backward),
                                       cmocka_unit_test(splits),
                                       cmocka_unit_test(decode_takes_every_feature),
                                       cmocka_unit_test(splits_where_keys_hide),
                                       cmocka_unit_test(decode_leaves_to_others),
                                       cmocka_unit_test(l2_groups),
                                       cmocka_unit_test(unnamed_features_are_refused),
                                       cmocka_unit_test(many_keys_have_a_plan_of_tiles),
                                       cmocka_unit_test(forward_of_256_takes_short_steps_where_long_ones_spill)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
