/* mma_backward.c: the backward on the host: its tile, by the rules of mma_rules.c, its workspace and its launches. */
#include "families/mma/mma_backward.h"

#include <stdio.h>
#include <string.h>

#include "error.h"
#include "families/mma/mma_gradients.h"
#include "families/mma/mma_rules.h"
#include "mma_family.h"

/* Of the plan's parameters. */
enum { STAGED_ROWS, OVERLAY, DS_BUFFERS, PAIRED };

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    (void)device;
    (void)text;
    (void)size;
    if (mma_dtype(p->dtype) < 0)
        return "it takes float16 and bfloat16";
    if (p->batch > 65535 || p->heads > 65535)
        return "batch and heads are at most 65535";
    if (p->deterministic && mma_dbias_kind(p) == MMA_DBIAS_SUMS)
        return "a bias with query rows that heads, batches or keys share has no deterministic gradient here";
    return NULL;
}

static int suits(const fdm_device *device, const fdm_problem *p) {
    (void)device;
    (void)p;
    return 1;
}

/* ---- workspace ---- */

static int64_t tiles_of(int64_t length, int32_t tile) { return (length + tile - 1) / tile; }

static struct mma_room room_of(const fdm_problem *p, int32_t block_m, int32_t block_n) {
    const int32_t widest = mma_backward_widest((int32_t)p->head_dim, (int32_t)p->head_dim_v);
    return (struct mma_room){
        .block_m = block_m,
        .block_n = block_n,
        .dq_columns = p->needs_dq ? mma_backward_padded((int32_t)p->head_dim, block_n, widest) : 0,
        .turns = p->needs_dq && p->deterministic,
        /* warps that may share keys; what one does not write stays 0 */
        .dbias_shares = block_n == 128 ? 2 : MMA_BACKWARD_WARPS * 16 / block_n,
        .lse_factor = p->has_bias || p->softcap > 0 ? 1.0f : 1.4426950408889634f,
    };
}

static int64_t workspace_bytes(const fdm_problem *p, int32_t block_m, int32_t block_n) {
    const struct mma_room room = room_of(p, block_m, block_n);
    return mma_workspace_bytes(p, &room);
}

/* ---- plan ---- */

static int32_t bytes_with(const fdm_plan *plan, const fdm_problem *p, int32_t paired, int32_t buffers) {
    return mma_backward_bytes_with(plan->block_m, plan->block_n, plan->stages, plan->v_in_registers,
                                   (int32_t)p->head_dim, (int32_t)p->head_dim_v, paired, buffers);
}

static int may_pair(const fdm_plan *plan, const fdm_problem *p) {
    /* where sums of a bias without rows, turns or a sequence's begin are kept too, paired warps have not enough
     * registers */
    const int crowded = (p->has_bias && !mma_bias_rows(p)) || p->deterministic || p->varlen;
    return !crowded &&
           mma_backward_can_pair(plan->block_n, (int32_t)p->head_dim, (int32_t)p->head_dim_v, plan->v_in_registers);
}

/* The tile is chosen; what shared memory is left buys paired warps, two buffers for what passes, or both. */
static void spend_more(const fdm_device *device, const fdm_problem *p, fdm_plan *plan) {
    for (int32_t way = 0; way < 3; way++) {
        const int32_t paired = way < 2, buffers = way == 1 ? 1 : 2;
        if (paired ? !may_pair(plan, p) : plan->parameters[OVERLAY])
            continue;
        const int32_t bytes = bytes_with(plan, p, paired, buffers);
        if (bytes > device->shared_bytes)
            continue;
        const size_t used = strlen(plan->reason);
        plan->parameters[PAIRED] = paired;
        plan->parameters[DS_BUFFERS] = buffers;
        plan->parameters[OVERLAY] = paired ? 0 : plan->parameters[OVERLAY];
        plan->shared_bytes = bytes;
        snprintf(plan->reason + used, sizeof plan->reason - used, "; %.4g KB with %s%s", (double)bytes / 1024,
                 paired ? "paired warps" : "",
                 buffers == 1 ? ""
                 : paired     ? " and dS twice"
                              : "dS twice");
        return;
    }
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
    plan->workspace_bytes = workspace_bytes(p, choice.block_m, choice.block_n);
    plan->parameters[STAGED_ROWS] = choice.staged_rows;
    plan->parameters[OVERLAY] = choice.overlay;
    plan->parameters[DS_BUFFERS] = 1;
    plan->parameters[PAIRED] = 0;
    spend_more(device, p, plan);
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

/* ---- execution ---- */

enum { PREPARE, MAIN, FINISH, DBIAS, SUMMARY, NUM_KERNELS };
static const char *const entries[NUM_KERNELS] = {
    [PREPARE] = "mma_backward_prepare", [FINISH] = "mma_backward_finish", [DBIAS] = "mma_dbias"};
_Static_assert((int)NUM_KERNELS <= (int)MMA_REQUESTS_MAX, "a plan launches no more");

/* Which of them a problem launches. */
static int wanted(const fdm_problem *p, int32_t kernel) {
    switch (kernel) {
    case FINISH: return p->needs_dq;
    case DBIAS: return mma_dbias_kind(p) == MMA_DBIAS_KEYS || mma_dbias_kind(p) == MMA_DBIAS_SUMS;
    case SUMMARY: return mma_mask_rows(p);
    default: return 1;
    }
}

static void main_request(const fdm_plan *plan, const fdm_problem *p, int32_t d, int32_t dv,
                         struct cuda_kernel_request *request) {
    const struct cuda_constant constants[] = {
        {"DTYPE", mma_dtype(p->dtype)},
        {"HEAD_DIM", d},
        {"HEAD_DIM_V", dv},
        {"BLOCK_M", plan->block_m},
        {"BLOCK_N", plan->block_n},
        {"STAGES", plan->stages},
        {"V_IN_REGISTERS", plan->v_in_registers},
        {"OVERLAY", plan->parameters[OVERLAY]},
        {"DS_BUFFERS", plan->parameters[DS_BUFFERS]},
        {"PAIRED", plan->parameters[PAIRED] != 0},
        {"ALIGNED", p->aligned},
        {"WINDOW", mma_bounded(p)},
        {"MASK", p->has_mask},
        {"MASK_ROWS", mma_mask_rows(p)},
        {"BIAS", mma_bias_constant(p)},
        {"BIAS_ROWS", mma_bias_rows(p)},
        {"DBIAS", mma_dbias_kind(p)},
        {"INTERVALS", p->has_intervals},
        {"VARLEN", p->varlen},
        {"SOFTCAP", p->softcap > 0},
        {"NEEDS_DQ", p->needs_dq},
        {"DETERMINISTIC", p->needs_dq && p->deterministic},
    };
    _Static_assert(sizeof constants / sizeof constants[0] == MMA_BACKWARD_NUM_CONSTANTS, "one value for each constant");
    request->file = "families/mma/mma_backward.cu";
    request->entry = "mma_backward";
    request->num_constants = MMA_BACKWARD_NUM_CONSTANTS;
    memcpy(request->constants, constants, sizeof constants);
    request->shared_bytes = plan->shared_bytes;
}

/* `place`: of each kernel among the requests. */
static int32_t make_requests(const fdm_plan *plan, const fdm_problem *p, struct cuda_kernel_request *requests,
                             int32_t place[NUM_KERNELS]) {
    const int32_t widest = mma_backward_widest((int32_t)p->head_dim, (int32_t)p->head_dim_v);
    const int32_t d = mma_backward_padded((int32_t)p->head_dim, plan->block_n, widest);
    const int32_t dv = mma_backward_padded((int32_t)p->head_dim_v, plan->block_n, widest);
    int32_t count = 0;
    for (int32_t kernel = 0; kernel < NUM_KERNELS; kernel++) {
        struct cuda_kernel_request *request = &requests[count];
        if (!wanted(p, kernel))
            continue;
        place[kernel] = count++;
        if (kernel == MAIN) {
            main_request(plan, p, d, dv, request);
        } else if (kernel == SUMMARY) {
            mma_summary_request(request);
        } else {
            mma_rows_request(p, entries[kernel], d, dv, p->needs_dq, request);
        }
    }
    return count;
}

static int overlays(const fdm_plan *plan, const fdm_problem *p) {
    return mma_backward_overlays(plan->block_m, plan->block_n, plan->stages, plan->v_in_registers, (int32_t)p->head_dim,
                                 (int32_t)p->head_dim_v);
}

/* A plan may come from a file: its tile must be its code's, and its room what the kernel takes. */
static int sound(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t v_in_registers = plan->v_in_registers, paired = plan->parameters[PAIRED] != 0,
                  buffers = plan->parameters[DS_BUFFERS];
    for (int32_t i = 0; i < mma_backward_code_count; i++) {
        const struct mma_backward_code *code = &mma_backward_codes[i];
        if (strcmp(code->code, plan->choice) == 0)
            return plan->block_m == code->block_m && plan->block_n == code->block_n &&
                   v_in_registers == code->v_in_registers && (plan->stages == 1 || plan->stages == 2) &&
                   (!paired || may_pair(plan, p)) && (buffers == 1 || buffers == 2) &&
                   plan->parameters[OVERLAY] == (!paired && buffers == 1 && overlays(plan, p)) &&
                   plan->shared_bytes == bytes_with(plan, p, paired, buffers) &&
                   plan->workspace_bytes >= workspace_bytes(p, plan->block_m, plan->block_n);
    }
    return 0;
}

static int32_t requests(const fdm_plan *plan, struct cuda_kernel_request *requests) {
    int32_t place[NUM_KERNELS];
    return sound(plan, &plan->problem) ? make_requests(plan, &plan->problem, requests, place) : 0;
}

/* The kernel counts bytes from one row of scores to the next in 32 bits. */
static int score_rows_fit(const struct attention *attention) {
    const int64_t bytes = mma_bias_bytes(attention->problem);
    const int64_t rows[] = {attention->mask.row, attention->bias.row * bytes, attention->dbias.row * bytes,
                            attention->problem->bias_shape[3] * 4};
    for (int i = 0; i < 4; i++)
        if (rows[i] > INT32_MAX || rows[i] < INT32_MIN)
            return 0;
    return 1;
}

static uint32_t threads_of(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t widest = mma_backward_widest((int32_t)p->head_dim, (int32_t)p->head_dim_v);
    return 32 * (uint32_t)mma_backward_warps(plan->block_n, widest, plan->v_in_registers);
}

static fdm_status execute(const fdm_plan *plan, const struct attention *attention, void *workspace, void *stream) {
    const fdm_problem *p = attention->problem;
    struct cuda_kernel_request list[NUM_KERNELS];
    const struct cuda_kernel *kernels[NUM_KERNELS];
    int32_t place[NUM_KERNELS];
    struct mma_backward_arguments a;
    if (!sound(plan, p))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's tile or workspace is not its kernel's");
    if (!score_rows_fit(attention))
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "rows of mask, bias or dbias lie 2^31 bytes or more apart; mma.backward takes less");
    fdm_status status = cuda_kernels_get(plan->device.index, list, make_requests(plan, p, list, place), kernels);
    if (status)
        return status;
    const struct mma_room room = room_of(p, plan->block_m, plan->block_n);
    mma_fill_gradients(attention, &room, workspace, &a);
    status = mma_launch_prepare(kernels[place[PREPARE]], p, &a, stream);
    if (!status && wanted(p, SUMMARY))
        status = mma_summarise(kernels[place[SUMMARY]], p, plan->block_m, plan->block_n,
                               (uint8_t *)(uintptr_t)a.in.summary, stream, &a.in);
    if (!status)
        status = mma_launch_gradients(kernels[place[MAIN]], tiles_of(p->seqlen_k, plan->block_n), p->heads_kv, p->batch,
                                      threads_of(plan, p), &a, stream);
    if (!status && wanted(p, FINISH))
        status = mma_launch_gradients(kernels[place[FINISH]], tiles_of(p->seqlen_q, 16 * MMA_BACKWARD_ROWS_WARPS),
                                      p->heads, p->batch, 32 * MMA_BACKWARD_ROWS_WARPS, &a, stream);
    if (!status && wanted(p, DBIAS))
        status = mma_launch_dbias(kernels[place[DBIAS]], &a, stream);
    return status;
}

const struct mma_algorithm mma_backward_algorithm = {
    .row = {"mma.backward", "FlashAttention-2's backward on mma.sync, every feature", FDM_BACKWARD},
    .chosen_freely = 1,
    .refusal = refusal,
    .suits = suits,
    .fill = fill,
    .has_code = has_code,
    .fill_code = fill_code,
    .requests = requests,
    .execute = execute,
};
