/* mma_decode.c: the split-key forward on the host: how many splits, how they are merged, the workspace, the launches.
 */
#include "families/mma/mma_decode.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "families/mma/mma_family.h"

enum { STAGES_MAX = 4, SPLITS_MAX = 128, TILES_OF_A_SPLIT_MIN = 4, KEYS_MIN = 512, BLOCKS_MAX = 2, RESERVE = 1 << 10 };
/* Of K and V that a multiprocessor waits for at a time: less leaves the memory idle, more is 2 % slower (H200). */
enum { FLIGHT_BYTES = 64 << 10 };

static int32_t shared_bytes(const fdm_problem *p, int32_t stages) {
    return mma_decode_shared_bytes((int32_t)gpu_round_up(p->head_dim, 16), (int32_t)gpu_round_up(p->head_dim_v, 16),
                                   stages);
}

/* Each block's reserve is the driver's. */
static int blocks_fit(const fdm_device *device, const fdm_problem *p, int32_t stages, int32_t blocks) {
    return blocks * (shared_bytes(p, stages) + RESERVE) <= device->shared_bytes + RESERVE;
}

static int64_t tile_bytes(const fdm_problem *p) {
    return MMA_DECODE_KEYS * (gpu_round_up(p->head_dim, 16) + gpu_round_up(p->head_dim_v, 16)) * 2;
}

/* The fewest stages with which `blocks` of a multiprocessor have enough under way, or as many as there is room for. */
static int32_t stages_of(const fdm_device *device, const fdm_problem *p, int32_t blocks) {
    int32_t stages = 2;
    while (stages < STAGES_MAX && (stages - 1) * blocks * tile_bytes(p) < FLIGHT_BYTES &&
           blocks_fit(device, p, stages + 1, blocks))
        stages++;
    return stages;
}

/* Blocks of a multiprocessor: one where it has enough under way by itself. */
static int32_t blocks_of(const fdm_device *device, const fdm_problem *p) {
    return (stages_of(device, p, 1) - 1) * tile_bytes(p) < FLIGHT_BYTES && blocks_fit(device, p, 2, BLOCKS_MAX)
               ? BLOCKS_MAX
               : 1;
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    if (gpu_dtype(p->dtype) < 0)
        return "it takes float16 and bfloat16";
    if (p->head_dim > 256 || p->head_dim_v > 256 || p->head_dim % 8 || p->head_dim_v % 8)
        return "head dims are multiples of 8 and at most 256";
    if (!p->aligned)
        return "addresses and strides must be multiples of 16 bytes";
    if (p->seqlen_q * (p->heads / p->heads_kv) > MMA_DECODE_ROWS)
        return "query rows times the heads of a group are at most 16";
    if (p->has_mask || p->has_bias || p->has_intervals || p->softcap > 0)
        return "mask, bias, intervals and softcap are left to mma.forward";
    if (p->batch * p->heads_kv > 65535)
        return "batch times KV heads are at most 65535";
    if (!blocks_fit(device, p, 2, 1)) {
        snprintf(text, size, "its ring needs %d KB of shared memory, the device has %lld KB",
                 (shared_bytes(p, 2) + 1023) >> 10, (long long)device->shared_bytes >> 10);
        return text;
    }
    return NULL;
}

static const char *passed_over(const fdm_device *device, const fdm_problem *p) {
    (void)device;
    return p->seqlen_k >= KEYS_MIN ? NULL : "other kernels suit it better";
}

/* Keys that the rows of a KV head can see at most. */
static int64_t visible_keys(const fdm_problem *p) {
    const int64_t right = p->causal ? 0 : p->window_right;
    if (p->window_left < 0 || right < 0 || p->window_left >= p->seqlen_k || right >= p->seqlen_k)
        return p->seqlen_k;
    const int64_t keys = p->seqlen_q + p->window_left + right;
    return keys < p->seqlen_k ? keys : p->seqlen_k;
}

static int64_t blocks_at_once(const fdm_device *device, const fdm_problem *p) {
    return (int64_t)device->num_sms * (blocks_fit(device, p, 2, BLOCKS_MAX) ? BLOCKS_MAX : 1);
}

/* How much of the device `blocks` use from begin to end, where so many fit on it at a time: the last wave is shorter.
 */
static double filling(int64_t blocks, int64_t resident) {
    const int64_t waves = (blocks + resident - 1) / resident;
    return waves > 0 ? (double)blocks / (double)(waves * resident) : 1;
}

/* As few as fill the device to 95 % of the best filling: one wave of as many blocks as are wanted on a multiprocessor,
 * or waves of as many as fit. Each split has a few tiles. */
static int32_t splits_of(const fdm_device *device, const fdm_problem *p) {
    const int64_t wanted = (int64_t)device->num_sms * blocks_of(device, p);
    const int64_t fit = blocks_at_once(device, p);
    const int64_t pairs = p->batch * p->heads_kv, tiles = (visible_keys(p) + MMA_DECODE_KEYS - 1) / MMA_DECODE_KEYS;
    int64_t most = tiles / TILES_OF_A_SPLIT_MIN;
    most = most < 1 ? 1 : most > SPLITS_MAX ? SPLITS_MAX : most;
    double best = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t splits = 1; splits <= most; splits++) {
            const double filled = filling(pairs * splits, pairs * splits <= wanted ? wanted : fit);
            if (pass == 0)
                best = filled > best ? filled : best;
            else if (filled >= 0.95 * best)
                return (int32_t)splits;
        }
    return 1;
}

static int64_t rows_of(const fdm_problem *p) {
    return p->varlen ? p->heads * p->total_q : p->batch * p->heads * p->seqlen_q;
}
static int64_t lse_bytes(const fdm_problem *p, int32_t splits) { return gpu_round_up(rows_of(p) * splits * 4, 64); }
static int64_t workspace_bytes(const fdm_problem *p, int32_t splits, int32_t merge) {
    return merge != MMA_MERGE_WORKSPACE
               ? 0
               : lse_bytes(p, splits) + gpu_round_up(rows_of(p) * splits * p->head_dim_v * 4, 64);
}

/* Clusters: 9.0 and 10.0; 12.0 is not built for them. Where blocks come in waves, one would wait for room for all of
 * it. */
static int32_t merge_of(const fdm_device *device, const fdm_problem *p, int32_t splits) {
    const int has_clusters = device->compute_major == 9 || device->compute_major == 10;
    const int at_once = p->batch * p->heads_kv * splits <= blocks_at_once(device, p);
    if (splits == 1)
        return MMA_MERGE_NONE;
    return has_clusters && at_once && splits <= MMA_MERGE_CLUSTER_MAX ? MMA_MERGE_CLUSTER : MMA_MERGE_WORKSPACE;
}

/* parameters: splits, stages, how they are merged, and whether mma_combine may begin before the splits have ended. */
static int fill(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    if (variant > 0)
        return 0;
    const int32_t splits = splits_of(device, p);
    const int shared = p->batch * p->heads_kv * splits > device->num_sms && blocks_fit(device, p, 2, BLOCKS_MAX);
    const int32_t stages = stages_of(device, p, shared ? BLOCKS_MAX : 1);
    plan->parameters[0] = splits;
    plan->parameters[1] = stages;
    plan->parameters[2] = merge_of(device, p, splits);
    plan->parameters[3] = device->compute_major >= 9;
    plan->block_m = MMA_DECODE_ROWS;
    plan->block_n = MMA_DECODE_KEYS;
    plan->stages = stages;
    plan->shared_bytes = shared_bytes(p, stages);
    plan->workspace_bytes = workspace_bytes(p, splits, plan->parameters[2]);
    snprintf(plan->choice, sizeof plan->choice, "MMA_Decode_%dx%d_S%d", MMA_DECODE_ROWS, MMA_DECODE_KEYS, stages);
    snprintf(plan->reason, sizeof plan->reason,
             "%lld query rows of a KV head fit in one tile of %d; %d splits of the keys fill %d multiprocessors with "
             "%lld KV heads; %d stages of %d keys (%lld KB)",
             (long long)(p->seqlen_q * (p->heads / p->heads_kv)), MMA_DECODE_ROWS, splits, device->num_sms,
             (long long)(p->batch * p->heads_kv), stages, MMA_DECODE_KEYS,
             (long long)(plan->shared_bytes + 1023) >> 10);
    return 1;
}

static int sound(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t splits = plan->parameters[0], stages = plan->parameters[1], merge = plan->parameters[2];
    const int32_t splits_max = merge == MMA_MERGE_NONE      ? 1
                               : merge == MMA_MERGE_CLUSTER ? MMA_MERGE_CLUSTER_MAX
                                                            : SPLITS_MAX;
    return merge >= MMA_MERGE_NONE && merge <= MMA_MERGE_CLUSTER && splits >= 1 && splits <= splits_max &&
           stages >= 2 && stages <= STAGES_MAX && workspace_bytes(p, splits, merge) <= plan->workspace_bytes;
}

enum { DECODE, COMBINE, NUM_KERNELS };
static int32_t make_requests(const fdm_plan *plan, const fdm_problem *p, struct cuda_kernel_request *requests) {
    const int32_t stages = plan->parameters[1], merge = plan->parameters[2];
    const struct cuda_constant constants[] = {
        {"DTYPE", gpu_dtype(p->dtype)},
        {"HEAD_DIM", gpu_round_up(p->head_dim, 16)},
        {"HEAD_DIM_V", gpu_round_up(p->head_dim_v, 16)},
        {"STAGES", stages},
        {"MIN_BLOCKS", BLOCKS_MAX},
        {"WINDOW", gpu_bounded(p)},
        {"VARLEN", p->varlen},
        {"MERGE", merge},
    };
    _Static_assert(sizeof constants / sizeof constants[0] == MMA_DECODE_NUM_CONSTANTS, "one value for each constant");
    requests[DECODE].file = "families/mma/mma_decode.cu";
    requests[DECODE].entry = "mma_decode";
    requests[DECODE].num_constants = MMA_DECODE_NUM_CONSTANTS;
    memcpy(requests[DECODE].constants, constants, sizeof constants);
    requests[DECODE].shared_bytes = shared_bytes(p, stages);
    requests[DECODE].threads = 32 * MMA_DECODE_WARPS;
    if (merge != MMA_MERGE_WORKSPACE)
        return 1;
    requests[COMBINE].file = "families/mma/mma_combine.cu";
    requests[COMBINE].entry = "mma_combine";
    requests[COMBINE].num_constants = 2;
    requests[COMBINE].constants[0] = (struct cuda_constant){"DTYPE", gpu_dtype(p->dtype)};
    requests[COMBINE].constants[1] = (struct cuda_constant){"VARLEN", p->varlen};
    requests[COMBINE].shared_bytes = 0;
    requests[COMBINE].threads = 32 * MMA_DECODE_WARPS;
    return 2;
}

static int32_t requests(const fdm_plan *plan, struct cuda_kernel_request *requests) {
    return sound(plan, &plan->problem) ? make_requests(plan, &plan->problem, requests) : 0;
}

static fdm_status execute(const fdm_plan *plan, const struct attention *attention, void *workspace, void *stream) {
    const fdm_problem *p = attention->problem;
    if (!sound(plan, p))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's splits, stages or workspace are not its kernel's");
    if (rows_of(p) == 0)
        return FDM_OK;
    struct cuda_kernel_request wanted[NUM_KERNELS];
    const struct cuda_kernel *kernels[NUM_KERNELS];
    const int32_t count = make_requests(plan, p, wanted), splits = plan->parameters[0], merge = plan->parameters[2];
    fdm_status status = cuda_kernels_get(plan->device.index, wanted, count, kernels);
    if (status)
        return status;
    struct gpu_forward_params arguments;
    gpu_fill_forward(attention, &arguments);
    arguments.num_splits = splits;
    if (merge == MMA_MERGE_WORKSPACE) {
        arguments.partial_lse = workspace;
        arguments.partial_out = (float *)(void *)((char *)workspace + lse_bytes(p, splits));
    }
    struct cuda_launch launch = {.kernel = kernels[DECODE],
                                 .grid = {(uint32_t)splits, (uint32_t)(p->batch * p->heads_kv), 1},
                                 .threads = 32 * MMA_DECODE_WARPS,
                                 .cluster = merge == MMA_MERGE_CLUSTER ? (uint32_t)splits : 1,
                                 .stream = stream,
                                 .arguments = &arguments,
                                 .arguments_bytes = sizeof arguments};
    status = cuda_launch(&launch);
    if (status || merge != MMA_MERGE_WORKSPACE)
        return status;
    launch.kernel = kernels[COMBINE];
    launch.programmatic_launch = plan->parameters[3];
    launch.grid[0] = (uint32_t)((rows_of(p) + MMA_DECODE_WARPS - 1) / MMA_DECODE_WARPS);
    launch.grid[1] = 1;
    return cuda_launch(&launch);
}

const struct gpu_algorithm mma_decode_algorithm = {
    .row = {"mma.decode", "few query rows, keys split over blocks and merged", FDM_FORWARD},
    .chosen_freely = 1,
    .refusal = refusal,
    .passed_over = passed_over,
    .fill = fill,
    .requests = requests,
    .execute = execute,
};
