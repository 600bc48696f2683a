/* mma_textbook.c: the six textbook kernels on the host: their shapes and variants, what they refuse, their launch. */
#include "families/mma/textbook/mma_textbook.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "families/mma/mma_family.h"

/* What an algorithm can hold. Columns of O are those of a block; for more, blocks share rows. 16 rows of O take half as
 * many registers a thread; where Q has HEAD_DIM / 4 of them, or the sums of a tile in float16 have their own, fewer are
 * left. */
static const struct algorithm {
    const char *name, *code;
    int32_t head_dim_max, out_columns_max;
} algorithms[] = {
    [MMA_SPLIT_KV] = {.name = "split-kv", .code = "SplitKV", .head_dim_max = 256, .out_columns_max = 256},
    [MMA_SPLIT_Q] = {.name = "split-q", .code = "SplitQ", .head_dim_max = 256, .out_columns_max = 256},
    [MMA_SHARE_KV] = {.name = "split-q+share-kv",
                      .code = "SplitQ_ShareKV",
                      .head_dim_max = 256,
                      .out_columns_max = 256},
    [MMA_SHARE_QKV] = {.name = "split-q+share-qkv",
                       .code = "SplitQ_ShareQKV",
                       .head_dim_max = 256,
                       .out_columns_max = 128},
    [MMA_TILING_QK] = {.name = "split-q+tiling-qk",
                       .code = "SplitQ_TilingQK",
                       .head_dim_max = 1024,
                       .out_columns_max = 256},
    [MMA_TILING_QKV] = {.name = "split-q+tiling-qkv",
                        .code = "SplitQ_TilingQKV",
                        .head_dim_max = 1024,
                        .out_columns_max = 256},
};
enum { NUM_ALGORITHMS = sizeof algorithms / sizeof algorithms[0], F16_OUT_COLUMNS_MAX = 128 };

/* Each algorithm's variants, in order; the first that fits is what runs by name alone. */
struct variant {
    int32_t stages, swizzled, f16_accumulation;
};
static const struct variant variants[] = {
    {.stages = 2, .swizzled = 1, .f16_accumulation = 0}, {.stages = 1, .swizzled = 1, .f16_accumulation = 0},
    {.stages = 2, .swizzled = 0, .f16_accumulation = 0}, {.stages = 1, .swizzled = 0, .f16_accumulation = 0},
    {.stages = 2, .swizzled = 1, .f16_accumulation = 1}, {.stages = 1, .swizzled = 1, .f16_accumulation = 1},
    {.stages = 2, .swizzled = 0, .f16_accumulation = 1}, {.stages = 1, .swizzled = 0, .f16_accumulation = 1},
};
enum { NUM_VARIANTS = sizeof variants / sizeof variants[0] };

PLAN_PARAMETER_STRUCT(MMA_TEXTBOOK_PARAMETERS);

/* ---- shapes ---- */

struct shape {
    int32_t head_dim, slice, out_columns, out_slice, out_blocks, block_n;
};

static int32_t quotient_up(int64_t n, int64_t parts) { return (int32_t)((n + parts - 1) / parts); }

/* As few slices of at most 64 columns as hold n, all alike and multiples of 16. */
static int32_t slice_of(int64_t n) { return (int32_t)gpu_round_up(quotient_up(n, quotient_up(n, 64)), 16); }

static struct shape shape_of(int32_t algorithm, const struct variant *v, const fdm_problem *p) {
    const int tiled = MMA_TEXTBOOK_IS_TILED(algorithm);
    const int64_t widest = gpu_widest(p);
    struct shape s;
    s.slice = tiled ? slice_of(p->head_dim) : (int32_t)gpu_round_up(p->head_dim, 16);
    s.head_dim = (int32_t)gpu_round_up(p->head_dim, s.slice);
    s.out_blocks =
        quotient_up(p->head_dim_v, v->f16_accumulation ? F16_OUT_COLUMNS_MAX : algorithms[algorithm].out_columns_max);
    const int32_t columns = quotient_up(p->head_dim_v, s.out_blocks);
    s.out_slice = algorithm == MMA_TILING_QKV ? slice_of(columns)
                                              : (int32_t)gpu_round_up(columns, algorithm == MMA_SPLIT_KV ? 32 : 16);
    s.out_columns = (int32_t)gpu_round_up(columns, s.out_slice);
    s.block_n = !tiled && widest > 128 ? 32 : 64; /* four tiles of 64 rows and 256 columns would take 128 KB */
    return s;
}

static int32_t shared_bytes(int32_t algorithm, const struct shape *s, const struct variant *v) {
    return MMA_TEXTBOOK_SHARED_BYTES(algorithm, s->head_dim, s->slice, s->out_slice, s->block_n, v->stages,
                                     v->swizzled);
}

static int64_t grid_of(const struct shape *s, const fdm_problem *p) {
    return (p->seqlen_q + MMA_TEXTBOOK_BLOCK_M - 1) / MMA_TEXTBOOK_BLOCK_M * s->out_blocks * p->heads * p->batch;
}

/* ---- choice ---- */

static const char *refusal(int32_t algorithm, const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const int32_t most = algorithms[algorithm].head_dim_max;
    if (!gpu_16_bits(p->dtype))
        return "it takes float16 and bfloat16";
    if (p->head_dim > most || p->head_dim_v > most) {
        snprintf(text, size, "head dims are at most %d", most);
        return text;
    }
    if (p->seqlen_q > INT32_MAX / 2 || p->seqlen_k > INT32_MAX / 2)
        return "sequences are at most 2^30 long";
    const struct variant *smallest = &variants[1];
    const struct shape s = shape_of(algorithm, smallest, p);
    if (grid_of(&s, p) > INT32_MAX / 2) /* sums in float16 take up to twice as many */
        return "blocks of 64 rows are fewer than 2^30";
    const int32_t least = shared_bytes(algorithm, &s, smallest);
    if (least > device->shared_bytes) {
        snprintf(text, size, "it needs %d KB of shared memory, the device has %lld KB", (least + 1023) >> 10,
                 (long long)device->shared_bytes >> 10);
        return text;
    }
    return NULL;
}

static void write_code(int32_t algorithm, const struct variant *v, char *code, size_t size) {
    snprintf(code, size, "MMA_%s_S%d_%s%s", algorithms[algorithm].code, v->stages, v->swizzled ? "Swizzle" : "Pad",
             v->f16_accumulation ? "_F16Acc" : "");
}

/* The index of the variant with this code, -1 if none. */
static int32_t find_code(int32_t algorithm, const char *code) {
    char own[sizeof((fdm_plan *)0)->choice];
    for (int32_t i = 0; i < NUM_VARIANTS; i++) {
        write_code(algorithm, &variants[i], own, sizeof own);
        if (strcmp(own, code) == 0)
            return i;
    }
    return -1;
}

/* A clause that says why not, or NULL. */
static const char *variant_refusal(int32_t algorithm, const fdm_device *device, const fdm_problem *p,
                                   const struct variant *v) {
    const struct shape s = shape_of(algorithm, v, p);
    if (v->f16_accumulation && p->dtype != FDM_FLOAT16)
        return "sums in float16 are for float16 tensors";
    if (shared_bytes(algorithm, &s, v) > device->shared_bytes)
        return "its tiles are larger than the device's shared memory; fewer stages or the swizzled layout take less";
    return NULL;
}

static void fill_variant(int32_t algorithm, int32_t index, const fdm_problem *p, fdm_plan *plan) {
    const struct variant *v = &variants[index];
    const struct shape s = shape_of(algorithm, v, p);
    PLAN_SET_PARAMETERS(plan, .ALGORITHM = algorithm, .VARIANT = index);
    plan->block_m = MMA_TEXTBOOK_BLOCK_M;
    plan->block_n = s.block_n;
    plan->stages = v->stages;
    plan->shared_bytes = shared_bytes(algorithm, &s, v);
    plan->workspace_bytes = 0;
    write_code(algorithm, v, plan->choice, sizeof plan->choice);
    snprintf(plan->reason, sizeof plan->reason,
             "%s by name: %d stage%s, %s, sums in float%d; Q and K in %d slice%s of %d columns, O in %d block%s of %d "
             "columns, %lld KB of shared memory",
             algorithms[algorithm].name, v->stages, v->stages > 1 ? "s" : "", v->swizzled ? "swizzled" : "padded",
             v->f16_accumulation ? 16 : 32, s.head_dim / s.slice, s.head_dim > s.slice ? "s" : "", s.slice,
             s.out_blocks, s.out_blocks > 1 ? "s" : "", s.out_columns, (long long)(plan->shared_bytes + 1023) >> 10);
}

/* The n-th of the variants that fit. */
static int fill(int32_t algorithm, const fdm_device *device, const fdm_problem *p, int32_t n, fdm_plan *plan) {
    for (int32_t i = 0; i < NUM_VARIANTS; i++)
        if (!variant_refusal(algorithm, device, p, &variants[i]) && n-- == 0) {
            fill_variant(algorithm, i, p, plan);
            return 1;
        }
    return 0;
}

static int fill_code(const fdm_device *device, const fdm_problem *p, const char *code, fdm_plan *plan) {
    for (int32_t algorithm = 0; algorithm < NUM_ALGORITHMS; algorithm++) {
        const int32_t index = find_code(algorithm, code);
        if (index < 0)
            continue;
        const char *why = variant_refusal(algorithm, device, p, &variants[index]);
        if (why) {
            snprintf(plan->reason, sizeof plan->reason, "%s", why);
            return 0;
        }
        fill_variant(algorithm, index, p, plan);
        return 1;
    }
    return 0;
}

/* ---- execution ---- */

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const int32_t algorithm = parameters_of(plan).ALGORITHM, variant = parameters_of(plan).VARIANT;
    if (algorithm < 0 || algorithm >= NUM_ALGORITHMS || variant < 0 || variant >= NUM_VARIANTS ||
        strcmp(plan->kernel + strlen("mma."), algorithms[algorithm].name) != 0)
        return 0;
    const struct variant *v = &variants[variant];
    const struct shape s = shape_of(algorithm, v, p);
    return (!v->f16_accumulation || p->dtype == FDM_FLOAT16) && plan->block_m == MMA_TEXTBOOK_BLOCK_M &&
           plan->block_n == s.block_n && plan->stages == v->stages &&
           plan->shared_bytes == shared_bytes(algorithm, &s, v);
}

static void request_of(const fdm_plan *plan, const fdm_problem *p, struct cuda_kernel_request *request) {
    const int32_t algorithm = parameters_of(plan).ALGORITHM;
    const struct variant *v = &variants[parameters_of(plan).VARIANT];
    const struct shape s = shape_of(algorithm, v, p);
    gpu_set_problem_constants(request, p, GPU_ALIKE_ALL & ~GPU_ALIKE_DTYPE);
    GPU_ADD_CONSTANTS(request, MMA_TEXTBOOK_CONSTANTS, .ALGORITHM = algorithm, .HEAD_DIM = s.head_dim, .SLICE = s.slice,
                      .OUT_COLUMNS = s.out_columns, .OUT_SLICE = s.out_slice, .OUT_BLOCKS = s.out_blocks,
                      .BLOCK_N = s.block_n, .STAGES = v->stages, .SWIZZLED = v->swizzled,
                      .F16_ACCUMULATION = v->f16_accumulation, .CAUSAL = p->causal != 0);
    request->file = "families/mma/textbook/mma_textbook.cu";
    request->entry = "mma_textbook";
    request->shared_bytes = shared_bytes(algorithm, &s, v);
    request->threads = 32 * MMA_TEXTBOOK_WARPS;
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct shape s = shape_of(parameters_of(plan).ALGORITHM, &variants[parameters_of(plan).VARIANT], p);
    if (l->attention && s.out_blocks > 1 && l->attention->out.data == l->attention->q.data)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "out takes the place of q, but of these head dims %d blocks of %s share the rows of q",
                         s.out_blocks, plan->kernel);
    struct cuda_kernel_request request;
    request_of(plan, p, &request);
    gpu_add_forward(l, plan, &request, GPU_TILES_OF_NOTHING, grid_of(&s, p), 1);
    return FDM_OK;
}

/* ---- the rows ---- */

/* A kernel's functions know their algorithm by their own names. */
#define TEXTBOOK_KERNEL(kernel_name, description, refusal_of, fill_of, has_code_of)                              \
    {                                                                                                            \
        .info = {kernel_name, description, FDM_FORWARD}, .parameters = PLAN_PARAMETERS(MMA_TEXTBOOK_PARAMETERS), \
        .features = GPU_FEATURE_CAUSAL, .chosen_freely = 0, .refusal = refusal_of, .fill = fill_of,              \
        .has_code = has_code_of, .fill_code = fill_code, .valid = valid, .launch = launch                        \
    }

static const char *split_kv_refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    return refusal(MMA_SPLIT_KV, device, p, text, size);
}
static int split_kv_fill(const fdm_device *device, const fdm_problem *p, int32_t n, fdm_plan *plan) {
    return fill(MMA_SPLIT_KV, device, p, n, plan);
}
static int split_kv_has_code(const char *code) { return find_code(MMA_SPLIT_KV, code) >= 0; }
const struct gpu_algorithm mma_split_kv_algorithm =
    TEXTBOOK_KERNEL("mma.split-kv", "by name: warps split rows and keys, as FlashAttention 1 did", split_kv_refusal,
                    split_kv_fill, split_kv_has_code);

static const char *split_q_refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    return refusal(MMA_SPLIT_Q, device, p, text, size);
}
static int split_q_fill(const fdm_device *device, const fdm_problem *p, int32_t n, fdm_plan *plan) {
    return fill(MMA_SPLIT_Q, device, p, n, plan);
}
static int split_q_has_code(const char *code) { return find_code(MMA_SPLIT_Q, code) >= 0; }
const struct gpu_algorithm mma_split_q_algorithm =
    TEXTBOOK_KERNEL("mma.split-q", "by name: warps split rows alone, as FlashAttention 2 does", split_q_refusal,
                    split_q_fill, split_q_has_code);

static const char *share_kv_refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    return refusal(MMA_SHARE_KV, device, p, text, size);
}
static int share_kv_fill(const fdm_device *device, const fdm_problem *p, int32_t n, fdm_plan *plan) {
    return fill(MMA_SHARE_KV, device, p, n, plan);
}
static int share_kv_has_code(const char *code) { return find_code(MMA_SHARE_KV, code) >= 0; }
const struct gpu_algorithm mma_share_kv_algorithm = TEXTBOOK_KERNEL(
    "mma.split-q+share-kv", "by name: K and V share one place", share_kv_refusal, share_kv_fill, share_kv_has_code);

static const char *share_qkv_refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    return refusal(MMA_SHARE_QKV, device, p, text, size);
}
static int share_qkv_fill(const fdm_device *device, const fdm_problem *p, int32_t n, fdm_plan *plan) {
    return fill(MMA_SHARE_QKV, device, p, n, plan);
}
static int share_qkv_has_code(const char *code) { return find_code(MMA_SHARE_QKV, code) >= 0; }
const struct gpu_algorithm mma_share_qkv_algorithm =
    TEXTBOOK_KERNEL("mma.split-q+share-qkv", "by name: Q, then K and V in turns, in one place", share_qkv_refusal,
                    share_qkv_fill, share_qkv_has_code);

static const char *tiling_qk_refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    return refusal(MMA_TILING_QK, device, p, text, size);
}
static int tiling_qk_fill(const fdm_device *device, const fdm_problem *p, int32_t n, fdm_plan *plan) {
    return fill(MMA_TILING_QK, device, p, n, plan);
}
static int tiling_qk_has_code(const char *code) { return find_code(MMA_TILING_QK, code) >= 0; }
const struct gpu_algorithm mma_tiling_qk_algorithm =
    TEXTBOOK_KERNEL("mma.split-q+tiling-qk", "by name: Q and K in slices of the head dim, to 1024", tiling_qk_refusal,
                    tiling_qk_fill, tiling_qk_has_code);

static const char *tiling_qkv_refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    return refusal(MMA_TILING_QKV, device, p, text, size);
}
static int tiling_qkv_fill(const fdm_device *device, const fdm_problem *p, int32_t n, fdm_plan *plan) {
    return fill(MMA_TILING_QKV, device, p, n, plan);
}
static int tiling_qkv_has_code(const char *code) { return find_code(MMA_TILING_QKV, code) >= 0; }
const struct gpu_algorithm mma_tiling_qkv_algorithm =
    TEXTBOOK_KERNEL("mma.split-q+tiling-qkv", "by name: Q, K and V in slices of the head dim, to 1024",
                    tiling_qkv_refusal, tiling_qkv_fill, tiling_qkv_has_code);
