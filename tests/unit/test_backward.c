/* test_backward.c: what the 16-bit backward decides beside its tile: where groups of heads are split, what is made in a
 * fixed order, and which plans from files it does not launch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "families/families.h"
#include "families/mma/backward/mma_backward.h"
#include "families/mma/mma_family.h"
#include "gpu/gpu_backward.h"

PLAN_PARAMETER_STRUCT(MMA_BACKWARD_PARAMETERS);

static fdm_problem problem_of(int64_t batch, int64_t heads, int64_t heads_kv, int64_t seqlen, int64_t head_dim) {
    fdm_problem p = fdm_problem_default();
    p.pass = FDM_BACKWARD;
    p.dtype = FDM_BFLOAT16;
    p.batch = batch;
    p.heads = heads;
    p.heads_kv = heads_kv;
    p.seqlen_q = p.seqlen_k = seqlen;
    p.head_dim = p.head_dim_v = head_dim;
    return p;
}

static fdm_plan plan_of(const char *name, const fdm_problem *p) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_options options = fdm_options_default();
    options.kernel = "mma.backward"; /* hopper.backward comes before it */
    assert_int_equal(fdm_device_from_name(name, &device), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, p, &options, &plan), FDM_OK);
    assert_string_equal(plan.kernel, "mma.backward");
    return plan;
}

static int64_t constant(const struct cuda_kernel_request *request, const char *name) {
    for (int32_t i = 0; i < request->num_constants; i++)
        if (strcmp(request->constants[i].name, name) == 0)
            return request->constants[i].value;
    return -1;
}

/* SPLIT and DETERMINISTIC of the main kernel, and whether the parts are added. */
struct launched {
    int64_t split, deterministic;
    int combines;
};
static struct launched launched_by(const fdm_plan *plan) {
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    struct launched l = {-1, -1, 0};
    const int32_t count = family_mma.launches(&family_mma, plan, requests);
    for (int32_t i = 0; i < count; i++) {
        l.combines += strcmp(requests[i].entry, "backward_combine") == 0;
        if (strcmp(requests[i].entry, "mma_backward") == 0)
            l = (struct launched){constant(&requests[i], "SPLIT"), constant(&requests[i], "DETERMINISTIC"), l.combines};
    }
    return l;
}

static void groups_are_split_where_blocks_are_few(void **state) {
    (void)state;
    static const struct {
        int64_t batch, heads, heads_kv, seqlen, head_dim;
        int32_t causal, parts;
    } cases[] = {
        {1, 32, 1, 2048, 128, 0, 8},                               /* 16 blocks to 128 of 132 multiprocessors */
        {1, 32, 4, 2048, 128, 0, 2}, {1, 32, 4, 2048, 128, 1, 8},  /* unlike in length: the more the better */
        {1, 28, 4, 1024, 128, 0, 7}, {1, 32, 32, 2048, 128, 0, 1}, /* nothing to split */
        {8, 32, 8, 4096, 128, 0, 1},                               /* blocks enough */
        {1, 32, 8, 16, 64, 1, 1},                                  /* too little work for one more launch */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p =
            problem_of(cases[i].batch, cases[i].heads, cases[i].heads_kv, cases[i].seqlen, cases[i].head_dim);
        p.causal = cases[i].causal;
        const fdm_plan plan = plan_of("sm_90", &p);
        const struct launched l = launched_by(&plan);
        assert_int_equal(parameters_of(&plan).GROUP_PARTS, cases[i].parts);
        assert_int_equal(l.split, cases[i].parts > 1);
        assert_int_equal(l.combines, cases[i].parts > 1);
        assert_int_equal(strstr(plan.reason, "whose sums are added") != NULL, cases[i].parts > 1);
        fdm_problem whole = p; /* the parts' sums are the difference */
        whole.heads_kv = whole.heads;
        const fdm_plan unsplit = plan_of("sm_90", &whole);
        const int64_t sums = cases[i].parts * p.heads_kv * p.batch * p.seqlen_k * 2 * cases[i].head_dim * 4;
        assert_int_equal(plan.workspace_bytes - unsplit.workspace_bytes, cases[i].parts > 1 ? sums : 0);
    }
}

static int32_t in_turn_of(const fdm_problem *p) {
    const fdm_plan plan = plan_of("sm_90", p);
    return parameters_of(&plan).IN_TURN;
}

static void heads_take_turns_where_every_block_walks_from_the_first_row(void **state) {
    (void)state;
    static const struct {
        int64_t batch, heads, seqlen, head_dim;
        int32_t causal, deterministic, heads_in_turn;
    } cases[] = {
        {1, 16, 8192, 128, 0, 1, 16}, /* 132 blocks at a time: at most 17 heads */
        {2, 16, 8192, 128, 0, 1, 16}, /* 32 heads in two equal parts */
        {2, 32, 8192, 64, 0, 1, 32},  /* 264 blocks at a time: at most 33 */
        {1, 1, 64, 64, 0, 1, 1},      {2, 16, 8192, 128, 1, 1, 0}, {2, 16, 8192, 128, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = problem_of(cases[i].batch, cases[i].heads, cases[i].heads, cases[i].seqlen, cases[i].head_dim);
        p.causal = cases[i].causal;
        p.deterministic = cases[i].deterministic;
        assert_int_equal(in_turn_of(&p), cases[i].heads_in_turn);
        p.has_bias = p.needs_dbias = 1; /* heads queue for its gradient: each after the one before */
        p.bias_dtype = p.dtype;
        p.bias_shape[2] = p.seqlen_q;
        p.bias_shape[3] = p.seqlen_k;
        assert_int_equal(in_turn_of(&p), cases[i].heads == 1 ? cases[i].heads_in_turn : 0);
    }
}

static void shared_biases_have_an_order(void **state) {
    (void)state;
    fdm_problem p = problem_of(2, 8, 2, 512, 64);
    p.has_bias = p.needs_dbias = 1;
    p.bias_dtype = p.dtype;
    p.bias_shape[2] = p.seqlen_q;
    p.bias_shape[3] = p.seqlen_k;
    p.needs_dq = 0;
    fdm_plan plan = plan_of("sm_90", &p);
    const int64_t loose = plan.workspace_bytes;
    assert_int_equal(launched_by(&plan).deterministic, 0);
    p.deterministic = 1;
    plan = plan_of("sm_90", &p);
    assert_int_equal(launched_by(&plan).deterministic, 1);
    assert_true(plan.workspace_bytes > loose);
    p.bias_shape[0] = p.batch;
    p.bias_shape[1] = p.heads;
    plan = plan_of("sm_90", &p); /* of one pair each: nothing is added */
    assert_int_equal(launched_by(&plan).deterministic, 0);
    p.bias_shape[1] = p.bias_shape[3] = 1;
    plan = plan_of("sm_90", &p); /* of all keys of a row: that of lse */
    assert_int_equal(launched_by(&plan).deterministic, 0);
    assert_int_equal(gpu_dbias_kind(&p), GPU_DBIAS_ROWS);
}

/* Where a block of half the warps has no ring, a block mask with row intervals and a shared bias' gradient spill. */
static void half_the_warps_are_too_few_registers(void **state) {
    (void)state;
    static const struct {
        const char *device;
        int32_t v_in_registers;
    } cases[] = {{"sm_80", 1}, {"sm_86", 1}, {"sm_89", 1}, {"sm_90", 0}, {"sm_100", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = problem_of(1, 8, 8, 8192, 64);
        p.has_bias = p.needs_dbias = 1;
        p.bias_dtype = p.dtype;
        p.bias_shape[2] = p.seqlen_q;
        p.bias_shape[3] = p.seqlen_k;
        p.has_row_intervals = 1;
        assert_int_equal(gpu_dbias_constant(&p), GPU_DBIAS_SUMS);
        if (strcmp(cases[i].device, "sm_86") != 0) /* which has V in registers anyway */
            assert_int_equal(plan_of(cases[i].device, &p).v_in_registers, 0);
        p.block_mask_size = 128;
        assert_int_equal(plan_of(cases[i].device, &p).v_in_registers, cases[i].v_in_registers);
    }
}

/* What shared memory is left buys; who brings the rows of a ring. */
static void rings(void **state) {
    (void)state;
    enum { PLAIN, UNALIGNED, PACKED, INTERVALS, KEY_BIAS, NO_MAP };
    static const struct {
        const char *device;
        int64_t head_dim;
        int features, ring, tma;
    } cases[] = {
        {"sm_90", 32, PLAIN, 3, 1},      {"sm_90", 64, PLAIN, 2, 1},
        {"sm_90", 96, PLAIN, 3, 1},      {"sm_90", 128, PLAIN, 3, 1},
        {"sm_90", 128, INTERVALS, 3, 1}, {"sm_90", 128, KEY_BIAS, 2, 1}, /* a word more for each key */
        {"sm_90", 256, PLAIN, 2, 1},     {"sm_90", 128, UNALIGNED, 3, 0},
        {"sm_90", 128, NO_MAP, 3, 0}, /* strides that TMA does not take */
        {"sm_90", 128, PACKED, 3, 0}, /* after a sequence's last row comes another's */
        {"sm_90", 224, PLAIN, 0, 0},  /* no shares of whole 64 columns */
        {"sm_80", 64, PLAIN, 0, 0},   /* two blocks would not fit */
        {"sm_80", 96, PLAIN, 2, 0},   /* no TMA */
        {"sm_120", 128, PLAIN, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = problem_of(1, 8, 8, 8192, cases[i].head_dim);
        p.aligned = cases[i].features != UNALIGNED;
        p.q_mappable = cases[i].features != NO_MAP;
        p.varlen = cases[i].features == PACKED;
        p.total_q = p.total_k = p.varlen ? 8192 : 0;
        p.has_intervals = cases[i].features == INTERVALS;
        p.interval_batch = p.interval_heads = p.has_intervals;
        p.has_bias = cases[i].features == KEY_BIAS;
        p.bias_dtype = p.dtype;
        p.bias_shape[3] = p.has_bias ? p.seqlen_k : 1;
        fdm_plan plan = plan_of(cases[i].device, &p);
        struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
        assert_int_equal(parameters_of(&plan).RING, cases[i].ring);
        assert_int_equal(parameters_of(&plan).TMA, cases[i].tma);
        assert_int_equal(strstr(plan.reason, "by TMA") != NULL, cases[i].tma);
        assert_true(family_mma.launches(&family_mma, &plan, requests) > 0);
        struct parameters x = parameters_of(&plan);
        x.TMA = !x.TMA;
        write_parameters(&plan, x);
        /* A plan from a file may do without TMA, and ask for it where there is a ring that it can fill. */
        assert_int_equal(family_mma.launches(&family_mma, &plan, requests) > 0,
                         !x.TMA || (x.RING && p.aligned && p.q_mappable && !p.varlen));
    }
}

/* No sequences have no mean length. */
static void no_packed_sequences(void **state) {
    (void)state;
    fdm_problem p = problem_of(0, 8, 2, 0, 128);
    p.varlen = 1;
    const fdm_plan plan = plan_of("sm_90", &p);
    assert_int_equal(parameters_of(&plan).GROUP_PARTS, 1);
}

static void foreign_plans_launch_nothing(void **state) {
    (void)state;
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    const fdm_problem p = problem_of(1, 32, 1, 2048, 128);
    const fdm_plan plan = plan_of("sm_90", &p);
    static const int32_t parts[] = {-1, 0, 3, 16, 33, 64}; /* 16: the workspace is too small for it */
    assert_true(family_mma.launches(&family_mma, &plan, requests) > 0);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        fdm_plan changed = plan;
        struct parameters x = parameters_of(&plan);
        x.GROUP_PARTS = parts[i];
        write_parameters(&changed, x);
        assert_int_equal(family_mma.launches(&family_mma, &changed, requests), 0);
    }
    fdm_plan fewer = plan;
    struct parameters x = parameters_of(&plan);
    x.GROUP_PARTS = 4;
    write_parameters(&fewer, x);
    assert_true(family_mma.launches(&family_mma, &fewer, requests) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_are_split_where_blocks_are_few),
        cmocka_unit_test(heads_take_turns_where_every_block_walks_from_the_first_row),
        cmocka_unit_test(shared_biases_have_an_order),
        cmocka_unit_test(half_the_warps_are_too_few_registers),
        cmocka_unit_test(rings),
        cmocka_unit_test(no_packed_sequences),
        cmocka_unit_test(foreign_plans_launch_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
