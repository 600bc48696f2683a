/* test_hopper_plans.c: which problems hopper.gather and hopper.backward take on 9.0, by which tile, and what they leave
 * to others; how the backwards divide groups of heads. */
#include <stdio.h>

#include "families/families.h"
#include "gpu/gpu_family.h"
#include "plan_cases.h"

/* Each query head has keys of its own. */
static fdm_problem hopper_problem(int features, int64_t rows, int64_t head_dim) {
    fdm_problem p = problem_of(FDM_FORWARD, features, rows, head_dim, head_dim);
    p.heads_kv = p.heads;
    return p;
}

static void takes_what_is_seen_key_by_key(void **state) {
    (void)state;
    static const struct {
        int features;
        int64_t rows, head_dim;
        const char *kernel, *tile; /* tile: the beginning of the choice code */
    } cases[] = {
        {INTERVALS | CAUSAL, 8192, 128, "hopper.forward", "SM90_Wgmma_128x128_Q2_"},
        {INTERVALS | CAUSAL, 8192, 64, "hopper.forward", "SM90_Wgmma_192x128_K4_Q2_"},
        {INTERVALS | CAUSAL, 1024, 128, "hopper.gather", "SM90_Gather_128x64_S2_Q1_Turns_Longest"}, /* few blocks */
        {INTERVALS | CAUSAL | BIAS, 8192, 64, "hopper.gather", "SM90_Gather_192x96_"},
        {MASK, 8192, 96, "hopper.forward", "SM90_Wgmma_128x128_"},
        {MASK, 128, 96, "hopper.gather", "SM90_Gather_128x64_"},
        {INTERVALS | MASK, 8192, 96, "hopper.gather", "SM90_Gather_192x64_"},
        {BIAS, 8192, 192, "hopper.gather", "SM90_Gather_128x64_"},
        {INTERVALS, 8192, 256, "hopper.forward", "SM90_Wgmma_128x64_"},
        {INTERVALS | BIAS, 8192, 256, "hopper.gather", "SM90_Gather_128x64_"},
        {INTERVALS | MASK | BIAS, 65, 16, "hopper.gather", "SM90_Gather_192x96_"},
        {CAUSAL, 8192, 128, "hopper.forward", "SM90_Wgmma_"},
        {MASK | ROWS, 8192, 128, "hopper.forward", "SM90_Wgmma_"},
        {INTERVALS | MASK | ROWS, 8192, 128, "mma.forward", "MMA_Forward_"},
        {INTERVALS | BIAS | ROWS, 8192, 128, "mma.forward", "MMA_Forward_"},
        {INTERVALS | FAR, 8192, 128, "hopper.forward", "SM90_Wgmma_128x128_"},
        {INTERVALS | FAR | BIAS, 8192, 128, "mma.forward", "MMA_Forward_"},
        {INTERVALS, 8192, 264, "mma.forward_d1024", ""},
        {INTERVALS, 1, 128, "mma.decode", "MMA_Decode_"},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fdm_problem p = hopper_problem(cases[i].features, cases[i].rows, cases[i].head_dim);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, cases[i].kernel);
        assert_memory_equal(plan.choice, cases[i].tile, strlen(cases[i].tile));
        assert_true(plan.shared_bytes <= device.shared_bytes);
    }
}

/* However many problems of few rows there are. */
static void leaves_few_rows_of_ranges(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (int64_t rows = 64; rows < 66; rows++) {
        fdm_problem p = hopper_problem(INTERVALS, rows, 128);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        p.batch = 256;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, rows == 64 ? "mma.forward" : "hopper.forward");
    }
}

static void backward_takes_what_it_names(void **state) {
    (void)state;
    static const struct {
        int features;
        int64_t rows, head_dim;
        int32_t heads_kv, heads_of_keys; /* of intervals and masks */
        const char *kernel, *tile, *words;
    } cases[] = {
        {CAUSAL, 8192, 128, 16, 1, "hopper.backward", "SM90_Wgmma_64x128_R3_DS2", "3 stages of Q, 3 of dO"},
        {INTERVALS | CAUSAL, 8192, 128, 16, 16, "hopper.backward", "SM90_Wgmma_64x128_R3_DS2_Spacious",
         "3 stages of Q, 3 of dO"},
        {INTERVALS, 8192, 64, 16, 1, "hopper.backward", "SM90_Wgmma_64x128_R3_DS2_Spacious",
         "scattered keys in the order of the last row that sees them"},
        {MASK, 8192, 96, 16, 16, "hopper.backward", "SM90_Wgmma_64x128_R3_DS2_Spacious", ""},
        {INTERVALS, 8192, 128, 4, 4, "hopper.backward", "SM90_Wgmma_64x128_R3_DS2_Spacious", ""},
        {INTERVALS, 8192, 128, 4, 16, "mma.backward", "", "of keys of their own"},
        {MASK, 8192, 128, 4, 16, "mma.backward", "", "of keys of their own"},
        {INTERVALS, 131072, 128, 16, 1, "hopper.backward", "", ""},
        {INTERVALS, 131073, 128, 16, 1, "mma.backward", "", "at most 131072 query rows"},
        {INTERVALS, 8192, 136, 16, 1, "hopper.backward_2pass", "", "head dims are at most 128"},
        {BIAS | ROWS, 8192, 128, 4, 1, "hopper.backward", "SM90_Wgmma_64x128_R3_DO2_DS2_Spacious", "2 of dO"},
        {MASK | ROWS, 8192, 128, 16, 1, "hopper.backward", "SM90_Wgmma_64x128_R3_DO2_DS2_Spacious", "2 of dO"},
        {MASK | BIAS | ROWS, 8192, 128, 16, 1, "hopper.backward", "SM90_Wgmma_64x128_R2_DS2_Spacious", "2 stages of Q"},
        {MASK | BIAS | ROWS | INTERVALS, 8192, 64, 16, 1, "hopper.backward", "SM90_Wgmma_64x128_R3_DS2_Spacious", ""},
        {BIAS | INTERVALS, 8192, 128, 16, 16, "hopper.backward", "SM90_Wgmma_64x128_R3_DO2_DS2_Spacious",
         "in the order"},
        {BIAS | SOFTCAP, 8192, 128, 16, 1, "mma.backward", "", "no softcap beside a bias"},
        {SOFTCAP | CAUSAL, 8192, 128, 16, 1, "hopper.backward", "SM90_Wgmma_64x128_R3_DS2", ""},
        {PACKED | CAUSAL, 8192, 64, 16, 1, "hopper.backward", "SM90_Wgmma_64x192_R3_DS2_RS", ""},
        {PACKED | MASK | ROWS, 8192, 128, 16, 1, "mma.backward", "", "rows of mask and bias"},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = hopper_problem(cases[i].features, cases[i].rows, cases[i].head_dim);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        p.pass = FDM_BACKWARD;
        p.needs_dq = p.needs_dk = p.needs_dv = 1;
        p.heads_kv = cases[i].heads_kv;
        p.interval_heads = p.mask_shape[1] = cases[i].heads_of_keys;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, cases[i].kernel);
        assert_memory_equal(plan.choice, cases[i].tile, strlen(cases[i].tile));
        if (strcmp(cases[i].kernel, "hopper.backward") == 0) {
            assert_non_null(strstr(plan.reason, cases[i].words));
        } else {
            fdm_options options = fdm_options_default();
            options.kernel = "hopper.backward";
            assert_int_not_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
            assert_non_null(strstr(fdm_last_error(), cases[i].words));
            continue;
        }
        assert_true(plan.shared_bytes <= device.shared_bytes);
    }
}

/* hopper.backward_2pass takes what it does not refuse above head dim 128; below, or beside a softcap, where it is
 * named. */
static void wide_takes_wide_heads(void **state) {
    (void)state;
    static const struct {
        int features;
        int64_t head_dim;
        const char *tile, *words; /* words: of the refusal; NULL: it runs */
    } cases[] = {
        {CAUSAL, 256, "V1_P2", NULL},
        {SOFTCAP | CAUSAL, 256, "V1_P2", NULL},
        {PACKED, 192, "V2_P2", NULL},
        {MASK | ROWS, 256, "V1_P1", NULL},
        {BIAS | ROWS, 256, "V1_P1", NULL},
        {MASK | BIAS | ROWS | CAUSAL, 256, "V1_P1", NULL},
        {MASK | BIAS | ROWS, 136, "V2_P2", NULL},
        {SOFTCAP | MASK | ROWS, 128, "V2_P2", NULL},
        {MASK, 256, "V1_P2", NULL},
        {MASK | PACKED | CAUSAL, 256, "V1_P2", NULL},
        {INTERVALS | PACKED, 160, "V2_P2", NULL},
        {INTERVALS | BIAS | ROWS, 256, NULL, "no biases, and no masks with rows"},
        {BIAS | ROWS | SOFTCAP, 256, NULL, "no softcap beside a bias"},
        {PACKED | MASK | ROWS, 256, NULL, "rows of mask and bias"},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = hopper_problem(cases[i].features, 8192, cases[i].head_dim);
        fdm_options options = fdm_options_default();
        fdm_plan plan = {.struct_bytes = sizeof plan};
        p.pass = FDM_BACKWARD;
        p.needs_dq = p.needs_dk = p.needs_dv = 1;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, cases[i].head_dim <= 128                        ? "hopper.backward"
                                         : cases[i].words || cases[i].features & SOFTCAP ? "mma.backward"
                                                                                         : "hopper.backward_2pass");
        options.kernel = "hopper.backward_2pass";
        if (cases[i].words) {
            assert_int_not_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
            assert_non_null(strstr(fdm_last_error(), cases[i].words));
            continue;
        }
        assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
        assert_non_null(strstr(plan.choice, cases[i].tile));
        assert_true(plan.shared_bytes <= device.shared_bytes);
    }
}

/* Row intervals have a tile plan, beside what they stand beside: in the forward bytes instead, where tiles of a mask or
 * bias are loaded. */
static void plans_row_intervals(void **state) {
    (void)state;
    static const struct {
        fdm_pass pass;
        int features;
        int64_t head_dim;
        const char *kernel;
        int planned;
    } cases[] = {
        {FDM_FORWARD, 0, 128, "hopper.forward", 1},
        {FDM_FORWARD, CAUSAL | PACKED, 256, "hopper.forward", 1},
        {FDM_FORWARD, INTERVALS | CAUSAL, 64, "hopper.forward", 1},
        {FDM_FORWARD, MASK | ROWS, 128, "hopper.forward", 0},
        {FDM_FORWARD, BIAS, 128, "mma.forward", 0},
        {FDM_BACKWARD, 0, 128, "hopper.backward", 1},
        {FDM_BACKWARD, CAUSAL | PACKED, 64, "hopper.backward", 1},
        {FDM_BACKWARD, MASK | BIAS | ROWS, 128, "hopper.backward", 1},
        {FDM_BACKWARD, INTERVALS | SOFTCAP, 96, "hopper.backward", 1},
        {FDM_BACKWARD, CAUSAL, 256, "hopper.backward_2pass", 1},
        {FDM_BACKWARD, INTERVALS | PACKED, 160, "hopper.backward_2pass", 1},
        {FDM_BACKWARD, MASK | ROWS, 256, "mma.backward", 0},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = hopper_problem(cases[i].features, 8192, cases[i].head_dim);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
        p.pass = cases[i].pass;
        p.needs_dq = p.needs_dk = p.needs_dv = p.pass == FDM_BACKWARD;
        p.has_row_intervals = 1;
        p.row_ranges = 2;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, cases[i].kernel);
        int planned = 0;
        const int32_t count =
            strncmp(plan.kernel, "hopper", 6) == 0 ? family_hopper.launches(&family_hopper, &plan, requests) : 0;
        for (int32_t n = 0; n < count; n++)
            planned |= strcmp(requests[n].entry, "tile_plan") == 0;
        assert_int_equal(planned, cases[i].planned);
    }
}

/* The constant of that name of the kernel that a plan launches by `entry`; -1: it launches none. */
static int64_t constant_of(const fdm_plan *plan, const char *entry, const char *name) {
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    const int32_t count = family_hopper.launches(&family_hopper, plan, requests);
    for (int32_t i = 0; i < count; i++)
        for (int32_t c = 0; c < requests[i].num_constants && strcmp(requests[i].entry, entry) == 0; c++)
            if (strcmp(requests[i].constants[c].name, name) == 0)
                return requests[i].constants[c].value;
    return -1;
}

/* A fixed order beside masks, intervals and shared biases is kept too; a kernel finds the turns where these say
 * which blocks come to which rows. */
static void backward_keeps_an_order(void **state) {
    (void)state;
    static const struct {
        int features, heads_kv, deterministic;
        const char *chosen;
        int visits;        /* a kernel finds turns */
        const char *words; /* of the refusal by name, or NULL */
    } cases[] = {
        {CAUSAL, 16, 1, "hopper.backward", 0, NULL},
        {INTERVALS | CAUSAL, 16, 0, "hopper.backward", 0, NULL},
        {INTERVALS | CAUSAL, 16, 1, "hopper.backward", 1, NULL},
        {INTERVALS, 4, 1, "hopper.backward", 1, NULL},
        {MASK | ROWS, 16, 1, "hopper.backward", 1, NULL},
        {BIAS, 16, 1, "hopper.backward", 1, NULL},
        {BIAS | ROWS, 16, 0, "hopper.backward", 0, NULL},
        {BIAS | ROWS, 16, 1, "hopper.backward", 0, NULL},
        {BIAS | MASK | ROWS, 16, 1, "hopper.backward", 1, NULL},
        {BIAS | ROWS, 4, 1, "mma.backward", 0, "do not share the gradient of a bias"},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = hopper_problem(cases[i].features, 8192, 128);
        fdm_options options = fdm_options_default();
        fdm_plan plan = {.struct_bytes = sizeof plan}, unordered = {.struct_bytes = sizeof unordered};
        p.pass = FDM_BACKWARD;
        p.needs_dq = p.needs_dk = p.needs_dv = 1;
        p.needs_dbias = p.has_bias;
        p.heads_kv = cases[i].heads_kv;
        p.deterministic = cases[i].deterministic;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, cases[i].chosen);
        options.kernel = "hopper.backward";
        if (cases[i].words) {
            assert_int_not_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
            assert_non_null(strstr(fdm_last_error(), cases[i].words));
            continue;
        }
        assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
        assert_int_equal(constant_of(&plan, "hopper_backward", "DETERMINISTIC"), p.deterministic);
        assert_int_equal(constant_of(&plan, "hopper_dq_order", "INTERVALS"), cases[i].visits ? p.has_intervals : -1);
        p.deterministic = 0; /* words for turns: a thousandth of what is there without them */
        assert_int_equal(fdm_plan_attention(&device, &p, &options, &unordered), FDM_OK);
        assert_true(plan.workspace_bytes - unordered.workspace_bytes <= unordered.workspace_bytes / 1000);
    }
}

/* Heads are packed and keys split where query rows are few; K and V are copied where many blocks of rows read them. */
static void forward_takes_the_shortest_way(void **state) {
    (void)state;
    static const struct {
        int features;
        int64_t batch, rows, heads, heads_kv, head_dim;
        const char *kernel, *way; /* way: what the choice code has after the tile; NULL: none of these words */
    } cases[] = {
        {CAUSAL, 1, 32, 32, 4, 128, "hopper.forward", "_Packed4_Split_"},
        {CAUSAL, 32, 32, 32, 4, 128, "hopper.forward", "_Packed4_Dynamic"},
        {0, 32, 96, 48, 4, 128, "hopper.forward", "_Packed4"}, /* of twelve */
        {0, 32, 32, 15, 5, 128, "hopper.forward", NULL},       /* three heads: no power of two */
        {CAUSAL, 1, 32, 16, 16, 128, "hopper.forward", "_Turns_Split_"},
        {0, 4, 128, 64, 8, 64, "hopper.forward", NULL}, /* a tile of 128 rows is full */
        {0, 64, 128, 64, 8, 128, "hopper.forward", NULL},
        {MASK | ROWS, 32, 32, 32, 4, 128, "hopper.forward", NULL},
        {CAUSAL | PACKED, 32, 32, 32, 4, 128, "hopper.forward", "_Packed4_Longest"},
        {CAUSAL | PACKED, 1, 32, 32, 4, 128, "hopper.forward", NULL},
        {0, 8, 1, 32, 4, 128, "mma.decode", NULL},
        {0, 8, 4, 64, 2, 128, "hopper.forward", "_Packed32_Split_"},
        {0, 1, 4096, 16, 16, 200, "hopper.forward", "_CopiedKV_"},
        {0, 1, 4096, 16, 16, 208, "hopper.forward", NULL},
        {CAUSAL, 1, 512, 16, 16, 200, "hopper.forward", "Q1_Split_"}, /* too few blocks for copies */
        {FAR, 4, 4096, 16, 16, 100, "hopper.forward", "_Copied_"},
        {FAR, 1, 128, 2, 2, 100, "mma.forward", NULL},
        {FAR | PACKED, 4, 4096, 16, 16, 100, "mma.forward", NULL},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = hopper_problem(cases[i].features, cases[i].rows, cases[i].head_dim);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        p.batch = cases[i].batch;
        p.heads = cases[i].heads;
        p.heads_kv = cases[i].heads_kv;
        p.total_q = p.varlen ? p.batch * p.seqlen_q : 0;
        p.total_k = p.varlen ? p.batch * p.seqlen_k : 0;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, cases[i].kernel);
        if (cases[i].way)
            assert_non_null(strstr(plan.choice, cases[i].way));
        else
            assert_true(!strstr(plan.choice, "_Packed") && !strstr(plan.choice, "_Split") &&
                        !strstr(plan.choice, "_Copied"));
    }
}

/* Rows of a tile by what all items take on 132 multiprocessors; a static order where pairs of blocks are equal. */
static void forward_takes_the_items_that_end_first(void **state) {
    (void)state;
    static const struct {
        int features;
        int64_t batch, length, heads, head_dim;
        const char *choice;
    } cases[] = {
        {0, 1, 1024, 4, 64, "_128x128_Q2_Turns_Longest"}, /* few: the shorter item, each on a multiprocessor */
        {CAUSAL, 1, 1024, 4, 64, "_128x128_Q2_Turns_Longest"},
        {0, 2, 640, 16, 64, "_192x128_Q2_Turns_Longest"}, /* 128 items instead of 160 */
        {0, 64, 256, 32, 64, "_128x128_Q2_Turns_Static"}, /* 256 rows are two tiles of either */
        {0, 32, 512, 32, 64, "_192x128_Q2_Turns_Static"},
        {CAUSAL, 32, 512, 32, 64, "_192x128_K4_Q2_Turns_Dynamic"},
        {CAUSAL, 1, 16384, 32, 64, "_192x128_K4_Q2_Turns_Dynamic"},
        {0, 26, 640, 32, 96, "_128x128_Q2_Turns_Static"},
        {0, 8, 1536, 16, 96, "_192x96_Q1_Turns_Static"},
        {0, 2, 640, 16, 96, "_192x96_Q1_Turns_Longest"},         /* one wave instead of two */
        {CAUSAL, 32, 512, 16, 128, "_128x128_Q2_Turns_Static"},  /* two pairs a head */
        {CAUSAL, 42, 384, 16, 128, "_128x128_Q2_Turns_Dynamic"}, /* three blocks */
        {CAUSAL, 1, 512, 4, 128, "_128x128_Q2_Turns_Longest"},
        {CAUSAL, 16, 995, 2, 128, "_128x128_Q2_Turns_Static"}, /* 128 pairs, one each */
        {CAUSAL, 8, 4814, 2, 192, "_128x96_Q1_Turns_Dynamic"}, /* 304 pairs: a last wave of 40 */
        {CAUSAL, 1, 8104, 32, 192, "_128x96_Q1_Turns_Static"}, /* 1024 pairs: one of 100 */
        {CAUSAL, 4, 3126, 4, 96, "_192x96_Q1_Turns_Dynamic"},
        {MASK | ROWS, 3, 1229, 12, 128, "_128x64_Q2_S2_Turns_Dynamic"},
        {CAUSAL, 1, 7438, 1, 128, "_Split_Dynamic"}, /* 59 items */
        {0, 1, 5081, 1, 64, "_Split_Static"},
        {0, 1, 10295, 2, 128, "_128x128_Q2_Turns_Static"}, /* 162 items */
        {CAUSAL, 24, 640, 8, 256, "_128x64_Q1_Dynamic"},
        {CAUSAL, 24, 128, 8, 256, "_128x64_Q1_Static"}, /* one block a head: nothing to pair */
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = hopper_problem(cases[i].features, cases[i].length, cases[i].head_dim);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        p.batch = cases[i].batch;
        p.heads = p.heads_kv = cases[i].heads;
        p.seqlen_k = cases[i].length;
        if (p.has_mask)
            p.mask_shape[2] = p.mask_shape[3] = cases[i].length;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, "hopper.forward");
        assert_non_null(strstr(plan.choice, cases[i].choice));
    }
}

/* The registers of all threads are the multiprocessor's: more would wait for ever, at setmaxnreg. */
/* A plan that leaves multiprocessors to others is that of a device without them, and at least one stays. */
static void leaves_multiprocessors(void **state) {
    (void)state;
    const fdm_device device = device_of("sm_90");
    const fdm_problem p = problem_of(FDM_FORWARD, CAUSAL, 8192, 128, 128);
    static const int64_t margins[] = {0, 16, 131, 1000}, left[] = {132, 116, 1, 1};
    for (int i = 0; i < 4; i++) {
        fdm_options options = fdm_options_default();
        fdm_plan plan = {.struct_bytes = sizeof plan}, of_smaller = plan;
        fdm_device smaller = device;
        static char json[4096], words[40];
        options.sm_margin = margins[i];
        smaller.num_sms = (int32_t)left[i];
        assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
        assert_int_equal(fdm_plan_attention(&smaller, &p, NULL, &of_smaller), FDM_OK);
        assert_memory_equal(&plan, &of_smaller, sizeof plan);
        assert_int_equal(fdm_plan_to_json(&plan, json, sizeof json, NULL), FDM_OK);
        snprintf(words, sizeof words, "\"NUM_SMS\": %d", (int)left[i]);
        assert_non_null(strstr(json, words));
    }
    fdm_options options = fdm_options_default();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    options.sm_margin = -1;
    assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "sm_margin is -1"));
}

static void registers_fit(void **state) {
    (void)state;
    static const int64_t head_dims[] = {16, 64, 96, 128, 192, 256};
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof head_dims / sizeof head_dims[0]; i++) {
        const fdm_problem p = hopper_problem(INTERVALS, 8192, head_dims[i]);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        for (int32_t n = 0; !fdm_plan_variant(&device, &p, "hopper.gather", n, &plan); n++) {
            struct cuda_kernel_request request[FAMILY_LAUNCHES_MAX];
            int64_t warpgroups = 0, consumer_registers = 0;
            assert_int_equal(family_hopper.launches(&family_hopper, &plan, request), 1);
            for (int32_t c = 0; c < request->num_constants; c++) {
                if (strcmp(request->constants[c].name, "WARPGROUPS") == 0)
                    warpgroups = request->constants[c].value;
                if (strcmp(request->constants[c].name, "CONSUMER_REGISTERS") == 0)
                    consumer_registers = request->constants[c].value;
            }
            const int64_t at_launch = 65536 / (128 * (warpgroups + 1)) / 8 * 8; /* of each thread */
            const int64_t producer_registers = (warpgroups + 1) * at_launch - warpgroups * consumer_registers;
            assert_true(warpgroups >= 2 && consumer_registers > at_launch);
            assert_true(producer_registers >= 24 && producer_registers < at_launch && producer_registers % 8 == 0);
        }
    }
}

/* The constant PARTS of the kernel that makes dK and dV, and whether the parts are added. */
static void parts_of(const fdm_plan *plan, int64_t *constant, int *combines) {
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    const int32_t count = family_hopper.launches(&family_hopper, plan, requests);
    *constant = -1;
    *combines = 0;
    for (int32_t i = 0; i < count; i++) {
        *combines += strcmp(requests[i].entry, "backward_combine") == 0;
        if (strcmp(requests[i].entry, "hopper_backward") && strcmp(requests[i].entry, "hopper_backward_2pass_dkv"))
            continue;
        for (int32_t c = 0; c < requests[i].num_constants; c++)
            if (strcmp(requests[i].constants[c].name, "PARTS") == 0)
                *constant = requests[i].constants[c].value;
    }
}

static void groups_are_divided(void **state) {
    (void)state;
    static const struct {
        int64_t batch, heads, heads_kv, seqlen, head_dim;
        int causal, parts;
    } cases[] = {
        {1, 32, 1, 2048, 128, 0, 8},                               /* 16 blocks to 128 of 132 multiprocessors */
        {1, 32, 32, 2048, 128, 1, 1}, {8, 32, 8, 4096, 128, 0, 1}, /* nothing to divide; blocks enough */
        {4, 32, 4, 3000, 128, 1, 2}, /* unlike in length: the longest alone take most of the time */
        {1, 32, 8, 16, 64, 1, 1},    /* too little work for one more launch */
        {1, 16, 2, 2048, 256, 0, 2},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = hopper_problem(cases[i].causal ? CAUSAL : 0, cases[i].seqlen, cases[i].head_dim);
        fdm_plan plan = {.struct_bytes = sizeof plan}, whole = {.struct_bytes = sizeof whole};
        int64_t constant;
        int combines;
        p.pass = FDM_BACKWARD;
        p.batch = cases[i].batch;
        p.heads = cases[i].heads;
        p.heads_kv = cases[i].heads_kv;
        p.seqlen_k = p.seqlen_q;
        p.q_mappable = p.keys_mappable = 1;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, cases[i].head_dim > 128 ? "hopper.backward_2pass" : "hopper.backward");
        const int32_t *parts = &plan.parameters[cases[i].head_dim > 128 ? 2 : 1];
        assert_int_equal(*parts, cases[i].parts);
        parts_of(&plan, &constant, &combines);
        assert_int_equal(constant, cases[i].parts > 1);
        assert_int_equal(combines, cases[i].parts > 1);
        assert_int_equal(strstr(plan.reason, "whose sums are added") != NULL, cases[i].parts > 1);
        /* Every way is another, and one of them does not divide the group. */
        int32_t ways = 0, undivided = 0;
        for (; !fdm_plan_variant(&device, &p, plan.kernel, ways, &whole); ways++) {
            undivided += strstr(whole.choice, "_Parts") == NULL;
            assert_int_equal(strcmp(whole.choice, plan.choice) == 0, ways == 0);
            if (!strstr(whole.choice, "_Parts") && cases[i].parts > 1) {
                const int64_t sums = cases[i].parts * p.heads_kv * p.batch * p.seqlen_k * 2 * p.head_dim * 4;
                assert_true(plan.workspace_bytes - whole.workspace_bytes == sums);
            }
        }
        assert_true(undivided >= 1 && ways >= (p.heads > p.heads_kv ? 3 : 1));
        plan.parameters[cases[i].head_dim > 128 ? 2 : 1] = 3; /* 3 divides none of these groups */
        parts_of(&plan, &constant, &combines);
        assert_int_equal(constant, -1);
    }
}

/* 128 keys a block where those of 192 would leave the device idle; not where few rows ask for dS by P in float32. */
static void backward_blocks_fill_the_device(void **state) {
    (void)state;
    static const struct {
        int features;
        int64_t batch, heads, heads_kv, seqlen, total, rows;
        const char *choice;
    } cases[] = {
        {CAUSAL, 1, 4, 4, 6847, 0, 0, "SM90_Wgmma_64x128_R3_DS1_RS"},
        {CAUSAL, 16, 2, 2, 9392, 0, 0, "SM90_Wgmma_64x192_R3_DS2_RS"},
        {0, 1, 1, 1, 16006, 0, 0, "SM90_Wgmma_64x128_R3_DS1_RS"},
        {0, 1, 2, 2, 10491, 0, 0, "SM90_Wgmma_64x192_R3_DS2_RS"},     /* 110 blocks instead of 164 */
        {CAUSAL, 3, 8, 2, 1919, 0, 0, "SM90_Wgmma_64x192_R3_DS2_RS"}, /* the group is divided */
        {CAUSAL | PACKED, 3, 1, 1, 8721, 17149, 0, "SM90_Wgmma_64x128_R3_DS1_RS"},
        {CAUSAL | PACKED, 3, 8, 8, 17172, 27792, 0, "SM90_Wgmma_64x192_R3_DS2_RS"},
        {CAUSAL, 1, 4, 4, 6847, 0, 64, "SM90_Wgmma_64x192_R3_DS2_RS"},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = hopper_problem(cases[i].features, cases[i].seqlen, 64);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        p.pass = FDM_BACKWARD;
        p.batch = cases[i].batch;
        p.heads = cases[i].heads;
        p.heads_kv = cases[i].heads_kv;
        p.seqlen_k = p.seqlen_q;
        p.total_q = p.total_k = cases[i].total;
        if (cases[i].rows)
            p.seqlen_q = cases[i].rows;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_memory_equal(plan.choice, cases[i].choice, strlen(cases[i].choice));
    }
}

/* Prompts and mixtures on a cache, but for what TMA cannot read and what another kernel does sooner. */
static void forward_takes_caches(void **state) {
    (void)state;
    static const struct {
        int features;
        int64_t rows;
        int32_t page, first_key, append_to_row, unmapped, invariance;
        const char *kernel, *words;
    } cases[] = {
        {CAUSAL, 2048, .page = 64, .kernel = "hopper.forward", .words = "TMA reads 64 rows of a page at a time"},
        {CAUSAL, 2048, .page = 16, .kernel = "hopper.forward", .words = "TMA reads 16 rows of a page at a time"},
        {CAUSAL, 2048, .page = 48, .kernel = "hopper.forward", .words = "TMA reads 16 rows of a page at a time"},
        {CAUSAL, 2048, .page = 4096, .kernel = "hopper.forward", .words = "TMA reads 128 rows of a page at a time"},
        {0, 9, .page = 16, .kernel = "hopper.forward", .words = "rows of 8 query heads in a tile"},
        {0, 2048, .page = 0, .kernel = "hopper.forward", .words = "dynamic order"},
        {PACKED | CAUSAL, 2048, .page = 16, .kernel = "hopper.forward", .words = "rows of 8 query heads in a tile"},
        {0, 8, .page = 16, .kernel = "mma.decode", .words = "not hopper.forward: few query rows"},
        {0, 2048, .page = 100, .kernel = "mma.forward", .words = "TMA reads pages of a multiple of 16 rows"},
        {MASK, 2048, .page = 16, .kernel = "mma.forward", .words = "without masks, biases and intervals"},
        {0, 2048, .page = 16, .first_key = 1, .kernel = "mma.forward", .words = "without first_key"},
        {0, 2048, .page = 16, .append_to_row = 1, .kernel = "hopper.forward", .words = "appends new keys"},
        {0, 2048, .page = 0, .append_to_row = 1, .kernel = "mma.forward", .words = "appends to the sequence's own row"},
        {0, 2048, .page = 16, .unmapped = 1, .kernel = "mma.forward", .words = "whose strides are multiples of 16"},
        {0, 2048, .page = 16, .invariance = 1, .kernel = "mma.forward", .words = "it does not take invariance"},
    };
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = hopper_problem(cases[i].features, cases[i].rows, 128);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        p.batch = 16;
        p.heads_kv = p.heads / 8;
        p.seqlen_k = 8192;
        p.total_q = p.varlen ? 4096 : 0;
        p.total_k = 0;
        p.mask_shape[3] = p.has_mask ? p.seqlen_k : 1;
        p.has_cache = 1;
        p.page_size = cases[i].page;
        p.max_pages = p.page_size ? 8192 / p.page_size + 1 : 0;
        p.num_pages = (int32_t)p.batch * (p.page_size ? p.max_pages : 1);
        p.has_first_key = cases[i].first_key;
        p.has_cache_row = cases[i].append_to_row;
        p.new_rows = cases[i].append_to_row * p.batch;
        p.keys_mappable = !cases[i].unmapped;
        p.invariance = cases[i].invariance;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        if (strcmp(plan.kernel, cases[i].kernel) || !strstr(plan.reason, cases[i].words))
            fail_msg("case %d: %s, %s", (int)i, plan.kernel, plan.reason);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(takes_what_is_seen_key_by_key),
                                       cmocka_unit_test(leaves_few_rows_of_ranges),
                                       cmocka_unit_test(leaves_multiprocessors),
                                       cmocka_unit_test(backward_takes_what_it_names),
                                       cmocka_unit_test(backward_keeps_an_order),
                                       cmocka_unit_test(wide_takes_wide_heads),
                                       cmocka_unit_test(plans_row_intervals),
                                       cmocka_unit_test(registers_fit),
                                       cmocka_unit_test(forward_takes_caches),
                                       cmocka_unit_test(forward_takes_the_shortest_way),
                                       cmocka_unit_test(forward_takes_the_items_that_end_first),
                                       cmocka_unit_test(groups_are_divided),
                                       cmocka_unit_test(backward_blocks_fill_the_device)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
