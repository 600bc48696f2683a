/* driver.c: libcuda by dlopen, its devices and primary contexts. */
#include "cuda/driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cuda/compiler.h"
#include "cuda/cuda.h"
#include "system/system.h"

enum { OLDEST_VERSION = 12000 };

static struct {
    pthread_once_t once;
    struct cuda_driver driver;
    fdm_status status;
    char sentence[300];
    atomic_int forked; /* this process is a child of the one that opened the driver */
} opened = {.once = PTHREAD_ONCE_INIT};

static fdm_status refuse(fdm_status status, const char *format, const char *detail) {
    snprintf(opened.sentence, sizeof opened.sentence, format, detail);
    return status;
}

/* Function by function, in the version of CUDA 12.0, whatever the driver's own. */
static fdm_status resolve(void *library, struct cuda_driver *driver) {
    cu_result (*get_address)(const char *, void **, int, unsigned long long, int *);
    *(void **)&get_address = system_symbol(library, "cuGetProcAddress_v2");
    if (!get_address)
        return refuse(FDM_ERROR_UNSUPPORTED, "the CUDA driver is older than 12.0%s: it has no cuGetProcAddress_v2", "");
    const struct {
        const char *name;
        void *place;
    } functions[] = {
#define CU_PLACE(member, name, parameters) {name, &driver->member},
        CU_FUNCTIONS(CU_PLACE)
#undef CU_PLACE
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        if (get_address(functions[i].name, functions[i].place, OLDEST_VERSION, 0, NULL) ||
            !*(void **)functions[i].place)
            return refuse(FDM_ERROR_UNSUPPORTED, "the CUDA driver has no %s: it is older than 12.0", functions[i].name);
    return FDM_OK;
}

/* The driver's words; it gives NULL for a result that it does not know. */
static const char *words_of(const struct cuda_driver *driver, cu_result result, char *text, size_t size) {
    const char *words = NULL;
    if (!driver->get_error_string(result, &words) && words)
        return words;
    snprintf(text, size, "unknown error %d", result);
    return text;
}

static fdm_status start(struct cuda_driver *driver) {
    char text[32];
    cu_result result = driver->init(0);
    if (result)
        return refuse(FDM_ERROR_SYSTEM, "the CUDA driver does not start: %s",
                      words_of(driver, result, text, sizeof text));
    if ((result = driver->driver_version(&driver->version)))
        return refuse(FDM_ERROR_SYSTEM, "the CUDA driver does not tell its version: %s",
                      words_of(driver, result, text, sizeof text));
    if (driver->version < OLDEST_VERSION) {
        snprintf(text, sizeof text, "%d.%d", driver->version / 1000, driver->version % 1000 / 10);
        return refuse(FDM_ERROR_UNSUPPORTED, "the CUDA driver is for CUDA %s; 12.0 or later is needed", text);
    }
    if ((result = driver->device_count(&driver->num_devices)))
        return refuse(FDM_ERROR_SYSTEM, "the CUDA driver does not count its devices: %s",
                      words_of(driver, result, text, sizeof text));
    if (driver->num_devices < 1)
        return refuse(FDM_ERROR_UNSUPPORTED, "the CUDA driver finds no device%s", "");
    if (driver->num_devices > CUDA_DEVICES_MAX)
        driver->num_devices = CUDA_DEVICES_MAX;
    return FDM_OK;
}

/* Told by a handler: to ask for the process's number in every call would be a system call each time. */
static void note_fork(void) { atomic_store_explicit(&opened.forked, 1, memory_order_relaxed); }

static void open_driver(void) {
    if (system_call_in_children(note_fork)) {
        opened.status = refuse(FDM_ERROR_OUT_OF_MEMORY, "no memory for the CUDA driver's%s fork handler", "");
        return;
    }
    void *library = system_open_library(system_cuda_driver);
    if (!library) {
        opened.status = refuse(FDM_ERROR_UNSUPPORTED, "no CUDA driver can be opened: %s", system_library_error());
        return;
    }
    opened.status = resolve(library, &opened.driver);
    if (!opened.status)
        opened.status = start(&opened.driver);
}

fdm_status cuda_driver_get(const struct cuda_driver **driver) {
    pthread_once(&opened.once, open_driver);
    if (opened.status)
        return error_set(opened.status, "%s", opened.sentence);
    if (atomic_load_explicit(&opened.forked, memory_order_relaxed))
        return error_set(FDM_ERROR_SYSTEM,
                         "CUDA was started before this process was forked and cannot be used in the child; start "
                         "workers with spawn, or use CUDA only in them");
    *driver = &opened.driver;
    return FDM_OK;
}

int32_t cuda_device_count(void) {
    const struct cuda_driver *driver;
    return cuda_driver_get(&driver) ? 0 : driver->num_devices;
}

/* After these the driver answers every call of the context with the same error (CUDA Driver API, CUresult). */
static int ends_the_context(cu_result result) {
    static const cu_result fatal[] = {214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719};
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++)
        if (fatal[i] == result)
            return 1;
    return 0;
}

fdm_status cuda_driver_error(const struct cuda_driver *driver, cu_result result, const char *what) {
    char text[32];
    const char *name = NULL, *words = words_of(driver, result, text, sizeof text);
    if (driver->get_error_name(result, &name) || !name)
        name = "a result without a name";
    fdm_status status = result == CU_ERROR_OUT_OF_MEMORY ? FDM_ERROR_OUT_OF_MEMORY : FDM_ERROR_SYSTEM;
    return error_set(status, "%s failed: %s (%s)%s", what, words, name,
                     ends_the_context(result) ? "; this process cannot use the device again" : "");
}

/* ---- captures of streams ---- */

fdm_status cuda_capture_relax(const struct cuda_driver *driver, struct cuda_capture_scope *scope) {
    *scope = (struct cuda_capture_scope){.mode = CU_STREAM_CAPTURE_MODE_RELAXED};
    const cu_result result = driver->capture_mode_exchange(&scope->mode);
    scope->relaxed = !result;
    return result ? cuda_driver_error(driver, result, "stepping out of the capture of a stream") : FDM_OK;
}

void cuda_capture_restore(const struct cuda_driver *driver, const struct cuda_capture_scope *scope) {
    int mode = scope->mode;
    if (scope->relaxed)
        driver->capture_mode_exchange(&mode);
}

/* ---- devices and contexts ---- */

static fdm_status check_index(const struct cuda_driver *driver, int32_t index) {
    if (index < 0 || index >= driver->num_devices)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "CUDA device index is %d; this machine has %d", index,
                         driver->num_devices);
    return FDM_OK;
}

static fdm_status ask_facts(const struct cuda_driver *driver, int32_t index, fdm_device *device) {
    cu_device handle;
    static const int attributes[] = {CU_COMPUTE_MAJOR,
                                     CU_COMPUTE_MINOR,
                                     CU_NUM_MULTIPROCESSORS,
                                     CU_SHARED_BYTES_OPTIN,
                                     CU_L2_CACHE_BYTES,
                                     CU_REGISTERS_PER_MULTIPROCESSOR,
                                     CU_THREADS_PER_MULTIPROCESSOR,
                                     CU_MEMORY_CLOCK_KHZ,
                                     CU_MEMORY_BUS_BITS};
    enum { COUNT = sizeof attributes / sizeof attributes[0], NEEDED = 7 };
    int values[COUNT] = {0};
    cu_result result = driver->device_get(&handle, index);
    for (int i = 0; i < NEEDED && !result; i++)
        result = driver->device_attribute(&values[i], attributes[i], handle);
    if (result)
        return cuda_driver_error(driver, result, "asking for the CUDA device's attributes");
    for (int i = NEEDED; i < COUNT; i++) /* of the bandwidth: a driver that does not tell leaves it unknown */
        if (driver->device_attribute(&values[i], attributes[i], handle))
            values[i] = 0;
    *device = (fdm_device){.id = {FDM_CUDA, index},
                           .present = 1,
                           .compute_major = values[0],
                           .compute_minor = values[1],
                           .num_sms = values[2],
                           .shared_bytes = values[3],
                           .l2_bytes = values[4],
                           .registers_per_sm = values[5],
                           .threads_per_sm = values[6],
                           .bandwidth = (int64_t)values[7] * 1000 * 2 * (values[8] / 8)}; /* two transfers a clock */
    snprintf(device->name, sizeof device->name, "sm_%d%d", values[0], values[1]);
    if (values[0] == 10) /* an older NVRTC does not know its target */
        device->nvrtc_version = cuda_compiler_version(driver->version / 1000);
    return FDM_OK;
}

/* Asked once for each device: every one-call attention plans, and plans need them. */
fdm_status cuda_device_facts(int32_t index, fdm_device *device) {
    static fdm_device known[CUDA_DEVICES_MAX];
    static _Atomic int asked[CUDA_DEVICES_MAX];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const struct cuda_driver *driver;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = check_index(driver, index)))
        return status;
    if (!atomic_load_explicit(&asked[index], memory_order_acquire)) {
        pthread_mutex_lock(&lock);
        struct cuda_capture_scope capture = {0, 0};
        if (!asked[index] && !(status = cuda_capture_relax(driver, &capture)) &&
            !(status = ask_facts(driver, index, &known[index])))
            atomic_store_explicit(&asked[index], 1, memory_order_release);
        cuda_capture_restore(driver, &capture);
        pthread_mutex_unlock(&lock);
    }
    if (!status)
        *device = known[index];
    return status;
}

static _Atomic(cu_context) contexts[CUDA_DEVICES_MAX]; /* primary contexts, retained once and kept */

static fdm_status primary_context(const struct cuda_driver *driver, int32_t index, cu_context *context) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    struct cuda_capture_scope capture;
    fdm_status status = check_index(driver, index);
    if (status || (*context = atomic_load_explicit(&contexts[index], memory_order_acquire)) ||
        (status = cuda_capture_relax(driver, &capture)))
        return status;
    pthread_mutex_lock(&lock);
    cu_device handle;
    cu_result result = 0;
    *context = atomic_load_explicit(&contexts[index], memory_order_relaxed);
    if (!*context && !(result = driver->device_get(&handle, index)) &&
        !(result = driver->primary_context_retain(context, handle)))
        atomic_store_explicit(&contexts[index], *context, memory_order_release);
    pthread_mutex_unlock(&lock);
    cuda_capture_restore(driver, &capture);
    return result ? cuda_driver_error(driver, result, "starting the CUDA device's context") : FDM_OK;
}

fdm_status cuda_context_enter(const struct cuda_driver *driver, int32_t device, struct cuda_context_scope *scope) {
    cu_context wanted, current = NULL;
    *scope = (struct cuda_context_scope){0};
    fdm_status status = primary_context(driver, device, &wanted);
    if (status)
        return status;
    cu_result result = driver->context_current(&current);
    if (!result && current != wanted) {
        result = driver->context_push(wanted);
        scope->pushed = !result;
    }
    return result ? cuda_driver_error(driver, result, "entering the CUDA device's context") : FDM_OK;
}

fdm_status cuda_context_enter_relaxed(const struct cuda_driver *driver, int32_t device,
                                      struct cuda_context_scope *scope) {
    struct cuda_capture_scope capture;
    fdm_status status = cuda_capture_relax(driver, &capture);
    if (status)
        return status;
    if ((status = cuda_context_enter(driver, device, scope)))
        cuda_capture_restore(driver, &capture);
    else
        scope->capture = capture;
    return status;
}

void cuda_context_leave(const struct cuda_driver *driver, const struct cuda_context_scope *scope) {
    cu_context popped;
    if (scope->pushed)
        driver->context_pop(&popped);
    cuda_capture_restore(driver, &scope->capture);
}
