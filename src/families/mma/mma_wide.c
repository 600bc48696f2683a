/* mma_wide.c: the host's side of the forward kernel for large head dims: refusals, tile choice, specialisation. */
#include "mma_wide.h"

#include <limits.h>
#include <string.h>

/* One row of the table. Rows are tried in order; the first whose head dims and bytes fit is taken. */
struct row {
    const char *choice;
    int32_t min_head_dim; /* smallest padded max(D, Dv) for which the row is preferred to later ones */
    int32_t max_head_dim;
    int32_t block_m, block_n, slice_d, slice_keys, slice_parts, stages, cluster;
};

static const struct row table[] = {
    {"WIDE_Cluster_128x128", 320, 512, 128, 128, 128, 32, 1, 4, 2},
    {"WIDE_Cluster_64x128", 513, 1024, 64, 128, 128, 16, 1, 5, 2},
    {"WIDE_128x64", 1, 256, 128, 64, 128, 32, 1, 4, 1},
    {"WIDE_64x128", 1, 512, 64, 128, 128, 32, 1, 4, 1},
    {"WIDE_64x128_Slice64", 1, 512, 64, 128, 64, 16, 1, 5, 1},
    {"WIDE_32x256", 513, 1024, 32, 256, 64, 16, 1, 4, 1},
    {"WIDE_32x128", 513, 1024, 32, 128, 64, 16, 2, 5, 1},
    {"WIDE_32x128_LowMem", 1, 512, 32, 128, 64, 16, 1, 3, 1},
    {"WIDE_32x64_LowMem", 513, 1024, 32, 64, 64, 16, 4, 3, 1},
};
enum { ROWS = sizeof table / sizeof table[0] };

static int32_t round_up(int64_t x, int32_t multiple) { return (int32_t)((x + multiple - 1) / multiple * multiple); }

int mma_wide_tile(int32_t index, const fdm_problem *problem, struct mma_wide_tile *tile) {
    if (index < 0 || index >= ROWS)
        return 0;
    const struct row *row = &table[index];
    const int64_t larger = problem->head_dim > problem->head_dim_v ? problem->head_dim : problem->head_dim_v;
    if (larger < row->min_head_dim || larger > row->max_head_dim)
        return 0;

    memset(tile, 0, sizeof *tile);
    tile->choice = row->choice;
    tile->block_m = row->block_m;
    tile->block_n = row->block_n;
    tile->slice_keys = row->slice_keys;
    tile->slice_parts = row->slice_parts;
    tile->stages = row->stages;
    tile->cluster = row->cluster;
    /* Slices of 128 only where they pad no further than slices of 64. */
    tile->head_dim = round_up(problem->head_dim, 64);
    tile->slice_d = tile->head_dim % row->slice_d == 0 ? row->slice_d : 64;
    /* Every warp holds whole 16-column units, and a row of a V slice is a multiple of 128 bytes. */
    const int32_t parts = row->cluster * row->slice_parts;
    const int32_t units = 16 * MMA_WIDE_COLUMN_GROUPS(row->block_m) * parts;
    tile->head_dim_v = round_up(problem->head_dim_v, units > 64 * parts ? units : 64 * parts);
    tile->shared_bytes =
        MMA_WIDE_SHARED_BYTES(tile->head_dim, tile->head_dim_v, tile->block_m, tile->block_n, tile->slice_d,
                              tile->slice_keys, tile->slice_parts, tile->stages, tile->cluster);
    return 1;
}

int mma_wide_tile_fits(const fdm_device *device, const struct mma_wide_tile *tile, const char **reason) {
    if (tile->cluster > 1 && (device->compute_major < 9 || device->compute_major == 12)) {
        *reason = "its clusters of two blocks are for compute capability 9.0 and 10.0";
        return 0;
    }
    if (tile->shared_bytes > device->shared_bytes) {
        *reason = "its tile needs more shared memory than a block may have on this device";
        return 0;
    }
    return 1;
}

int32_t mma_wide_choose(const fdm_device *device, const fdm_problem *problem) {
    for (int32_t i = 0; i < ROWS; ++i) {
        struct mma_wide_tile tile;
        const char *reason;
        if (mma_wide_tile(i, problem, &tile) && mma_wide_tile_fits(device, &tile, &reason))
            return i;
    }
    return -1;
}

const char *mma_wide_refusal(const fdm_device *device, const fdm_problem *problem) {
    if (problem->pass != FDM_FORWARD)
        return "mma.forward.wide computes the forward pass";
    if (device->id.type != FDM_CUDA || device->compute_major < 8)
        return "mma.forward.wide needs a CUDA device of compute capability 8.0 or above";
    if (problem->dtype != FDM_FLOAT16 && problem->dtype != FDM_BFLOAT16)
        return "mma.forward.wide takes float16 and bfloat16";
    if (problem->head_dim > 1024 || problem->head_dim_v > 1024)
        return "mma.forward.wide takes head dims up to 1024";
    if (problem->head_dim % 8 != 0 || problem->head_dim_v % 8 != 0 || !problem->aligned)
        return "mma.forward.wide needs head dims that are multiples of 8 and addresses and strides that are multiples "
               "of 16 bytes";
    if (problem->seqlen_q > INT32_MAX / 2 || problem->seqlen_k > INT32_MAX / 2)
        return "mma.forward.wide takes sequences up to 2^30";
    const int32_t index = mma_wide_choose(device, problem);
    if (index < 0)
        return "mma.forward.wide has no tile that fits this device's shared memory";
    struct mma_wide_tile tile;
    if (mma_wide_tile(index, problem, &tile) && mma_wide_grid(problem, &tile) > INT32_MAX)
        return "mma.forward.wide takes up to 2^31 - 1 blocks of rows, heads and batch together";
    return NULL;
}

int64_t mma_wide_grid(const fdm_problem *problem, const struct mma_wide_tile *tile) {
    const int64_t row_blocks = (problem->seqlen_q + tile->block_m - 1) / tile->block_m;
    return row_blocks * tile->cluster * problem->heads * problem->batch;
}

void mma_wide_request(const fdm_problem *problem, const struct mma_wide_tile *tile,
                      struct cuda_kernel_request *request) {
    const int32_t DTYPE = problem->dtype == FDM_FLOAT16 ? MMA_FLOAT16 : MMA_BFLOAT16;
    const int32_t HEAD_DIM = tile->head_dim, HEAD_DIM_V = tile->head_dim_v;
    const int32_t BLOCK_M = tile->block_m, BLOCK_N = tile->block_n;
    const int32_t SLICE_D = tile->slice_d, SLICE_KEYS = tile->slice_keys, SLICE_PARTS = tile->slice_parts;
    const int32_t STAGES = tile->stages, CLUSTER = tile->cluster;
    const int32_t HAS_SOFTCAP = problem->softcap > 0, HAS_MASK = problem->has_mask != 0;
    const int32_t HAS_BIAS = !problem->has_bias ? 0 : problem->bias_dtype == FDM_FLOAT32 ? 2 : 1;
    const int32_t HAS_INTERVALS = problem->has_intervals != 0, VARLEN = problem->varlen != 0;
#define ROW(name) {#name, name},
    const struct cuda_constant constants[] = {MMA_WIDE_CONSTANTS(ROW)};
#undef ROW
    memset(request, 0, sizeof *request);
    request->file = "families/mma/mma_wide.cu";
    request->entry = "mma_wide";
    request->num_constants = sizeof constants / sizeof constants[0];
    memcpy(request->constants, constants, sizeof constants);
    request->shared_bytes = (int32_t)tile->shared_bytes;
}
