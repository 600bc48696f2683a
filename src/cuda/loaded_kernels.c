/* loaded_kernels.c: kernels in memory: found without a lock, loaded or compiled under one. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "cuda/cache.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "cuda/loaded_kernels.h"

/* A chain for each hash; kernels are added at its head and never leave. */
enum { NUM_CHAINS = 1024 };
static _Atomic(struct cuda_kernel *) chains[NUM_CHAINS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

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

static const struct cuda_kernel *find_loaded(int32_t device, const struct cuda_kernel_request *request) {
    struct cuda_kernel *kernel = atomic_load_explicit(&chains[chain_of(device, request)], memory_order_acquire);
    while (kernel && !is_same(kernel, device, request))
        kernel = kernel->next;
    return kernel;
}

/* ---- misses ---- */

struct miss {
    const struct cuda_kernel_request *request;
    const struct cuda_source *source; /* NULL: there is none of this name */
    char arch[CUDA_TARGET_BYTES];
    int32_t max_major;
    const void *image;         /* what is loaded: the binary's code or another kernel's image */
    struct cuda_binary binary; /* from the disk or the compiler */
    int on_disk;
    fdm_status status;
    char sentence[512];
};

/* The same kernel for the same architecture on another device, with its image. */
static const struct cuda_kernel *find_image(const char *arch, const struct cuda_kernel_request *request) {
    for (int32_t device = 0; device < CUDA_DEVICES_MAX; device++) {
        const struct cuda_kernel *kernel = find_loaded(device, request);
        if (kernel && kernel->image && strcmp(kernel->arch, arch) == 0)
            return kernel;
    }
    return NULL;
}

/* From another device, from the disk, or compiled and then stored. Runs on a thread of its own where several kernels
 * are missing. */
static void *make_binary(void *argument) {
    struct miss *miss = argument;
    struct cuda_compiler compiler;
    const struct cuda_kernel *twin = find_image(miss->arch, miss->request);
    if (twin) {
        miss->image = twin->image;
        miss->binary.resources = twin->resources;
        return NULL;
    }
    if (!miss->source)
        miss->status = error_set(FDM_ERROR_INTERNAL, "there is no kernel source %s", miss->request->file);
    else
        miss->status = cuda_compiler_find(miss->max_major, &compiler);
    if (!miss->status) {
        struct cache_key key = cache_key_of(&compiler, miss->arch, miss->source, miss->request);
        miss->on_disk = cache_load(&key, &miss->binary);
        if (!miss->on_disk && !(miss->status = cuda_compile(&compiler, miss->arch, miss->request, &miss->binary)))
            miss->on_disk = cache_store(&key, &miss->binary);
        miss->image = miss->binary.code;
    }
    if (miss->status)
        snprintf(miss->sentence, sizeof miss->sentence, "%s", fdm_last_error());
    return NULL;
}

static void make_binaries(struct miss *misses, int32_t count) {
    pthread_t threads[CUDA_KERNELS_MAX];
    int started[CUDA_KERNELS_MAX] = {0};
    for (int32_t i = 1; i < count; i++)
        started[i] = pthread_create(&threads[i], NULL, make_binary, &misses[i]) == 0;
    make_binary(&misses[0]);
    for (int32_t i = 1; i < count; i++)
        started[i] ? (void)pthread_join(threads[i], NULL) : (void)make_binary(&misses[i]);
}

static fdm_status load(const struct cuda_driver *driver, int32_t device, struct miss *miss,
                       const struct cuda_kernel **loaded) {
    const struct cuda_kernel_request *request = miss->request;
    struct cuda_kernel *kernel = memory_allocate(sizeof *kernel);
    if (!kernel)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the record of a kernel");
    *kernel = (struct cuda_kernel){.device = device,
                                   .shared_bytes = request->shared_bytes,
                                   .num_constants = request->num_constants,
                                   .file = request->file,
                                   .entry = request->entry,
                                   .resources = miss->binary.resources};
    for (int32_t i = 0; i < request->num_constants; i++)
        kernel->values[i] = request->constants[i].value;
    cu_result result = driver->module_load(&kernel->module, miss->image);
    if (!result)
        result = driver->module_function(&kernel->function, kernel->module, request->entry);
    if (!result && request->shared_bytes > 48 << 10)
        result = driver->function_set(kernel->function, CU_FUNCTION_MAX_DYNAMIC_SHARED_BYTES, request->shared_bytes);
    if (!result && request->shared_bytes > 0)
        result = driver->function_set(kernel->function, CU_FUNCTION_SHARED_CARVEOUT, 100);
    if (!result)
        result = driver->function_get(&kernel->resources.max_threads, CU_FUNCTION_MAX_THREADS, kernel->function);
    if (!result)
        result = driver->function_get(&kernel->resources.static_shared_bytes, CU_FUNCTION_STATIC_SHARED_BYTES,
                                      kernel->function);
    if (result) {
        if (kernel->module)
            driver->module_unload(kernel->module);
        memory_release(kernel);
        return cuda_driver_error(driver, result, "loading a kernel");
    }
    snprintf(kernel->arch, sizeof kernel->arch, "%s", miss->arch);
    if (!miss->on_disk) { /* kept; NULL where it is another kernel's */
        kernel->image = miss->binary.code;
        miss->binary.code = NULL;
    }
    _Atomic(struct cuda_kernel *) *chain = &chains[chain_of(device, request)];
    kernel->next = atomic_load_explicit(chain, memory_order_relaxed);
    atomic_store_explicit(chain, kernel, memory_order_release);
    *loaded = kernel;
    return FDM_OK;
}

/* Under the lock: what another thread has loaded meanwhile is taken; the rest is made and loaded. */
static fdm_status load_missing(const struct cuda_driver *driver, int32_t device,
                               const struct cuda_kernel_request *requests, int32_t count,
                               const struct cuda_kernel **kernels) {
    struct miss misses[CUDA_KERNELS_MAX];
    int32_t index[CUDA_KERNELS_MAX], num_misses = 0;
    char arch[16];
    fdm_device facts;
    fdm_status status = cuda_device_facts(device, &facts);
    if (!status && facts.compute_major < 8)
        status = error_set(FDM_ERROR_UNSUPPORTED, "the CUDA device has compute capability %d.%d; 8.0 is the lowest",
                           facts.compute_major, facts.compute_minor);
    if (status)
        return status;
    snprintf(arch, sizeof arch, "sm_%d%d", facts.compute_major, facts.compute_minor);
    for (int32_t i = 0; i < count; i++)
        if (!(kernels[i] = find_loaded(device, &requests[i]))) {
            const struct cuda_source *source = cuda_source_find(requests[i].file);
            if (source && source->arch_specific && facts.compute_major < 9)
                return error_set(FDM_ERROR_UNSUPPORTED,
                                 "kernel %s is for compute capability 9.0 and above; the CUDA device has %d.%d",
                                 requests[i].entry, facts.compute_major, facts.compute_minor);
            misses[num_misses] =
                (struct miss){.request = &requests[i], .source = source, .max_major = driver->version / 1000};
            cuda_target_of(arch, source, misses[num_misses].arch);
            index[num_misses++] = i;
        }
    if (num_misses > 0)
        make_binaries(misses, num_misses);
    for (int32_t m = 0; m < num_misses; m++) {
        if (misses[m].status && !status)
            status = error_set(misses[m].status, "%s", misses[m].sentence);
        if (!status)
            status = load(driver, device, &misses[m], &kernels[index[m]]);
        memory_release(misses[m].binary.code);
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
    if (status || (status = cuda_context_enter(driver, device, &scope)))
        return status;
    pthread_mutex_lock(&lock);
    status = load_missing(driver, device, requests, count, kernels);
    pthread_mutex_unlock(&lock);
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
    struct miss miss = {.request = request, .source = cuda_source_find(request->file)};
    cuda_target_of(arch, miss.source, miss.arch);
    make_binary(&miss);
    *resources = miss.binary.resources;
    memory_release(miss.binary.code);
    return miss.status; /* with its sentence, on this thread */
}
