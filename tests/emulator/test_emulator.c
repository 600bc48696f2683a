/* test_emulator.c: the emulated device is right about sound kernels, and finds and names each planted fault. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dlfcn.h>

#include "cuda/cuda.h"
#include "emulated_settings.h"
#include "instructions/tile_product.h"
#include "planted/planted.h"

enum { BLOCKS = 3, DEVICE_80 = 0, DEVICE_90 = 1, DEVICE_100 = 2, K = PLANTED_STEPS * 64, TO_DEVICE = 0, TO_HOST = 1 };
static struct emulated *emulated;

static void *upload(int32_t device, const void *data, size_t bytes) {
    void *memory;
    assert_int_equal(cuda_memory_allocate(device, bytes, &memory), FDM_OK);
    assert_int_equal(cuda_memory_copy(device, memory, data, bytes, TO_DEVICE), FDM_OK);
    return memory;
}

static fdm_status run_request(int32_t device, const struct cuda_kernel_request *request,
                              const struct cuda_launch *shape, const struct planted_arguments *a) {
    struct cuda_launch launch = *shape;
    fdm_status status = cuda_kernels_get(device, request, 1, &launch.kernel);
    if (status)
        print_error("%s\n", fdm_last_error());
    assert_int_equal(status, FDM_OK);
    launch.arguments = a;
    launch.arguments_bytes = sizeof *a;
    status = cuda_launch(&launch);
    const fdm_status end = cuda_synchronize(device);
    return status ? status : end;
}

static fdm_status run(int32_t device, const char *file, const char *entry, int fault, const struct cuda_launch *shape,
                      int shared_bytes, const struct planted_arguments *a) {
    const struct cuda_kernel_request request = {.file = file,
                                                .entry = entry,
                                                .num_constants = 1,
                                                .constants = {{"FAULT", fault}},
                                                .shared_bytes = shared_bytes};
    return run_request(device, &request, shape, a);
}

/* ---- planted_block ---- */

static void block_truth(const float *in, float *out) {
    enum { N = PLANTED_THREADS };
    float x[N], y[N];
    for (int t = 0; t < N; t++)
        x[t] = in[(t + 40) % N];
    for (int t = 0; t < N; t++) {
        y[t] = x[t];
        for (int lane = 0; lane < 32; lane++)
            y[t] += x[t / 32 * 32 + lane];
    }
    for (int t = 0; t < N; t++)
        x[t] = y[t] + (t / 32 == 1 ? y[t - 32] : y[t]);
    for (int t = 0; t < N; t++) {
        y[t] = x[t];
        for (int n = 0; n < 6 && t / 32 == 1; n++)
            y[t] += x[t - 32] + (float)n;
    }
    for (int t = 0; t < N; t++) {
        for (int b = 0; b < BLOCKS; b++)
            out[b * N + t] = y[t];
        out[BLOCKS * N + t] = BLOCKS * y[t];
    }
}

static int run_block(int fault) {
    float in[PLANTED_THREADS], out[(BLOCKS + 1) * PLANTED_THREADS] = {0}, truth[(BLOCKS + 1) * PLANTED_THREADS];
    const int32_t zero = 0;
    for (int t = 0; t < PLANTED_THREADS; t++)
        in[t] = (float)(t * 7 % 11) - 4;
    block_truth(in, truth);
    struct planted_arguments a = {.in = upload(DEVICE_80, in, sizeof in),
                                  .out = upload(DEVICE_80, out, sizeof out),
                                  .flags = upload(DEVICE_80, &zero, sizeof zero),
                                  .count = PLANTED_THREADS};
    const struct cuda_launch shape = {.grid = {BLOCKS, 1, 1}, .threads = PLANTED_THREADS};
    run(DEVICE_80, "planted/planted_block.cu", "planted_block", fault, &shape, 0, &a);
    cuda_memory_copy(DEVICE_80, out, a.out, sizeof out, TO_HOST);
    cuda_memory_release(DEVICE_80, (void *)(uintptr_t)a.in);
    cuda_memory_release(DEVICE_80, a.out);
    cuda_memory_release(DEVICE_80, a.flags);
    return memcmp(out, truth, sizeof out) == 0;
}

/* ---- planted_stale ---- */

static int run_stale(int fault) {
    enum { N = PLANTED_THREADS };
    static float in[PLANTED_TILES * N], out[N], truth[N];
    static const int32_t active[PLANTED_TILES] = {1, 1, 0, 1, 0, 0, 1, 1};
    for (int i = 0; i < PLANTED_TILES * N; i++)
        in[i] = (float)(i * 13 % 17) + (float)(i / N);
    for (int t = 0; t < N; t++) {
        truth[t] = 0;
        for (int tile = 0; tile < PLANTED_TILES; tile++)
            truth[t] += active[tile] ? in[tile * N + (t + 33) % N] : 0;
    }
    struct planted_arguments a = {.in = upload(DEVICE_80, in, sizeof in),
                                  .out = upload(DEVICE_80, out, sizeof out),
                                  .flags = upload(DEVICE_80, active, sizeof active)};
    const struct cuda_launch shape = {.grid = {1, 1, 1}, .threads = N};
    run(DEVICE_80, "planted/planted_stale.cu", "planted_stale", fault, &shape, 2 * N * 4, &a);
    cuda_memory_copy(DEVICE_80, out, a.out, sizeof out, TO_HOST);
    cuda_memory_release(DEVICE_80, (void *)(uintptr_t)a.in);
    cuda_memory_release(DEVICE_80, a.out);
    cuda_memory_release(DEVICE_80, a.flags);
    return memcmp(out, truth, sizeof out) == 0;
}

/* ---- planted_ring ---- */

static int value_of(int tensor, int i) { return (i * (tensor ? 5 : 3) + i / 7) % 5 - 2; }
static uint16_t bf16_of(int x) {
    const float value = (float)x;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static void make_ring_maps(struct planted_arguments *a, const void *left, const void *right, const void *sums) {
    const struct cuda_tensor_layout operand = {.type = CUDA_MAP_BFLOAT16,
                                               .rank = 3,
                                               .extents = {K, PLANTED_ROWS, 1},
                                               .stride_bytes = {0, K * 2, K * 2 * PLANTED_ROWS},
                                               .box = {64, PLANTED_ROWS, 1},
                                               .swizzle_bytes = 128};
    struct cuda_tensor_layout layouts[3] = {operand, operand};
    struct cuda_tensor_map maps[3];
    layouts[0].address = left;
    layouts[1].address = right;
    layouts[2] = (struct cuda_tensor_layout){.type = CUDA_MAP_FLOAT32,
                                             .rank = 3,
                                             .address = sums,
                                             .extents = {64, 64, 2},
                                             .stride_bytes = {0, 256, 64 * 256},
                                             .box = {64, 64, 1}};
    assert_int_equal(cuda_tensor_maps_make(DEVICE_90, layouts, 3, maps), FDM_OK);
    a->a = maps[0];
    a->b = maps[1];
    a->c = maps[2];
}

static int ring_right(const float *c, const float *numbers) {
    int right = numbers[0] == 41 && numbers[1] == 40;
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < 64; j++) {
            int sum = 0;
            for (int k = 0; k < K; k++)
                sum += value_of(0, i * K + k) * value_of(1, j * K + k);
            right = right && c[i * 64 + j] == (float)sum && c[4096 + i * 64 + j] == (float)sum;
        }
    return right;
}

static int run_ring(int fault) {
    static uint16_t left[PLANTED_ROWS * K], right[PLANTED_ROWS * K];
    static float c[2 * 64 * 64], numbers[2];
    const int32_t zero = 0;
    for (int i = 0; i < PLANTED_ROWS * K; i++) {
        left[i] = bf16_of(value_of(0, i));
        right[i] = bf16_of(value_of(1, i));
    }
    void *memory[5] = {upload(DEVICE_90, left, sizeof left), upload(DEVICE_90, right, sizeof right),
                       upload(DEVICE_90, c, sizeof c), upload(DEVICE_90, numbers, sizeof numbers),
                       upload(DEVICE_90, &zero, sizeof zero)};
    struct planted_arguments a = {.out = memory[3], .flags = memory[4]};
    make_ring_maps(&a, memory[0], memory[1], memory[2]);
    const struct cuda_launch shape = {.grid = {2, 1, 1}, .threads = PLANTED_RING_THREADS, .cluster = 2};
    run(DEVICE_90, "planted/planted_ring.cu", "planted_ring", fault, &shape, 50 << 10, &a);
    cuda_memory_copy(DEVICE_90, c, memory[2], sizeof c, TO_HOST);
    cuda_memory_copy(DEVICE_90, numbers, memory[3], sizeof numbers, TO_HOST);
    for (int i = 0; i < 5; i++)
        cuda_memory_release(DEVICE_90, memory[i]);
    return ring_right(c, numbers);
}

/* ---- planted_tile ---- */

static uint16_t half_of(int x, int f16) {
    static const uint16_t halves[] = {0xc000, 0xbc00, 0, 0x3c00, 0x4000}; /* -2 .. 2 */
    return f16 ? halves[x + 2] : bf16_of(x);
}

static int tile_value(int matrix, int row, int k) { return (row * (matrix ? 7 : 3) + k * 5 + row * k / 3) % 5 - 2; }

/* group blocks multiply m x n sums; in lane and column of block `block`: which row and column of the product. */
static int tile_right(const float *out, int group, int m, int n) {
    const int folded = group == 2 && m == 128, columns = folded ? n / 2 : n, rows = m / group;
    int right = 1;
    for (int block = 0; block < 2; block++)
        for (int lane = 0; lane < 128; lane++)
            for (int c = 0; c < columns; c++) {
                const int row = block * rows + lane % rows, column = c + (folded ? lane / 64 * columns : 0);
                int sum = 0;
                for (int k = 0; k < TILE_K; k++)
                    sum += tile_value(0, row, k) * tile_value(1, column, k);
                right = right && out[(block * 128 + lane) * columns + c] == (float)sum;
            }
    return right;
}

static int run_tile(int group, int m, int n, int operand_a, int b_mn, int f16) {
    static uint16_t in[512 * TILE_K];
    static float out[2 * 128 * 256];
    for (int i = 0; i < 512; i++)
        for (int k = 0; k < TILE_K; k++)
            in[i * TILE_K + k] = half_of(tile_value(i >= 256, i % 256, k), f16);
    struct planted_arguments a = {.in = upload(DEVICE_100, in, sizeof in), .out = upload(DEVICE_100, out, sizeof out)};
    const struct cuda_kernel_request request = {
        .file = "planted/planted_tile.cu",
        .entry = "planted_tile",
        .num_constants = 6,
        .constants =
            {{"FAULT", f16}, {"GROUP", group}, {"TILE_M", m}, {"TILE_N", n}, {"OPERAND_A", operand_a}, {"B_MN", b_mn}},
        .shared_bytes = TILE_SHARED};
    const struct cuda_launch shape = {.grid = {2, 1, 1}, .threads = TILE_THREADS, .cluster = 2};
    run_request(DEVICE_100, &request, &shape, &a);
    cuda_memory_copy(DEVICE_100, out, a.out, sizeof out, TO_HOST);
    cuda_memory_release(DEVICE_100, (void *)(uintptr_t)a.in);
    cuda_memory_release(DEVICE_100, a.out);
    return tile_right(out, group, m, n);
}

/* One block and two, a from shared and from tensor memory, K-major and MN-major, both layouts of a pair's sums. */
static void tensor_products_are_right(void **state) {
    static const int cases[][6] = {
        {1, 128, 128, 0, 0, 0}, {1, 128, 256, 1, 1, 1}, {1, 128, 64, 2, 1, 0},  {1, 128, 128, 1, 0, 0},
        {2, 256, 128, 0, 0, 0}, {2, 256, 256, 0, 1, 0}, {2, 256, 128, 2, 1, 1}, {2, 256, 256, 1, 0, 0},
        {2, 128, 128, 0, 0, 0}, {2, 128, 256, 0, 1, 1}, {2, 128, 128, 2, 0, 0}, {2, 128, 256, 1, 1, 0},
    };
    (void)state;
    emulated->quiet = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int mode = EMULATED_EARLY; mode <= EMULATED_RANDOM; mode++) {
            const int *c = cases[i];
            emulated->mode = (enum emulated_mode)mode;
            emulated->seed = i + 1;
            emulated->forget();
            assert_true(run_tile(c[0], c[1], c[2], c[3], c[4], c[5]));
            assert_int_equal(emulated->findings(), 0);
        }
}

/* ---- planted_tensor ---- */

enum { ROWS = 256, KEYS = PLANTED_TENSOR_TILES * 128, WIDTH = 64, COLUMNS = 128 };
static int sign_of(int tensor, int i) { return (i * (tensor ? 11 : 7) + i / 13) % 3 - 1; }

static int sums_right(const float *out) {
    static int s[KEYS];
    int right = 1;
    for (int row = 0; row < ROWS; row++) {
        for (int key = 0; key < KEYS; key++) {
            s[key] = 0;
            for (int i = 0; i < WIDTH; i++)
                s[key] += sign_of(0, row * WIDTH + i) * sign_of(1, key * WIDTH + i);
        }
        for (int c = 0; c < COLUMNS; c++) {
            int sum = 0;
            for (int key = 0; key < KEYS; key++)
                sum += s[key] * value_of(1, key * COLUMNS + c);
            right = right && out[row * COLUMNS + c] == (float)sum;
        }
    }
    return right;
}

static int run_tensor(int fault) {
    static uint16_t q[ROWS * WIDTH], k[KEYS * WIDTH], v[KEYS * COLUMNS];
    static float out[ROWS * COLUMNS];
    for (int i = 0; i < ROWS * WIDTH; i++)
        q[i] = bf16_of(sign_of(0, i));
    for (int i = 0; i < KEYS * WIDTH; i++)
        k[i] = bf16_of(sign_of(1, i));
    for (int i = 0; i < KEYS * COLUMNS; i++)
        v[i] = bf16_of(value_of(1, i));
    void *memory[4] = {upload(DEVICE_100, q, sizeof q), upload(DEVICE_100, k, sizeof k),
                       upload(DEVICE_100, v, sizeof v), upload(DEVICE_100, out, sizeof out)};
    struct planted_arguments a = {.in = memory[0], .out = memory[3]};
    const struct cuda_tensor_layout layouts[2] = {{.type = CUDA_MAP_BFLOAT16,
                                                   .rank = 3,
                                                   .address = memory[1],
                                                   .extents = {WIDTH, KEYS, 1},
                                                   .stride_bytes = {0, WIDTH * 2, WIDTH * 2 * KEYS},
                                                   .box = {64, 64, 1},
                                                   .swizzle_bytes = 128},
                                                  {.type = CUDA_MAP_BFLOAT16,
                                                   .rank = 3,
                                                   .address = memory[2],
                                                   .extents = {COLUMNS, KEYS, 1},
                                                   .stride_bytes = {0, COLUMNS * 2, COLUMNS * 2 * KEYS},
                                                   .box = {64, 128, 1},
                                                   .swizzle_bytes = 128}};
    struct cuda_tensor_map maps[2];
    assert_int_equal(cuda_tensor_maps_make(DEVICE_100, layouts, 2, maps), FDM_OK);
    a.a = maps[0];
    a.b = maps[1];
    const struct cuda_launch shape = {.grid = {2, 1, 1}, .threads = PLANTED_TENSOR_THREADS, .cluster = 2};
    run(DEVICE_100, "planted/planted_tensor.cu", "planted_tensor", fault, &shape, 90 << 10, &a);
    cuda_memory_copy(DEVICE_100, out, memory[3], sizeof out, TO_HOST);
    for (int i = 0; i < 4; i++)
        cuda_memory_release(DEVICE_100, memory[i]);
    return sums_right(out);
}

/* By the order that PTX first promised, the next scores may come over an operand that is still read. */
static void a_weaker_order_is_found(void **state) {
    int found = 0;
    (void)state;
    emulated->quiet = 1;
    emulated->unordered = 1;
    emulated->forget();
    run_tensor(0);
    found = emulated->found("race in tensor memory");
    emulated->unordered = 0;
    assert_true(found > 0);
}

/* ---- planted_clusters ---- */

static int run_clusters(int fault) {
    enum { PAIRS = 7, Y = 3, Z = 2, N = 2 * PAIRS * Y * Z };
    float out[N] = {0};
    int right = 1;
    struct planted_arguments a = {.out = upload(DEVICE_100, out, sizeof out)};
    const struct cuda_launch shape = {.grid = {2 * PAIRS, Y, Z}, .threads = 32, .cluster = 2};
    run(DEVICE_100, "planted/planted_clusters.cu", "planted_clusters", fault, &shape, 64, &a);
    cuda_memory_copy(DEVICE_100, out, a.out, sizeof out, TO_HOST);
    cuda_memory_release(DEVICE_100, a.out);
    for (int i = 0; i < N; i++)
        right = right && out[i] == 1;
    return right;
}

/* ---- each fault, with the names that it may be found under ---- */

static const char wrong_result[] = "wrong result";
static const struct planted {
    int (*run)(int fault);
    const char *what;
    int fault;
    const char *kinds[3];
} planted[] = {
    {run_block, "a barrier left out", 1, {"race"}},
    {run_block, "a wait too early", 2, {"read too early"}},
    {run_block, "a shuffle whose mask lacks lanes", 3, {"wrong mask"}},
    {run_block, "two blocks add without atomics", 4, {"race between blocks"}},
    {run_block, "a read past static shared memory", 5, {"out of bounds"}},
    {run_block, "shared memory read before it is written", 6, {"read before it was written"}},
    {run_block, "a misaligned copy", 7, {"misaligned"}},
    {run_block, "a barrier in a branch", 8, {"divergence", "deadlock"}},
    {run_block, "a __syncwarp left out", 9, {"race"}},
    {run_block, "a read past a tensor", 10, {"out of bounds"}},
    {run_block, "a place released before it is read", 11, {"race"}},
    {run_block, "a named barrier with two numbers of threads", 12, {"wrong barrier"}},
    {run_block, "a wait for the wrong parity", 13, {"race", "deadlock"}},
    {run_block, "an arrival short", 14, {"deadlock"}},
    {run_block, "an arrival too many", 15, {"wrong mbarrier", "deadlock"}},
    {run_block, "an accumulator that nobody has set", 16, {"register read before it was written"}},
    {run_block, "a lane that ends before a shuffle", 17, {"wrong mask"}},
    {run_block, "a hand-over between blocks without release", 18, {"race between blocks"}},
    {run_stale, "a tile that is not fetched after an inactive one", 1, {wrong_result}},
    {run_stale, "sixteen bytes past shared memory", 2, {"out of bounds"}},
    {run_ring, "the producer waits for the wrong parity", 1, {"race", "written while a copy is under way", "deadlock"}},
    {run_ring, "bytes that never come", 2, {"deadlock"}},
    {run_ring, "the producer does not wait", 3, {"race", "written while a copy is under way"}},
    {run_ring, "a swizzle wrong by one bit", 4, {wrong_result}},
    {run_ring, "the consumer does not wait", 5, {"read too early", "read before it was written"}},
    {run_ring, "wgmma.fence left out", 6, {"wgmma fence missing"}},
    {run_ring, "a stage released while wgmma reads it", 7, {"race"}},
    {run_ring, "a register touched that wgmma owns", 8, {"register touched"}},
    {run_ring, "the last wait for wgmma left out", 9, {"register touched"}},
    {run_ring, "a consumer's arrival short", 10, {"deadlock"}},
    {run_ring, "a fence between proxies left out", 11, {"proxy fence missing"}},
    {run_ring, "a barrier before the store left out", 12, {"race", "read before it was written"}},
    {run_ring, "a store that is not waited for", 13, {"block ended too early"}},
    {run_ring, "an arrival at what is no mbarrier", 14, {"wrong mbarrier"}},
    {run_ring, "mbarriers that TMA was not told of", 15, {"proxy fence missing"}},
    {run_ring, "the first cluster barrier left out", 16, {"race", "read before it was written"}},
    {run_ring, "more registers than the block has", 17, {"deadlock"}},
    {run_ring, "the last cluster barrier left out", 18, {"block has ended"}},
    {run_ring, "a tile that begins in the middle of 16 bytes", 19, {"misaligned"}},
    {run_ring, "a store that begins before the tensor", 20, {"wrong copy"}},
    {run_tensor,
     "scores read in the wrong phase",
     1,
     {"tensor memory read before it was written", "race in tensor memory", "deadlock"}},
    {run_tensor, "sums over the columns of scores", 2, {"columns overlap"}},
    {run_tensor, "the fence before a load left out", 3, {"tcgen05 fence missing"}},
    {run_tensor, "tcgen05.wait::ld left out", 4, {"register touched"}},
    {run_tensor, "the fence after a store left out", 5, {"tcgen05 fence missing"}},
    {run_tensor, "tcgen05.wait::st left out", 6, {"race in tensor memory"}},
    {run_tensor, "tensor memory given back while it is read", 7, {"race in tensor memory"}},
    {run_tensor, "tensor memory that is not given back", 8, {"tensor memory not given back"}},
    {run_tensor, "a commit to one block of the pair", 9, {"deadlock"}},
    {run_tensor, "each lane arrives where one should", 10, {"wrong mbarrier", "race in tensor memory"}},
    {run_tensor, "both blocks copy the same half of b", 11, {wrong_result}},
    {run_tensor, "a fence between proxies left out before a product", 12, {"proxy fence missing"}},
    {run_tensor, "a warp that takes another's lanes", 13, {"wrong lanes"}},
    {run_tensor, "an operand overwritten before the commit", 14, {"race", "written while a copy is under way"}},
    {run_tensor,
     "a block that ends while the pair multiplies",
     15,
     {"block has ended", "tensor memory not given back"}},
    {run_tensor, "two kinds of cta_group", 16, {"mixed cta_group"}},
    {run_tensor, "a descriptor without its version", 17, {"wrong descriptor"}},
    {run_tensor, "the other block's mbarriers used before they are known", 18, {"race"}},
    {run_clusters, "a cluster asked for after there was none", 1, {"wrong cluster launch"}},
    {run_clusters, "an answer that one block does not expect", 2, {"deadlock"}},
    {run_clusters, "an answer over one that was read without a fence", 4, {"proxy fence missing"}},
    {run_clusters, "an answer that is not waited for", 3, {"read too early", "read before it was written"}},
};

static int found(const struct planted *p, int right) {
    for (int i = 0; i < 3 && p->kinds[i]; i++)
        if (p->kinds[i] == wrong_result ? !right : emulated->found(p->kinds[i]) > 0)
            return 1;
    return 0;
}

static void sound_kernels_are_right(void **state) {
    static int (*const runs[])(int) = {run_block, run_stale, run_ring, run_tensor, run_clusters};
    (void)state;
    emulated->quiet = 0;
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++)
        for (int mode = EMULATED_EARLY; mode <= EMULATED_RANDOM; mode++)
            for (emulated->seed = 1; emulated->seed <= 3; emulated->seed++) {
                emulated->mode = (enum emulated_mode)mode;
                emulated->forget();
                assert_true(runs[i](0));
                assert_int_equal(emulated->findings(), 0);
            }
}

/* In some mode, with one of few seeds. */
static void planted_faults_are_found(void **state) {
    int missed = 0;
    (void)state;
    emulated->quiet = 1;
    for (size_t i = 0; i < sizeof planted / sizeof planted[0]; i++) {
        const struct planted *p = &planted[i];
        int seen = 0;
        for (int n = 0; n < 12 && !seen; n++) {
            emulated->mode = (enum emulated_mode)((n + 2) % 3);
            emulated->seed = (uint64_t)n + 1;
            emulated->forget();
            seen = found(p, p->run(p->fault));
        }
        print_message("%s %s: %s\n", seen ? "found" : "MISSED", p->what,
                      *emulated->last_finding() ? emulated->last_finding()
                      : seen                    ? "results differ"
                                                : "nothing");
        missed += !seen;
    }
    assert_int_equal(missed, 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sound_kernels_are_right), cmocka_unit_test(tensor_products_are_right),
        cmocka_unit_test(a_weaker_order_is_found), cmocka_unit_test(planted_faults_are_found)};
    setenv("EMULATED_DEVICES", "sm_80,sm_90,sm_100", 1);
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) : NULL;
    emulated = library ? dlsym(library, "emulated") : NULL;
    if (!emulated) {
        fprintf(stderr, "usage: test_emulator PATH/libcuda.so.1\n");
        return 2;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
