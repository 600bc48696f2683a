/* test_cuda_capture.c: streams: first uses while one is captured, on a pretended driver that refuses whatever is not
 * enqueued as the strictest of drivers does; and streams of other contexts. */
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "cuda_call.h"
#include "scenario.h"

enum { GLOBAL, OF_THREAD, RELAXED, NUM_MODES };
static const fdm_device_id cuda = {FDM_CUDA, 0}, host = {FDM_CPU, 0};

/* The test's own driver does forbid: what follows would be worth nothing otherwise. */
static void assert_forbidding(void) {
    const struct cuda_driver *driver;
    cu_address address;
    int mode = RELAXED, value;
    assert_int_equal(cuda_driver_get(&driver), FDM_OK);
    assert_int_equal(driver->memory_allocate(&address, 64), 900);
    assert_int_equal(driver->device_attribute(&value, CU_COMPUTE_MAJOR, 0), 900);
    assert_int_equal(driver->capture_mode_exchange(&mode), 0);
    assert_int_equal(mode, GLOBAL);
    assert_int_equal(driver->device_attribute(&value, CU_COMPUTE_MAJOR, 0), 0);
    assert_int_equal(driver->capture_mode_exchange(&mode), 0);
    assert_int_equal(mode, RELAXED);
    assert_int_equal(fake_driver()->end_capture(), 0);
}

static void the_driver_forbids(void) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    assert_int_equal(cuda_driver_get(&driver), FDM_OK);
    assert_int_equal(cuda_context_enter(driver, 0, &scope), FDM_OK);
    for (int mode = GLOBAL; mode < RELAXED; mode++) {
        fake_driver()->begin_capture(mode);
        assert_forbidding();
    }
    cuda_context_leave(driver, &scope);
}

/* Nothing has run before: the driver, the facts of the device, its context, the kernels and their maps come in while
 * the stream is captured. */
static void first_use_in_a_capture(void) {
    use_fake_compiler();
    for (int mode = GLOBAL; mode < NUM_MODES; mode++)
        for (int kind = 0; kind < NUM_CALL_KINDS; kind++) {
            struct cuda_call call;
            fdm_plan plan = {.struct_bytes = sizeof plan};
            fake_driver()->begin_capture(mode);
            assert_int_equal(cuda_call_make(&call, (enum cuda_call_kind)kind, mode), FDM_OK);
            assert_int_equal(cuda_call_run(&call, NULL), FDM_OK);
            call.options.family = NULL; /* the kernels that are chosen freely */
            assert_int_equal(cuda_call_run(&call, NULL), FDM_OK);
            if (kind != CALL_WIDE)
                assert_int_equal(cuda_call_run_backward(&call, &plan), FDM_OK);
            assert_int_equal(fake_driver()->capture_mode(), GLOBAL);
            cuda_call_release(&call);
            assert_int_equal(fake_driver()->end_capture(), 1);
        }
    assert_true(fake_driver()->count("cuTensorMapEncodeTiled") > 0);
    assert_true(fake_driver()->count("cuModuleLoadData") > 20);
    assert_int_equal(fake_driver()->live().allocations, 0);
}

/* fdm_prepare, and what callers without a toolkit use. */
static void everything_else_in_a_capture(void) {
    struct cuda_call call;
    fdm_device facts = {.struct_bytes = sizeof facts};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_timer *timer;
    char bytes[64];
    use_fake_compiler();
    fake_driver()->begin_capture(GLOBAL);
    assert_int_equal(cuda_call_make(&call, CALL_DECODE, 0), FDM_OK);
    assert_int_equal(fdm_device_query(FDM_CUDA, 0, &facts), FDM_OK);
    assert_int_equal(fdm_describe(FDM_FORWARD, &call.tensors, NULL, &problem), FDM_OK);
    assert_int_equal(fdm_plan_attention(&facts, &problem, NULL, &plan), FDM_OK);
    assert_int_equal(fdm_prepare(&plan), FDM_OK);
    assert_int_equal(fdm_memory_copy(bytes, host, call.memory, cuda, sizeof bytes), FDM_OK);
    assert_int_equal(fdm_timer_create(cuda, &timer), FDM_OK);
    assert_int_equal(fdm_timer_start(timer, NULL), FDM_OK);
    fdm_timer_release(timer);
    cuda_call_release(&call);
    assert_int_equal(fake_driver()->end_capture(), 1);
    assert_int_equal(fake_driver()->capture_mode(), GLOBAL);
}

/* ---- KV caches ---- */

/* Tensors of a call on a cache whose memory nobody may touch: a host that read a length or a table would end here. */
struct cached_call {
    char *memory;
    size_t used;
    int64_t shapes[16][4];
    fdm_tensor tensors[16], *k, *v;
    int count;
};
enum { UNTOUCHABLE = 1 << 24, BATCH = 3, PAGE = 16, COLUMNS = 40, HEADS = 8, HEADS_KV = 2, DIM = 64 };

static fdm_tensor *untouchable(struct cached_call *c, fdm_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t d,
                               int64_t e) {
    int64_t *shape = c->shapes[c->count], elements = 1;
    const int64_t extents[4] = {a, b, d, e};
    for (int32_t i = 0; i < ndim; i++)
        elements *= shape[i] = extents[i];
    fdm_tensor *t = &c->tensors[c->count++];
    *t = (fdm_tensor){c->memory + c->used, {FDM_CUDA, 0}, ndim, fdm_data_type_of(dtype), shape, NULL, 0};
    c->used += (size_t)(elements * fdm_dtype_bytes(dtype) + 255) / 256 * 256;
    assert_true(c->used < UNTOUCHABLE / 2); /* a workspace follows */
    return t;
}

/* rows: of each sequence, packed where above 1; adds: it appends and turns. */
static void make_cached(struct cached_call *c, int64_t rows, int adds, fdm_cache *cache, fdm_tensors *tensors) {
    const int64_t total = BATCH * rows;
    const int packed = rows > 1;
    *c = (struct cached_call){.memory = mmap(NULL, UNTOUCHABLE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)};
    assert_true(c->memory != MAP_FAILED);
    *cache = (fdm_cache){.struct_bytes = sizeof *cache,
                         .block_table = untouchable(c, FDM_INT32, 2, BATCH, COLUMNS, 0, 0),
                         .lengths = untouchable(c, FDM_INT32, 1, BATCH, 0, 0, 0)};
    if (adds) {
        cache->k_new = untouchable(c, FDM_BFLOAT16, 4, BATCH, 2, HEADS_KV, DIM);
        cache->v_new = untouchable(c, FDM_BFLOAT16, 4, BATCH, 2, HEADS_KV, DIM);
        cache->rotary_cos = untouchable(c, FDM_FLOAT32, 2, 100, DIM / 2, 0, 0);
        cache->rotary_sin = untouchable(c, FDM_FLOAT32, 2, 100, DIM / 2, 0, 0);
    }
    *tensors = (fdm_tensors){.struct_bytes = sizeof *tensors, .cache = cache};
    tensors->k = c->k = untouchable(c, FDM_BFLOAT16, 4, BATCH * COLUMNS, PAGE, HEADS_KV, DIM);
    tensors->v = c->v = untouchable(c, FDM_BFLOAT16, 4, BATCH * COLUMNS, PAGE, HEADS_KV, DIM);
    tensors->q = packed ? untouchable(c, FDM_BFLOAT16, 3, total, HEADS, DIM, 0)
                        : untouchable(c, FDM_BFLOAT16, 4, BATCH, 1, HEADS, DIM);
    tensors->out = packed ? untouchable(c, FDM_BFLOAT16, 3, total, HEADS, DIM, 0)
                          : untouchable(c, FDM_BFLOAT16, 4, BATCH, 1, HEADS, DIM);
    tensors->lse = packed ? untouchable(c, FDM_FLOAT32, 2, HEADS, total, 0, 0)
                          : untouchable(c, FDM_FLOAT32, 3, BATCH, HEADS, 1, 0);
    if (packed)
        tensors->cu_seqlens_q = untouchable(c, FDM_INT32, 1, BATCH + 1, 0, 0, 0);
}

/* The launches of one call, of which the first and the last are these. */
static void assert_launches(int64_t before, const char *first, const char *last, int64_t count) {
    assert_int_equal(fake_driver()->num_launches() - before, count);
    assert_string_equal(fake_driver()->launch(before).entry, first);
    assert_string_equal(fake_driver()->launch(before + count - 1).entry, last);
}

static const struct cached_kind {
    int64_t rows, invariance;
    int adds;
    const char *first, *last;
    int64_t launches;
} cached_kinds[] = {
    {1, 0, 0, "mma_decode", "mma_decode", 1},          {1, 1, 0, "mma_decode", "combine_splits", 2},
    {1, 0, 1, "mma_decode", "mma_decode", 1},          {4, 1, 1, "mma_decode", "combine_splits", 2},
    {90, 0, 0, "hopper_forward", "hopper_forward", 1}, {90, 2, 1, "cache_append", "mma_forward", 2},
};

/* A plan is made and prepared from bounds alone. Then executions are nothing but launches: what a graph keeps. */
static void caches_in_a_capture(void) {
    use_fake_compiler();
    for (size_t n = 0; n < sizeof cached_kinds / sizeof cached_kinds[0]; n++) {
        const struct cached_kind *kind = &cached_kinds[n];
        struct cached_call call;
        fdm_cache cache;
        fdm_tensors tensors;
        fdm_device facts = {.struct_bytes = sizeof facts};
        fdm_problem problem;
        fdm_plan plan = {.struct_bytes = sizeof plan};
        fdm_options options = fdm_options_default();
        make_cached(&call, kind->rows, kind->adds, &cache, &tensors);
        options.causal = 1;
        options.max_seqlen_q = kind->rows > 1 ? kind->rows : 0;
        options.invariance = kind->invariance;
        assert_int_equal(fdm_device_query(FDM_CUDA, 0, &facts), FDM_OK);
        assert_int_equal(fdm_describe(FDM_FORWARD, &tensors, &options, &problem), FDM_OK);
        assert_int_equal(fdm_plan_attention(&facts, &problem, &options, &plan), FDM_OK);
        assert_int_equal(fdm_prepare(&plan), FDM_OK);
        const int64_t modules = fake_driver()->count("cuModuleLoadData"),
                      allocated = fake_driver()->count("cuMemAlloc");
        fake_driver()->begin_capture(GLOBAL);
        for (int round = 0; round < 2; round++) {
            const int64_t before = fake_driver()->num_launches();
            assert_int_equal(
                fdm_execute(&plan, &tensors, call.memory + UNTOUCHABLE / 2, (size_t)plan.workspace_bytes, NULL),
                FDM_OK);
            assert_launches(before, kind->first, kind->last, kind->launches);
        }
        assert_int_equal(fake_driver()->end_capture(), 1);
        assert_int_equal(fake_driver()->count("cuModuleLoadData"), modules);
        assert_int_equal(fake_driver()->count("cuMemAlloc"), allocated);
        assert_int_equal(fake_driver()->live().allocations, 0);
        munmap(call.memory, UNTOUCHABLE);
    }
}

/* Appending alone has no plan. Its second call finds all that it needs. */
static void appending_in_a_capture(void) {
    struct cached_call call;
    fdm_cache cache;
    fdm_tensors tensors;
    use_fake_compiler();
    make_cached(&call, 1, 1, &cache, &tensors);
    const fdm_append_tensors append = {
        .struct_bytes = sizeof append, .k = call.k, .v = call.v, .cache = &cache, .q = tensors.q, .q_out = tensors.out};
    assert_int_equal(fdm_cache_append(&append), FDM_OK);
    fake_driver()->begin_capture(GLOBAL);
    const int64_t before = fake_driver()->num_launches();
    assert_int_equal(fdm_cache_append(&append), FDM_OK);
    assert_launches(before, "cache_append", "cache_append", 1);
    assert_int_equal(fake_driver()->end_capture(), 1);
    munmap(call.memory, UNTOUCHABLE);
}

static pthread_barrier_t began, ended;
static int still_sound;
static void *capture_meanwhile(void *argument) {
    fake_driver()->begin_capture(GLOBAL);
    pthread_barrier_wait(&began);
    pthread_barrier_wait(&ended);
    still_sound = fake_driver()->end_capture();
    return argument;
}

/* In the default mode a capture binds every thread of the process. */
static void another_thread_captures(void) {
    pthread_t thread;
    use_fake_compiler();
    pthread_barrier_init(&began, NULL, 2);
    pthread_barrier_init(&ended, NULL, 2);
    assert_int_equal(pthread_create(&thread, NULL, capture_meanwhile, NULL), 0);
    pthread_barrier_wait(&began);
    for (int kind = 0; kind < NUM_CALL_KINDS; kind++)
        assert_int_equal(cuda_call_once((enum cuda_call_kind)kind, 0, NULL), FDM_OK);
    pthread_barrier_wait(&ended);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(still_sound, 1);
}

/* What fails goes back to the capture's mode too. */
static void failures_in_a_capture(void) {
    static const char *const functions[] = {"cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuFuncSetAttribute",
                                            "cuModuleGetFunction",      "cuCtxPushCurrent", "cuLaunchKernelEx"};
    struct cuda_call call;
    use_fake_compiler();
    fake_driver()->inject("cuDevicePrimaryCtxRetain", 2, 1);
    assert_refused(fdm_synchronize(cuda), FDM_ERROR_OUT_OF_MEMORY, "starting the CUDA device's context failed");
    assert_int_equal(fake_driver()->capture_mode(), GLOBAL);
    assert_int_equal(cuda_call_make(&call, CALL_FORWARD, 0), FDM_OK);
    fake_driver()->begin_capture(GLOBAL);
    for (int i = 1; i < 6; i++) {
        fake_driver()->inject(functions[i], 1, 1);
        assert_refused(cuda_call_run(&call, NULL), FDM_ERROR_SYSTEM, "failed");
        assert_int_equal(fake_driver()->capture_mode(), GLOBAL);
        assert_int_equal(fake_driver()->depth(), 0);
    }
    fake_driver()->inject("cuThreadExchangeStreamCaptureMode", 1, 1);
    assert_refused(fdm_synchronize(cuda), FDM_ERROR_SYSTEM, "stepping out of the capture of a stream failed");
    assert_int_equal(cuda_call_run(&call, NULL), FDM_OK);
    assert_int_equal(fake_driver()->end_capture(), 1);
    cuda_call_release(&call);
}

/* A stream that a caller made in a context of its own. */
static void streams_of_other_contexts(void) {
    struct cuda_call call;
    int stream;
    use_fake_compiler();
    assert_int_equal(cuda_call_make(&call, CALL_FORWARD, 0), FDM_OK);
    assert_refused(cuda_call_run(&call, fake_driver()->foreign_stream()), FDM_ERROR_INVALID_ARGUMENT,
                   "the stream belongs to another context than the primary one of CUDA device 0");
    assert_int_equal(fake_driver()->num_launches(), 0);
    fake_driver()->inject("cuLaunchKernelEx", 400, 1); /* for another reason */
    assert_refused(cuda_call_run(&call, &stream), FDM_ERROR_SYSTEM,
                   "launching a kernel failed: invalid resource handle");
    fake_driver()->inject("cuStreamGetCtx", 400, 1); /* a stream that is none */
    assert_refused(cuda_call_run(&call, fake_driver()->foreign_stream()), FDM_ERROR_SYSTEM,
                   "launching a kernel failed: invalid resource handle");
    assert_int_equal(cuda_call_run(&call, &stream), FDM_OK);
    assert_int_equal(fake_driver()->depth(), 0);
    cuda_call_release(&call);
}

#define THREE "FAKE_CUDA_DEVICES=9.0:232448,9.0:232448,8.6:101376"
static const struct scenario scenarios[] = {
    {"the_driver_forbids", the_driver_forbids, NULL, 0},
    {"first_use_in_a_capture", first_use_in_a_capture, THREE, 0},
    {"everything_else_in_a_capture", everything_else_in_a_capture, NULL, 0},
    {"caches_in_a_capture", caches_in_a_capture, NULL, 0},
    {"appending_in_a_capture", appending_in_a_capture, NULL, 0},
    {"another_thread_captures", another_thread_captures, NULL, 0},
    {"failures_in_a_capture", failures_in_a_capture, NULL, 0},
    {"streams_of_other_contexts", streams_of_other_contexts, NULL, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
