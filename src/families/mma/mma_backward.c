/* mma_backward.c: the backward on the host: its tile, by the rules of mma_rules.c. Its kernels are not written yet. */
#include "families/mma/mma_backward.h"

#include <stdio.h>
#include <string.h>

#include "error.h"
#include "families/mma/mma_rules.h"
#include "mma_family.h"

/* Of the plan's parameters. */
enum { STAGED_ROWS, OVERLAY };

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    (void)device;
    (void)text;
    (void)size;
    return mma_dtype(p->dtype) < 0 ? "it takes float16 and bfloat16" : NULL;
}

static int suits(const fdm_device *device, const fdm_problem *p) {
    (void)device;
    (void)p;
    return 1;
}

/* fp32 sums of dQ, for each row its lse and the sum of dO * O, and, where query heads share keys, fp32 sums of dK and
 * dV. */
static int64_t workspace_bytes(const fdm_problem *p) {
    const int64_t rows = (p->varlen ? p->total_q : p->batch * p->seqlen_q) * p->heads;
    const int64_t keys = (p->varlen ? p->total_k : p->batch * p->seqlen_k) * p->heads_kv;
    const int64_t d = mma_round_up(p->head_dim, 16), dv = mma_round_up(p->head_dim_v, 16);
    const int64_t shared_keys = p->heads > p->heads_kv ? mma_round_up(4 * keys * (d + dv), 64) : 0;
    return mma_round_up(4 * rows * d, 64) + mma_round_up(8 * rows, 64) + shared_keys;
}

static int fill_code(const fdm_device *device, const fdm_problem *p, const char *code, fdm_plan *plan) {
    struct mma_backward_choice choice;
    if (!mma_backward_choose(device, p, code, &choice, plan->reason, sizeof plan->reason))
        return 0;
    snprintf(plan->choice, sizeof plan->choice, "%s", choice.code);
    plan->block_m = choice.block_m;
    plan->block_n = choice.block_n;
    plan->stages = choice.stages;
    plan->v_in_registers = choice.v_in_registers;
    plan->shared_bytes = choice.shared_bytes;
    plan->workspace_bytes = workspace_bytes(p);
    plan->parameters[STAGED_ROWS] = choice.staged_rows;
    plan->parameters[OVERLAY] = choice.overlay;
    return 1;
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    return variant == 0 && fill_code(device, p, NULL, plan);
}

static int has_code(const char *code) {
    for (int32_t i = 0; i < mma_backward_code_count; i++)
        if (strcmp(mma_backward_codes[i].code, code) == 0)
            return 1;
    return 0;
}

static const char planned_only[] = "this version plans the backward on CUDA devices but has no kernel to run it; move "
                                   "the tensors to the CPU";

static int32_t requests(const fdm_plan *plan, struct cuda_kernel_request *wanted) {
    (void)plan;
    (void)wanted;
    return 0;
}

static fdm_status execute(const fdm_plan *plan, const struct attention *attention, void *workspace, void *stream) {
    (void)plan;
    (void)attention;
    (void)workspace;
    (void)stream;
    return error_set(FDM_ERROR_UNSUPPORTED, "%s", planned_only);
}

const struct mma_algorithm mma_backward_algorithm = {
    .row = {"mma.backward", "FlashAttention-2's backward on mma.sync; planned only, no kernel yet", FDM_BACKWARD},
    .chosen_freely = 1,
    .refusal = refusal,
    .suits = suits,
    .fill = fill,
    .has_code = has_code,
    .fill_code = fill_code,
    .planned_only = planned_only,
    .requests = requests,
    .execute = execute,
};
