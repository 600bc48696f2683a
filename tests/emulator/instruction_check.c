/* instruction_check.c: every wrapper of src/cuda/ptx on random operands, on a device and on the emulated one.
 *
 * Usage: instruction-check --write FILE [--seeds N]            on the first CUDA device: its results to a file
 *        instruction-check --emulate NAME --write FILE         the same on an emulated device
 *        instruction-check --emulate NAME --compare FILE       on an emulated device: a table of agreement
 *        ... --only WRAPPER [--at X,Y,Z,W]                      one wrapper's rows; tiles begin there
 * The file holds the device's name and the number of seeds; wrappers that it lacks are not tried. */
#include <dlfcn.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/cuda.h"
#include "instructions/instructions.h"

enum {
    BLOCKS = 2,
    SUMS = 64,
    WORDS = BLOCKS * INSTRUCTION_THREADS * INSTRUCTION_OUT + SUMS,
    TO_DEVICE = 0,
    TO_HOST = 1
};
enum fill { BITS, BF16, F16, F32, ROOMY }; /* ROOMY: float32 between -100 and 100 */

/* `wrappers`: scripts/check_wrappers.py looks for each name here. limit: of a float32 result, against the largest of
 * its thread's; 0: the same bits. */
static const struct instruction {
    const char *wrappers, *variant;
    int number;
    enum fill fill;
    double limit;
    int32_t rank, box[4], swizzle; /* rank 0: box[0] columns of a product, box[1]: float16; of tcgen05 box[2] rows,
                                    * box[3]: 100 blocks + 10 OPERAND_A + B_MN of tile_product.cuh */
} instructions[] = {
    {"ldmatrix_x4 shared_address", "any rows", TRY_LDMATRIX_X4, BITS, 0, 0, {0}, 0},
    {"ldmatrix_x4_trans", "any rows", TRY_LDMATRIX_X4_TRANS, BITS, 0, 0, {0}, 0},
    {"ldmatrix_x2", "any rows", TRY_LDMATRIX_X2, BITS, 0, 0, {0}, 0},
    {"ldmatrix_x2_trans", "any rows", TRY_LDMATRIX_X2_TRANS, BITS, 0, 0, {0}, 0},
    {"mma_m16n8k16_bf16", "sums in float32", TRY_MMA_BF16, BF16, 1e-5, 0, {0}, 0},
    {"mma_m16n8k16_f16", "sums in float32", TRY_MMA_F16, F16, 1e-5, 0, {0}, 0},
    {"mma_m16n8k16_f16_f16", "sums in float16", TRY_MMA_F16_F16, F16, 4e-3, 0, {0}, 0},
    {"mma_m16n8k8_tf32", "sums in float32", TRY_MMA_TF32, F32, 1e-5, 0, {0}, 0},
    {"ex2_approx lg2_approx tanh_accurate", "-100 .. 100", TRY_APPROXIMATE, ROOMY, 1e-5, 0, {0}, 0},
    {"cvt_bf16x2 cvt_f16x2 cvt_f32_f16 cvt_f32_bf16 cvt_tf32 zero_bytes",
     "any finite",
     TRY_CONVERSIONS,
     F32,
     0,
     0,
     {0},
     0},
    {"st_shared_16 st_shared_4 ld_shared_16 ld_shared_8 ld_shared_4 ld_shared_2", "", TRY_SHARED, BITS, 0, 0, {0}, 0},
    {"cp_async_16 cp_async_16_fill cp_async_4_fill cp_async_commit cp_async_wait",
     "0 .. 16 bytes",
     TRY_CP_ASYNC,
     BITS,
     0,
     0,
     {0},
     0},
    {"barrier_sync barrier_arrive barrier_red_or", "two warps, all", TRY_BARRIERS, BITS, 0, 0, {0}, 0},
    {"mbarrier_init mbarrier_arrive cp_async_mbarrier_arrive_noinc mbarrier_wait mbarrier_test",
     "8 phases",
     TRY_MBARRIERS,
     BITS,
     0,
     0,
     {0},
     0},
    {"red_add ld_acquire st_release ld_relaxed ld_relaxed_8 st_relaxed_8 ld_global_16 ld_global_16_once "
     "ld_global_2_early ld_global_4_early",
     "two blocks in turn",
     TRY_GLOBAL,
     BITS,
     0,
     0,
     {0},
     0},
    {"exit_if tid_x_reread ctaid_x_reread griddepcontrol_wait griddepcontrol_wait_after "
     "griddepcontrol_launch_dependents",
     "",
     TRY_CONTROL,
     BITS,
     0,
     0,
     {0},
     0},
    {"opaque opaque_pair opaque_memory", "any", TRY_OPAQUE, BITS, 0, 0, {0}, 0},
    {"cluster_ctarank mapa_shared st_cluster_4 st_async_8 st_async_16 ld_cluster_4 barrier_cluster_arrive "
     "barrier_cluster_arrive_relaxed barrier_cluster_wait "
     "mbarrier_arrive_cluster mbarrier_arrive_remote mbarrier_wait_cluster cp_async_bulk_cluster",
     "two blocks",
     TRY_CLUSTER,
     BITS,
     0,
     0,
     {0},
     0},
    {"cp_async_bulk_tensor_3d prefetch_tensormap mbarrier_arrive_expect_tx fence_mbarrier_init",
     "no swizzle",
     TRY_TILE,
     BITS,
     0,
     3,
     {32, 16, 2},
     0},
    {"cp_async_bulk_tensor_3d", "swizzle 32", TRY_TILE, BITS, 0, 3, {16, 24, 2}, 32},
    {"cp_async_bulk_tensor_3d", "swizzle 64", TRY_TILE, BITS, 0, 3, {32, 24, 2}, 64},
    {"cp_async_bulk_tensor_3d", "swizzle 128", TRY_TILE, BITS, 0, 3, {64, 32, 2}, 128},
    {"cp_async_bulk_tensor_4d", "swizzle 128", TRY_TILE_4D, BITS, 0, 4, {64, 8, 3, 2}, 128},
    {"cp_async_bulk_tensor_4d", "swizzle 64", TRY_TILE_4D, BITS, 0, 4, {32, 8, 3, 2}, 64},
    {"cp_async_bulk_tensor_3d_multicast", "two blocks, swizzle 128", TRY_MULTICAST, BITS, 0, 3, {64, 32, 1}, 128},
    {"cp_async_bulk_tensor_3d_store", "swizzle 128", TRY_TILE_STORE, BITS, 0, 3, {64, 32, 2}, 128},
    {"cp_async_bulk_tensor_3d_store", "no swizzle", TRY_TILE_STORE, BITS, 0, 3, {32, 16, 2}, 0},
    {"cp_async_bulk cp_async_bulk_prefetch", "2048 bytes", TRY_BULK, BITS, 0, 0, {0}, 0},
    {"wgmma_m64k16 wgmma_descriptor wgmma_fence wgmma_commit_group wgmma_wait_group fence_proxy_async "
     "fence_proxy_async_global setmaxnreg_dec setmaxnreg_inc",
     "n 16, a shared, b K-major",
     TRY_WGMMA_SHARED,
     BF16,
     1e-5,
     0,
     {16},
     0},
#define FOUR(N, NAME, FILL, IS_F16)                                                                                      \
    {"wgmma_m64k16", "n " #N ", " NAME ", a shared, b K-major", TRY_WGMMA_SHARED, FILL, 1e-5, 0, {N, IS_F16}, 0},        \
        {"wgmma_m64k16", "n " #N ", " NAME ", a shared, b MN-major", TRY_WGMMA_SHARED_T, FILL, 1e-5, 0, {N, IS_F16}, 0}, \
        {"wgmma_m64k16",                                                                                                 \
         "n " #N ", " NAME ", a registers, b K-major",                                                                   \
         TRY_WGMMA_REGISTERS,                                                                                            \
         FILL,                                                                                                           \
         1e-5,                                                                                                           \
         0,                                                                                                              \
         {N, IS_F16},                                                                                                    \
         0},                                                                                                             \
        {"wgmma_m64k16",                                                                                                 \
         "n " #N ", " NAME ", a registers, b MN-major",                                                                  \
         TRY_WGMMA_REGISTERS_T,                                                                                          \
         FILL,                                                                                                           \
         1e-5,                                                                                                           \
         0,                                                                                                              \
         {N, IS_F16},                                                                                                    \
         0},
    FOUR(16, "bf16", BF16, 0) FOUR(64, "bf16", BF16, 0) FOUR(80, "bf16", BF16, 0) FOUR(96, "bf16", BF16, 0)
        FOUR(128, "bf16", BF16, 0) FOUR(176, "bf16", BF16, 0) FOUR(192, "bf16", BF16, 0) FOUR(256, "bf16", BF16, 0)
            FOUR(64, "f16", F16, 1) FOUR(128, "f16", F16, 1)
#undef FOUR
                {"wgmma_m64k16", "n 128, bf16, a and b shared, MN-major", TRY_WGMMA_BOTH_T, BF16, 1e-5, 0, {128, 0}, 0},
    {"stmatrix_x4", "any rows", TRY_STMATRIX, BITS, 0, 0, {0}, 0},
    {"stmatrix_x4_trans", "any rows", TRY_STMATRIX_TRANS, BITS, 0, 0, {0}, 0},
    {"red_add_4", "two blocks", TRY_RED_ADD_4, BITS, 0, 0, {0}, 0},
    {"cp_reduce_async_bulk_add cp_async_bulk_store cp_async_bulk_commit cp_async_bulk_wait_read cp_async_bulk_wait",
     "two blocks",
     TRY_BULK_ADD,
     BITS,
     0,
     0,
     {0},
     0},
    {"tcgen05_alloc tcgen05_relinquish_alloc_permit tcgen05_dealloc tcgen05_mma tcgen05_commit tcgen05_ld_32x32b "
     "tcgen05_wait_ld tcgen05_fence_before_thread_sync tcgen05_fence_after_thread_sync",
     "one block, a and b K-major",
     TRY_PRODUCT,
     BF16,
     1e-5,
     0,
     {128, 0, 128, 100},
     0},
    {"tcgen05_mma", "one block, a and b MN-major, f16", TRY_PRODUCT, F16, 1e-5, 0, {128, 1, 128, 111}, 0},
    {"tcgen05_mma_ts tcgen05_st_32x32b tcgen05_wait_st",
     "one block, n 64, b MN-major",
     TRY_PRODUCT,
     BF16,
     1e-5,
     0,
     {64, 0, 128, 121},
     0},
    {"tcgen05_mma_ts", "one block, b K-major, f16", TRY_PRODUCT, F16, 1e-5, 0, {128, 1, 128, 120}, 0},
    {"tcgen05_mma tcgen05_commit_multicast",
     "two blocks, m 256, a and b K-major",
     TRY_PRODUCT,
     BF16,
     1e-5,
     0,
     {128, 0, 256, 200},
     0},
    {"tcgen05_mma", "two blocks, m 256, b MN-major, f16", TRY_PRODUCT, F16, 1e-5, 0, {128, 1, 256, 201}, 0},
    {"tcgen05_mma", "two blocks, m 256, a MN-major", TRY_PRODUCT, BF16, 1e-5, 0, {64, 0, 256, 210}, 0},
    {"tcgen05_mma_ts", "two blocks, m 256, b MN-major", TRY_PRODUCT, BF16, 1e-5, 0, {128, 0, 256, 221}, 0},
    {"tcgen05_mma", "two blocks, m 128, a and b K-major", TRY_PRODUCT, BF16, 1e-5, 0, {256, 0, 128, 200}, 0},
    {"tcgen05_mma", "two blocks, m 128, b MN-major", TRY_PRODUCT, BF16, 1e-5, 0, {256, 0, 128, 201}, 0},
    {"add_f32x2 mul_f32x2 fma_f32x2 add_rm_f32x2 max_3 elect_one cluster_nctarank",
     "any finite",
     TRY_PACKED,
     F32,
     0,
     0,
     {0},
     0},
    {"cp_async_bulk_tensor_3d_pair mbarrier_arrive_expect_tx_remote",
     "two blocks, swizzle 128",
     TRY_PAIR,
     BITS,
     0,
     3,
     {64, 32, 1},
     128},
    {"cp_async_bulk_tensor_4d_pair", "two blocks, swizzle 128", TRY_PAIR_4D, BITS, 0, 4, {64, 8, 3, 1}, 128},
    {"clusterlaunchcontrol_try_cancel clusterlaunchcontrol_query_cancel",
     "600 clusters",
     TRY_CLUSTERS,
     BITS,
     0,
     0,
     {0},
     0},
    {"clusterlaunchcontrol_try_cancel_multicast", "600 clusters", TRY_CLUSTERS_MULTICAST, BITS, 0, 0, {0}, 0},
};
enum { COUNT = sizeof instructions / sizeof instructions[0] };

/* ---- operands ---- */

static uint64_t state;
static uint32_t random_word(void) {
    state += 0x9e3779b97f4a7c15u;
    uint64_t z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static uint32_t operand(enum fill fill) {
    const uint32_t r = random_word();
    const float unit = (float)(int32_t)random_word() * 0x1p-31f;
    switch (fill) {
    case BITS: return r;
    case BF16: return (bits_of(unit) >> 16) | (bits_of((float)(int32_t)r * 0x1p-31f) & 0xffff0000u);
    case F16: /* exponents 2^-8 .. 2^0 */
        return (r & 0x83ff83ffu) | (7 + random_word() % 8) << 10 | (7 + random_word() % 8) << 26;
    case ROOMY: return bits_of(100 * unit);
    default: return bits_of(ldexpf(unit, (int)(r % 40) - 20));
    }
}

/* ---- one wrapper, one seed ---- */

static int32_t given[4]; /* where tiles begin, if all do at one place */
static int is_given;

/* A tile may lie outside of the tensor, a load's then is zeros. A store's does not begin before it: an H200 reports an
 * illegal instruction then. */
static int32_t random_start(const struct instruction *i, int axis, int64_t extent) {
    const int store = i->number == TRY_TILE_STORE;
    const int32_t at = (int32_t)(random_word() % (uint32_t)(extent + 8)) - (store ? 0 : 4);
    return axis ? at : at & ~7; /* the innermost begins at a multiple of 16 bytes, else the instruction is illegal */
}

static fdm_status make_map(const struct instruction *i, const void *in, struct instruction_arguments *a) {
    struct cuda_tensor_layout l = {
        .type = CUDA_MAP_BFLOAT16, .rank = i->rank, .address = in, .swizzle_bytes = i->swizzle};
    const int64_t extents[4] = {72, 20, 3, 2}; /* so that tiles reach past each end */
    int64_t stride = 2;
    a->tile_bytes = 2;
    for (int n = 0; n < i->rank; n++) {
        l.extents[n] = extents[n];
        l.stride_bytes[n] = stride;
        stride *= extents[n];
        l.box[n] = i->box[n];
        a->tile_bytes *= i->box[n];
        a->at[n] = is_given ? given[n] : random_start(i, n, extents[n]);
    }
    l.stride_bytes[1] = 72 * 2;
    return cuda_tensor_maps_make(0, &l, 1, &a->map);
}

/* Where a wrapper is tried: what each compute capability has, by the first number of it. */
static const struct program {
    const char *file, *entry;
    int first, major; /* major 0: any */
} programs[] = {{"instructions/instructions_portable.cu", "instructions_portable", 0, 0},
                {"instructions/instructions_hopper.cu", "instructions_hopper", TRY_CLUSTER, 9},
                {"instructions/instructions_blackwell.cu", "instructions_blackwell", TRY_PRODUCT, 10}};

static const struct program *program_of(const struct instruction *i) {
    return &programs[i->number >= TRY_PRODUCT ? 2 : i->number >= TRY_CLUSTER];
}

static fdm_status try_one(const struct instruction *i, int seed, uint32_t *results) {
    const struct program *program = program_of(i);
    const int product = i->number == TRY_PRODUCT;
    static uint32_t in[INSTRUCTION_IN];
    const size_t bytes[4] = {sizeof in, (size_t)(WORDS - SUMS) * 4, SUMS * 4, 16};
    void *memory[4];
    fdm_status status = FDM_OK;
    state = (uint64_t)seed * 1000 + (uint64_t)i->number * 17 + (uint64_t)i->swizzle + (uint64_t)i->box[0] * 7919 +
            (uint64_t)i->box[1];
    for (int n = 0; n < INSTRUCTION_IN; n++)
        in[n] = operand(i->fill);
    for (int n = 0; n < 4 && !status; n++)
        if (!(status = cuda_memory_allocate(0, bytes[n], &memory[n])))
            status = n ? cuda_memory_fill(0, memory[n], 0, bytes[n])
                       : cuda_memory_copy(0, memory[0], in, sizeof in, TO_DEVICE);
    struct instruction_arguments a = {
        .in = memory[0], .out = memory[1], .sums = memory[2], .flags = memory[3], .tile_bytes = 2048};
    const struct cuda_kernel_request request = {.file = program->file,
                                                .entry = program->entry,
                                                .num_constants = program->major == 10 ? 9 : 3,
                                                .constants = {{"INSTRUCTION", i->number},
                                                              {"WGMMA_N", i->rank == 0 && i->box[0] ? i->box[0] : 16},
                                                              {"WGMMA_F16", i->rank == 0 && i->box[1]},
                                                              {"PRODUCT_F16", product && i->box[1]},
                                                              {"TILE_N", product ? i->box[0] : 128},
                                                              {"TILE_M", product ? i->box[2] : 128},
                                                              {"GROUP", product ? i->box[3] / 100 : 1},
                                                              {"OPERAND_A", product ? i->box[3] / 10 % 10 : 0},
                                                              {"B_MN", product ? i->box[3] % 10 : 0}},
                                                .shared_bytes = INSTRUCTION_SHARED};
    struct cuda_launch launch = {.grid = {BLOCKS, i->number >= TRY_CLUSTERS ? 600 : 1, 1},
                                 .threads = INSTRUCTION_THREADS,
                                 .cluster = program->major ? 2 : 0};
    launch.arguments = &a;
    launch.arguments_bytes = sizeof a;
    if (!status && i->rank)
        status = make_map(i, memory[0], &a);
    if (status || (status = cuda_kernels_get(0, &request, 1, &launch.kernel)) || (status = cuda_launch(&launch)) ||
        (status = cuda_synchronize(0)) || (status = cuda_memory_copy(0, results, memory[1], bytes[1], TO_HOST)) ||
        (status = cuda_memory_copy(0, results + WORDS - SUMS, memory[2], bytes[2], TO_HOST)))
        return status;
    for (int n = 0; n < 4; n++)
        cuda_memory_release(0, memory[n]);
    return FDM_OK;
}

/* ---- all of them ---- */

struct header {
    char device[80];
    int32_t seeds, words;
};

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

struct agreement {
    int64_t words, same;
    double worst;
};
static void compare(const struct instruction *i, const uint32_t *device, const uint32_t *emulated,
                    struct agreement *g) {
    for (int n = 0; n < WORDS; n++) {
        const float x = float_of(device[n]), y = float_of(emulated[n]);
        const double size = i->number == TRY_APPROXIMATE ? fmax(fabs((double)x), 1e-30) : fmax(fabs((double)x), 1);
        const int same = device[n] == emulated[n];
        g->words++;
        g->same += same;
        if (!same)
            g->worst =
                fmax(g->worst, i->limit > 0 && isfinite(x) && isfinite(y) ? fabs((double)x - y) / size : INFINITY);
    }
}

static const char *only; /* the wrapper that is tried; NULL: each */

static int run_all(FILE *file, int comparing, struct header *header, const fdm_device *device) {
    static uint32_t results[WORDS], theirs[WORDS];
    int wrong = 0, shown;
    for (int n = 0; n < COUNT; n++) {
        const struct instruction *i = &instructions[n];
        const int major = program_of(i)->major;
        struct agreement g = {0, 0, 0};
        if ((major && major != device->compute_major) || (only && !strstr(i->wrappers, only)))
            continue;
        for (int seed = 0; seed < header->seeds; seed++) {
            if (try_one(i, seed, results)) {
                printf("WRONG %s, %s, seed %d: %s\n", i->wrappers, i->variant, seed, fdm_last_error());
                return 1;
            }
            if (!comparing)
                fwrite(results, sizeof results, 1, file);
            else if (fread(theirs, sizeof theirs, 1, file) == 1)
                compare(i, theirs, results, &g);
        }
        if (!comparing)
            continue;
        const int right = g.words > 0 && g.worst <= i->limit;
        shown = (int)strcspn(i->wrappers, " ");
        printf("%s | %.*s%s | %s | %d | %.3f %% | %.1e |\n", right ? "| agrees" : "| WRONG", shown, i->wrappers,
               i->wrappers[shown] ? " ..." : "", i->variant, header->seeds,
               g.words ? 100.0 * (double)g.same / (double)g.words : 0, g.worst);
        wrong += !right;
    }
    return wrong;
}

static int use_emulated(const char *name) {
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 32);
    path[length > 0 ? length : 0] = 0;
    char *slash = strrchr(path, '/');
    setenv("EMULATED_DEVICES", name, 1);
    if (!slash)
        return 0;
    strcpy(slash, "/cache");
    setenv("FLASH_DMATTN_CACHE_DIR", path, 0);
    strcpy(slash, "/libcuda.so.1");
    if (dlopen(path, RTLD_NOW | RTLD_GLOBAL))
        return 1;
    fprintf(stderr, "no emulated device: %s\n", dlerror());
    return 0;
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"write", required_argument, 0, 'w'},
                                            {"compare", required_argument, 0, 'c'},
                                            {"emulate", required_argument, 0, 'e'},
                                            {"seeds", required_argument, 0, 's'},
                                            {"only", required_argument, 0, 'o'},
                                            {"at", required_argument, 0, 'a'},
                                            {0}};
    struct header header = {.seeds = 4, .words = WORDS};
    const char *path = NULL, *emulate = NULL;
    int option, comparing = 0;
    fdm_device device = {.struct_bytes = sizeof device};
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'w' || option == 'c')
            path = optarg, comparing = option == 'c';
        else if (option == 'e')
            emulate = optarg;
        else if (option == 's')
            header.seeds = atoi(optarg);
        else if (option == 'o')
            only = optarg;
        else if (option == 'a')
            is_given =
                sscanf(optarg, "%" SCNd32 ",%" SCNd32 ",%" SCNd32 ",%" SCNd32, given, given + 1, given + 2, given + 3);
        else
            path = NULL;
    }
    FILE *file = path ? fopen(path, comparing ? "rb" : "wb") : NULL;
    if (!file) {
        fprintf(stderr, "usage: instruction-check [--emulate sm_90] --write FILE | --compare FILE [--seeds N] "
                        "[--only WRAPPER [--at X,Y,Z,W]]\n");
        return 2;
    }
    if (emulate && !use_emulated(emulate))
        return 2;
    if (fdm_device_query(FDM_CUDA, 0, &device)) {
        printf("skipped: %s\n", fdm_last_error());
        return 77;
    }
    snprintf(header.device, sizeof header.device, "%s%s", emulate ? "emulated " : "", device.name);
    if (comparing ? fread(&header, sizeof header, 1, file) != 1 || header.words != WORDS
                  : fwrite(&header, sizeof header, 1, file) != 1)
        return 2;
    if (comparing)
        printf("Results of %s against those of emulated %s.\n\n"
               "| | instruction | variant | seeds | the same bits | largest difference |\n|---|---|---|---|---|---|\n",
               header.device, device.name);
    const int wrong = run_all(file, comparing, &header, &device);
    return fclose(file) != 0 || wrong > 0;
}
