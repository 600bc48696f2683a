/* hopper_latent.c: the forward of a latent KV cache on the host: how many splits, the tensor map, the launch. */
#include "families/hopper/latent/hopper_latent.h"

#include <stdio.h>

#include "families/hopper/hopper_family.h"
#include "gpu/splits.h"
#include "gpu/tile_maps.h"

enum { HEAD_DIM = 576, VALUE_DIM = 512, BLOCK_N = 64 };
enum { PAGE_ROWS = 16, SPLITS_MAX = 32, TILES_OF_A_SPLIT_MIN = 4 };

PLAN_PARAMETER_STRUCT(HOPPER_LATENT_PARAMETERS);

static int64_t row_blocks(const fdm_problem *p) {
    return gpu_ceil_div(p->seqlen_q * (p->heads / p->heads_kv), HOPPER_LATENT_BLOCK_M);
}
static int64_t items(const fdm_problem *p) { return p->batch * p->heads_kv * row_blocks(p); }
static int64_t tiles_of(const fdm_problem *p) { return gpu_ceil_div(p->seqlen_k, BLOCK_N); }

/* Keys of a box of TMA: a box lies in one page. */
static int32_t page_box(const fdm_problem *p) {
    int32_t box = BLOCK_N;
    while (p->page_size % box)
        box /= 2;
    return box;
}

/* ---- choice ---- */

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    if (!p->value_in_key)
        return "v is not the first columns of k";
    if (!gpu_16_bits(p->dtype))
        return "it takes float16 and bfloat16";
    if (p->head_dim != HEAD_DIM || p->head_dim_v != VALUE_DIM)
        return "head dims are 576 and 512";
    if (gpu_loads_nothing(p) || (p->has_cache && p->num_pages < 1))
        return "there is nothing to load";
    if (p->varlen && !p->has_cache)
        return "packed keys are not taken";
    if (p->new_rows || p->rotary_dim)
        return "it does not append keys or turn q";
    if (p->has_first_key)
        return "it does not take first_key";
    if (p->page_size % PAGE_ROWS)
        return "rows of a page must be a multiple of 16";
    if (!p->keys_mappable)
        return "TMA reads k whose strides are above 0";
    return hopper_latent_shared_bytes(HEAD_DIM, BLOCK_N) <= device->shared_bytes ? NULL
                                                                                 : gpu_no_tile_fits(device, text, size);
}

/* Time of a block of each wave in tiles; beginning and end take about as long as four, and combining splits as long as
 * three. */
static double time_of(const fdm_device *device, const fdm_problem *p, int64_t splits) {
    const int64_t waves = gpu_ceil_div(items(p) * splits, device->num_sms);
    return (double)(waves * (gpu_ceil_div(tiles_of(p), splits) + 4) + (splits > 1 ? 3 : 0));
}

static int is_possible(const fdm_problem *p, int64_t splits) {
    return splits == 1 || (splits > 1 && splits <= SPLITS_MAX && tiles_of(p) / splits >= TILES_OF_A_SPLIT_MIN);
}

/* As few as take at most 3 % longer than the best. */
static int32_t preferred(const fdm_device *device, const fdm_problem *p) {
    double least = time_of(device, p, 1);
    for (int32_t splits = 2; is_possible(p, splits); splits++)
        least = time_of(device, p, splits) < least ? time_of(device, p, splits) : least;
    for (int32_t splits = 1; is_possible(p, splits); splits++)
        if (time_of(device, p, splits) <= 1.03 * least)
            return splits;
    return 1;
}

/* The rule's number of splits, then the powers of two. */
static int32_t splits_of(const fdm_device *device, const fdm_problem *p, int32_t number) {
    const int32_t first = preferred(device, p);
    if (number == 0)
        return first;
    for (int32_t splits = 1; is_possible(p, splits); splits *= 2)
        if (splits != first && --number == 0)
            return splits;
    return 0;
}

static int64_t workspace_bytes(const fdm_problem *p, int32_t splits) {
    return splits > 1 ? splits_workspace_bytes(p, splits) : 0;
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t number, fdm_plan *plan) {
    const int32_t splits = splits_of(device, p, number);
    if (splits < 1)
        return 0;
    PLAN_SET_PARAMETERS(plan, .NUM_SPLITS = splits);
    plan->block_m = HOPPER_LATENT_BLOCK_M;
    plan->block_n = BLOCK_N;
    plan->stages = HOPPER_LATENT_STAGES;
    plan->shared_bytes = hopper_latent_shared_bytes(HEAD_DIM, BLOCK_N);
    plan->workspace_bytes = workspace_bytes(p, splits);
    char split[64] = "";
    if (splits > 1)
        snprintf(split, sizeof split, "; %d splits of the keys", splits);
    snprintf(plan->choice, sizeof plan->choice, "SM90_Latent_%dx%d_S%d", plan->block_m, plan->block_n, splits);
    snprintf(plan->reason, sizeof plan->reason,
             "v is the first %d columns of k: a tile of %d keys is loaded once for both products; %lld rows of a KV "
             "head, query rows times heads, are in %lld blocks of %d; %d stages of K (%lld KB)%s",
             VALUE_DIM, BLOCK_N, (long long)(p->seqlen_q * (p->heads / p->heads_kv)), (long long)row_blocks(p),
             plan->block_m, plan->stages, (long long)(plan->shared_bytes + 1023) >> 10, split);
    return 1;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t splits = parameters_of(plan).NUM_SPLITS;
    return is_possible(p, splits) && plan->block_m == HOPPER_LATENT_BLOCK_M && plan->block_n == BLOCK_N &&
           plan->stages == HOPPER_LATENT_STAGES &&
           plan->shared_bytes == hopper_latent_shared_bytes(HEAD_DIM, BLOCK_N) &&
           plan->workspace_bytes >= workspace_bytes(p, splits);
}

/* ---- launch ---- */

static void make_request(const fdm_plan *plan, const fdm_problem *p, struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p, GPU_ALIKE_ALIGNED | GPU_ALIKE_MASK_ROWS | GPU_ALIKE_BIAS_ROWS);
    GPU_ADD_CONSTANTS(request, HOPPER_LATENT_CONSTANTS, .HEAD_DIM = HEAD_DIM, .VALUE_DIM = VALUE_DIM,
                      .BLOCK_N = BLOCK_N, .PAGE_BOX = page_box(p), .SPLITS = parameters_of(plan).NUM_SPLITS > 1);
    request->file = "families/hopper/latent/hopper_latent.cu";
    request->entry = "hopper_latent";
    request->shared_bytes = plan->shared_bytes;
    request->threads = HOPPER_LATENT_THREADS;
}

/* K of a cache has pages, or rows, where other tensors have sequences. */
static fdm_status make_map(const fdm_plan *plan, const struct attention *attention, struct cuda_tensor_map *map) {
    const fdm_problem *p = attention->problem;
    const int64_t rows = p->has_cache ? attention->cache.page_rows : p->seqlen_k;
    struct cuda_tensor_layout layout = tile_rows_layout(p, &attention->k, HEAD_DIM, rows, p->heads_kv, page_box(p));
    layout.extents[3] = p->has_cache ? p->num_pages : p->batch;
    layout.stride_bytes[3] = tile_map_stride(layout.extents[3], attention->k.batch, 2);
    return cuda_tensor_maps_make(plan->device.index, &layout, 1, map);
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const int32_t splits = parameters_of(plan).NUM_SPLITS;
    struct hopper_latent_params params = {.row_blocks = (int32_t)row_blocks(p)};
    fdm_status status = FDM_OK;
    if (l->attention) {
        gpu_fill_forward(l->attention, &params.in);
        if (splits > 1)
            splits_fill(p, splits, l->workspace, &params.in);
        status = make_map(plan, l->attention, &params.k_map);
    }
    make_request(plan, p, gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){
                          .grid = {gpu_grid(items(p) * splits)}, .params = &params, .params_bytes = sizeof params});
    if (splits > 1)
        combine_splits_add(l, 0, &params.in);
    return status;
}

const struct gpu_algorithm hopper_latent_algorithm = {
    .info = {"hopper.latent", "a latent KV cache, whose keys hold the values: FlashMLA's alternation", FDM_FORWARD},
    .parameters = PLAN_PARAMETERS(HOPPER_LATENT_PARAMETERS),
    .features = GPU_FEATURE_CAUSAL | GPU_FEATURE_VARLEN | GPU_SCORE_FEATURES | GPU_FEATURE_SEQUSED | GPU_FEATURE_CACHE,
    .chosen_freely = 1,
    .refusal = refusal,
    .fill = fill,
    .valid = valid,
    .launch = launch,
};
