/* gemm_skinny_plan.c: which problems gemm.skinny takes, its rows, loads in flight and split of k. */
#include <stdio.h>

#include "companions/gemm/gemm_plan.h"

enum { K_OF_A_ROUND = 64 * GEMM_SKINNY_WARPS };

const char *gemm_skinny_refusal(const fdm_device *device, const void *problem) {
    const fdm_gemm_problem *p = problem;
    if (p->m > GEMM_SKINNY_ROWS_MAX)
        return "it is for 32 rows of A at most";
    if (p->k == 0)
        return "there is nothing to multiply";
    if (p->accumulate_float16)
        return "it sums in float32";
    if (!p->a_rows_contiguous)
        return "rows of A must be contiguous";
    if (!p->mappable || p->k % 8 || (p->b_rows_contiguous && p->n % 8))
        return "rows of A and what is contiguous of B must be whole loads of 16 bytes";
    return NULL;
}

const char *gemm_skinny_passed_over(const fdm_device *device, const void *problem) {
    enum { ROWS_BESIDE_HOPPER = 8 };
    const fdm_gemm_problem *p = problem;
    return p->m > ROWS_BESIDE_HOPPER && !gemm_hopper_refusal(device, problem)
               ? "from 9 rows on gemm.hopper reads B as fast"
               : NULL;
}

/* A block can draw some 90 GB/s, so that 48 reach the bandwidth of the largest device; k is split where there are fewer
 * of them, into parts that are worth a sum in memory. */
static int32_t splits_of(const fdm_device *device, const fdm_gemm_problem *p) {
    enum { BLOCKS_MIN = 48, ROUNDS_MIN = 4 };
    const int64_t blocks = ceil_div(p->n, GEMM_SKINNY_COLUMNS) * p->batch, rounds = ceil_div(p->k, K_OF_A_ROUND);
    int32_t splits = 1;
    while (blocks * splits < BLOCKS_MIN && rounds / (2 * splits) >= ROUNDS_MIN)
        splits *= 2;
    return splits;
}

static void fill_way(const fdm_device *device, const fdm_gemm_problem *p, int32_t depth, int32_t splits,
                     fdm_companion_choice *choice) {
    const int32_t rows = p->m <= 8 ? 8 : p->m <= 16 ? 16 : GEMM_SKINNY_ROWS_MAX;
    gemm_set_parameters(
        choice, (union gemm_parameters){
                    .skinny = {.rows = rows, .depth = depth, .splits = splits, .early = device->compute_major >= 9}});
    choice->shared_bytes = gemm_skinny_shared_bytes(rows);
    choice->workspace_bytes = gemm_splits_bytes(p, splits);
    snprintf(choice->choice, sizeof choice->choice, "%dx%d, %d loads of B a thread in flight, %d split%s", rows,
             GEMM_SKINNY_COLUMNS, 8 * depth, splits, splits > 1 ? "s" : "");
}

/* The rules' way, then other splits by the rules' depth, then by the other. 4 was slower on an H200: 36.6 beside 35.7
 * us for 1 row, 38.3 beside 36.6 for 16. */
int gemm_skinny_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice) {
    enum { DEPTH = 2, OTHER_DEPTH = 4, SPLITS_MAX = 16 };
    const fdm_gemm_problem *p = problem;
    const int32_t rules = splits_of(device, p);
    if (number == 0)
        fill_way(device, p, DEPTH, rules, choice);
    for (int32_t depth = DEPTH; number > 0 && depth <= OTHER_DEPTH; depth += OTHER_DEPTH - DEPTH)
        for (int32_t splits = 1; splits <= SPLITS_MAX && (splits == 1 || ceil_div(p->k, K_OF_A_ROUND) >= 2 * splits);
             splits *= 2)
            if ((depth != DEPTH || splits != rules) && --number == 0) {
                fill_way(device, p, depth, splits, choice);
                return 1;
            }
    return number == 0;
}

void gemm_skinny_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    gemm_skinny_variant(device, problem, 0, choice);
}

int gemm_skinny_request(const fdm_gemm_plan *plan, struct cuda_kernel_request *request) {
    const fdm_gemm_problem *p = &plan->problem;
    const union gemm_parameters at = gemm_parameters_of(&plan->choice);
    const int32_t partial = at.skinny.splits > 1;
    *request = (struct cuda_kernel_request){.file = "companions/gemm/gemm_skinny.cu",
                                            .entry = "gemm_skinny",
                                            .shared_bytes = (int32_t)plan->choice.shared_bytes,
                                            .threads = 32 * GEMM_SKINNY_WARPS};
    GPU_SET_CONSTANTS(request, GEMM_SKINNY_CONSTANTS, .DTYPE = p->dtype, .B_N_MAJOR = p->b_rows_contiguous,
                      .HAS_C = p->has_c && !partial, .ROWS = at.skinny.rows, .DEPTH = at.skinny.depth,
                      .PARTIAL = partial);
    return at.skinny.rows >= p->m && at.skinny.depth > 1 && at.skinny.splits >= 1 &&
           plan->choice.shared_bytes == gemm_skinny_shared_bytes(at.skinny.rows);
}

int64_t gemm_skinny_blocks(const fdm_gemm_plan *plan) {
    const fdm_gemm_problem *p = &plan->problem;
    return ceil_div(p->n, GEMM_SKINNY_COLUMNS) * gemm_parameters_of(&plan->choice).skinny.splits * p->batch;
}
