/* test_cuda_runtime.c: memory, timers, contexts, launches and threads on a pretended driver: what reaches the device is
 * what was planned, and wrong use gets a sentence. */
#include <pthread.h>
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
#include "cuda_call.h"
#include "families/families.h"
#include "families/mma/decode/mma_decode.h"
#include "families/mma/mma_family.h"
#include "gpu/block_mask.h"
#include "gpu/combine_splits.h"
#include "scenario.h"

PLAN_PARAMETER_STRUCT(MMA_DECODE_PARAMETERS);

static const fdm_device_id cuda = {FDM_CUDA, 0}, second = {FDM_CUDA, 1}, host = {FDM_CPU, 0};

/* ---- memory ---- */

/* The pretended device does copies and fills when something waits for them: here they are done when they return. */
static void copies_are_done(void) {
    unsigned char there[100], back[100];
    void *a, *b;
    for (int i = 0; i < 100; i++)
        there[i] = (unsigned char)(7 * i);
    assert_int_equal(fdm_memory_allocate(cuda, 100, &a), FDM_OK);
    assert_int_equal(fdm_memory_allocate(cuda, 100, &b), FDM_OK);
    assert_int_equal((uintptr_t)a % 256, 0);
    int64_t waits = fake_driver()->count("cuCtxSynchronize");
    assert_int_equal(fdm_memory_copy(a, cuda, there, host, 100), FDM_OK);
    assert_memory_equal(a, there, 100);
    assert_in_range(fake_driver()->count("cuCtxSynchronize"), waits + 1, waits + 2); /* before it; after it too */
    assert_int_equal(fdm_memory_copy(b, cuda, a, cuda, 100), FDM_OK);
    assert_memory_equal(b, there, 100);
    assert_int_equal(fdm_memory_fill(cuda, (char *)b + 10, 0xee, 20), FDM_OK);
    memset(there + 10, 0xee, 20);
    assert_memory_equal(b, there, 100);
    waits = fake_driver()->count("cuCtxSynchronize");
    assert_int_equal(fdm_memory_copy(back, host, b, cuda, 100), FDM_OK);
    assert_memory_equal(back, there, 100);
    assert_int_equal(fake_driver()->count("cuCtxSynchronize"), waits + 1);
    assert_int_equal(fdm_memory_copy(back, host, there + 1, host, 99), FDM_OK);
    assert_memory_equal(back, there + 1, 99);
    assert_int_equal(fdm_memory_release(cuda, a), FDM_OK);
    assert_int_equal(fdm_memory_release(cuda, b), FDM_OK);
    assert_int_equal(fake_driver()->live().allocations, 0);
    assert_int_equal(fake_driver()->depth(), 0);
}

static void memory_used_wrongly(void) {
    const fdm_device_id odd = {7, 0}, third = {FDM_CUDA, 2}, other_cpu = {FDM_CPU, 1};
    char bytes[64];
    void *a, *untouched = bytes;
    const fdm_status wrong = FDM_ERROR_INVALID_ARGUMENT;
    assert_int_equal(fdm_memory_allocate(cuda, 64, &a), FDM_OK);
    assert_refused(fdm_memory_allocate(cuda, 64, NULL), wrong, "memory is NULL");
    assert_refused(fdm_memory_allocate(odd, 64, &untouched), wrong, "device type is 7");
    assert_refused(fdm_memory_allocate(third, 64, &untouched), wrong, "index is 2; this machine has 2");
    assert_refused(fdm_memory_allocate(other_cpu, 64, &untouched), wrong, "CPU index is 1");
    assert_refused(fdm_memory_allocate(host, SIZE_MAX, &untouched), FDM_ERROR_OUT_OF_MEMORY, "bytes");
    assert_ptr_equal(untouched, bytes);
    assert_refused(fdm_memory_copy(NULL, cuda, bytes, host, 1), wrong, "to is NULL");
    assert_refused(fdm_memory_copy(a, cuda, NULL, host, 1), wrong, "from is NULL");
    assert_refused(fdm_memory_copy(a, cuda, bytes, odd, 1), wrong, "device type is 7");
    assert_refused(fdm_memory_copy(a, third, bytes, host, 1), wrong, "index is 2");
    assert_refused(fdm_memory_copy(a, cuda, a, second, 1), FDM_ERROR_UNSUPPORTED, "between CUDA devices 1 and 0");
    assert_refused(fdm_memory_copy(a, cuda, bytes, host, 65), FDM_ERROR_SYSTEM,
                   "copying device memory failed: invalid");
    assert_refused(fdm_memory_copy(bytes, host, bytes, cuda, 1), FDM_ERROR_SYSTEM, "copying device memory failed");
    assert_refused(fdm_memory_copy(a, cuda, bytes, cuda, 1), FDM_ERROR_SYSTEM, "copying device memory failed");
    assert_refused(fdm_memory_fill(cuda, NULL, 0, 1), wrong, "memory is NULL");
    assert_refused(fdm_memory_fill(host, NULL, 0, 1), wrong, "memory is NULL");
    assert_refused(fdm_memory_fill(cuda, bytes, 0, 1), FDM_ERROR_SYSTEM, "filling device memory failed");
    assert_refused(fdm_memory_fill(odd, bytes, 0, 1), wrong, "device type is 7");
    assert_refused(fdm_memory_release(cuda, bytes), FDM_ERROR_SYSTEM, "releasing device memory failed");
    assert_refused(fdm_memory_release(second, a), FDM_ERROR_SYSTEM, "releasing device memory failed");
    assert_refused(fdm_memory_release(odd, a), wrong, "device type is 7");
    assert_refused(fdm_synchronize(third), wrong, "index is 2");
    assert_refused(fdm_synchronize(odd), wrong, "device type is 7");
    assert_int_equal(fdm_memory_copy(NULL, cuda, NULL, host, 0), FDM_OK);
    assert_int_equal(fdm_memory_fill(cuda, NULL, 0, 0), FDM_OK);
    assert_int_equal(fdm_memory_release(cuda, NULL), FDM_OK);
    assert_int_equal(fdm_memory_release(host, NULL), FDM_OK);
    assert_int_equal(fdm_synchronize(host), FDM_OK);
    assert_int_equal(fdm_memory_release(cuda, a), FDM_OK);
    assert_int_equal(fdm_memory_allocate(cuda, 0, &a), FDM_OK); /* nothing is something that can be released */
    assert_non_null(a);
    assert_int_equal(fdm_memory_release(cuda, a), FDM_OK);
    assert_int_equal(fake_driver()->live().allocations, 0);
    assert_int_equal(fake_driver()->depth(), 0);
}

static void timers(void) {
    const fdm_device_id odd = {7, 0}, places[] = {host, cuda, second};
    fdm_timer *timer = NULL;
    double seconds = -1;
    assert_refused(fdm_timer_create(cuda, NULL), FDM_ERROR_INVALID_ARGUMENT, "timer is NULL");
    assert_refused(fdm_timer_create(odd, &timer), FDM_ERROR_INVALID_ARGUMENT, "device type is 7");
    assert_refused(fdm_timer_start(NULL, NULL), FDM_ERROR_INVALID_ARGUMENT, "timer is NULL");
    assert_refused(fdm_timer_stop(NULL, NULL, &seconds), FDM_ERROR_INVALID_ARGUMENT, "timer is NULL");
    fdm_timer_release(NULL);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(fdm_timer_create(places[i], &timer), FDM_OK);
        assert_refused(fdm_timer_stop(timer, NULL, &seconds), FDM_ERROR_INVALID_ARGUMENT, "was not started");
        assert_true(seconds == -1);
        assert_int_equal(fdm_timer_start(timer, NULL), FDM_OK);
        assert_refused(fdm_timer_stop(timer, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT, "seconds is NULL");
        assert_int_equal(fdm_timer_stop(timer, NULL, &seconds), FDM_OK);
        assert_true(i == 0 ? seconds >= 0 && seconds < 10 : seconds == 0.0015);
        seconds = -1;
        if (i > 0) {
            fake_driver()->inject("cuEventElapsedTime", 1, 1);
            assert_refused(fdm_timer_stop(timer, NULL, &seconds), FDM_ERROR_SYSTEM, "waiting for a CUDA event failed");
            assert_true(seconds == -1);
        }
        fdm_timer_release(timer);
    }
    assert_int_equal(fake_driver()->live().events, 0);
    assert_int_equal(memory_live(), 0);
}

/* ---- contexts ---- */

/* Another library's context is on top again after each call, whether it worked or not. */
static void contexts_of_others(void) {
    struct cuda_call call;
    fdm_timer *timer;
    double seconds;
    use_fake_compiler();
    assert_int_equal(cuda_device_count(), 2);
    fake_driver()->push_foreign_context();
    for (int device = 0; device < 2; device++) {
        assert_int_equal(cuda_call_make(&call, CALL_DECODE, device), FDM_OK);
        assert_int_equal(cuda_call_run(&call, NULL), FDM_OK);
        fake_driver()->inject("cuLaunchKernelEx", 1, 2);
        assert_refused(cuda_call_run(&call, NULL), FDM_ERROR_SYSTEM, "launching");
        assert_int_equal(fdm_timer_create(call.device, &timer), FDM_OK);
        assert_int_equal(fdm_timer_start(timer, NULL), FDM_OK);
        assert_int_equal(fdm_timer_stop(timer, NULL, &seconds), FDM_OK);
        fdm_timer_release(timer);
        assert_int_equal(fdm_synchronize(call.device), FDM_OK);
        cuda_call_release(&call);
        fake_driver()->inject("cuCtxPushCurrent", 201, 1);
        assert_refused(fdm_synchronize(call.device), FDM_ERROR_SYSTEM, "entering the CUDA device's context failed");
        assert_int_equal(fake_driver()->depth(), 1);
    }
    assert_int_equal(fake_driver()->live().contexts_retained, 2);
    assert_int_equal(fake_driver()->pop_foreign_context(), 1);
    assert_int_equal(fake_driver()->live().allocations, 0);
}

/* ---- launches ---- */

static int64_t constant(const struct cuda_kernel_request *request, const char *name) {
    for (int32_t i = 0; i < request->num_constants; i++)
        if (strcmp(request->constants[i].name, name) == 0)
            return request->constants[i].value;
    return -1;
}

static int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The n-th launch from the end is this one. */
static void assert_launch(int64_t from_end, const struct fake_launch *want) {
    struct fake_launch have = fake_driver()->launch(fake_driver()->num_launches() - from_end);
    assert_string_equal(have.entry, want->entry);
    assert_int_equal(have.device, want->device);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(have.grid[i], want->grid[i]);
        assert_int_equal(have.block[i], want->block[i]);
    }
    assert_int_equal(have.shared_bytes, want->shared_bytes);
    assert_int_equal(have.max_shared_bytes, want->shared_bytes > 48 << 10 ? want->shared_bytes : 48 << 10);
    assert_int_equal(have.cluster, want->cluster);
    assert_int_equal(have.programmatic, want->programmatic);
    assert_int_equal(have.cooperative, want->cooperative);
    assert_ptr_equal(have.stream, want->stream);
    assert_ptr_equal(have.first_member, want->first_member);
}

/* What the family's page says that each kind launches; returns how many. */
static int64_t expected(enum cuda_call_kind kind, const fdm_plan *plan, const struct cuda_call *call, void *stream,
                        struct fake_launch *want) {
    struct cuda_kernel_request r[FAMILY_LAUNCHES_MAX];
    const fdm_problem *p = &plan->problem;
    assert_int_equal(family_mma.launches(&family_mma, plan, r), kind == CALL_MASKED || kind == CALL_DECODE ? 2 : 1);
    const struct cuda_kernel_request *own = &r[kind == CALL_MASKED]; /* behind the block mask */
    const int64_t rows = p->batch * p->heads * p->seqlen_q, blocks = ceil_of(p->seqlen_q, plan->block_m);
    struct fake_launch main = {.device = plan->device.index,
                               .grid = {(unsigned)(blocks * p->batch * p->heads), 1, 1},
                               .block = {(unsigned)(32 * constant(own, "WARPS")), 1, 1},
                               .shared_bytes = (unsigned)plan->shared_bytes,
                               .stream = stream,
                               .first_member = call->q.data};
    snprintf(main.entry, sizeof main.entry, "%s", own->entry);
    struct fake_launch other = main;
    want[0] = main;
    if (kind == CALL_MASKED) {
        const int64_t tiles = ceil_of(p->seqlen_k, plan->block_n);
        other = (struct fake_launch){.entry = "block_mask",
                                     .device = main.device,
                                     .grid = {(unsigned)(ceil_of(tiles, BLOCK_MASK_WARPS) * blocks * 2), 1, 1},
                                     .block = {32 * BLOCK_MASK_WARPS, 1, 1},
                                     .stream = stream,
                                     .first_member = call->mask.data};
        want[0] = other;
        want[1] = main;
        return 2;
    }
    if (kind == CALL_WIDE && constant(own, "CLUSTER") > 1) {
        want[0].cluster = (unsigned)constant(own, "CLUSTER");
        want[0].grid[0] *= want[0].cluster;
    }
    if (kind != CALL_DECODE)
        return 1;
    want[0].grid[0] = (unsigned)(parameters_of(plan).SPLITS * p->batch * p->heads_kv);
    want[0].block[0] = (unsigned)(32 * parameters_of(plan).WARPS); /* warps */
    want[0].programmatic = parameters_of(plan).EARLY;
    snprintf(other.entry, sizeof other.entry, "combine_splits");
    other.grid[0] = (unsigned)rows;
    other.block[0] = 32 * COMBINE_SPLITS_WARPS;
    other.shared_bytes = 0;
    other.programmatic = parameters_of(plan).EARLY;
    want[1] = other;
    return 2;
}

static void launches_of(enum cuda_call_kind kind, int32_t device, void *stream) {
    static const char *const quiet[] = {"cuModuleLoadData", "cuFuncSetAttribute", "cuFuncGetAttribute",
                                        "cuMemAlloc",       "cuCtxSynchronize",   "cuDeviceGetAttribute"};
    struct cuda_call call;
    fdm_device facts = {.struct_bytes = sizeof facts};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    struct fake_launch want[2];
    void *workspace;
    fdm_launch launch = {sizeof launch, stream, NULL};
    assert_int_equal(cuda_call_make(&call, kind, device), FDM_OK);
    assert_int_equal(fdm_device_query(FDM_CUDA, device, &facts), FDM_OK);
    assert_int_equal(fdm_describe(FDM_FORWARD, &call.tensors, &call.options, &problem), FDM_OK);
    assert_int_equal(fdm_plan_attention(&facts, &problem, &call.options, &plan), FDM_OK);
    const size_t bytes = (size_t)plan.workspace_bytes;
    assert_int_equal(fdm_memory_allocate(call.device, bytes, &workspace), FDM_OK);
    const int64_t before = fake_driver()->num_launches();
    assert_int_equal(fdm_prepare(&plan), FDM_OK);
    assert_int_equal(fake_driver()->num_launches(), before);
    int64_t counts[6], live = memory_live();
    for (int i = 0; i < 6; i++)
        counts[i] = fake_driver()->count(quiet[i]);
    assert_int_equal(fdm_execute(&plan, &call.tensors, workspace, bytes, &launch), FDM_OK);
    for (int i = 0; i < 6; i++) /* a warm plan only launches */
        assert_int_equal(fake_driver()->count(quiet[i]), counts[i]);
    assert_int_equal(memory_live(), live);
    const int64_t count = expected(kind, &plan, &call, stream, want);
    assert_int_equal(fake_driver()->num_launches(), before + count);
    for (int64_t i = 0; i < count; i++)
        assert_launch(count - i, &want[i]);
    if (bytes > 0)
        assert_refused(fdm_execute(&plan, &call.tensors, workspace, bytes - 1, NULL), FDM_ERROR_WORKSPACE, "workspace");
    assert_refused(fdm_execute(&plan, &call.tensors, (char *)workspace + 1, bytes, NULL), FDM_ERROR_WORKSPACE, "64");
    assert_int_equal(fake_driver()->num_launches(), before + count);
    assert_int_equal(fdm_memory_release(call.device, workspace), FDM_OK);
    cuda_call_release(&call);
}

/* Few splits are merged by their blocks where there are clusters: one launch, and no workspace. */
static void decode_in_a_cluster(void) {
    use_fake_compiler();
    for (int32_t device = 0; device < 2; device++) {
        struct cuda_call call;
        fdm_device facts = {.struct_bytes = sizeof facts};
        fdm_problem problem;
        fdm_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(cuda_call_make(&call, CALL_DECODE, device), FDM_OK);
        call.k_shape[1] = 512;
        assert_int_equal(fdm_device_query(FDM_CUDA, device, &facts), FDM_OK);
        assert_int_equal(fdm_describe(FDM_FORWARD, &call.tensors, &call.options, &problem), FDM_OK);
        assert_int_equal(fdm_plan_attention(&facts, &problem, &call.options, &plan), FDM_OK);
        const int32_t splits = parameters_of(&plan).SPLITS;
        assert_true(splits > 1 && splits <= MMA_DECODE_CLUSTER_MAX(plan.stages));
        const int clustered = parameters_of(&plan).MERGE == MMA_MERGE_CLUSTER;
        assert_int_equal(clustered, facts.compute_major == 9);
        assert_int_equal(plan.workspace_bytes == 0, clustered);
        if (clustered) {
            assert_int_equal(fdm_execute(&plan, &call.tensors, NULL, 0, NULL), FDM_OK);
            const struct fake_launch have = fake_driver()->launch(fake_driver()->num_launches() - 1);
            assert_string_equal(have.entry, "mma_decode");
            assert_int_equal(have.cluster, splits);
            assert_int_equal(have.grid[0], splits * problem.batch * problem.heads_kv);
            struct parameters x = parameters_of(&plan);
            x.SPLITS = MMA_DECODE_CLUSTER_MAX(plan.stages) + 1;
            write_parameters(&plan, x);
            assert_refused(fdm_execute(&plan, &call.tensors, NULL, 0, NULL), FDM_ERROR_INVALID_ARGUMENT,
                           "tile or workspace");
        }
        cuda_call_release(&call);
    }
}

/* Reports of resources say the same threads of a block as the launches. */
static void blocks_are_reported(void) {
    use_fake_compiler();
    for (int32_t device = 0; device < 3; device++)
        for (int kind = 0; kind < NUM_CALL_KINDS + 2; kind++) {
            struct cuda_call call;
            fdm_plan plan = {.struct_bytes = sizeof plan};
            fdm_device facts = {.struct_bytes = sizeof facts};
            fdm_problem problem;
            struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
            const int backward = kind >= NUM_CALL_KINDS;
            const int64_t before = fake_driver()->num_launches();
            assert_int_equal(
                cuda_call_make(
                    &call, backward ? (enum cuda_call_kind)(kind - NUM_CALL_KINDS) : (enum cuda_call_kind)kind, device),
                FDM_OK);
            if (backward) {
                assert_int_equal(cuda_call_run_backward(&call, &plan), FDM_OK);
            } else {
                assert_int_equal(fdm_device_query(FDM_CUDA, device, &facts), FDM_OK);
                assert_int_equal(fdm_describe(FDM_FORWARD, &call.tensors, &call.options, &problem), FDM_OK);
                assert_int_equal(fdm_plan_attention(&facts, &problem, &call.options, &plan), FDM_OK);
                assert_int_equal(cuda_call_run(&call, NULL), FDM_OK);
            }
            const struct family *family = strcmp(plan.family, "hopper") == 0 ? &family_hopper : &family_mma;
            const int32_t count = family->launches(family, &plan, requests);
            assert_int_equal(fake_driver()->num_launches() - before, count);
            for (int64_t i = before; i < before + count; i++) {
                const struct fake_launch launch = fake_driver()->launch(i);
                int32_t r = 0;
                while (r < count && strcmp(requests[r].entry, launch.entry) != 0)
                    r++;
                assert_true(r < count);
                assert_int_equal(requests[r].threads, launch.block[0]);
            }
            cuda_call_release(&call);
        }
}

static void launches_are_the_plans(void) {
    static int streams[2];
    use_fake_compiler();
    for (int32_t device = 0; device < 3; device++)
        for (int kind = 0; kind < NUM_CALL_KINDS; kind++) {
            launches_of((enum cuda_call_kind)kind, device, NULL);
            launches_of((enum cuda_call_kind)kind, device, &streams[device % 2]);
        }
    int early = 0;
    for (int64_t i = 0; i < fake_driver()->num_launches(); i++) {
        struct fake_launch launch = fake_driver()->launch(i);
        early += launch.programmatic;
        assert_true(launch.device == 0 || (!launch.programmatic && !launch.cluster)); /* which only 9.0 has */
    }
    assert_int_equal(early, 4); /* twice two launches */
}

/* The launch itself, with everything that it can have. */
static void launch_attributes(void) {
    static const struct cuda_kernel_request request = {
        .file = "gpu/combine_splits.cu", .entry = "combine_splits", .shared_bytes = 100 << 10};
    const struct cuda_kernel *kernel;
    void *argument = &argument;
    int stream;
    use_fake_compiler();
    assert_int_equal(cuda_kernels_get(0, &request, 1, &kernel), FDM_OK);
    struct cuda_launch launch = {.kernel = kernel,
                                 .grid = {8, 3, 2},
                                 .threads = 96,
                                 .cluster = 4,
                                 .programmatic_launch = 1,
                                 .cooperative = 1,
                                 .stream = &stream,
                                 .arguments = &argument,
                                 .arguments_bytes = sizeof argument};
    struct fake_launch want = {"combine_splits", 0, 0, {8, 3, 2}, {96, 1, 1}, 100 << 10, 4, 1, &stream, argument, 1};
    assert_int_equal(cuda_launch(&launch), FDM_OK);
    assert_launch(1, &want);
    launch.cluster = 1;
    launch.programmatic_launch = launch.cooperative = 0;
    launch.stream = NULL;
    want.cluster = 0, want.programmatic = want.cooperative = 0, want.stream = NULL;
    assert_int_equal(cuda_launch(&launch), FDM_OK);
    assert_launch(1, &want);
    launch.cluster = 3; /* does not divide the grid */
    assert_refused(cuda_launch(&launch), FDM_ERROR_SYSTEM, "launching a kernel failed: invalid argument");
    launch.cluster = 0;
    launch.threads = 1025;
    assert_refused(cuda_launch(&launch), FDM_ERROR_SYSTEM, "launching a kernel failed: invalid argument");
    assert_int_equal(fake_driver()->num_launches(), 2);
    struct cuda_kernel_request greedy = request;
    greedy.shared_bytes = 300 << 10;
    assert_refused(cuda_kernels_get(0, &greedy, 1, &kernel), FDM_ERROR_UNSUPPORTED,
                   "combine_splits takes 307200 bytes of shared memory for a block; the CUDA device has 232448");
    assert_int_equal(fake_driver()->live().modules, 1);
    assert_int_equal(fake_driver()->depth(), 0);
}

static void calls_that_do_not_fit(void) {
    struct cuda_call call, other;
    fdm_device facts = {.struct_bytes = sizeof facts};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    use_fake_compiler();
    assert_int_equal(cuda_call_make(&call, CALL_DECODE, 0), FDM_OK);
    assert_int_equal(cuda_call_make(&other, CALL_DECODE, 1), FDM_OK);
    assert_int_equal(fdm_device_query(FDM_CUDA, 0, &facts), FDM_OK);
    assert_int_equal(fdm_describe(FDM_FORWARD, &call.tensors, NULL, &problem), FDM_OK);
    assert_int_equal(fdm_plan_attention(&facts, &problem, &call.options, &plan), FDM_OK);
    assert_true(plan.workspace_bytes > 0);
    const fdm_status wrong = FDM_ERROR_INVALID_ARGUMENT;
    assert_refused(fdm_attention_forward(&call.tensors, NULL, NULL), wrong, "allocator is NULL");
    assert_refused(fdm_execute(&plan, &call.tensors, NULL, 0, NULL), FDM_ERROR_WORKSPACE, "workspace has 0 bytes");
    assert_refused(fdm_execute(&plan, &other.tensors, call.memory, 1 << 20, NULL), wrong, "q is on DLPack device 2:1");
    fdm_tensor mixed = other.k;
    other.tensors.k = &mixed;
    mixed.device = cuda;
    assert_refused(cuda_call_run(&other, NULL), wrong, "k is on CUDA device 0, but q is on CUDA device 1");
    mixed.device = host;
    assert_refused(cuda_call_run(&other, NULL), wrong, "k is on the CPU, but q is on CUDA device 1");
    mixed = other.v;
    mixed.data = NULL;
    assert_refused(cuda_call_run(&other, NULL), wrong, "k has no data");
    fdm_plan damaged = plan;
    damaged.parameters[0] = 1000000;
    assert_refused(fdm_execute(&damaged, &call.tensors, call.memory, 1 << 20, NULL), wrong, "the plan's");
    assert_refused(fdm_prepare(&damaged), wrong, "the plan's");
    damaged = plan;
    damaged.device.index = 64;
    assert_refused(fdm_prepare(&damaged), wrong, "index is 64");
    assert_int_equal(fake_driver()->num_launches(), 0);
    cuda_call_release(&call);
    cuda_call_release(&other);
}

/* ---- threads ---- */

enum { THREADS = 24, ROUNDS = 12 };
static int streams_of_threads[2];
static pthread_barrier_t ready;

/* Each thread takes kinds, devices and streams in an order of its own. */
static void *attend_often(void *argument) {
    const int number = (int)(intptr_t)argument;
    intptr_t failures = 0;
    pthread_barrier_wait(&ready);
    for (int i = 0; i < ROUNDS; i++) {
        const int turn = number + i * (number % 3 + 1);
        failures += cuda_call_once((enum cuda_call_kind)(turn % NUM_CALL_KINDS), turn / NUM_CALL_KINDS % 2,
                                   &streams_of_threads[number % 2]) != FDM_OK;
        failures += fake_driver()->depth() != 0;
    }
    return (void *)failures;
}

static void run_threads(void) {
    pthread_t threads[THREADS];
    pthread_barrier_init(&ready, NULL, THREADS);
    for (intptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, attend_often, (void *)i), 0);
    for (int i = 0; i < THREADS; i++) {
        void *failures;
        assert_int_equal(pthread_join(threads[i], &failures), 0);
        assert_null(failures);
    }
    pthread_barrier_destroy(&ready);
}

/* forward, forward with a mask and its block mask, decode and its merge, wide: six kernels */
static void assert_each_once(int64_t architectures) {
    assert_int_equal(fake_compiler()->num_distinct(), 6 * architectures);
    assert_int_equal(fake_compiler()->num_compiled(), 6 * architectures);
    assert_int_equal(fake_driver()->count("cuModuleLoadData"), 12);
    assert_int_equal(fake_driver()->live().modules, 12);
    assert_int_equal(fake_driver()->live().contexts_retained, 2);
    assert_int_equal(fake_driver()->live().allocations, 0);
    int64_t on[2] = {0, 0}, at[2] = {0, 0};
    for (int64_t i = 0; i < fake_driver()->num_launches(); i++) {
        struct fake_launch launch = fake_driver()->launch(i);
        on[launch.device]++;
        at[launch.stream == &streams_of_threads[1]]++;
        assert_true(launch.stream == &streams_of_threads[0] || launch.stream == &streams_of_threads[1]);
    }
    assert_int_equal(on[0] + on[1], THREADS * ROUNDS + THREADS * ROUNDS / NUM_CALL_KINDS * 2);
    assert_true(on[0] > 0 && on[1] > 0 && at[0] > 0 && at[1] > 0);
}

static void threads_at_once(void) {
    use_fake_compiler();
    run_threads();
    assert_each_once(1);
}
static void threads_on_different_devices(void) {
    use_fake_compiler();
    run_threads();
    assert_each_once(2);
}
/* Nothing can be written to disk: what the first device's thread compiled serves the second device. */
static void threads_without_a_cache(void) {
    use_fake_compiler();
    setenv("FLASH_DMATTN_CACHE_DIR", "/proc/nowhere", 1);
    run_threads();
    assert_each_once(1);
}

static void different_devices_without_a_cache(void) {
    use_fake_compiler();
    setenv("FLASH_DMATTN_CACHE_DIR", "/proc/nowhere", 1);
    run_threads();
    assert_each_once(2);
}

static const struct scenario scenarios[] = {
    {"copies_are_done", copies_are_done, NULL, 0},
    {"memory_used_wrongly", memory_used_wrongly, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912", 0},
    {"timers", timers, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912", 0},
    {"contexts_of_others", contexts_of_others, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912", 0},
    {"launches_are_the_plans", launches_are_the_plans, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912,8.6:101376", 0},
    {"blocks_are_reported", blocks_are_reported, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912,8.6:101376", 0},
    {"decode_in_a_cluster", decode_in_a_cluster, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912", 0},
    {"launch_attributes", launch_attributes, NULL, 0},
    {"calls_that_do_not_fit", calls_that_do_not_fit, "FAKE_CUDA_DEVICES=9.0:232448,9.0:232448", 0},
    {"threads_at_once", threads_at_once, "FAKE_CUDA_DEVICES=9.0:232448,9.0:232448", 0},
    {"threads_on_different_devices", threads_on_different_devices, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912", 0},
    {"threads_without_a_cache", threads_without_a_cache, "FAKE_CUDA_DEVICES=9.0:232448,9.0:232448", 0},
    {"different_devices_without_a_cache", different_devices_without_a_cache, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912",
     0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
