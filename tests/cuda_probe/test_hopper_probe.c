/* test_hopper_probe.c: tensor maps, clusters, programmatic launches and sm_90a on a pretended driver: bad layouts, what
 * arrives, and every call fails once. hopper_probe_device.c runs the same product on a device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "cuda_probe/hopper_probe.h"
#include "faults/cuda_call.h"
#include "faults/scenario.h"
#include "hopper_probe_run.h"

/* ---- tensor maps ---- */

static _Alignas(16) char storage[64];
static const struct cuda_tensor_layout sound = {.type = CUDA_MAP_BFLOAT16,
                                                .rank = 4,
                                                .address = storage,
                                                .extents = {128, 4096, 16, 2},
                                                .stride_bytes = {-1, 4096, 256, 4096 * 4096},
                                                .box = {64, 128, 1, 1},
                                                .swizzle_bytes = 128,
                                                .l2_bytes = 256};

static struct fake_tensor_map made_from(const struct cuda_tensor_layout *layout) {
    struct cuda_tensor_map map;
    struct fake_tensor_map written;
    memset(&map, 0xaa, sizeof map);
    assert_int_equal(cuda_tensor_maps_make(0, layout, 1, &map), FDM_OK);
    memcpy(&written, &map, sizeof written);
    assert_string_equal(written.word, "tiled");
    return written;
}

static void layouts_arrive_whole(void) {
    struct fake_tensor_map map = made_from(&sound);
    assert_int_equal(map.address, (uintptr_t)storage);
    assert_int_equal(map.rank, 4);
    assert_int_equal(map.l2_promotion, 3);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(map.last[i], sound.extents[i] - 1);
        assert_int_equal(map.box[i], sound.box[i]);
        assert_int_equal(map.stride_bytes[i], i < 3 ? sound.stride_bytes[i + 1] : 0);
    }
    static const struct {
        enum cuda_map_type type;
        int number, bytes;
    } types[] = {{CUDA_MAP_UINT8, 0, 1}, {CUDA_MAP_FLOAT16, 6, 2}, {CUDA_MAP_BFLOAT16, 9, 2}, {CUDA_MAP_FLOAT32, 7, 4}};
    static const int32_t swizzles[] = {0, 32, 64, 128}, promotions[] = {0, 64, 128, 256};
    for (int t = 0; t < 4; t++)
        for (int s = 0; s < 4; s++) {
            struct cuda_tensor_layout layout = sound;
            layout.type = types[t].type;
            layout.swizzle_bytes = swizzles[s];
            layout.l2_bytes = promotions[s];
            layout.box[0] = (s ? swizzles[s] : 256) / types[t].bytes;
            map = made_from(&layout);
            assert_int_equal(map.type, types[t].number);
            assert_int_equal(map.swizzle, s);
            assert_int_equal(map.l2_promotion, s);
        }
    struct cuda_tensor_layout edge = {.type = CUDA_MAP_UINT8, .rank = 5, .address = storage, .swizzle_bytes = 0};
    for (int i = 0; i < 5; i++) {
        edge.extents[i] = 1ll << 32;
        edge.box[i] = 256;
        edge.stride_bytes[i] = i % 2 ? (1ll << 40) - 16 : 0;
    }
    map = made_from(&edge);
    assert_int_equal(map.last[4], UINT32_MAX);
    assert_int_equal(map.stride_bytes[3], 0);
    struct cuda_tensor_layout thin = sound; /* an axis of extent 1 has no stride; no driver is told 0 */
    thin.extents[1] = thin.extents[3] = 1;
    thin.stride_bytes[1] = thin.stride_bytes[3] = 0;
    map = made_from(&thin);
    assert_int_equal(map.stride_bytes[0], 256);
    assert_int_equal(map.stride_bytes[1], 256);
    assert_int_equal(map.stride_bytes[2], 16 * 256);
    edge.rank = 1;
    edge.extents[0] = 1;
    edge.box[0] = 16;
    map = made_from(&edge);
    assert_int_equal(map.last[0], 0);
}

static void refused(struct cuda_tensor_layout layout, const char *words) {
    struct cuda_tensor_map map, before;
    memset(&map, 0x55, sizeof map);
    before = map;
    assert_refused(cuda_tensor_maps_make(0, &layout, 1, &map), FDM_ERROR_INVALID_ARGUMENT, words);
    assert_memory_equal(&map, &before, sizeof map);
}
#define REFUSED(words, ...)                       \
    do {                                          \
        struct cuda_tensor_layout layout = sound; \
        __VA_ARGS__;                              \
        refused(layout, words);                   \
    } while (0)

/* Each with one sentence, and none reaches the driver. */
static void layouts_refused(void) {
    REFUSED("type is 4; there are 4", layout.type = (enum cuda_map_type)4);
    REFUSED("type is -1", layout.type = (enum cuda_map_type) - 1);
    REFUSED("rank is 0; it must be 1 to 5", layout.rank = 0);
    REFUSED("rank is 6", layout.rank = 6);
    REFUSED("a multiple of 16 and not 0", layout.address = NULL);
    REFUSED("a multiple of 16", layout.address = storage + 8);
    REFUSED("extent 1 is 0; it must be 1 to 2^32", layout.extents[1] = 0);
    REFUSED("extent 3 is -5", layout.extents[3] = -5);
    REFUSED("extent 0 is 4294967297", layout.extents[0] = (1ll << 32) + 1);
    REFUSED("stride 2 is 264 bytes", layout.stride_bytes[2] = 264);
    REFUSED("stride 1 is -4096 bytes", layout.stride_bytes[1] = -4096);
    REFUSED("stride 3 is 1099511627776 bytes", layout.stride_bytes[3] = 1ll << 40);
    REFUSED("box 1 is 257; it must be 1 to 256", layout.box[1] = 257);
    REFUSED("box 0 is 0", layout.box[0] = 0);
    REFUSED("rows of 24 bytes; they must be a multiple of 16", layout.box[0] = 12);
    REFUSED("swizzle is 16 bytes", layout.swizzle_bytes = 16);
    REFUSED("swizzle is 256 bytes", layout.swizzle_bytes = 256);
    REFUSED("rows of 256 bytes; with this swizzle they have at most 128", layout.box[0] = 128);
    REFUSED("rows of 128 bytes; with this swizzle they have at most 64", layout.swizzle_bytes = 64);
    REFUSED("L2 promotion is 32 bytes", layout.l2_bytes = 32);
    assert_int_equal(cuda_device_count(), 1);
    assert_int_equal(fake_driver()->count("cuTensorMapEncodeTiled"), 0);
    struct cuda_tensor_map map;
    fake_driver()->inject("cuTensorMapEncodeTiled", 1, 1);
    assert_refused(cuda_tensor_maps_make(0, &sound, 1, &map), FDM_ERROR_SYSTEM,
                   "making a tensor map failed: invalid argument (CUDA_ERROR_INVALID_VALUE)");
    assert_int_equal(cuda_tensor_maps_make(0, &sound, 1, &map), FDM_OK);
    const struct cuda_tensor_layout pair[2] = {sound, {.type = CUDA_MAP_UINT8, .rank = 9}};
    struct cuda_tensor_map maps[2];
    assert_refused(cuda_tensor_maps_make(0, pair, 2, maps), FDM_ERROR_INVALID_ARGUMENT, "rank is 9");
    assert_refused(cuda_tensor_maps_make(1, &sound, 1, &map), FDM_ERROR_INVALID_ARGUMENT, "this machine has 1");
    assert_int_equal(fake_driver()->count("cuTensorMapEncodeTiled"), 2);
    assert_int_equal(fake_driver()->depth(), 0);
}

/* A driver that does not have the function is refused as a whole: 12.0 has it. */
static void driver_without_tensor_maps(void) {
    static const char *const names[] = {
#define NAME_OF(member, name, parameters) name,
        CU_FUNCTIONS(NAME_OF)
#undef NAME_OF
    };
    char number[16];
    int place = 0;
    while (strcmp(names[place], "cuTensorMapEncodeTiled") != 0)
        place++;
    snprintf(number, sizeof number, "%d", place + 1);
    setenv("FAKE_CUDA_LACKS", number, 1);
    struct cuda_tensor_map map;
    assert_refused(cuda_tensor_maps_make(0, &sound, 1, &map), FDM_ERROR_UNSUPPORTED,
                   "the CUDA driver has no cuTensorMapEncodeTiled: it is older than 12.0");
    assert_int_equal(cuda_device_count(), 0);
    assert_cpu_works();
}

/* ---- the probe's own calls ---- */

static const struct hopper_probe small = {.m = 300, .n = 128, .k = 64, .batch = 3, .waits = 1};
static float result[3 * 300 * 128];

static void launches_have_their_attributes(void) {
    use_fake_compiler();
    assert_int_equal(hopper_probe_run(&small, result), FDM_OK);
    assert_int_equal(fake_driver()->num_launches(), 2);
    const struct fake_launch fill = fake_driver()->launch(0), product = fake_driver()->launch(1);
    assert_string_equal(fill.entry, "hopper_probe_fill");
    assert_int_equal(fill.cluster, 0);
    assert_int_equal(fill.programmatic, 0);
    assert_string_equal(product.entry, "hopper_probe");
    assert_int_equal(product.cluster, 2);
    assert_int_equal(product.programmatic, 1);
    assert_int_equal(product.grid[0], 4); /* two clusters of 256 rows */
    assert_int_equal(product.grid[1], 3);
    assert_int_equal(product.block[0], 384);
    assert_int_equal(product.shared_bytes, 232448);
    assert_int_equal(product.max_shared_bytes, 232448);
    assert_int_equal(fake_driver()->live().allocations, 0);
}

/* The pretended compiler's code starts with its options; the cache keeps it in a file. */
static int64_t entries_with(const char *words) {
    char command[512], line[64];
    snprintf(command, sizeof command, "grep -l -a -e '%s' %s/*.cubin | wc -l", words, getenv("FLASH_DMATTN_CACHE_DIR"));
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_non_null(fgets(line, sizeof line, pipe));
    pclose(pipe);
    return atoll(line);
}

/* Only the kernel with instructions of one architecture is compiled for that one; both are kept on disk. */
static void targets_are_the_sources(void) {
    static const struct hopper_probe second = {.device = 1, .m = 1, .n = 8, .k = 8, .batch = 1, .waits = 1};
    use_fake_compiler();
    assert_int_equal(hopper_probe_run(&small, result), FDM_OK);
    assert_int_equal(fake_compiler()->num_distinct(), 2);
    assert_int_equal(entries_with("fake cubin"), 2);
    assert_int_equal(entries_with("hopper_probe.cu .*architecture=sm_90a -D"), 1);
    assert_int_equal(entries_with("hopper_probe_fill.cu .*architecture=sm_90$"), 1);
    assert_int_equal(hopper_probe_run(&second, result), FDM_OK); /* the second device finds them there */
    assert_int_equal(hopper_probe_run(&small, result), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 2);
    assert_int_equal(fake_driver()->live().modules, 4);
    const struct cuda_kernel_request request = {
        .file = "cuda_probe/hopper_probe.cu",
        .entry = "hopper_probe",
        .num_constants = 3,
        .constants = {{"B_TRANSPOSED", 0}, {"A_IN_REGISTERS", 0}, {"WAITS", 1}}};
    assert_int_equal(cuda_compile_only("sm_90", &request, NULL), FDM_OK);
    assert_int_equal(cuda_compile_only("sm_90a", &request, NULL), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 4);
    assert_int_equal(fake_compiler()->num_distinct(), 2);
}

static void devices_below_9_are_told(void) {
    use_fake_compiler();
    assert_refused(hopper_probe_run(&small, result), FDM_ERROR_UNSUPPORTED,
                   "is for compute capability 9.0 and above; the CUDA device has 8.9");
    assert_int_equal(fake_driver()->count("cuModuleLoadData"), 0);
    assert_int_equal(fake_compiler()->num_compiled(), 0);
    assert_int_equal(fake_driver()->live().allocations, 0);
    assert_int_equal(fake_driver()->depth(), 0);
}

static void every_call_fails(void) {
    static const char opening[] = " cuGetProcAddress cuInit cuDriverGetVersion cuDeviceGetCount ";
    char word[64];
    use_fake_compiler();
    const fdm_status status = hopper_probe_run(&small, result);
    const char *failed = fake_driver()->injected();
    if (!*failed) {
        assert_int_equal(status, FDM_OK);
        scenario_past_the_end = 1;
        return;
    }
    print_message("%s: %d, %s\n", failed, status, fdm_last_error());
    if (status)
        assert_sentence();
    else /* the bandwidth is then unknown; a context that is not left stays on top, and so does a mode */
        assert_true(strcmp(failed, "cuDeviceGetAttribute") == 0 || strcmp(failed, "cuCtxPopCurrent") == 0 ||
                    strcmp(failed, "cuThreadExchangeStreamCaptureMode") == 0);
    const int64_t kept = fake_driver()->live().allocations;
    if (kept) /* only what could not be released, and the call says so */
        assert_true(kept == 1 && status && fake_driver()->count("cuMemFree") >= 2);
    assert_int_equal(memory_live(), fake_driver()->live().modules);
    assert_int_equal(fake_driver()->depth(), strcmp(failed, "cuCtxPopCurrent") == 0);
    snprintf(word, sizeof word, " %s ", failed); /* what is done once a process is remembered */
    assert_int_equal(hopper_probe_run(&small, result), strstr(opening, word) ? status : FDM_OK);
    assert_int_equal(fake_driver()->live().allocations, kept);
    assert_cpu_works();
}

static void every_host_allocation_fails(void) {
    fdm_status status = FDM_ERROR_OUT_OF_MEMORY;
    int64_t n = 1;
    use_fake_compiler();
    assert_int_equal(cuda_device_count(), 1);
    for (; status; n++) {
        memory_fail_at(n);
        status = hopper_probe_run(&small, result);
        memory_fail_at(0);
        assert_int_equal(memory_live(), fake_driver()->live().modules); /* a record for each kernel */
        assert_int_equal(fake_driver()->live().allocations, 0);
        if (status)
            assert_refused(status, FDM_ERROR_OUT_OF_MEMORY, "no memory for");
    }
    assert_true(n > 2);
}

/* The real compiler, where there is one: no spill, and no remark that the products wait for each other. */
static void compiles_without_remarks(void) {
    char path[1024];
    if (fdm_compiler_path(path, sizeof path)) {
        print_message("not covered: %s\n", fdm_last_error());
        return;
    }
    for (int variant = 0; variant < 8; variant++) {
        const struct cuda_kernel_request request = {
            .file = "cuda_probe/hopper_probe.cu",
            .entry = "hopper_probe",
            .num_constants = 3,
            .constants = {{"B_TRANSPOSED", variant % 2}, {"A_IN_REGISTERS", variant / 2 % 2}, {"WAITS", variant / 4}}};
        struct cuda_resources resources;
        const fdm_status status = cuda_compile_only("sm_90", &request, &resources);
        if (status && strstr(fdm_last_error(), "libnvrtc-builtins")) { /* under sanitizers */
            print_message("not covered: %s\n", fdm_last_error());
            return;
        }
        print_message("%s\n", status ? fdm_last_error() : "compiled");
        assert_int_equal(status, FDM_OK);
        assert_int_equal(resources.spill_bytes, 0);
        assert_int_equal(resources.remarks, 0);
        assert_int_equal(resources.registers, 168);
    }
}

static const struct scenario scenarios[] = {
    {"layouts_arrive_whole", layouts_arrive_whole, NULL, 0},
    {"layouts_refused", layouts_refused, NULL, 0},
    {"driver_without_tensor_maps", driver_without_tensor_maps, NULL, 0},
    {"launches_have_their_attributes", launches_have_their_attributes, NULL, 0},
    {"targets_are_the_sources", targets_are_the_sources, "FAKE_CUDA_DEVICES=9.0:232448,9.0:232448", 0},
    {"devices_below_9_are_told", devices_below_9_are_told, "FAKE_CUDA_DEVICES=8.9:101376", 0},
    {"every_call_fails", every_call_fails, "FAKE_CUDA_FAIL=*:1:%", 1},
    {"compiles_without_remarks", compiles_without_remarks, NULL, 0},
    {"every_host_allocation_fails", every_host_allocation_fails, NULL, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
