/* plan_cases.h: what tests of plans share: devices by name, attention problems by features, and what a kernel says of
 * each. */
#ifndef FDM_PLAN_CASES_H
#define FDM_PLAN_CASES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "flash_dmattn.h"

static inline fdm_device device_of(const char *name) {
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name(name, &device), FDM_OK);
    return device;
}

enum {
    CAUSAL = 1,
    WINDOW = 2,
    PACKED = 4,
    SOFTCAP = 8,
    MASK = 16,
    BIAS = 32,
    ROWS = 64, /* of mask or bias */
    INTERVALS = 128,
    FAR = 256, /* addresses that are no multiples of 16 */
    NO_LSE = 512,
    DLSE = 1024,
    NEGATIVE = 2048 /* softmax scale */
};

/* bfloat16, 16 heads on 4, 8192 keys. */
static inline fdm_problem problem_of(fdm_pass pass, int features, int64_t rows, int64_t head_dim, int64_t head_dim_v) {
    fdm_problem p = fdm_problem_default();
    p.pass = pass;
    p.dtype = p.bias_dtype = FDM_BFLOAT16;
    p.heads = 16;
    p.heads_kv = 4;
    p.seqlen_q = rows;
    p.seqlen_k = 8192;
    p.head_dim = head_dim;
    p.head_dim_v = head_dim_v;
    p.softmax_scale = features & NEGATIVE ? -0.1 : 0.1;
    p.causal = (features & CAUSAL) != 0;
    p.window_left = features & WINDOW ? 100 : -1;
    p.varlen = (features & PACKED) != 0;
    p.total_q = p.varlen ? rows : 0;
    p.total_k = p.varlen ? p.seqlen_k : 0;
    p.softcap = features & SOFTCAP ? 30 : 0;
    p.has_mask = (features & MASK) != 0;
    p.has_bias = (features & BIAS) != 0;
    p.has_intervals = (features & INTERVALS) != 0;
    p.mask_shape[2] = p.has_mask && features & ROWS ? rows : 1;
    p.bias_shape[2] = p.has_bias && features & ROWS ? rows : 1;
    p.mask_shape[3] = p.has_mask ? p.seqlen_k : 1;
    p.bias_shape[3] = p.has_bias ? p.seqlen_k : 1;
    p.aligned = p.scores_aligned = !(features & FAR);
    p.needs_lse = !(features & NO_LSE);
    p.has_dlse = (features & DLSE) != 0;
    return p;
}

struct plan_case {
    int features;
    int64_t rows, head_dim, head_dim_v;
    const char *choice, *words; /* of its plan; choice NULL: of why it cannot, where it is asked for */
};

/* The kernel is chosen, in this way and for a reason with these words, or says why it cannot. */
static inline void check_plans(const char *kernel, fdm_pass pass, const fdm_device *device,
                               const struct plan_case *cases, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const struct plan_case *c = &cases[i];
        const fdm_problem p = problem_of(pass, c->features, c->rows, c->head_dim, c->head_dim_v);
        fdm_options options = fdm_options_default();
        fdm_plan plan = {.struct_bytes = sizeof plan};
        options.kernel = c->choice ? NULL : kernel;
        const fdm_status status = fdm_plan_attention(device, &p, &options, &plan);
        if (!c->choice) {
            assert_int_not_equal(status, FDM_OK);
            assert_non_null(strstr(fdm_last_error(), c->words));
            continue;
        }
        assert_int_equal(status, FDM_OK);
        assert_string_equal(plan.kernel, kernel);
        assert_string_equal(plan.choice, c->choice);
        assert_non_null(strstr(plan.reason, c->words));
        assert_true(plan.shared_bytes <= device->shared_bytes);
    }
}

#endif
