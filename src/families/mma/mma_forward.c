/* mma_forward.c: the production forward on the host: which tile for which problem, its constants and its launch. */
#include "families/mma/mma_forward.h"

#include <stdio.h>
#include <string.h>

#include "error.h"
#include "mma_family.h"

/* ---- tiles ---- */

enum features { PLAIN, SCORED }; /* SCORED: mask, intervals, bias or softcap, which need registers of their own */

/* A row is taken when head dims and device fit it; the first that fits is chosen. Registers of O and S are
 * (max head dim of V + block_n) / 2 * row_tiles. */
struct tile {
    int32_t head_dim_max;
    enum features features;
    int32_t warps, row_tiles, block_n, stages, blocks; /* blocks: wanted on a multiprocessor at a time */
    int32_t q_in_registers, optimistic;
    const char *reason;
};
static const struct tile tiles[] = {
    {64, PLAIN, 4, 2, 128, 2, 2, 1, 1, "1.23 x the time of 128x64 tiles saved at D 64 on H200"},
    {64, PLAIN, 4, 2, 64, 2, 2, 1, 1, "two blocks in 99 KB"},
    {128, PLAIN, 4, 2, 64, 2, 2, 0, 1, "32 rows a warp: each fragment of K and V feeds two products"},
    {128, PLAIN, 4, 2, 32, 2, 1, 0, 1, "fits 99 KB"},
    {256, PLAIN, 8, 1, 64, 2, 1, 0, 0, "32 rows a warp would need 256 registers for O alone"},
    {256, PLAIN, 8, 1, 32, 2, 1, 0, 0, "fits 163 KB"},
    {256, PLAIN, 4, 1, 32, 2, 1, 0, 0, "fits 99 KB"},
    {64, SCORED, 4, 2, 32, 2, 2, 0, 1, "registers for mask and bias"},
    {128, SCORED, 4, 1, 64, 2, 2, 0, 1, "registers for mask and bias"},
    {256, SCORED, 4, 1, 16, 2, 1, 0, 0, "registers for mask and bias"},
};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0] };

static int32_t block_m(const struct tile *t) { return 16 * t->row_tiles * t->warps; }

static enum features features_of(const fdm_problem *p) {
    return p->has_mask || p->has_bias || p->has_intervals || p->softcap > 0 ? SCORED : PLAIN;
}

static int32_t shared_bytes(const struct tile *t, const fdm_problem *p) {
    return mma_forward_shared_bytes(block_m(t), t->block_n, t->stages, (int32_t)mma_round_up(p->head_dim, 16),
                                    (int32_t)mma_round_up(p->head_dim_v, 16), p->has_mask || p->has_intervals);
}

static int fits(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    int64_t widest = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
    return widest <= t->head_dim_max && features_of(p) == t->features && shared_bytes(t, p) <= device->shared_bytes;
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    if (mma_dtype(p->dtype) < 0)
        return "it takes float16 and bfloat16";
    if (p->head_dim > 256 || p->head_dim_v > 256)
        return "head dims are at most 256";
    for (int32_t i = 0; i < NUM_TILES; i++)
        if (fits(&tiles[i], device, p))
            return NULL;
    snprintf(text, size, "no tile fits the device's %lld KB of shared memory", (long long)device->shared_bytes >> 10);
    return text;
}

static int suits(const fdm_device *device, const fdm_problem *p) {
    (void)device;
    (void)p;
    return 1;
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    for (int32_t i = 0; i < NUM_TILES; i++) {
        const struct tile *t = &tiles[i];
        if (!fits(t, device, p) || variant-- > 0)
            continue;
        plan->parameters[0] = i;
        plan->block_m = block_m(t);
        plan->block_n = t->block_n;
        plan->stages = t->stages;
        plan->shared_bytes = shared_bytes(t, p);
        plan->workspace_bytes = 0;
        snprintf(plan->choice, sizeof plan->choice, "MMA_Forward_%dx%d_S%d%s", plan->block_m, plan->block_n,
                 plan->stages, t->q_in_registers ? "_QRegs" : "");
        snprintf(
            plan->reason, sizeof plan->reason,
            "head dim %lld: the first tile that fits %lld KB of shared memory is %dx%d with %d stages (%lld KB): %s",
            (long long)(p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v),
            (long long)device->shared_bytes >> 10, plan->block_m, plan->block_n, plan->stages,
            (long long)(plan->shared_bytes + 1023) >> 10, t->reason);
        return 1;
    }
    return 0;
}

/* ---- execution ---- */

static int bounded(const fdm_problem *p) { return p->causal || p->window_left >= 0 || p->window_right >= 0; }

static void request_of(const fdm_plan *plan, const fdm_problem *p, struct cuda_kernel_request *request) {
    const struct tile *t = &tiles[plan->parameters[0]];
    const struct cuda_constant constants[] = {
        {"DTYPE", mma_dtype(p->dtype)},
        {"HEAD_DIM", mma_round_up(p->head_dim, 16)},
        {"HEAD_DIM_V", mma_round_up(p->head_dim_v, 16)},
        {"WARPS", t->warps},
        {"ROW_TILES", t->row_tiles},
        {"BLOCK_N", t->block_n},
        {"STAGES", t->stages},
        {"MIN_BLOCKS", t->blocks},
        {"Q_IN_REGISTERS", t->q_in_registers},
        {"OPTIMISTIC", t->optimistic},
        {"ALIGNED", p->aligned},
        {"WINDOW", bounded(p)},
        {"MASK", p->has_mask},
        {"MASK_ROWS", p->has_mask && p->mask_shape[2] != 1},
        {"BIAS", !p->has_bias                   ? MMA_BIAS_NONE
                 : p->bias_dtype == FDM_FLOAT32 ? MMA_BIAS_FLOAT32
                                                : MMA_BIAS_SAME},
        {"BIAS_ROWS", p->has_bias && p->bias_shape[2] != 1},
        {"INTERVALS", p->has_intervals},
        {"VARLEN", p->varlen},
        {"SOFTCAP", p->softcap > 0},
        {"POSITIVE_SCALE", (float)p->softmax_scale > 0},
    };
    _Static_assert(sizeof constants / sizeof constants[0] == MMA_FORWARD_NUM_CONSTANTS, "one value for each constant");
    request->file = "families/mma/mma_forward.cu";
    request->entry = "mma_forward";
    request->num_constants = MMA_FORWARD_NUM_CONSTANTS;
    memcpy(request->constants, constants, sizeof constants);
    request->shared_bytes = shared_bytes(t, p);
}

static fdm_status kernel_of(const fdm_plan *plan, const fdm_problem *p, const struct cuda_kernel **kernel) {
    struct cuda_kernel_request request;
    request_of(plan, p, &request);
    return cuda_kernels_get(plan->device.index, &request, 1, kernel);
}

static fdm_status prepare(const fdm_plan *plan) {
    const struct cuda_kernel *kernel;
    return kernel_of(plan, &plan->problem, &kernel);
}

/* Heads whose keys and values fit together in half of a second-level cache of 50 MB take turns row block by row block,
 * the longest first; without a window all row blocks are equal and one head after the other is best. */
static int32_t heads_per_section(const fdm_problem *p) {
    enum { CACHE_BYTES = 32 << 20 };
    int64_t head_bytes = (p->seqlen_k + 1) * (p->head_dim + p->head_dim_v) * 2;
    int64_t heads = CACHE_BYTES / head_bytes, most = p->batch * p->heads;
    return !bounded(p) || heads < 1 ? 1 : (int32_t)(heads < most ? heads : most);
}

static fdm_status execute(const fdm_plan *plan, const struct attention *attention, void *workspace, void *stream) {
    const fdm_problem *p = attention->problem;
    (void)workspace;
    if (plan->parameters[0] < 0 || plan->parameters[0] >= NUM_TILES)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan names tile %d, which its kernel does not have",
                         plan->parameters[0]);
    const struct tile *t = &tiles[plan->parameters[0]];
    const struct cuda_kernel *kernel;
    struct mma_forward_arguments arguments;
    mma_fill_arguments(attention, &arguments);
    arguments.heads_per_section = heads_per_section(p);
    int64_t blocks = (p->seqlen_q + block_m(t) - 1) / block_m(t) * p->batch * p->heads;
    if (blocks == 0)
        return FDM_OK;
    fdm_status status = kernel_of(plan, p, &kernel);
    if (status)
        return status;
    struct cuda_launch launch = {.kernel = kernel,
                                 .grid = {(uint32_t)blocks, 1, 1},
                                 .threads = (uint32_t)(32 * t->warps),
                                 .stream = stream,
                                 .arguments = &arguments,
                                 .arguments_bytes = sizeof arguments};
    return cuda_launch(&launch);
}

const struct mma_algorithm mma_forward_algorithm = {
    .row = {"mma.forward", "FlashAttention-2 on mma.sync, every feature", FDM_FORWARD},
    .chosen_freely = 1,
    .refusal = refusal,
    .suits = suits,
    .fill = fill,
    .prepare = prepare,
    .execute = execute,
};
