/* hopper_backward_2pass.c: the wgmma backward in two kernels, on the host: for head dims above 128, and for the
 * same bits every time at all head dims. */
#include "families/hopper/backward_2pass/hopper_backward_2pass.h"

#include <stdio.h>

#include "families/hopper/backward/hopper_backward_common.h"
#include "families/hopper/hopper_family.h"
#include "families/hopper/pipeline/hopper_items.h"
#include "gpu/tile_plan_launch.h"

PLAN_PARAMETER_STRUCT(HOPPER_BACKWARD_2PASS_PARAMETERS);

static struct hopper_score_inputs score_inputs_of(const fdm_problem *p) {
    return (struct hopper_score_inputs){gpu_lists_keys(p), gpu_mask_rows(p), p->has_bias, gpu_bias_rows(p),
                                        gpu_row_runs(p)};
}
static int32_t dq_bytes(const fdm_problem *p, int32_t v_stages) {
    return hopper_backward_2pass_dq_bytes(hopper_backward_padded(p->head_dim), hopper_backward_padded(p->head_dim_v),
                                          v_stages, score_inputs_of(p));
}
static int32_t dkv_bytes(const fdm_problem *p, int32_t p_stages) {
    return hopper_backward_2pass_dkv_bytes(hopper_backward_padded(p->head_dim), hopper_backward_padded(p->head_dim_v),
                                           p_stages, score_inputs_of(p));
}

static struct hopper_division division_of(const fdm_plan *plan) {
    return (struct hopper_division){.parts = parameters_of(plan).PARTS, .in_turn = parameters_of(plan).IN_TURN};
}

/* Tiles are walked by the tile plan; and keys that lie scattered are put in order. */
static int is_planned(const fdm_problem *p) { return gpu_lists_keys(p) || gpu_row_runs(p); }
static int may_sort(const fdm_problem *p) { return p->has_intervals && !p->varlen && !gpu_row_runs(p); }

static struct gpu_backward_needs needs_of(const fdm_plan *plan, const fdm_problem *p) {
    struct gpu_backward_needs needs =
        hopper_backward_needs(p, HOPPER_BACKWARD_2PASS_DQ_ROWS, 0, parameters_of(plan).PARTS);
    needs.block_m = needs.block_n = HOPPER_BACKWARD_2PASS_MASK;
    needs.may_order_keys = needs.orders_keys = may_sort(p);
    needs.order_block_n = may_sort(p) ? HOPPER_BACKWARD_2PASS_KEYS : 0;
    needs.plans_rows = gpu_row_runs(p);
    needs.lse_factor = p->has_bias || p->softcap > 0 ? 1.0f : needs.lse_factor;
    return needs;
}

/* The tile plan lies behind the rest. */
static int64_t plan_offset(const fdm_problem *p, const struct gpu_backward_needs *needs) {
    return gpu_round_up(gpu_backward_workspace_bytes(p, needs), 256);
}
static int64_t workspace_bytes(const fdm_plan *plan, const fdm_problem *p) {
    const struct gpu_backward_needs needs = needs_of(plan, p);
    return plan_offset(p, &needs) + (is_planned(p) ? tile_plan_bytes(p) : 0);
}

/* ---- choice ---- */

enum { LENGTH_MAX = HOPPER_BACKWARD_2PASS_MASK * HOPPER_BACKWARD_TILES_MAX }; /* where tiles are listed */

/* Of intervals, and of masks and biases with query rows. */
static const char *refusal_of_scores(const fdm_problem *p, char *text, size_t size) {
    if ((p->has_mask || is_planned(p)) && (p->seqlen_q > LENGTH_MAX || p->seqlen_k > LENGTH_MAX)) {
        snprintf(text, size, "beside masks and intervals there are at most %d query rows and keys", LENGTH_MAX);
        return text;
    }
    if (is_planned(p) && (p->has_bias || gpu_mask_rows(p) || !tile_plan_possible(p)))
        return "there are no biases, and no masks with rows, beside intervals or masks of keys";
    if (p->has_intervals && p->has_mask)
        return "there are no masks beside intervals";
    if ((p->has_intervals && p->interval_heads > p->heads_kv) ||
        (p->has_row_intervals && p->row_interval_heads > p->heads_kv) ||
        (p->block_mask_size && p->block_mask_heads > p->heads_kv))
        return "query heads that share keys have intervals of their own";
    if (p->has_mask && p->mask_shape[1] > p->heads_kv)
        return "query heads that share keys have masks of their own";
    if (!gpu_mask_rows(p) && !p->has_bias)
        return NULL;
    if (!p->scores_mappable || p->varlen || (p->has_mask && p->mask_shape[3] != p->seqlen_k) ||
        (p->has_bias && p->bias_shape[3] != p->seqlen_k) || p->seqlen_k % (p->has_mask ? 16 : 8))
        return "rows of mask and bias must be contiguous, and multiples of 16 bytes";
    if (p->has_bias && p->bias_dtype != p->dtype)
        return "a bias has q's dtype";
    if (p->has_bias && p->softcap > 0)
        return "there is no softcap beside a bias";
    if (gpu_dbias_constant(p) == GPU_DBIAS_SUMS)
        return "the gradient of a bias that heads or batches share is a sum over blocks";
    return NULL;
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = hopper_backward_refusal(p, 256, text, size);
    if (!clause)
        clause = refusal_of_scores(p, text, size);
    const int fits = dq_bytes(p, 1) <= device->shared_bytes && dkv_bytes(p, 1) <= device->shared_bytes;
    return clause || fits ? clause : gpu_no_tile_fits(device, text, size);
}

/* Up to here hopper.backward computes five products a tile where this kernel has seven, and mma.backward is faster too.
 * tanh stands between its products, but mma.backward pays for a fixed order (docs/lab/hopper_backward.md). */
enum { NARROW = 128 };

/* The orders of blocks and keys and the tile plan take 35 us: measured at head dim 256, keys 1024 of 8 heads are slower
 * by a third than by mma.backward, 2048 faster by a sixth. The plan alone takes a sixth of that (not measured here). At
 * 400 TFLOPS. */
static int plan_costs_more(const fdm_problem *p) {
    return is_planned(p) && !p->deterministic &&
           hopper_pairs(p) * (double)(6 * p->head_dim + 4 * p->head_dim_v) / 400e12 < (may_sort(p) ? 60e-6 : 10e-6);
}

static const char *passed_over(const fdm_device *device, const fdm_problem *p) {
    (void)device;
    if (plan_costs_more(p))
        return "the plan of tiles takes longer than it gains";
    return p->head_dim <= NARROW && p->head_dim_v <= NARROW ? "at head dims up to 128 it is the slowest on tensor cores"
           : p->softcap > 0 && !p->deterministic            ? "mma.backward is faster beside a softcap"
                                                            : NULL;
}

/* One tile; the ways are the divisions of the heads in the kernel of dK and dV. */
static int fill(const fdm_device *device, const fdm_problem *p, int32_t number, fdm_plan *plan) {
    const double flops = (double)(4 * p->head_dim + 4 * p->head_dim_v);
    struct hopper_division division;
    if (!hopper_backward_divide(device, p, HOPPER_BACKWARD_2PASS_KEYS, flops, number, &division))
        return 0;
    const int32_t v_stages = dq_bytes(p, 2) <= device->shared_bytes ? 2 : 1;
    const int32_t p_stages = dkv_bytes(p, 2) <= device->shared_bytes ? 2 : 1;
    PLAN_SET_PARAMETERS(plan, .V_STAGES = v_stages, .P_STAGES = p_stages, .PARTS = division.parts,
                        .IN_TURN = division.in_turn);
    plan->block_m = HOPPER_BACKWARD_2PASS_DQ_ROWS;
    plan->block_n = HOPPER_BACKWARD_2PASS_KEYS;
    plan->stages = HOPPER_BACKWARD_2PASS_STAGES;
    plan->shared_bytes =
        dq_bytes(p, v_stages) > dkv_bytes(p, p_stages) ? dq_bytes(p, v_stages) : dkv_bytes(p, p_stages);
    plan->workspace_bytes = workspace_bytes(plan, p);
    snprintf(plan->choice, sizeof plan->choice, "SM90_Wgmma_TwoKernels_128x64_V%d_P%d", v_stages, p_stages);
    snprintf(
        plan->reason, sizeof plan->reason,
        "head dim %lld on compute capability 9.0: one kernel for dQ (two warpgroups of 64 rows, 64 keys a step), one "
        "for dK and dV of 64 keys (a warpgroup each, 64 rows a step), %d registers a thread (%lld KB): no additions "
        "in global memory, the same bits every time%s",
        (long long)(p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v),
        HOPPER_BACKWARD_2PASS_CONSUMER_REGISTERS, (long long)(plan->shared_bytes + 1023) >> 10,
        !is_planned(p) ? ""
        : may_sort(p)  ? "; tiles that no row sees are left out, scattered keys in the order of the last row that sees "
                         "them"
                       : "; tiles that no row sees are left out");
    hopper_backward_name_parts(p, division, plan);
    return 1;
}

/* ---- launch ---- */

enum own_kernel { DQ, DKV };

static int wanted(const fdm_problem *p, enum own_kernel kernel) {
    return kernel == DQ ? p->needs_dq || gpu_dbias_constant(p) : p->needs_dk || p->needs_dv;
}

static void make_request(const fdm_plan *plan, const fdm_problem *p, enum own_kernel kernel,
                         struct cuda_kernel_request *request) {
    const int32_t v_stages = parameters_of(plan).V_STAGES, p_stages = parameters_of(plan).P_STAGES;
    gpu_set_problem_constants(request, p, GPU_ALIKE_SCORES_ALIGNED | GPU_ALIKE_POSITIVE_SCALE);
    GPU_ADD_CONSTANTS(request, HOPPER_BACKWARD_2PASS_CONSTANTS, .HEAD_DIM = hopper_backward_padded(p->head_dim),
                      .HEAD_DIM_V = hopper_backward_padded(p->head_dim_v), .V_STAGES = v_stages, .P_STAGES = p_stages,
                      .DBIAS = kernel == DQ ? gpu_dbias_constant(p) : 0,
                      .EMPTY_ROWS = gpu_empty_rows(p) || p->varlen || p->has_mask || p->has_bias || is_planned(p),
                      .SCRUB = gpu_hides_keys(p),
                      .PARTS = kernel == DKV && gpu_backward_leaves_sums(p, parameters_of(plan).PARTS));
    request->file = kernel == DQ ? "families/hopper/backward_2pass/hopper_backward_2pass_dq.cu"
                                 : "families/hopper/backward_2pass/hopper_backward_2pass_dkv.cu";
    request->entry = kernel == DQ ? "hopper_backward_2pass_dq" : "hopper_backward_2pass_dkv";
    request->shared_bytes = kernel == DQ ? dq_bytes(p, v_stages) : dkv_bytes(p, p_stages);
    request->threads = HOPPER_BACKWARD_2PASS_THREADS;
    /* What a row that is done again needs behind the loop. */
    if (kernel == DQ && p->has_mask && gpu_dbias_constant(p))
        request->spill_bytes_max = 8;
    /* Compiled for head dim 256, row intervals spill 96 bytes. */
    if (kernel == DQ && p->has_row_intervals && gpu_widest(p) > 192)
        request->spill_bytes_max = 96;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t v_stages = parameters_of(plan).V_STAGES, p_stages = parameters_of(plan).P_STAGES;
    if (!hopper_backward_divides(p, division_of(plan)))
        return 0;
    if (v_stages < 1 || v_stages > 2 || p_stages < 1 || p_stages > 2 || p->head_dim > 256 || p->head_dim_v > 256)
        return 0;
    const int32_t dq = dq_bytes(p, v_stages), dkv = dkv_bytes(p, p_stages);
    return plan->block_m == HOPPER_BACKWARD_2PASS_DQ_ROWS && plan->block_n == HOPPER_BACKWARD_2PASS_KEYS &&
           plan->shared_bytes == (dq > dkv ? dq : dkv) && plan->workspace_bytes >= workspace_bytes(plan, p);
}

static void add(const fdm_plan *plan, struct gpu_launches *l, enum own_kernel kernel, int64_t blocks,
                const struct hopper_backward_params *params) {
    make_request(plan, l->problem, kernel, gpu_add_kernel(l));
    gpu_add_launch(l,
                   (struct gpu_launch){.grid = {gpu_grid(blocks)}, .params = params, .params_bytes = sizeof *params});
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct gpu_backward_needs needs = needs_of(plan, p);
    struct hopper_backward_params params = {0};
    gpu_backward_fill(l, &needs, &params.in);
    const int64_t key_blocks =
        hopper_backward_order(p, HOPPER_BACKWARD_2PASS_KEYS, division_of(plan), may_sort(p), &params);
    fdm_status status = FDM_OK;
    if (l->attention)
        status = hopper_backward_maps(plan, l->attention, HOPPER_BACKWARD_2PASS_KEYS, &params);
    gpu_backward_add(l, GPU_BACKWARD_BEFORE, &needs, &params.in);
    if ((wanted(p, DQ) && is_planned(p)) || gpu_row_runs(p)) {
        const struct tile_plan_order order = {.block_m = plan->block_m,
                                              .keys = may_sort(p) ? params.in.order : NULL,
                                              .sorted = may_sort(p) ? params.in.block_order : NULL};
        tile_plan_add(l, &params.in.in, order, l->workspace + plan_offset(p, &needs), &params.plan);
    }
    if (wanted(p, DQ))
        add(plan, l, DQ, hopper_all_blocks(p, 1, plan->block_m), &params);
    if (wanted(p, DKV))
        add(plan, l, DKV, key_blocks, &params);
    gpu_backward_add(l, GPU_BACKWARD_AFTER, &needs, &params.in);
    return status;
}

const struct gpu_algorithm hopper_backward_2pass_algorithm = {
    .info = {"hopper.backward_2pass", "the backward on wgmma and TMA by two kernels, without additions to dQ",
             FDM_BACKWARD},
    .parameters = PLAN_PARAMETERS(HOPPER_BACKWARD_2PASS_PARAMETERS),
    .features = GPU_FEATURE_CAUSAL | GPU_FEATURE_WINDOW | GPU_FEATURE_MASK_ROWS | GPU_FEATURE_MASK_KEYS |
                GPU_FEATURE_BIAS_ROWS | GPU_FEATURE_INTERVALS | GPU_ROW_RUN_FEATURES | GPU_FEATURE_DBIAS |
                GPU_FEATURE_VARLEN | GPU_SCORE_FEATURES | GPU_FEATURE_DLSE | GPU_FEATURE_EMPTY_ROWS |
                GPU_FEATURE_DETERMINISTIC,
    .chosen_freely = 1,
    .refusal = refusal,
    .passed_over = passed_over,
    .fill = fill,
    .valid = valid,
    .launch = launch,
};
