/* gemm_hopper_plan.c: which problems gemm.hopper takes, by which tile, cluster and split of k. */
#include <math.h>
#include <stdio.h>

#include "companions/gemm/gemm_plan.h"

const char *gemm_hopper_refusal(const fdm_device *device, const void *problem) {
    const fdm_gemm_problem *p = problem;
    if (device->compute_major != 9)
        return "it is for compute capability 9.0";
    return gemm_tma_refusal(p);
}

/* ---- the tile ---- */

struct tile {
    int32_t warpgroups, block_n, cluster, splits;
};
static struct gemm_tma_tile tma_tile_of(const fdm_gemm_problem *p, const struct tile *t) {
    const int32_t rows = 64 * t->warpgroups, few = p->a_rows_contiguous && p->m < rows;
    return (struct gemm_tma_tile){.block_m = rows,
                                  .block_n = t->block_n,
                                  .cluster = t->cluster,
                                  .splits = t->splits,
                                  .a_rows = few ? ((int32_t)p->m + 7) / 8 * 8 : rows,
                                  .b_columns = t->block_n / t->cluster,
                                  .out_rows = 64,
                                  .out_columns = gemm_hopper_panel_columns(t->block_n)};
}
static int64_t items_of(const fdm_gemm_problem *p, const struct tile *t) {
    const struct gemm_tma_tile tile = tma_tile_of(p, t);
    return gemm_tma_items(p, &tile);
}

static int32_t stages_of(const fdm_device *device, const struct tile *t) {
    enum { STAGES_MAX = 12 };
    const int32_t bytes = gemm_tma_stage_bytes(64 * t->warpgroups, t->block_n);
    const int64_t left = device->shared_bytes - gemm_hopper_shared_bytes(t->warpgroups, t->block_n, 0, t->splits > 1);
    return left / bytes > STAGES_MAX ? STAGES_MAX : (int32_t)(left / bytes);
}

/* Cycles, as far as they tell tiles apart: waves of items over the device, each the larger of its products, at 2048
 * multiply-adds a cycle, and of its bytes from L2, at 50 a cycle (37 were measured for tiles that no neighbour shares,
 * 65 for shared ones), then its results; no less than device memory takes for everything once. Parts of k are written
 * and read again. */
static double cycles_of(const fdm_device *device, const fdm_gemm_problem *p, const struct tile *t) {
    const double clock = 1.7e9, m = (double)p->m, n = (double)p->n, k = (double)p->k, batch = (double)p->batch;
    const double rows = 64.0 * t->warpgroups, steps = (double)ceil_div(gemm_tma_steps(p), t->splits);
    const double products = rows * (t->block_n + 16) * 64 / 2048; /* narrow ones read A more often */
    const double bytes = ((m < rows ? m : rows) + (double)t->block_n / t->cluster) * 128;
    const double step = products > bytes / 50 ? products : bytes / 50;
    const double waves = (double)ceil_div(items_of(p, t), device->num_sms / t->cluster);
    const double items = waves * (steps * step + 300 + 3 * t->block_n);
    const double memory =
        device->bandwidth ? 2 * batch * (m * k + k * n + m * n) * clock / (double)device->bandwidth : 0;
    const double parts = t->splits > 1 ? 5000 + batch * m * n * 8 * t->splits / (30.0 * device->num_sms) : 0;
    return (items > memory ? items : memory) + items * 1e-3 + parts; /* of those that memory holds up, the quickest */
}

static void fill_tile(const fdm_device *device, const fdm_gemm_problem *p, struct tile t,
                      fdm_companion_choice *choice) {
    const int64_t clusters = device->num_sms / t.cluster, items = items_of(p, &t);
    const int32_t stages = stages_of(device, &t), blocks = (int32_t)(items < clusters ? items : clusters) * t.cluster;
    gemm_set_parameters(choice, (union gemm_parameters){.hopper = {.warpgroups = t.warpgroups,
                                                                   .block_n = t.block_n,
                                                                   .stages = stages,
                                                                   .cluster = t.cluster,
                                                                   .splits = t.splits,
                                                                   .blocks = blocks,
                                                                   .early = 1}});
    choice->shared_bytes = gemm_hopper_shared_bytes(t.warpgroups, t.block_n, stages, t.splits > 1);
    choice->workspace_bytes = gemm_splits_bytes(p, t.splits);
    snprintf(choice->choice, sizeof choice->choice, "%dx%d, %d stages, cluster %d, %d split%s", 64 * t.warpgroups,
             t.block_n, stages, t.cluster, t.splits, t.splits > 1 ? "s" : "");
}

/* Tiles and splits of k that a problem can have, in order; returns how many. */
enum { TILES = 10, SPLITS_MAX = 16, WAYS_MAX = TILES * 5 };
static int32_t ways_of(const fdm_device *device, const fdm_gemm_problem *p, struct tile ways[WAYS_MAX]) {
    static const struct tile tiles[TILES] = {{2, 256, 2, 1}, {2, 256, 1, 1}, {2, 224, 2, 1}, {2, 192, 2, 1},
                                             {2, 192, 1, 1}, {2, 160, 2, 1}, {2, 128, 2, 1}, {2, 128, 1, 1},
                                             {1, 64, 1, 1},  {2, 64, 1, 1}};
    int32_t count = 0;
    for (int32_t i = 0; i < TILES; i++)
        for (int32_t splits = 1; splits <= SPLITS_MAX && (splits == 1 || gemm_tma_steps(p) / splits >= 8);
             splits *= 2) {
            struct tile t = tiles[i];
            t.splits = splits;
            /* The lower block would have nothing; or a launch of clusters costs more than sharing saves (H200). */
            if (t.cluster == 1 || (p->m > 64 * t.warpgroups && items_of(p, &t) * t.cluster > device->num_sms))
                ways[count++] = t;
        }
    return count;
}

/* The place of the rules' way. */
static int32_t best_of(const fdm_device *device, const fdm_gemm_problem *p, const struct tile *ways, int32_t count) {
    const double NARROWER = 0.98; /* wide ones cost less power, which the estimate leaves out */
    int32_t best = 0;
    double least = 0;
    for (int32_t i = 0; i < count; i++) {
        const double cycles = cycles_of(device, p, &ways[i]);
        if (least > 0 && cycles >= NARROWER * least)
            continue;
        least = cycles;
        best = i;
    }
    return best;
}

/* The rules' way, then the others by their estimates. */
int gemm_hopper_variant(const fdm_device *device, const void *problem, int32_t number, fdm_companion_choice *choice) {
    const fdm_gemm_problem *p = problem;
    struct tile ways[WAYS_MAX];
    double cycles[WAYS_MAX];
    const int32_t count = ways_of(device, p, ways);
    int32_t next = best_of(device, p, ways, count);
    if (number >= count)
        return 0;
    for (int32_t i = 0; i < count; i++)
        cycles[i] = cycles_of(device, p, &ways[i]);
    for (; number > 0; number--) {
        cycles[next] = INFINITY; /* taken */
        next = 0;
        for (int32_t i = 1; i < count; i++)
            if (cycles[i] < cycles[next])
                next = i;
    }
    fill_tile(device, p, ways[next], choice);
    return 1;
}

void gemm_hopper_fill(const fdm_device *device, const void *problem, fdm_companion_choice *choice) {
    gemm_hopper_variant(device, problem, 0, choice);
}

/* ---- the launch ---- */

int gemm_hopper_request(const fdm_gemm_plan *plan, struct cuda_kernel_request *request) {
    const fdm_gemm_problem *p = &plan->problem;
    const union gemm_parameters at = gemm_parameters_of(&plan->choice);
    const int32_t partial = at.hopper.splits > 1;
    *request = (struct cuda_kernel_request){.file = "companions/gemm/gemm_hopper.cu",
                                            .entry = "gemm_hopper",
                                            .shared_bytes = (int32_t)plan->choice.shared_bytes,
                                            .threads = 128 * (at.hopper.warpgroups + 1)};
    GPU_SET_CONSTANTS(request, GEMM_HOPPER_CONSTANTS, .DTYPE = p->dtype, .A_M_MAJOR = !p->a_rows_contiguous,
                      .B_N_MAJOR = p->b_rows_contiguous, .HAS_C = p->has_c && !partial,
                      .WARPGROUPS = at.hopper.warpgroups, .BLOCK_N = at.hopper.block_n, .STAGES = at.hopper.stages,
                      .CLUSTER = at.hopper.cluster, .PARTIAL = partial);
    return at.hopper.stages > 1 && at.hopper.cluster >= 1 && at.hopper.splits >= 1 && at.hopper.blocks >= 1 &&
           plan->choice.shared_bytes ==
               gemm_hopper_shared_bytes(at.hopper.warpgroups, at.hopper.block_n, at.hopper.stages, partial);
}

fdm_status gemm_hopper_launch(const fdm_gemm_plan *plan, const struct cuda_kernel *kernel,
                              const struct gemm_params *params, void *stream) {
    const union gemm_parameters at = gemm_parameters_of(&plan->choice);
    const struct tile t = {at.hopper.warpgroups, at.hopper.block_n, at.hopper.cluster, at.hopper.splits};
    const struct gemm_tma_tile tile = tma_tile_of(&plan->problem, &t);
    const struct gemm_tma_grid grid = {at.hopper.blocks, 128 * (t.warpgroups + 1), at.hopper.early};
    return gemm_tma_launch(plan, kernel, &tile, &grid, params, stream);
}
