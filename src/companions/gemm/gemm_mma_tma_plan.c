/* gemm_mma_tma_plan.c: which problems gemm.mma-tma takes, by which tile. */
#include <stdio.h>

#include "companions/gemm/gemm_plan.h"

const char *gemm_mma_tma_refusal(const fdm_device *device, const void *problem) {
    const fdm_gemm_problem *p = problem;
    if (device->compute_major != 9 && device->compute_major != 10)
        return "it is for compute capabilities 9.0 and 10.0";
    return gemm_tma_refusal(p);
}

/* ---- the tile ---- */

static struct gemm_tma_tile tile_with(int32_t block_n) {
    return (struct gemm_tma_tile){.block_m = GEMM_MMA_BLOCK_M,
                                  .block_n = block_n,
                                  .cluster = 1,
                                  .splits = 1,
                                  .a_rows = GEMM_MMA_BLOCK_M,
                                  .b_columns = gemm_mma_tma_box(block_n),
                                  .out_rows = GEMM_MMA_BLOCK_M,
                                  .out_columns = 64};
}

static int32_t stages_of(const fdm_device *device, int32_t block_n) {
    enum { STAGES_MAX = 8 };
    const int64_t left = device->shared_bytes - gemm_mma_tma_shared_bytes(block_n, 0);
    const int64_t stages = left / gemm_tma_stage_bytes(GEMM_MMA_BLOCK_M, block_n);
    return stages > STAGES_MAX ? STAGES_MAX : (int32_t)stages;
}

/* Cycles, as far as they tell tiles apart: waves of tiles over the device, each of steps of 64 of k. A step takes its
 * products, at 1270 multiply-adds a cycle, and of what shared memory takes meanwhile 0.29 (fitted on an H200). */
static double cycles_of(const fdm_device *device, const fdm_gemm_problem *p, int32_t block_n) {
    const struct gemm_tma_tile t = tile_with(block_n);
    const double products = (double)block_n * GEMM_MMA_BLOCK_M * GEMM_TMA_BLOCK_K / 1270;
    const double shared = 4 * (160 + 0.75 * block_n);
    const double waves = (double)ceil_div(gemm_tma_items(p, &t), device->num_sms > 0 ? device->num_sms : 1);
    return waves * ((double)gemm_tma_steps(p) * (products + 0.29 * shared) + 1000 + 3 * block_n);
}

static const int32_t columns[] = {256, 320, 192, 128, 64};
static int32_t columns_of(const fdm_device *device, const fdm_gemm_problem *p) {
    const double OTHER = 0.96; /* the first where they are alike: on an H200 the quickest for each of its columns */
    int32_t best = 0;
    double least = 0;
    for (size_t i = 0; i < sizeof columns / sizeof columns[0]; i++) {
        const double cycles = cycles_of(device, p, columns[i]);
        if (best && cycles >= OTHER * least)
            continue;
        least = cycles;
        best = columns[i];
    }
    return best;
}

static void fill_columns(const fdm_device *device, const fdm_gemm_problem *p, int32_t block_n,
                         fdm_companion_choice *choice) {
    const struct gemm_tma_tile t = tile_with(block_n);
    const int64_t items = gemm_tma_items(p, &t), sms = device->num_sms > 0 ? device->num_sms : 1;
    const int32_t stages = stages_of(device, t.block_n), blocks = (int32_t)(items < sms ? items : sms);
    gemm_set_parameters(choice, (union gemm_parameters){
                                    .mma_tma = {.block_n = t.block_n, .stages = stages, .blocks = blocks, .early = 1}});
    choice->shared_bytes = gemm_mma_tma_shared_bytes(t.block_n, stages);
    snprintf(choice->choice, sizeof choice->choice, "%dx%d, %d stages", GEMM_MMA_BLOCK_M, t.block_n, stages);
}

void gemm_mma_tma_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    fill_columns(device, problem, columns_of(device, problem), choice);
}

int gemm_mma_tma_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice) {
    const int32_t rules = columns_of(device, problem);
    if (number == 0)
        fill_columns(device, problem, rules, choice);
    for (size_t i = 0; number > 0 && i < sizeof columns / sizeof columns[0]; i++)
        if (columns[i] != rules && --number == 0) {
            fill_columns(device, problem, columns[i], choice);
            return 1;
        }
    return number == 0;
}

/* ---- the launch ---- */

int gemm_mma_tma_request(const fdm_gemm_plan *plan, struct cuda_kernel_request *request) {
    const fdm_gemm_problem *p = &plan->problem;
    const union gemm_parameters at = gemm_parameters_of(&plan->choice);
    *request = (struct cuda_kernel_request){.file = "companions/gemm/gemm_mma_tma.cu",
                                            .entry = "gemm_mma_tma",
                                            .shared_bytes = (int32_t)plan->choice.shared_bytes,
                                            .threads = GEMM_MMA_TMA_THREADS};
    GPU_SET_CONSTANTS(request, GEMM_MMA_TMA_CONSTANTS, .DTYPE = p->dtype, .A_M_MAJOR = !p->a_rows_contiguous,
                      .B_N_MAJOR = p->b_rows_contiguous, .HAS_C = p->has_c, .BLOCK_N = at.mma_tma.block_n,
                      .STAGES = at.mma_tma.stages);
    return at.mma_tma.block_n > 0 && at.mma_tma.stages > 1 && at.mma_tma.blocks >= 1 &&
           plan->choice.shared_bytes == gemm_mma_tma_shared_bytes(at.mma_tma.block_n, at.mma_tma.stages);
}

fdm_status gemm_mma_tma_launch(const fdm_gemm_plan *plan, const struct cuda_kernel *kernel,
                               const struct gemm_params *params, void *stream) {
    const union gemm_parameters at = gemm_parameters_of(&plan->choice);
    const struct gemm_tma_tile tile = tile_with(at.mma_tma.block_n);
    const struct gemm_tma_grid grid = {at.mma_tma.blocks, GEMM_MMA_TMA_THREADS, at.mma_tma.early};
    return gemm_tma_launch(plan, kernel, &tile, &grid, params, stream);
}
