/* mma_backward.c: the backward on the host: its tile, by the rules of mma_rules.c, its workspace and its launches. */
#include "families/mma/mma_backward.h"

#include <stdio.h>
#include <string.h>

#include "error.h"
#include "families/mma/mma_rules.h"
#include "mma_family.h"

/* Of the plan's parameters. */
enum { STAGED_ROWS, OVERLAY, DS_BUFFERS, PAIRED };

/* How the bias' gradient is made: MMA_DBIAS_*. */
static int32_t dbias_kind(const fdm_problem *p) {
    if (!p->needs_dbias)
        return MMA_DBIAS_NONE;
    if (!mma_bias_rows(p))
        return MMA_DBIAS_KEYS;
    const int own = p->bias_shape[0] == p->batch && p->bias_shape[1] == p->heads && p->bias_shape[3] == p->seqlen_k;
    return own ? MMA_DBIAS_DIRECT : MMA_DBIAS_SUMS;
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    (void)device;
    (void)text;
    (void)size;
    if (mma_dtype(p->dtype) < 0)
        return "it takes float16 and bfloat16";
    if (p->batch > 65535 || p->heads > 65535)
        return "batch and heads are at most 65535";
    if (p->deterministic && dbias_kind(p) == MMA_DBIAS_SUMS)
        return "a bias with query rows that heads, batches or keys share has no deterministic gradient here";
    return NULL;
}

static int suits(const fdm_device *device, const fdm_problem *p) {
    (void)device;
    (void)p;
    return 1;
}

/* ---- workspace ---- */

/* Where the arrays of struct mma_backward_arguments lie, in bytes from the workspace's start. */
struct layout {
    int64_t lse, delta, dq, dbias, summary, turns, ticket, bytes;
    int64_t rows, arrays, dbias_count;
};

static int64_t put(struct layout *l, int64_t bytes) {
    const int64_t at = l->bytes;
    l->bytes += mma_round_up(bytes, 256);
    return at;
}

/* Warps that may share keys; what one does not write stays 0. */
static int32_t dbias_shares(int32_t block_n) { return block_n == 128 ? 2 : MMA_BACKWARD_WARPS * 16 / block_n; }

static int64_t dbias_count(const fdm_problem *p, int32_t block_n) {
    const int64_t *shape = p->bias_shape;
    switch (dbias_kind(p)) {
    case MMA_DBIAS_KEYS: return dbias_shares(block_n) * p->batch * p->heads * p->seqlen_k;
    case MMA_DBIAS_SUMS: return shape[0] * shape[1] * shape[2] * shape[3];
    default: return 0;
    }
}

static int64_t tiles_of(int64_t length, int32_t tile) { return (length + tile - 1) / tile; }

static struct layout lay_out(const fdm_problem *p, int32_t block_m, int32_t block_n) {
    const int32_t d = mma_backward_padded((int32_t)p->head_dim, block_n,
                                          mma_backward_widest((int32_t)p->head_dim, (int32_t)p->head_dim_v));
    struct layout l = {0};
    l.rows = p->varlen ? mma_backward_begin(p->total_q, p->batch) : mma_round_up(p->seqlen_q, MMA_BACKWARD_ROW_STEP);
    l.arrays = p->varlen ? p->heads : p->batch * p->heads;
    const int64_t all = l.rows * l.arrays;
    l.lse = put(&l, 4 * all);
    l.delta = put(&l, 4 * all);
    l.dq = put(&l, p->needs_dq ? 4 * all * d : 0);
    l.turns = put(&l, p->needs_dq && p->deterministic ? all / 16 * 4 : 0);
    l.ticket = put(&l, 4);
    l.dbias_count = dbias_count(p, block_n);
    l.dbias = put(&l, 4 * l.dbias_count);
    l.summary = put(&l, mma_mask_rows(p) ? mma_summary_bytes(p, block_m, block_n) : 0);
    return l;
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
    plan->workspace_bytes = lay_out(p, choice.block_m, choice.block_n).bytes;
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
_Static_assert((int)NUM_KERNELS <= (int)MMA_REQUESTS_MAX, "a plan launches no more");

/* Which of them a problem launches. */
static int wanted(const fdm_problem *p, int32_t kernel) {
    switch (kernel) {
    case FINISH: return p->needs_dq;
    case DBIAS: return dbias_kind(p) == MMA_DBIAS_KEYS || dbias_kind(p) == MMA_DBIAS_SUMS;
    case SUMMARY: return mma_mask_rows(p);
    default: return 1;
    }
}

static int32_t bias_constant(const fdm_problem *p) {
    return !p->has_bias ? MMA_BIAS_NONE : p->bias_dtype == FDM_FLOAT32 ? MMA_BIAS_FLOAT32 : MMA_BIAS_SAME;
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
        {"BIAS", bias_constant(p)},
        {"BIAS_ROWS", mma_bias_rows(p)},
        {"DBIAS", dbias_kind(p)},
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

static void rows_request(const fdm_problem *p, int32_t d, int32_t dv, int32_t kernel,
                         struct cuda_kernel_request *request) {
    const struct cuda_constant constants[] = {
        {"DTYPE", mma_dtype(p->dtype)}, {"HEAD_DIM", d},           {"HEAD_DIM_V", dv},         {"ALIGNED", p->aligned},
        {"VARLEN", p->varlen},          {"NEEDS_DQ", p->needs_dq}, {"BIAS", bias_constant(p)},
    };
    _Static_assert(sizeof constants / sizeof constants[0] == MMA_ROWS_NUM_CONSTANTS, "one value for each constant");
    request->file = kernel == DBIAS ? "families/mma/mma_dbias.cu" : "families/mma/mma_backward_rows.cu";
    request->entry = kernel == DBIAS ? "mma_dbias" : kernel == PREPARE ? "mma_backward_prepare" : "mma_backward_finish";
    request->num_constants = MMA_ROWS_NUM_CONSTANTS;
    memcpy(request->constants, constants, sizeof constants);
    request->shared_bytes = 0;
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
            rows_request(p, d, dv, kernel, request);
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
                   plan->workspace_bytes >= lay_out(p, plan->block_m, plan->block_n).bytes;
    }
    return 0;
}

static int32_t requests(const fdm_plan *plan, struct cuda_kernel_request *requests) {
    int32_t place[NUM_KERNELS];
    return sound(plan, &plan->problem) ? make_requests(plan, &plan->problem, requests, place) : 0;
}

static int64_t bias_bytes(const fdm_problem *p) { return p->has_bias ? (int64_t)fdm_dtype_bytes(p->bias_dtype) : 0; }

/* The kernel counts bytes from one row of scores to the next in 32 bits. */
static int score_rows_fit(const struct attention *attention) {
    const int64_t bytes = bias_bytes(attention->problem);
    const int64_t rows[] = {attention->mask.row, attention->bias.row * bytes, attention->dbias.row * bytes,
                            attention->problem->bias_shape[3] * 4};
    for (int i = 0; i < 4; i++)
        if (rows[i] > INT32_MAX || rows[i] < INT32_MIN)
            return 0;
    return 1;
}

static struct mma_matrix matrix_of(const struct matrix_view *view) {
    return (struct mma_matrix){view->data, view->batch, view->row, view->head};
}

static void fill_arguments(const fdm_plan *plan, const struct attention *attention, char *workspace,
                           struct mma_backward_arguments *a) {
    const fdm_problem *p = attention->problem;
    const struct layout l = lay_out(p, plan->block_m, plan->block_n);
    const struct row_view *dlse = &attention->dlse;
    const struct score_view *dbias = &attention->dbias;
    const int64_t *shape = p->bias_shape;
    *a = (struct mma_backward_arguments){
        .dout = matrix_of(&attention->dout),
        .dq = matrix_of(&attention->dq),
        .dk = matrix_of(&attention->dk),
        .dv = matrix_of(&attention->dv),
        .dlse = {(float *)(void *)dlse->data, dlse->batch, dlse->head, dlse->row},
        .dbias = {dbias->data, dbias->batch, dbias->head, dbias->row, dbias->key, (int32_t)dbias->group, 0},
        .lse_rows = (float *)(void *)(workspace + l.lse),
        .delta_rows = (float *)(void *)(workspace + l.delta),
        .dq_sums = (float *)(void *)(workspace + l.dq),
        .dbias_sums = (float *)(void *)(workspace + l.dbias),
        .turns = p->needs_dq && p->deterministic ? (int32_t *)(void *)(workspace + l.turns) : NULL,
        .ticket = (int32_t *)(void *)(workspace + l.ticket),
        .rows = l.rows,
        .num_row_arrays = l.arrays,
        .dbias_count = l.dbias_count,
        .dbias_batch = shape[0] == 1 ? 0 : shape[1] * shape[2] * shape[3],
        .dbias_head = shape[1] == 1 ? 0 : shape[2] * shape[3],
        .dbias_key = shape[3] == 1 ? 0 : 1,
        .dbias_batches = (int32_t)shape[0],
        .dbias_heads = (int32_t)shape[1],
        .dbias_rows = (int32_t)shape[2],
        .dbias_keys = (int32_t)shape[3],
        .dbias_shares = dbias_kind(p) == MMA_DBIAS_KEYS ? dbias_shares(plan->block_n) : 0,
        .zero_dbias = dbias_kind(p) == MMA_DBIAS_DIRECT,
        .lse_factor = p->has_bias || p->softcap > 0 ? 1.0f : 1.4426950408889634f,
    };
    mma_fill_arguments(attention, &a->in);
    a->mask_row_bytes = (int32_t)a->in.mask.row;
    a->bias_row_bytes = (int32_t)(a->in.bias.row * bias_bytes(p));
    a->dbias_row_bytes =
        (int32_t)(dbias_kind(p) == MMA_DBIAS_SUMS ? shape[3] * 4 : attention->dbias.row * bias_bytes(p));
    a->in.summary = (const uint8_t *)workspace + l.summary;
}

static fdm_status launch(const struct cuda_kernel *kernel, int64_t x, int64_t y, int64_t z, uint32_t threads,
                         const struct mma_backward_arguments *a, void *stream) {
    struct cuda_launch launch = {.kernel = kernel,
                                 .grid = {(uint32_t)x, (uint32_t)y, (uint32_t)z},
                                 .threads = threads,
                                 .stream = stream,
                                 .arguments = a,
                                 .arguments_bytes = sizeof *a};
    return x > 0 && y > 0 && z > 0 ? cuda_launch(&launch) : FDM_OK;
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
    fill_arguments(plan, attention, workspace, &a);
    enum { ROWS_OF_A_BLOCK = 16 * MMA_BACKWARD_ROWS_WARPS, DBIAS_THREADS = 128 };
    const int64_t rows = mma_round_up(p->seqlen_q, MMA_BACKWARD_ROW_STEP) / ROWS_OF_A_BLOCK;
    const int64_t elements = (int64_t)a.dbias_batches * a.dbias_heads * a.dbias_rows * a.dbias_keys;
    const int64_t dbias_threads = a.dbias_shares && a.dbias_keys == 1 ? 32 * elements : elements;
    status = launch(kernels[place[PREPARE]], rows > 1 ? rows : 1, p->heads, p->batch > 1 ? p->batch : 1,
                    32 * MMA_BACKWARD_ROWS_WARPS, &a, stream);
    if (!status && wanted(p, SUMMARY))
        status = mma_summarise(kernels[place[SUMMARY]], p, plan->block_m, plan->block_n,
                               (uint8_t *)(uintptr_t)a.in.summary, stream, &a.in);
    if (!status)
        status = launch(kernels[place[MAIN]], tiles_of(p->seqlen_k, plan->block_n), p->heads_kv, p->batch,
                        threads_of(plan, p), &a, stream);
    if (!status && wanted(p, FINISH))
        status = launch(kernels[place[FINISH]], tiles_of(p->seqlen_q, ROWS_OF_A_BLOCK), p->heads, p->batch,
                        32 * MMA_BACKWARD_ROWS_WARPS, &a, stream);
    if (!status && wanted(p, DBIAS))
        status = launch(kernels[place[DBIAS]], tiles_of(dbias_threads, DBIAS_THREADS), 1, 1, DBIAS_THREADS, &a, stream);
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
