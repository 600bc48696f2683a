/* hopper_probe_run.c: the host's side of hopper_probe.cu: memory, tensor maps, two launches. */
#include "hopper_probe_run.h"

#include <time.h>

#include "cuda/cuda.h"
#include "cuda_probe/hopper_probe.h"

enum { FILL, PRODUCT, NUM_KERNELS };

static int64_t a_elements(const struct hopper_probe *p) { return (int64_t)p->m * p->batch * p->k; }
static int64_t b_elements(const struct hopper_probe *p) { return (int64_t)(p->broadcast ? 1 : p->batch) * p->n * p->k; }
static int64_t c_elements(const struct hopper_probe *p) { return (int64_t)p->batch * p->m * p->n; }

static void make_requests(const struct hopper_probe *p, struct cuda_kernel_request *requests) {
    requests[FILL] =
        (struct cuda_kernel_request){.file = "cuda_probe/hopper_probe_fill.cu", .entry = "hopper_probe_fill"};
    requests[PRODUCT] = (struct cuda_kernel_request){
        .file = "cuda_probe/hopper_probe.cu",
        .entry = "hopper_probe",
        .num_constants = 3,
        .constants = {{"B_TRANSPOSED", p->transposed}, {"A_IN_REGISTERS", p->in_registers}, {"WAITS", p->waits}},
        .shared_bytes = HOPPER_PROBE_SHARED_BYTES};
}

/* a is [m][batch][k]: the stride of the outermost axis is not the largest. */
static fdm_status make_maps(const struct hopper_probe *p, const struct hopper_probe_operands *o,
                            struct hopper_probe_arguments *arguments) {
    const int32_t row = p->transposed ? p->n : p->k, rows = p->transposed ? p->k : p->n;
    struct cuda_tensor_map maps[2];
    const struct cuda_tensor_layout layouts[2] = {
        {.type = CUDA_MAP_BFLOAT16,
         .rank = 3,
         .address = o->a,
         .extents = {p->k, p->m, p->batch},
         .stride_bytes = {0, (int64_t)p->batch * p->k * 2, (int64_t)p->k * 2},
         .box = {HOPPER_PROBE_BLOCK_K, HOPPER_PROBE_BLOCK_M, 1},
         .swizzle_bytes = 128,
         .l2_bytes = 256},
        {.type = CUDA_MAP_BFLOAT16,
         .rank = 3,
         .address = o->b,
         .extents = {row, rows, p->batch},
         .stride_bytes = {0, (int64_t)row * 2, p->broadcast ? 0 : (int64_t)row * rows * 2},
         .box = {64, 64, 1},
         .swizzle_bytes = 128,
         .l2_bytes = 128},
    };
    const fdm_status status = cuda_tensor_maps_make(p->device, layouts, 2, maps);
    if (!status) {
        arguments->a = maps[0];
        arguments->b = maps[1];
    }
    return status;
}

static fdm_status launch_both(const struct hopper_probe *p, const struct hopper_probe_operands *operands, float *c) {
    struct cuda_kernel_request requests[NUM_KERNELS];
    const struct cuda_kernel *kernels[NUM_KERNELS];
    struct hopper_probe_arguments arguments = {.c = c, .m = p->m, .n = p->n, .k = p->k};
    fdm_status status = make_maps(p, operands, &arguments);
    make_requests(p, requests);
    if (status || (status = cuda_kernels_get(p->device, requests, NUM_KERNELS, kernels)))
        return status;
    const struct cuda_launch fill = {.kernel = kernels[FILL],
                                     .grid = {4, 1, 1},
                                     .threads = 256,
                                     .arguments = operands,
                                     .arguments_bytes = sizeof *operands};
    const int32_t rows = HOPPER_PROBE_CLUSTER * HOPPER_PROBE_BLOCK_M;
    const struct cuda_launch product = {
        .kernel = kernels[PRODUCT],
        .grid = {(uint32_t)((p->m + rows - 1) / rows * HOPPER_PROBE_CLUSTER), (uint32_t)p->batch, 1},
        .threads = HOPPER_PROBE_THREADS,
        .cluster = HOPPER_PROBE_CLUSTER,
        .programmatic_launch = 1,
        .arguments = &arguments,
        .arguments_bytes = sizeof arguments};
    if (!(status = cuda_launch(&fill)) && !(status = cuda_launch(&product)))
        status = cuda_synchronize(p->device);
    return status;
}

fdm_status hopper_probe_run(const struct hopper_probe *p, float *c) {
    enum { TO_HOST = 1 };
    const size_t bytes[3] = {(size_t)a_elements(p) * 2, (size_t)b_elements(p) * 2, (size_t)c_elements(p) * sizeof *c};
    const uint8_t before[3] = {0, 0, 0xff};
    void *memory[3] = {NULL, NULL, NULL};
    fdm_status status = FDM_OK;
    for (int i = 0; i < 3 && !status; i++)
        if (!(status = cuda_memory_allocate(p->device, bytes[i], &memory[i])))
            status = cuda_memory_fill(p->device, memory[i], before[i], bytes[i]);
    const struct hopper_probe_operands operands = {memory[0], memory[1], a_elements(p), b_elements(p)};
    if (!status)
        status = launch_both(p, &operands, memory[2]);
    if (!status)
        status = cuda_memory_copy(p->device, c, memory[2], bytes[2], TO_HOST);
    for (int i = 0; i < 3; i++)
        if (memory[i]) {
            fdm_status released = cuda_memory_release(p->device, memory[i]);
            status = status ? status : released;
        }
    return status;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

fdm_status hopper_probe_host_cost(int32_t device, int32_t times, double seconds[3]) {
    const struct hopper_probe p = {.device = device, .m = 1, .n = 8, .k = 8, .batch = 1, .waits = 1};
    struct cuda_kernel_request requests[NUM_KERNELS];
    const struct cuda_kernel *kernels[NUM_KERNELS];
    const struct hopper_probe_operands nothing = {0};
    const struct hopper_probe_arguments no_steps = {.k = 0};
    make_requests(&p, requests);
    fdm_status status = cuda_kernels_get(device, requests, NUM_KERNELS, kernels);
    for (int kind = 0; kind < NUM_KERNELS && !status; kind++) {
        const struct cuda_launch launch = {.kernel = kernels[kind],
                                           .grid = {HOPPER_PROBE_CLUSTER, 1, 1},
                                           .threads = kind == FILL ? 256 : HOPPER_PROBE_THREADS,
                                           .cluster = kind == FILL ? 0 : HOPPER_PROBE_CLUSTER,
                                           .programmatic_launch = kind != FILL,
                                           .arguments = kind == FILL ? (const void *)&nothing : &no_steps,
                                           .arguments_bytes = kind == FILL ? sizeof nothing : sizeof no_steps};
        const double from = now();
        for (int32_t i = 0; i < times && !status; i++)
            status = cuda_launch(&launch);
        seconds[kind] = (now() - from) / times;
        if (!status)
            status = cuda_synchronize(device);
    }
    uint16_t *const address = (uint16_t *)256; /* nothing is read there */
    const struct hopper_probe_operands somewhere = {.a = address, .b = address};
    struct hopper_probe_arguments arguments;
    const double from = now();
    for (int32_t i = 0; i < times && !status; i++)
        status = make_maps(&p, &somewhere, &arguments);
    seconds[NUM_KERNELS] = (now() - from) / times;
    return status;
}

void hopper_probe_truth(const struct hopper_probe *p, float *c) {
    for (int64_t z = 0; z < p->batch; z++)
        for (int64_t i = 0; i < p->m; i++)
            for (int64_t j = 0; j < p->n; j++) {
                const int64_t first = p->broadcast ? 0 : z * p->n * p->k;
                int64_t sum = 0;
                for (int64_t l = 0; l < p->k; l++) {
                    const int64_t at = p->transposed ? l * p->n + j : j * p->k + l;
                    sum += hopper_probe_eighths((uint32_t)((i * p->batch + z) * p->k + l), 0) *
                           hopper_probe_eighths((uint32_t)(first + at), 1);
                }
                c[(z * p->m + i) * p->n + j] = (float)sum / 64;
            }
}
