/* gemm_plan.c: the gemm kernels by name, best first, and what a plan launches. */
#include "companions/gemm/gemm_plan.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "tuning/class.h"

/* The kernels in the order of the list. Those from MMA_WIDE to MMA_STAGE2 are gemm_mma.cu with one idea more or less.
 */
enum {
    SKINNY,
    HOPPER,
    MMA_TMA,
    MMA,
    MMA_WIDE,
    MMA_AHEAD,
    MMA_ORDER,
    MMA_STAGE5,
    MMA_STAGE4,
    MMA_STAGE3,
    MMA_SWIZZLE,
    MMA_PADDED,
    MMA_STAGE2,
    MMA_WARP,
    SLICED_K,
    NAIVE,
    NUM_KERNELS
};

static const char *float16_refusal(const fdm_device *device, const void *problem) {
    const fdm_gemm_problem *p = problem;
    return p->accumulate_float16 && p->dtype != FDM_FLOAT16 ? "sums in float16 are for float16 operands" : NULL;
}
static const char *float32_refusal(const fdm_device *device, const void *problem) {
    const fdm_gemm_problem *p = problem;
    return p->accumulate_float16 ? "its sums are in float32" : NULL;
}

static int64_t tiles_of(int64_t extent, int64_t tile) { return (extent + tile - 1) / tile; }

/* early: it may begin before the kernel ahead of it has ended, for which it waits by itself. */
static fdm_status launch(const struct cuda_kernel_request *request, const struct cuda_kernel *kernel, int64_t blocks,
                         int early, const struct gemm_params *params, void *stream) {
    const struct cuda_launch l = {.kernel = kernel,
                                  .grid = {(uint32_t)blocks, 1, 1},
                                  .threads = (uint32_t)request->threads,
                                  .programmatic_launch = early,
                                  .stream = stream,
                                  .arguments = params,
                                  .arguments_bytes = sizeof *params};
    return cuda_launch(&l);
}

/* ---- gemm.mma and the rungs below it ---- */

static const struct rung {
    int32_t block_n, block_k, stages, layout, l2_order, ahead;
} rungs[NUM_KERNELS] = {
    [MMA] = {256, 64, 4, GEMM_ROWS_SWIZZLE, 1, 1},        [MMA_WIDE] = {256, 32, 4, GEMM_ROWS_SWIZZLE, 1, 1},
    [MMA_AHEAD] = {128, 32, 4, GEMM_ROWS_SWIZZLE, 1, 1},  [MMA_ORDER] = {128, 32, 4, GEMM_ROWS_SWIZZLE, 1, 0},
    [MMA_STAGE5] = {128, 32, 5, GEMM_ROWS_SWIZZLE, 0, 0}, [MMA_STAGE4] = {128, 32, 4, GEMM_ROWS_SWIZZLE, 0, 0},
    [MMA_STAGE3] = {128, 32, 3, GEMM_ROWS_SWIZZLE, 0, 0}, [MMA_SWIZZLE] = {128, 32, 2, GEMM_ROWS_SWIZZLE, 0, 0},
    [MMA_PADDED] = {128, 32, 2, GEMM_ROWS_PADDED, 0, 0},  [MMA_STAGE2] = {128, 32, 2, GEMM_ROWS_DENSE, 0, 0},
};

static int32_t mma_shared_bytes(const struct rung *r) {
    enum { ALIGNMENT = 128 };
    return r->stages * (gemm_mma_operand_bytes(GEMM_MMA_BLOCK_M, r->block_k, r->layout) +
                        gemm_mma_operand_bytes(r->block_n, r->block_k, r->layout)) +
           ALIGNMENT;
}

static int64_t mma_tiles(const fdm_gemm_problem *p, int32_t block_n) {
    return p->batch * tiles_of(p->m, GEMM_MMA_BLOCK_M) * tiles_of(p->n, block_n);
}

/* Whether tiles of 128 columns end earlier than those of 256: cycles of 16 of k, of a block that has a multiprocessor
 * to itself, and of two that share it (766 were measured for the two on an H200; the others are estimates). */
static int narrow_is_faster(const fdm_device *device, const fdm_gemm_problem *p) {
    const int64_t of_256 = 460, alone = 300, of_two = 766, sms = device->num_sms > 0 ? device->num_sms : 1;
    const int64_t tiles = mma_tiles(p, 128);
    return (tiles <= sms ? alone : tiles_of(tiles, 2 * sms) * of_two) < tiles_of(mma_tiles(p, 256), sms) * of_256;
}

/* A rung by name is as the table has it; gemm.mma takes the stages that fit, and smaller tiles for few or unaligned. */
static struct rung rung_of(const fdm_device *device, const fdm_gemm_problem *p, int32_t index) {
    struct rung r = rungs[index];
    if (index != MMA)
        return r;
    if (!p->mappable || narrow_is_faster(device, p))
        return rungs[MMA_ORDER];
    if (mma_shared_bytes(&r) > device->shared_bytes)
        r.stages--;
    return mma_shared_bytes(&r) > device->shared_bytes ? rungs[MMA_WIDE] : r;
}

static void fill_rung(const fdm_gemm_problem *p, struct rung r, fdm_companion_choice *choice) {
    gemm_set_parameters(choice,
                        (union gemm_parameters){
                            .mma = {.block_n = r.block_n, .block_k = r.block_k, .stages = r.stages, .ahead = r.ahead}});
    choice->shared_bytes = mma_shared_bytes(&r);
    snprintf(choice->choice, sizeof choice->choice, "%dx%d, %d of k, %d stages, %s", GEMM_MMA_BLOCK_M, r.block_n,
             r.block_k, r.stages, p->mappable ? "16-byte copies" : "copies of elements");
}

static void mma_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    fill_rung(problem, rung_of(device, problem, choice->kernel_index), choice);
}

static int same_rung(const struct rung *a, const struct rung *b) { return memcmp(a, b, sizeof *a) == 0; }

/* The rules' tile of gemm.mma, then the other rungs that swizzle and order, those that fit. They differ from gemm.mma's
 * own in numbers alone. */
static int mma_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice) {
    const struct rung rules = rung_of(device, problem, MMA);
    if (number == 0)
        fill_rung(problem, rules, choice);
    for (int32_t i = MMA; number > 0 && i <= MMA_ORDER; i++)
        if (!same_rung(&rungs[i], &rules) && mma_shared_bytes(&rungs[i]) <= device->shared_bytes &&
            (((const fdm_gemm_problem *)problem)->mappable || !rungs[i].ahead) && --number == 0) {
            fill_rung(problem, rungs[i], choice);
            return 1;
        }
    return number == 0;
}

/* 0: the numbers are none that mma_fill() can have made. */
static int mma_request(const fdm_gemm_plan *plan, struct cuda_kernel_request *request) {
    const fdm_gemm_problem *p = &plan->problem;
    const union gemm_parameters at = gemm_parameters_of(&plan->choice);
    const struct rung *named = &rungs[plan->choice.kernel_index];
    const struct rung r = {at.mma.block_n, at.mma.block_k, at.mma.stages, named->layout, named->l2_order, at.mma.ahead};
    *request = (struct cuda_kernel_request){.file = "companions/gemm/gemm_mma.cu",
                                            .entry = "gemm_mma",
                                            .shared_bytes = mma_shared_bytes(&r),
                                            .threads = GEMM_MMA_THREADS};
    GPU_SET_CONSTANTS(request, GEMM_MMA_CONSTANTS, .DTYPE = p->dtype, .A_M_MAJOR = !p->a_rows_contiguous,
                      .B_N_MAJOR = p->b_rows_contiguous, .HAS_C = p->has_c, .ACCUMULATE16 = p->accumulate_float16,
                      .ALIGNED = p->mappable, .BLOCK_N = r.block_n, .BLOCK_K = r.block_k, .STAGES = r.stages,
                      .LAYOUT = r.layout, .L2_ORDER = r.l2_order, .AHEAD = r.ahead);
    return r.block_n > 0 && r.stages > 1 && plan->choice.shared_bytes == request->shared_bytes;
}

/* ---- the rungs without ring or tensor cores ---- */

static void warp_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    snprintf(choice->choice, sizeof choice->choice, "%dx%d a warp", GEMM_WARP_ROWS, GEMM_WARP_COLUMNS);
}
static void sliced_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    snprintf(choice->choice, sizeof choice->choice, "%dx%d, %d of k a step", GEMM_SLICED_BLOCK, GEMM_SLICED_BLOCK,
             GEMM_SLICED_K);
}
static void naive_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    snprintf(choice->choice, sizeof choice->choice, "a thread an element");
}

static void rung_request(const fdm_gemm_problem *p, const char *entry, int32_t threads,
                         struct cuda_kernel_request *request) {
    *request =
        (struct cuda_kernel_request){.file = "companions/gemm/gemm_rungs.cu", .entry = entry, .threads = threads};
    GPU_SET_CONSTANTS(request, GEMM_RUNG_CONSTANTS, .DTYPE = p->dtype, .HAS_C = p->has_c);
}
static void element_request(const fdm_gemm_problem *p, const char *entry, int32_t accumulate16,
                            struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){
        .file = "companions/gemm/gemm_naive.cu", .entry = entry, .threads = GEMM_ELEMENT_THREADS};
    GPU_SET_CONSTANTS(request, GEMM_ELEMENT_CONSTANTS, .DTYPE = p->dtype, .HAS_C = p->has_c,
                      .ACCUMULATE16 = accumulate16);
}

/* ---- the list ---- */

#define MMA_RUNG(index, name, description) [index] = {name, description, 0, float16_refusal, NULL, mma_fill, NULL}
static const struct companion_kernel kernels[NUM_KERNELS] = {
    [SKINNY] = {"gemm.skinny", "few rows of A: B from memory straight to registers and mma.sync, k split over warps", 1,
                gemm_skinny_refusal, gemm_skinny_passed_over, gemm_skinny_fill, gemm_skinny_variant},
    [HOPPER] = {"gemm.hopper", "wgmma and TMA, persistent, specialised warpgroups, clusters, k split over blocks", 1,
                gemm_hopper_refusal, NULL, gemm_hopper_fill, gemm_hopper_variant},
    [MMA_TMA] = {"gemm.mma-tma", "mma.sync, 64x64 a warp, persistent, a ring of stages by TMA, barriers of each", 1,
                 gemm_mma_tma_refusal, NULL, gemm_mma_tma_fill, gemm_mma_tma_variant},
    [MMA] = {"gemm.mma", "mma.sync, 64x64 a warp, 64 of k a stage, a ring of stages by cp.async", 1, float16_refusal,
             NULL, mma_fill, mma_variant},
    MMA_RUNG(MMA_WIDE, "gemm.mma+wide", "gemm.mma+ahead with 64x64 a warp"),
    MMA_RUNG(MMA_AHEAD, "gemm.mma+ahead", "gemm.mma+order with registers loaded one product ahead"),
    MMA_RUNG(MMA_ORDER, "gemm.mma+order", "gemm.mma+stage4 with tiles ordered for L2"),
    MMA_RUNG(MMA_STAGE5, "gemm.mma+stage5", "the same with five stages"),
    MMA_RUNG(MMA_STAGE4, "gemm.mma+stage4", "the same with four stages"),
    MMA_RUNG(MMA_STAGE3, "gemm.mma+stage3", "the same with three stages"),
    MMA_RUNG(MMA_SWIZZLE, "gemm.mma+stage2+swizzle", "two stages, chunks of rows permuted"),
    MMA_RUNG(MMA_PADDED, "gemm.mma+stage2+pad", "two stages, 16 bytes between rows"),
    MMA_RUNG(MMA_STAGE2, "gemm.mma+stage2", "mma.sync from shared memory, two stages, rows as they come"),
    [MMA_WARP] = {"gemm.mma-warp", "mma.sync, a tile of 16x8 a warp, straight from global memory", 0, float32_refusal,
                  NULL, warp_fill, NULL},
    [SLICED_K] = {"gemm.sliced-k", "slices of k in shared memory, 4x4 sums a thread, no tensor cores", 0,
                  float32_refusal, NULL, sliced_fill, NULL},
    [NAIVE] = {"gemm.naive", "the definition, a thread an element", 0, float16_refusal, NULL, naive_fill, NULL},
};

static void name_class(const void *problem, char text[COMPANION_CLASS_BYTES]) {
    const fdm_gemm_problem *p = problem;
    snprintf(text, COMPANION_CLASS_BYTES,
             "%s, batch %lld, m %lld, n %lld, k %lld, rows contiguous %d%d, c %d, float16 sums %d, mappable %d",
             fdm_dtype_name(p->dtype), (long long)tuning_batch_edge(p->batch), (long long)tuning_length_edge(p->m),
             (long long)tuning_length_edge(p->n), (long long)tuning_length_edge(p->k), p->a_rows_contiguous,
             p->b_rows_contiguous, p->has_c, p->accumulate_float16, p->mappable);
}
const struct companion_operation gemm_operation = {"gemm", NUM_KERNELS, kernels, sizeof(fdm_gemm_problem), name_class};
_Static_assert(sizeof(fdm_gemm_problem) <= COMPANION_PROBLEM_BYTES, "a thread's last problem has room");

/* Parts of k, whose sums gemm_combine adds where there are several. */
static int32_t splits_of(const fdm_companion_choice *c) {
    return c->kernel_index == HOPPER   ? gemm_parameters_of(c).hopper.splits
           : c->kernel_index == SKINNY ? gemm_parameters_of(c).skinny.splits
                                       : 1;
}

int32_t gemm_requests(const fdm_gemm_plan *plan, struct cuda_kernel_request *requests) {
    const fdm_companion_choice *c = &plan->choice;
    const fdm_gemm_problem *p = &plan->problem;
    if (c->kernel_index < 0 || c->kernel_index >= NUM_KERNELS || strcmp(c->kernel, kernels[c->kernel_index].name) != 0)
        return 0;
    switch (c->kernel_index) {
    case SKINNY:
    case HOPPER:
        if (c->kernel_index == HOPPER ? !gemm_hopper_request(plan, &requests[0])
                                      : !gemm_skinny_request(plan, &requests[0]))
            return 0;
        if (c->workspace_bytes < gemm_splits_bytes(p, splits_of(c)))
            return 0;
        if (splits_of(c) == 1)
            return 1;
        element_request(p, "gemm_combine", 0, &requests[1]);
        return 2;
    case MMA_TMA: return gemm_mma_tma_request(plan, &requests[0]);
    case MMA_WARP: rung_request(p, "gemm_mma_warp", 32 * GEMM_WARPS, &requests[0]); return 1;
    case SLICED_K: rung_request(p, "gemm_sliced_k", GEMM_ELEMENT_THREADS, &requests[0]); return 1;
    case NAIVE: element_request(p, "gemm_naive", p->accumulate_float16, &requests[0]); return 1;
    default: return mma_request(plan, &requests[0]);
    }
}

static int64_t element_blocks_of(const fdm_gemm_problem *p) {
    return tiles_of(p->batch * p->m * p->n, GEMM_ELEMENT_THREADS);
}

/* Of the list's kernels but those by TMA. */
static int64_t blocks_of(const fdm_gemm_plan *plan) {
    const fdm_gemm_problem *p = &plan->problem;
    switch (plan->choice.kernel_index) {
    case SKINNY: return gemm_skinny_blocks(plan);
    case MMA_WARP: return p->batch * tiles_of(p->m, GEMM_WARP_ROWS) * tiles_of(p->n, GEMM_WARPS * GEMM_WARP_COLUMNS);
    case SLICED_K: return p->batch * tiles_of(p->m, GEMM_SLICED_BLOCK) * tiles_of(p->n, GEMM_SLICED_BLOCK);
    case NAIVE: return element_blocks_of(p);
    default: return mma_tiles(p, gemm_parameters_of(&plan->choice).mma.block_n);
    }
}

fdm_status gemm_launch(const fdm_gemm_plan *plan, struct gemm_params *params, void *workspace, void *stream) {
    struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
    const struct cuda_kernel *loaded[COMPANION_REQUESTS_MAX];
    const int32_t count = gemm_requests(plan, requests), index = plan->choice.kernel_index;
    const int early = index == SKINNY && gemm_parameters_of(&plan->choice).skinny.early;
    if (count == 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's tile or workspace is not its kernel's");
    params->partials = workspace;
    params->splits = splits_of(&plan->choice);
    fdm_status status = cuda_kernels_get(plan->choice.device.index, requests, count, loaded);
    if (!status)
        status = index == HOPPER    ? gemm_hopper_launch(plan, loaded[0], params, stream)
                 : index == MMA_TMA ? gemm_mma_tma_launch(plan, loaded[0], params, stream)
                                    : launch(&requests[0], loaded[0], blocks_of(plan), early, params, stream);
    if (!status && count > 1)
        status = launch(&requests[1], loaded[1], element_blocks_of(&plan->problem), 0, params, stream);
    return status;
}
