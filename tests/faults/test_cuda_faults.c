/* test_cuda_faults.c: the driver missing, old, broken, refusing, and failing at every call; on a pretended driver. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cuda/cuda.h"
#include "cuda_call.h"
#include "scenario.h"

static const fdm_device_id cuda = {FDM_CUDA, 0}, host = {FDM_CPU, 0};

/* ---- opening the driver ---- */

static char never_looked_at[3][1 << 20];

/* Every entry that needs the driver says the same, nothing is available, and everything else works. */
static void assert_no_cuda(fdm_status wanted, const char *words) {
    fdm_device device = {.struct_bytes = sizeof device};
    struct cuda_call call;
    void *memory = &device;
    fdm_timer *timer = NULL;
    for (int again = 0; again < 2; again++) {
        assert_refused(fdm_device_query(FDM_CUDA, 0, &device), wanted, words);
        assert_refused(fdm_memory_allocate(cuda, 64, &memory), wanted, words);
        assert_refused(fdm_synchronize(cuda), wanted, words);
        assert_refused(fdm_timer_create(cuda, &timer), wanted, words);
        assert_refused(cuda_call_make(&call, CALL_FORWARD, 0), wanted, words);
        call.q.data = call.k.data = call.v.data = never_looked_at[0];
        call.out.data = never_looked_at[1], call.lse.data = never_looked_at[2];
        assert_refused(cuda_call_run(&call, NULL), wanted, words);
    }
    assert_ptr_equal(memory, &device);
    assert_int_equal(cuda_device_count(), 0);
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    for (int32_t i = 0; fdm_kernel_list(i, &info) == FDM_OK; i++)
        if (info.device_type == FDM_CUDA)
            assert_int_equal(info.available, 0);
    fdm_problem problem = fdm_problem_default();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    problem.dtype = FDM_FLOAT16;
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &plan), FDM_OK);
    assert_refused(fdm_prepare(&plan), wanted, words);
    assert_cpu_works();
}

static void no_driver(void) {
    if (dlopen("libcuda.so.1", RTLD_LAZY)) {
        print_message("not covered: this machine has a CUDA driver\n");
        return;
    }
    assert_no_cuda(FDM_ERROR_UNSUPPORTED, "no CUDA driver can be opened: libcuda.so.1: cannot open shared object file");
}

/* LD_LIBRARY_PATH is read when a process starts, so the test's own file comes in by the process it becomes. */
static void become_with(const char *folder, const char *scenario) {
    setenv("LD_LIBRARY_PATH", folder, 1);
    execl("/proc/self/exe", "test_cuda_faults", scenario, (char *)NULL);
    _exit(126);
}
static void damaged_file(void) { assert_no_cuda(FDM_ERROR_UNSUPPORTED, "libcuda.so.1: file too short"); }
static void become_damaged(void) {
    char path[128];
    snprintf(path, sizeof path, "%s/libcuda.so.1", scenario_folder());
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("ELF", file);
    fclose(file);
    become_with(scenario_folder(), "damaged_file");
}
static void driver_file_is_damaged(void) {
    scenario_folder(); /* made here, so that this process removes it */
    scenario_fork(become_damaged);
}

static void without_entry(void) { assert_no_cuda(FDM_ERROR_UNSUPPORTED, "it has no cuGetProcAddress_v2"); }
static void become_without_entry(void) {
    char path[128], target[300];
    snprintf(path, sizeof path, "%s/libcuda.so.1", scenario_folder());
    snprintf(target, sizeof target, "%s/libfake_nvrtc.so", getenv("LD_LIBRARY_PATH")); /* any library will do */
    assert_int_equal(symlink(target, path), 0);
    become_with(scenario_folder(), "without_entry");
}
static void driver_before_12(void) {
    scenario_folder();
    scenario_fork(become_without_entry);
}

static void driver_too_old(void) { assert_no_cuda(FDM_ERROR_UNSUPPORTED, "is for CUDA 11.8; 12.0 or later is needed"); }

static void every_symbol_missing(void) {
    if (cuda_device_count() > 0)
        scenario_past_the_end = 1;
    else
        assert_no_cuda(FDM_ERROR_UNSUPPORTED, "the CUDA driver has no cu");
}

static void start_fails(void) {
    assert_no_cuda(FDM_ERROR_SYSTEM, "the CUDA driver does not start: initialization error");
}
static void start_fails_unnamed(void) {
    assert_no_cuda(FDM_ERROR_SYSTEM, "the CUDA driver does not start: unknown error 4321");
}
static void version_fails(void) { assert_no_cuda(FDM_ERROR_SYSTEM, "does not tell its version: invalid argument"); }
static void count_fails(void) { assert_no_cuda(FDM_ERROR_SYSTEM, "does not count its devices: out of memory"); }
static void no_device(void) { assert_no_cuda(FDM_ERROR_SYSTEM, "no CUDA-capable device is detected"); }

/* ---- devices ---- */

static void facts_of_devices(void) {
    fdm_device d = {.struct_bytes = sizeof d};
    fdm_arch_config config = {.struct_bytes = sizeof config};
    assert_int_equal(cuda_device_count(), 3);
    assert_int_equal(fdm_device_query(FDM_CUDA, 0, &d), FDM_OK);
    assert_string_equal(d.name, "sm_90");
    assert_int_equal(d.shared_bytes, 232448);
    assert_int_equal(d.num_sms, 132);
    assert_int_equal(d.l2_bytes, 50 << 20);
    assert_int_equal(d.threads_per_sm, 2048);
    assert_int_equal(d.registers_per_sm, 65536);
    assert_int_equal(d.bandwidth, 2619000ll * 1000 * 2 * (6144 / 8));
    assert_int_equal(fdm_supports_sm90_features(&d), 1);
    assert_int_equal(fdm_arch_optimization_config(&d, &config), FDM_OK);
    assert_int_equal(config.tier, FDM_MEMORY_HIGH);
    assert_int_equal(fdm_device_query(FDM_CUDA, 1, &d), FDM_OK);
    assert_string_equal(d.name, "sm_89");
    assert_int_equal(fdm_arch_optimization_config(&d, &config), FDM_OK);
    assert_int_equal(config.tier, FDM_MEMORY_LOW);
    assert_int_equal(fdm_supports_sm89_features(&d), 1);
    assert_int_equal(fdm_supports_sm90_features(&d), 0);
    const fdm_device before = d;
    assert_refused(fdm_device_query(FDM_CUDA, 3, &d), FDM_ERROR_INVALID_ARGUMENT, "index is 3; this machine has 3");
    assert_refused(fdm_device_query(FDM_CUDA, -1, &d), FDM_ERROR_INVALID_ARGUMENT, "index is -1; this machine has 3");
    assert_memory_equal(&d, &before, sizeof d);
    assert_refused(cuda_call_once(CALL_FORWARD, 3, NULL), FDM_ERROR_INVALID_ARGUMENT, "index is 3");
}

/* Device 2 has compute capability 7.5: its memory can be used, no kernel runs, and its neighbours are not bothered. */
static void device_is_too_old(void) {
    fdm_device d = {.struct_bytes = sizeof d};
    fdm_arch_config config = {.struct_bytes = sizeof config};
    const struct cuda_kernel *kernel;
    const struct cuda_kernel_request request = {.file = "gpu/combine_splits.cu", .entry = "combine_splits"};
    use_fake_compiler();
    assert_int_equal(fdm_device_query(FDM_CUDA, 2, &d), FDM_OK);
    assert_string_equal(d.name, "sm_75");
    assert_refused(fdm_arch_optimization_config(&d, &config), FDM_ERROR_UNSUPPORTED, "7.5");
    assert_refused(cuda_call_once(CALL_FORWARD, 2, NULL), FDM_ERROR_UNSUPPORTED, "compute capability 7.5 is below 8.0");
    assert_refused(cuda_kernels_get(2, &request, 1, &kernel), FDM_ERROR_UNSUPPORTED, "7.5; 8.0 is the lowest");
    assert_int_equal(fake_driver()->count("cuModuleLoadData"), 0);
    assert_int_equal(cuda_call_once(CALL_FORWARD, 1, NULL), FDM_OK);
    assert_int_equal(fake_driver()->launch(0).device, 1);
    assert_cpu_works();
}

/* A first question that fails is asked again by the next call. */
static void facts_fail_once(void) {
    fdm_device d = {.struct_bytes = sizeof d, .num_sms = -1};
    for (int64_t n = 1; n <= 7; n++) {
        fake_driver()->inject("cuDeviceGetAttribute", 999, n);
        assert_refused(fdm_device_query(FDM_CUDA, 0, &d), FDM_ERROR_SYSTEM, "asking for the CUDA device's attributes");
        assert_int_equal(d.num_sms, -1);
    }
    int64_t before = fake_driver()->count("cuDeviceGetAttribute");
    fake_driver()->inject("cuDeviceGet", 101, 1);
    assert_refused(fdm_device_query(FDM_CUDA, 0, &d), FDM_ERROR_SYSTEM, "invalid device ordinal");
    assert_int_equal(fake_driver()->count("cuDeviceGetAttribute"), before); /* there was no device to ask */
    fake_driver()->inject("cuDeviceGetAttribute", 1, 8);                    /* of the bandwidth: it stays unknown */
    assert_int_equal(fdm_device_query(FDM_CUDA, 0, &d), FDM_OK);
    assert_int_equal(d.num_sms, 132);
    assert_int_equal(d.bandwidth, 0);
}

/* ---- errors of running work ---- */

static void launch_fails(void) {
    struct cuda_call call;
    use_fake_compiler();
    assert_int_equal(cuda_call_make(&call, CALL_DECODE, 0), FDM_OK);
    for (int64_t n = 1; n <= 2; n++) { /* the splits, then their merge */
        fake_driver()->inject("cuLaunchKernelEx", 1, n);
        assert_refused(cuda_call_run(&call, NULL), FDM_ERROR_SYSTEM,
                       "launching a kernel failed: invalid argument (CUDA_ERROR_INVALID_VALUE)");
        assert_int_equal(fake_driver()->live().allocations, 1); /* the workspace was given back */
        assert_int_equal(fake_driver()->depth(), 0);
    }
    fake_driver()->inject("cuLaunchKernelEx", 4321, 1); /* a number that the driver has no words for */
    assert_refused(cuda_call_run(&call, NULL), FDM_ERROR_SYSTEM,
                   "launching a kernel failed: unknown error 4321 (a result without a name)");
    fake_driver()->inject("cuLaunchKernelEx", 2, 1);
    assert_refused(cuda_call_run(&call, NULL), FDM_ERROR_OUT_OF_MEMORY, "out of memory (CUDA_ERROR_OUT_OF_MEMORY)");
    assert_int_equal(cuda_call_run(&call, NULL), FDM_OK);
    cuda_call_release(&call);
}

/* An address fault of a kernel ends a context: every later call says so, other devices and the CPU go on. */
static void sticky_error(void) {
    static const char words[] = "an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)";
    static const char advice[] = "; this process cannot use the device again";
    struct cuda_call call;
    fdm_timer *timer;
    void *more = NULL;
    char byte = 0;
    use_fake_compiler();
    assert_int_equal(cuda_call_make(&call, CALL_FORWARD, 0), FDM_OK);
    assert_int_equal(fdm_timer_create(cuda, &timer), FDM_OK);
    assert_int_equal(cuda_call_run(&call, NULL), FDM_OK);
    fake_driver()->inject("cuCtxSynchronize", 700, 1);
    assert_refused(fdm_synchronize(cuda), FDM_ERROR_SYSTEM, words);
    assert_refused(fdm_synchronize(cuda), FDM_ERROR_SYSTEM, advice);
    assert_refused(cuda_call_run(&call, NULL), FDM_ERROR_SYSTEM, words);
    assert_refused(fdm_memory_copy(&byte, host, call.memory, cuda, 1), FDM_ERROR_SYSTEM, words);
    assert_refused(fdm_memory_fill(cuda, call.memory, 0, 1), FDM_ERROR_SYSTEM, words);
    assert_refused(fdm_memory_allocate(cuda, 1, &more), FDM_ERROR_SYSTEM, words);
    assert_null(more);
    assert_refused(fdm_timer_start(timer, NULL), FDM_ERROR_SYSTEM, words);
    assert_refused(cuda_call_once(CALL_WIDE, 0, NULL), FDM_ERROR_SYSTEM, words);
    assert_refused(fdm_memory_release(cuda, call.memory), FDM_ERROR_SYSTEM, words);
    fdm_timer_release(timer);
    fdm_device d = {.struct_bytes = sizeof d};
    assert_int_equal(fdm_device_query(FDM_CUDA, 0, &d), FDM_OK);
    assert_int_equal(cuda_call_once(CALL_FORWARD, 1, NULL), FDM_OK);
    assert_int_equal(fake_driver()->depth(), 0);
    assert_cpu_works();
}

static void device_memory_runs_out(void) {
    struct cuda_call call;
    void *memory = &call;
    use_fake_compiler();
    assert_refused(fdm_memory_allocate(cuda, 33 << 20, &memory), FDM_ERROR_OUT_OF_MEMORY,
                   "allocating 34603008 bytes of device memory failed: out of memory");
    assert_ptr_equal(memory, &call);
    assert_refused(fdm_memory_allocate(cuda, SIZE_MAX, &memory), FDM_ERROR_OUT_OF_MEMORY, "out of memory");
    assert_int_equal(cuda_call_make(&call, CALL_DECODE, 0), FDM_OK);
    assert_int_equal(fdm_memory_allocate(cuda, (32 << 20) - call.bytes - 1024, &memory), FDM_OK);
    assert_refused(cuda_call_run(&call, NULL), FDM_ERROR_OUT_OF_MEMORY, "no memory for a workspace of");
    assert_int_equal(fake_driver()->num_launches(), 0);
    assert_int_equal(fdm_memory_release(cuda, memory), FDM_OK);
    assert_int_equal(cuda_call_run(&call, NULL), FDM_OK);
    cuda_call_release(&call);
    assert_int_equal(fake_driver()->live().allocations, 0);
}

/* ---- forks ---- */

static void child_of_an_open_driver(void) {
    assert_refused(cuda_call_once(CALL_FORWARD, 0, NULL), FDM_ERROR_SYSTEM, "before this process was forked");
    fdm_device d = {.struct_bytes = sizeof d};
    assert_refused(fdm_device_query(FDM_CUDA, 0, &d), FDM_ERROR_SYSTEM, "start workers with spawn");
    assert_refused(fdm_synchronize(cuda), FDM_ERROR_SYSTEM, "before this process was forked");
    assert_int_equal(cuda_device_count(), 0);
    assert_cpu_works();
}
static void first_user_of_the_driver(void) {
    assert_int_equal(cuda_call_once(CALL_FORWARD, 0, NULL), FDM_OK);
    scenario_fork(child_of_an_open_driver);
}

/* A child may use CUDA where its parent had not; where it had, a loaded kernel is no way round the sentence either. */
static void forked_processes(void) {
    use_fake_compiler();
    scenario_fork(first_user_of_the_driver);
    assert_int_equal(cuda_call_once(CALL_FORWARD, 0, NULL), FDM_OK);
    int64_t launches = fake_driver()->num_launches();
    scenario_fork(child_of_an_open_driver);
    assert_int_equal(cuda_call_once(CALL_FORWARD, 0, NULL), FDM_OK);
    assert_int_equal(fake_driver()->num_launches(), launches + 1);
}

/* ---- every call fails once ---- */

static int memory_release_failed;
static int timer_release_failed; /* which has no status of its own */

/* A bit of everything, on device 0; what was made is given back in any case. */
static fdm_status everything(void) {
    struct cuda_call call = {.memory = NULL};
    fdm_device d = {.struct_bytes = sizeof d};
    fdm_timer *timer = NULL;
    double seconds;
    char bytes[64];
    void *copy = NULL;
    fdm_status status = fdm_device_query(FDM_CUDA, 0, &d);
    if (!status)
        status = cuda_call_make(&call, CALL_DECODE, 0);
    if (!status && !(status = fdm_memory_allocate(cuda, 64, &copy)) &&
        !(status = fdm_memory_copy(call.memory, cuda, bytes, host, memset(bytes, 7, 64) ? 64 : 0)) &&
        !(status = fdm_memory_copy(copy, cuda, call.memory, cuda, 64)) &&
        !(status = fdm_memory_copy(bytes, host, copy, cuda, 64)) && !(status = fdm_timer_create(cuda, &timer)) &&
        !(status = fdm_timer_start(timer, NULL)) && !(status = cuda_call_run(&call, NULL)) &&
        !(status = cuda_call_workspace_status()) && !(status = fdm_timer_stop(timer, NULL, &seconds)))
        status = fdm_synchronize(cuda);
    if (status)
        assert_sentence();
    const int before = *fake_driver()->injected() != 0;
    fdm_timer_release(timer);
    timer_release_failed = *fake_driver()->injected() && !before;
    fdm_status released[2] = {copy ? fdm_memory_release(cuda, copy) : FDM_OK,
                              call.memory ? fdm_memory_release(cuda, call.memory) : FDM_OK};
    memory_release_failed = released[0] || released[1] || cuda_call_workspace_status();
    for (int i = 0; i < 2; i++)
        status = status ? status : released[i];
    return status;
}

static int is_one_of(const char *name, const char *const *names) {
    for (; *names; names++)
        if (strcmp(name, *names) == 0)
            return 1;
    return 0;
}

/* The n-th call of any function, with an error that passes. */
static void every_call_fails(void) {
    /* what may fail and leave a call as it was: leaving a context, going back to a capture's mode, and the bandwidth,
     * which is then unknown */
    static const char *const tolerated[] = {"cuDeviceGetAttribute", "cuCtxPopCurrent",
                                            "cuThreadExchangeStreamCaptureMode", NULL};
    static const char *const opening[] = {"cuGetProcAddress", "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", NULL};
    use_fake_compiler();
    fdm_status status = everything();
    const char *failed = fake_driver()->injected();
    if (!*failed) {
        assert_int_equal(status, FDM_OK);
        scenario_past_the_end = 1;
        return;
    }
    print_message("%s: %d, %s\n", failed, status, fdm_last_error());
    if (status)
        assert_true(status == FDM_ERROR_SYSTEM || status == FDM_ERROR_UNSUPPORTED || status == FDM_ERROR_OUT_OF_MEMORY);
    else
        assert_true(is_one_of(failed, tolerated) || timer_release_failed);
    assert_int_equal(memory_live(), fake_driver()->live().modules); /* a record for each kernel */
    const int64_t kept = memory_release_failed;
    assert_int_equal(fake_driver()->depth(), strcmp(failed, "cuCtxPopCurrent") == 0);
    assert_int_equal(fake_driver()->live().allocations, kept);
    assert_int_equal(fake_driver()->live().events, 0);
    assert_cpu_works();
    char first[512];
    snprintf(first, sizeof first, "%s", fdm_last_error());
    if (is_one_of(failed, opening)) { /* done once a process, and remembered */
        assert_int_equal(everything(), status);
        assert_string_equal(fdm_last_error(), first);
        return;
    }
    assert_int_equal(everything(), FDM_OK);
    assert_int_equal(fake_driver()->live().allocations, kept);
    assert_int_equal(fake_driver()->live().events, 0);
    assert_true(fake_driver()->live().modules <= 2);
    assert_int_equal(memory_live(), fake_driver()->live().modules);
    assert_true(fake_driver()->live().contexts_retained <= 1);
}

/* The n-th call of any function ends the context. */
static void every_call_is_the_last(void) {
    use_fake_compiler();
    fdm_status status = everything();
    const char *failed = fake_driver()->injected();
    if (!*failed) {
        scenario_past_the_end = 1;
        return;
    }
    print_message("%s: %d, %s\n", failed, status, fdm_last_error());
    assert_int_equal(fake_driver()->live().events, 0);
    assert_true(fake_driver()->depth() == (strcmp(failed, "cuCtxPopCurrent") == 0));
    if (everything()) /* functions that need no context do not end it */
        assert_sentence();
    assert_cpu_works();
}

/* The n-th allocation of host memory: what has been made is given back, and the next call works. */
static void every_host_allocation_fails(void) {
    use_fake_compiler();
    int64_t kernels = 0, n = 1;
    fdm_status status = FDM_ERROR_OUT_OF_MEMORY;
    assert_int_equal(cuda_device_count(), 2);
    for (; status; n++) {
        int64_t live = memory_live(), modules = fake_driver()->live().modules;
        memory_fail_at(n);
        status = everything();
        memory_fail_at(0);
        kernels = fake_driver()->live().modules - modules;
        assert_int_equal(memory_live(), live + kernels); /* a record for each kernel that was loaded */
        assert_int_equal(fake_driver()->live().allocations, 0);
        assert_int_equal(fake_driver()->live().events, 0);
        assert_int_equal(fake_driver()->depth(), 0);
        if (status)
            assert_refused(status, FDM_ERROR_OUT_OF_MEMORY, "no memory for");
    }
    assert_true(n > 5);
}

static const struct scenario scenarios[] = {
    {"no_driver", no_driver, "LD_LIBRARY_PATH=", 0},
    {"driver_file_is_damaged", driver_file_is_damaged, NULL, 0},
    {"driver_before_12", driver_before_12, NULL, 0},
    {"driver_too_old", driver_too_old, "FAKE_CUDA_VERSION=11080", 0},
    {"every_symbol_missing", every_symbol_missing, "FAKE_CUDA_LACKS=%", 1},
    {"start_fails", start_fails, "FAKE_CUDA_FAIL=cuInit:3:1", 0},
    {"start_fails_unnamed", start_fails_unnamed, "FAKE_CUDA_FAIL=cuInit:4321:1", 0},
    {"version_fails", version_fails, "FAKE_CUDA_FAIL=cuDriverGetVersion:1:1", 0},
    {"count_fails", count_fails, "FAKE_CUDA_FAIL=cuDeviceGetCount:2:1", 0},
    {"no_device", no_device, "FAKE_CUDA_DEVICES=", 0},
    {"facts_of_devices", facts_of_devices, "FAKE_CUDA_DEVICES=9.0:232448:H,8.9:101376,8.0:166912", 0},
    {"device_is_too_old", device_is_too_old, "FAKE_CUDA_DEVICES=9.0:232448,8.6:101376,7.5:65536", 0},
    {"facts_fail_once", facts_fail_once, NULL, 0},
    {"launch_fails", launch_fails, NULL, 0},
    {"sticky_error", sticky_error, "FAKE_CUDA_DEVICES=9.0:232448,9.0:232448", 0},
    {"device_memory_runs_out", device_memory_runs_out, "FAKE_CUDA_MEMORY=33554432", 0},
    {"forked_processes", forked_processes, NULL, 0},
    {"every_call_fails", every_call_fails, "FAKE_CUDA_FAIL=*:1:%", 1},
    {"every_call_is_the_last", every_call_is_the_last, "FAKE_CUDA_FAIL=*:700:%", 1},
    {"every_host_allocation_fails", every_host_allocation_fails, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912", 0},
};
/* Run by others of them, in a process that has another library path. */
static const struct scenario inner[] = {{"damaged_file", damaged_file, NULL, 0},
                                        {"without_entry", without_entry, NULL, 0}};

int main(int argc, char **argv) {
    for (int i = 0; i < 2; i++)
        if (argc > 1 && strcmp(argv[1], inner[i].name) == 0)
            return scenarios_main(argc, argv, inner, 2);
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
