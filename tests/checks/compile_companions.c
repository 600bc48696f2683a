/* compile_companions.c: problems of the companions for the compile matrix: every shape of a kernel, with its features
 * in turn or all of them. */
#include "compile_companions.h"

#include <stdlib.h>
#include <string.h>

#include "companions/gemm/gemm_plan.h"
#include "companions/softmax/softmax_plan.h"

typedef void (*add_request)(const char *arch, const struct cuda_kernel_request *request);

/* ---- softmax ---- */

/* Columns on both sides of each shape's border are not needed: a shape has one text, but for rows that fill it. In
 * float32, from a thread a row to what a cluster of 16 holds in registers and shared memory; rows that fill three
 * quarters or five eighths of such a shape; and rows of whole 16 bytes that fill none. */
static const int64_t columns[] = {
    1,     8,    16,    32,    64,     128,    256,    512,    1024,    2048,    4096,    8192,    16384,   32768,
    65536, 12,   24,    48,    96,     192,    384,    768,    1536,    3072,    6144,    12288,   24576,   1280,
    2560,  5120, 10240, 20480, 131072, 262144, 393216, 786432, 1048576, 1200000, 1600000, 4194304, 1 << 24, 40,
    88,    136,  264,   520,   1000,   1040,   2000,   2056,   4040,    4104,    8104,    8200,    16200,   16904};
enum { NUM_COLUMNS = sizeof columns / sizeof columns[0] };

/* feature: a bit each for log, mask, negative scale; then rows that begin anywhere, alike, or aligned. */
enum { NUM_FEATURES = 24 };
static fdm_softmax_problem softmax_problem(fdm_pass pass, fdm_dtype dtype, int32_t column, int32_t feature) {
    return (fdm_softmax_problem){.pass = pass,
                                 .dtype = dtype,
                                 .rows = columns[column] > 65536 ? 64 : 4096,
                                 .columns = columns[column],
                                 .log = feature & 1,
                                 .has_mask = pass == FDM_FORWARD && feature >> 1 & 1,
                                 .negative_scale = pass == FDM_FORWARD && feature >> 2 & 1,
                                 .aligned = feature / 8 % 3};
}

static void add_softmax(const fdm_device *device, const fdm_softmax_problem *problem, const char *kernel,
                        add_request add) {
    fdm_softmax_plan plan = {.struct_bytes = sizeof plan};
    struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
    if (fdm_plan_softmax(device, problem, kernel, &plan))
        return;
    const int32_t count = softmax_requests(&plan, requests);
    for (int32_t i = 0; i < count; i++)
        add(device->name, &requests[i]);
}

static void list_softmax(const fdm_device *device, const char *kernel, int every, add_request add) {
    static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};
    const char *name, *description;
    int32_t turn = 0;
    for (int32_t k = 0; fdm_softmax_kernel(k, &name, &description) == FDM_OK; k++)
        for (int32_t i = 0; i < 6 * NUM_COLUMNS && (!kernel || strcmp(kernel, name) == 0); i++)
            for (int32_t f = 0; f < (every ? NUM_FEATURES : 1); f++) {
                const fdm_softmax_problem problem =
                    softmax_problem((fdm_pass)(i / 3 % 2), dtypes[i % 3], i / 6, every ? f : turn);
                add_softmax(device, &problem, name, add);
                turn = (turn + 7) % NUM_FEATURES;
            }
}

/* ---- gemm ---- */

/* m, n, k, batch: sizes for which each tile, cluster and split is the fastest by the rule. */
static const int64_t sizes[][4] = {
    {1024, 1024, 1024, 1}, {2048, 2048, 2048, 1},  {3072, 3072, 3072, 1}, {4096, 4096, 4096, 1}, {5120, 5120, 5120, 1},
    {8192, 8192, 8192, 1}, {16, 8192, 8192, 1},    {64, 8192, 8192, 1},   {64, 512, 65536, 1},   {128, 4096, 4096, 1},
    {64, 16384, 64, 4},    {256, 256, 65536, 1},   {96, 192, 64, 300},    {64, 256, 512, 132},   {128, 192, 8192, 1},
    {128, 128, 4096, 64},  {1024, 2048, 32768, 1}, {1, 8192, 8192, 1},    {32, 8192, 8192, 1},   {8, 512, 65536, 1}};
enum { NUM_SIZES = sizeof sizes / sizeof sizes[0] };

/* feature: a bit each for rows of A, rows of B, C, and the dtype; then for tensors that TMA does not take. */
static void list_gemm(const fdm_device *device, const char *kernel, int every, add_request add) {
    const char *name, *description;
    int32_t turn = 0;
    for (int32_t k = 0; fdm_gemm_kernel(k, &name, &description) == FDM_OK; k++)
        for (int32_t i = 0; i < NUM_SIZES * (every ? 32 : 4) && (!kernel || strcmp(kernel, name) == 0); i++) {
            const int64_t *size = sizes[i % NUM_SIZES];
            const int32_t f = every ? i / NUM_SIZES : turn, skinny = strcmp(name, "gemm.skinny") == 0,
                          by_tma = strcmp(name, "gemm.hopper") == 0 || strcmp(name, "gemm.mma-tma") == 0;
            const fdm_gemm_problem problem = {.dtype = f & 8 ? FDM_FLOAT16 : FDM_BFLOAT16,
                                              .m = size[0],
                                              .n = size[1],
                                              .k = size[2],
                                              .batch = size[3],
                                              .a_rows_contiguous = f & 1 || skinny,
                                              .b_rows_contiguous = f >> 1 & 1,
                                              .has_c = f >> 2 & 1,
                                              .mappable = skinny || by_tma || !(f & 16)};
            fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
            struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
            turn = (turn + 5) % 32;
            if (fdm_plan_gemm(device, &problem, name, &plan))
                continue;
            const int32_t count = gemm_requests(&plan, requests);
            for (int32_t r = 0; r < count; r++)
                add(device->name, &requests[r]);
        }
}

void list_companions(const char *arch, const char *kernel, int every, add_request add) {
    fdm_device device = {.struct_bytes = sizeof device};
    if (fdm_device_from_name(arch, &device))
        abort();
    list_softmax(&device, kernel, every, add);
    list_gemm(&device, kernel, every, add);
}
