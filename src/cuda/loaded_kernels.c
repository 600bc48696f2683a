/* loaded_kernels.c: kernels in memory: found without a lock; what is missing is compiled once, whoever needs it. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "cuda/archive.h"
#include "cuda/cache.h"
#include "cuda/cache_folder.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "cuda/loaded_kernels.h"

/* A chain for each hash; kernels are added at its head and never leave. */
enum { NUM_CHAINS = 1024 };
static _Atomic(struct cuda_kernel *) chains[NUM_CHAINS];

static uint32_t chain_of(int32_t device, const struct cuda_kernel_request *request) {
    uint64_t hash = (uint64_t)(uint32_t)device * 0x9e3779b97f4a7c15ull + (uintptr_t)request->entry;
    for (int32_t i = 0; i < request->num_constants; i++)
        hash = (hash ^ (uint64_t)request->constants[i].value) * 0x100000001b3ull;
    return (uint32_t)(hash >> 40 ^ hash) % NUM_CHAINS;
}

/* Mostly the same literal. */
static int is_text(const char *a, const char *b) { return a == b || strcmp(a, b) == 0; }

/* The names of a file's constants are always the same, in the same order. */
static int is_same(const struct cuda_kernel *kernel, int32_t device, const struct cuda_kernel_request *request) {
    if (kernel->device != device || kernel->num_constants != request->num_constants ||
        kernel->shared_bytes != request->shared_bytes || !is_text(kernel->entry, request->entry) ||
        !is_text(kernel->file, request->file))
        return 0;
    for (int32_t i = 0; i < request->num_constants; i++)
        if (kernel->values[i] != request->constants[i].value)
            return 0;
    return 1;
}

static int is_same_request(const struct cuda_kernel_request *a, const struct cuda_kernel_request *b) {
    if (a->num_constants != b->num_constants || a->shared_bytes != b->shared_bytes || !is_text(a->entry, b->entry) ||
        !is_text(a->file, b->file))
        return 0;
    for (int32_t i = 0; i < a->num_constants; i++)
        if (a->constants[i].value != b->constants[i].value)
            return 0;
    return 1;
}

static const struct cuda_kernel *find_loaded(int32_t device, const struct cuda_kernel_request *request) {
    struct cuda_kernel *kernel = atomic_load_explicit(&chains[chain_of(device, request)], memory_order_acquire);
    while (kernel && !is_same(kernel, device, request))
        kernel = kernel->next;
    return kernel;
}

/* ---- kernels that are missing ----
 *
 * Machine code that is being looked for or compiled is work in flight: a thread that needs the same code waits for it,
 * on whatever device, and for no other work. Its owner finishes what it owns before it waits for others. */

enum { COMPILE_STACK_BYTES = 16 << 20 }; /* a compiler recurses; callers' own threads may be small */

struct work {
    struct work *next;
    struct cuda_kernel_request request; /* a copy: others may still look at it when its owner has returned */
    const struct cuda_source *source;   /* NULL: there is none of this name */
    const struct cuda_driver *driver;   /* NULL: for a report, without a device */
    char arch[CUDA_TARGET_BYTES];
    int32_t users; /* its owner and those who wait */
    int done, on_disk;
    const void *image;         /* what is loaded: the binary's code or another kernel's image */
    struct cuda_binary binary; /* from the disk or the compiler; its code passes to a kernel where it is on no disk */
    fdm_status status;
    char sentence[512];
};
static struct work *in_flight;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all work, and of what is added to chains; held briefly */
static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;

static const struct cuda_kernel *find_image(const char *arch, const struct cuda_kernel_request *request) {
    for (int32_t device = 0; device < CUDA_DEVICES_MAX; device++) {
        const struct cuda_kernel *kernel = find_loaded(device, request);
        if (kernel && kernel->image && strcmp(kernel->arch, arch) == 0)
            return kernel;
    }
    return NULL;
}

static struct work work_of(const struct cuda_driver *driver, const char *arch,
                           const struct cuda_kernel_request *request) {
    struct work work = {.request = *request, .source = cuda_source_find(request->file), .driver = driver, .users = 1};
    cuda_target_of(arch, work.source, work.arch);
    return work;
}

static int32_t max_major_of(const struct work *work) { return work->driver ? work->driver->version / 1000 : 0; }

/* 1 when the code is there without compiling: another device's, or on disk, made by the compiler that is installed.
 * Where none can be seen without opening one, that of any compiler will do. */
static int is_ready(struct work *work) {
    struct cuda_compiler compiler;
    const struct cuda_kernel *twin = find_image(work->arch, &work->request);
    if (twin) {
        work->image = twin->image;
        work->binary.resources = twin->resources;
        return 1;
    }
    if (!work->source)
        return 0;
    const int found = cuda_compiler_known(max_major_of(work), &compiler);
    const struct cache_key key =
        cache_key_of(found ? &compiler : NULL, work->arch, work->source, &work->request, cuda_compile_options);
    work->on_disk = cache_load(&key, max_major_of(work), &work->binary) ||
                    archive_load(&key, work->arch, max_major_of(work), &work->binary);
    work->image = work->binary.code;
    return work->on_disk;
}

static void compile(struct work *work) {
    struct cuda_compiler compiler;
    if (!work->source)
        work->status = error_set(FDM_ERROR_INTERNAL, "there is no kernel source %s", work->request.file);
    else
        work->status = cuda_compiler_get(max_major_of(work), &compiler);
    if (!work->status && !(work->status = cuda_compile(&compiler, work->arch, &work->request, &work->binary))) {
        const struct cache_key key =
            cache_key_of(&compiler, work->arch, work->source, &work->request, cuda_compile_options);
        work->on_disk = cache_store(&key, &work->binary);
        work->image = work->binary.code;
    }
    if (work->status)
        snprintf(work->sentence, sizeof work->sentence, "%s", fdm_last_error());
}

static void finish(struct work *work) {
    pthread_mutex_lock(&lock);
    work->done = 1;
    pthread_cond_broadcast(&finished);
    pthread_mutex_unlock(&lock);
}

static void *compile_in_thread(void *argument) {
    struct work *work = argument;
    struct cuda_capture_scope capture = {0, 0};
    if (work->driver) /* the compiler may ask the driver too */
        (void)cuda_capture_relax(work->driver, &capture);
    compile(work);
    if (work->driver)
        cuda_capture_restore(work->driver, &capture);
    finish(work);
    return NULL;
}

/* All at once, each on a thread of its own where there can be one. */
static void do_work(struct work *const *works, int32_t count) {
    pthread_t threads[CUDA_KERNELS_MAX];
    int started[CUDA_KERNELS_MAX] = {0};
    pthread_attr_t attributes;
    const int sized = pthread_attr_init(&attributes) == 0;
    if (sized)
        (void)pthread_attr_setstacksize(&attributes, COMPILE_STACK_BYTES);
    for (int32_t i = 0; i < count; i++) {
        if (is_ready(works[i]))
            finish(works[i]);
        else
            started[i] = pthread_create(&threads[i], sized ? &attributes : NULL, compile_in_thread, works[i]) == 0;
    }
    for (int32_t i = 0; i < count; i++) {
        if (started[i])
            pthread_join(threads[i], NULL);
        else if (!works[i]->done)
            compile_in_thread(works[i]);
    }
    if (sized)
        pthread_attr_destroy(&attributes);
}

/* Work in flight for the same code, or new work, which is the caller's to do. NULL when memory is short. */
static struct work *join_work(const struct cuda_driver *driver, const char *arch,
                              const struct cuda_kernel_request *request, int *is_owner) {
    const struct work wanted = work_of(driver, arch, request);
    struct work *work = in_flight;
    while (work && (strcmp(work->arch, wanted.arch) != 0 || !is_same_request(&work->request, request)))
        work = work->next;
    *is_owner = !work;
    if (work) {
        work->users++;
    } else if ((work = memory_allocate(sizeof *work))) {
        *work = wanted;
        work->next = in_flight;
        in_flight = work;
    }
    return work;
}

/* What failed has no owner any more: the next call tries again. */
static void leave_work(struct work *work) {
    pthread_mutex_lock(&lock);
    const int32_t users = --work->users;
    if (users == 0 || work->status)
        for (struct work **link = &in_flight; *link; link = &(*link)->next)
            if (*link == work) {
                *link = work->next;
                break;
            }
    pthread_mutex_unlock(&lock);
    if (users == 0) {
        memory_release(work->binary.code);
        memory_release(work);
    }
}

static void wait_for(const struct work *work) {
    pthread_mutex_lock(&lock);
    while (!work->done)
        pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
}

/* ---- loading ---- */

static struct cuda_kernel *record_of(int32_t device, const struct work *work) {
    const struct cuda_kernel_request *request = &work->request;
    struct cuda_kernel *kernel = memory_allocate(sizeof *kernel);
    if (!kernel)
        return NULL;
    *kernel = (struct cuda_kernel){.device = device,
                                   .shared_bytes = request->shared_bytes,
                                   .num_constants = request->num_constants,
                                   .file = request->file,
                                   .entry = request->entry,
                                   .resources = work->binary.resources};
    for (int32_t i = 0; i < request->num_constants; i++)
        kernel->values[i] = request->constants[i].value;
    snprintf(kernel->arch, sizeof kernel->arch, "%s", work->arch);
    return kernel;
}

static void add_to_chain(struct cuda_kernel *kernel, struct work *work) {
    _Atomic(struct cuda_kernel *) *chain = &chains[chain_of(kernel->device, &work->request)];
    pthread_mutex_lock(&lock);
    if (!work->on_disk) { /* kept; NULL where it is another kernel's */
        kernel->image = work->binary.code;
        work->binary.code = NULL;
    }
    kernel->next = atomic_load_explicit(chain, memory_order_relaxed);
    atomic_store_explicit(chain, kernel, memory_order_release);
    pthread_mutex_unlock(&lock);
}

/* Why a kernel is not loaded. A plan may have been made for a device with more shared memory. */
static fdm_status refuse_to_load(const struct cuda_driver *driver, int32_t device,
                                 const struct cuda_kernel_request *request, int32_t shared_bytes, cu_result result) {
    fdm_device facts;
    if (!cuda_device_facts(device, &facts) && shared_bytes > facts.shared_bytes)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "kernel %s takes %d bytes of shared memory for a block; the CUDA device has %lld",
                         request->entry, shared_bytes, (long long)facts.shared_bytes);
    return cuda_driver_error(driver, result, "loading a kernel");
}

static fdm_status load_new(const struct cuda_driver *driver, int32_t device, struct work *work,
                           const struct cuda_kernel **loaded) {
    const int32_t shared_bytes = work->request.shared_bytes;
    struct cuda_kernel *kernel = record_of(device, work);
    if (!kernel)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the record of a kernel");
    cu_result result = driver->module_load(&kernel->module, work->image);
    if (!result)
        result = driver->module_function(&kernel->function, kernel->module, work->request.entry);
    if (!result)
        result = driver->function_get(&kernel->resources.static_shared_bytes, CU_FUNCTION_STATIC_SHARED_BYTES,
                                      kernel->function);
    if (!result && shared_bytes + kernel->resources.static_shared_bytes > 48 << 10)
        result = driver->function_set(kernel->function, CU_FUNCTION_MAX_DYNAMIC_SHARED_BYTES, shared_bytes);
    if (!result && shared_bytes > 0)
        result = driver->function_set(kernel->function, CU_FUNCTION_SHARED_CARVEOUT, 100);
    if (!result && work->request.cluster > 8)
        result = driver->function_set(kernel->function, CU_FUNCTION_NON_PORTABLE_CLUSTER, 1);
    if (!result)
        result = driver->function_get(&kernel->resources.max_threads, CU_FUNCTION_MAX_THREADS, kernel->function);
    if (result) {
        const int32_t needed = shared_bytes + kernel->resources.static_shared_bytes;
        if (kernel->module)
            driver->module_unload(kernel->module);
        memory_release(kernel);
        return refuse_to_load(driver, device, &work->request, needed, result);
    }
    add_to_chain(kernel, work);
    *loaded = kernel;
    return FDM_OK;
}

/* Once for each device, whoever comes first. */
static fdm_status load(const struct cuda_driver *driver, int32_t device, struct work *work,
                       const struct cuda_kernel **loaded) {
    static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
    if (work->status)
        return error_set(work->status, "%s", work->sentence);
    pthread_mutex_lock(&loading);
    *loaded = find_loaded(device, &work->request);
    const fdm_status status = *loaded ? FDM_OK : load_new(driver, device, work, loaded);
    pthread_mutex_unlock(&loading);
    return status;
}

/* ---- a call's kernels ---- */

static fdm_status check_device(const fdm_device *facts, const struct cuda_kernel_request *requests, int32_t count) {
    if (facts->compute_major < 8)
        return error_set(FDM_ERROR_UNSUPPORTED, "the CUDA device has compute capability %d.%d; 8.0 is the lowest",
                         facts->compute_major, facts->compute_minor);
    for (int32_t i = 0; i < count; i++) {
        const struct cuda_source *source = cuda_source_find(requests[i].file);
        if (source && source->arch_specific && facts->compute_major < 9)
            return error_set(FDM_ERROR_UNSUPPORTED,
                             "kernel %s is for compute capability 9.0 and above; the CUDA device has %d.%d",
                             requests[i].entry, facts->compute_major, facts->compute_minor);
    }
    return FDM_OK;
}

static fdm_status load_missing(const struct cuda_driver *driver, int32_t device,
                               const struct cuda_kernel_request *requests, int32_t count,
                               const struct cuda_kernel **kernels) {
    struct work *works[CUDA_KERNELS_MAX] = {NULL}, *own[CUDA_KERNELS_MAX];
    int32_t num_own = 0;
    char arch[16];
    fdm_device facts;
    fdm_status status = cuda_device_facts(device, &facts);
    if (status || (status = check_device(&facts, requests, count)) || (status = cache_check_settings()))
        return status;
    snprintf(arch, sizeof arch, "sm_%d%d", facts.compute_major, facts.compute_minor);
    pthread_mutex_lock(&lock);
    for (int32_t i = 0; i < count && !status; i++) {
        int is_owner;
        if ((kernels[i] = find_loaded(device, &requests[i])))
            continue;
        if (!(works[i] = join_work(driver, arch, &requests[i], &is_owner)))
            status = error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the record of a kernel");
        else if (is_owner)
            own[num_own++] = works[i];
    }
    pthread_mutex_unlock(&lock);
    do_work(own, num_own); /* also where memory is short: others may wait for it */
    for (int32_t i = 0; i < count; i++)
        if (works[i]) {
            wait_for(works[i]);
            if (!status)
                status = load(driver, device, works[i], &kernels[i]);
            leave_work(works[i]);
        }
    return status;
}

fdm_status cuda_kernels_get(int32_t device, const struct cuda_kernel_request *requests, int32_t count,
                            const struct cuda_kernel **kernels) {
    int32_t found = 0;
    while (found < count && (kernels[found] = find_loaded(device, &requests[found])))
        found++;
    if (found == count)
        return FDM_OK;
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    fdm_status status = count > CUDA_KERNELS_MAX
                            ? error_set(FDM_ERROR_INTERNAL, "%d kernels are asked for at once", count)
                            : cuda_driver_get(&driver);
    if (status || (status = cuda_context_enter_relaxed(driver, device, &scope)))
        return status;
    status = load_missing(driver, device, requests, count, kernels);
    cuda_context_leave(driver, &scope);
    return status;
}

fdm_status cuda_kernel_resources(const struct cuda_kernel *kernel, struct cuda_resources *resources) {
    *resources = kernel->resources;
    return FDM_OK;
}

fdm_status cuda_compile_only(const char *arch, const struct cuda_kernel_request *request,
                             struct cuda_resources *resources) {
    struct cuda_compiler compiler;
    struct cuda_binary binary;
    fdm_status status = cuda_compiler_find(0, &compiler);
    char target[CUDA_TARGET_BYTES];
    cuda_target_of(arch, cuda_source_find(request->file), target);
    if (!status)
        status = cuda_compile(&compiler, target, request, &binary);
    if (status)
        return status;
    memory_release(binary.code);
    if (resources)
        *resources = binary.resources;
    return FDM_OK;
}

fdm_status cuda_resources_for(const char *arch, const struct cuda_kernel_request *request,
                              struct cuda_resources *resources) {
    struct work work = work_of(NULL, arch, request), *const works[1] = {&work};
    const fdm_status status = cache_check_settings();
    if (status)
        return status;
    do_work(works, 1);
    *resources = work.binary.resources;
    memory_release(work.binary.code);
    return work.status ? error_set(work.status, "%s", work.sentence) : FDM_OK;
}
