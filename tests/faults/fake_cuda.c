/* fake_cuda.c: a pretended CUDA driver for tests on machines without one; see fake_cuda.h. This file: its start,
 * devices, contexts and errors, and what is exported. */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

#include "fake_state.h"

static const struct {
    cu_result number;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CU_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
};

struct fake_state fake_state;
const struct fake_hooks *fake_hooks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local cu_context stack[STACK_MAX];
static _Thread_local int depth;

enum { GLOBAL, OF_THREAD, RELAXED, NO_CAPTURE };
static _Thread_local int capture_mode = GLOBAL, capture = NO_CAPTURE, capture_is_lost;

#define NAME(member, name, parameters) {name, offsetof(struct cuda_driver, member)},
static const struct {
    const char *name;
    size_t place;
} functions[] = {CU_FUNCTIONS(NAME)};
enum { NUM_FUNCTIONS = sizeof functions / sizeof functions[0] };
_Static_assert(NUM_FUNCTIONS <= sizeof fake_state.counts / sizeof fake_state.counts[0], "one count for each function");

static int64_t number_of(const char *name, int64_t unset) {
    const char *value = getenv(name);
    return value && *value ? atoll(value) : unset;
}

static void read_devices(const char *text) {
    while (text && *text && fake_state.num_devices < DEVICES_MAX) {
        cu_context device = &fake_state.devices[fake_state.num_devices];
        if (sscanf(text, "%d.%d:%d:%63[^,]", &device->major, &device->minor, &device->shared_bytes, device->name) < 3)
            return;
        fake_state.num_devices++;
        text += strcspn(text, ",");
        text += *text == ',';
    }
}

static void get_ready(void) {
    if (fake_state.ready)
        return;
    const char *devices = getenv("FAKE_CUDA_DEVICES");
    fake_state.ready = 1;
    fake_state.version = (int)number_of("FAKE_CUDA_VERSION", 13000);
    fake_state.lacks = (int)number_of("FAKE_CUDA_LACKS", 0);
    fake_state.no_stride_0 = (int)number_of("FAKE_CUDA_NO_STRIDE_0", 0);
    fake_state.memory_limit = (size_t)number_of("FAKE_CUDA_MEMORY", INT64_MAX);
    fake_state.injection = injection_parse(getenv("FAKE_CUDA_FAIL"));
    read_devices(devices ? devices : "9.0:232448");
}

cu_context fake_current(void) { return depth > 0 ? stack[depth - 1] : NULL; }

/* CUDA Driver API, cuThreadExchangeStreamCaptureMode; what is "potentially unsafe" is left to the driver, so that here
 * it is everything that is not enqueued and not of the thread alone. */
static int is_forbidden(const char *function) {
    static const char *const safe[] = {"cuInit",           "cuDriverGetVersion", "cuDeviceGetCount",
                                       "cuCtxGetCurrent",  "cuCtxPushCurrent",   "cuCtxPopCurrent",
                                       "cuLaunchKernelEx", "cuEventRecord",      "cuThreadExchangeStreamCaptureMode",
                                       "cuMemsetD8Async",  "cuStreamWaitEvent"};
    for (size_t i = 0; i < sizeof safe / sizeof safe[0]; i++)
        if (strcmp(function, safe[i]) == 0)
            return 0;
    const int own = capture == GLOBAL || capture == OF_THREAD;
    return capture_mode != RELAXED && (own || (capture_mode == GLOBAL && fake_state.global_captures > 0));
}

cu_result fake_begin(const char *function, enum fake_needs needs) {
    pthread_mutex_lock(&lock);
    get_ready();
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        if (strcmp(functions[i].name, function) == 0)
            fake_state.counts[i]++;
    if (needs != NOTHING && !fake_state.initialized)
        return NOT_INITIALIZED;
    if (needs == CONTEXT && !fake_current())
        return INVALID_CONTEXT;
    if (is_forbidden(function)) {
        capture_is_lost = 1;
        return CAPTURE_UNSUPPORTED;
    }
    cu_result result = injection_due(&fake_state.injection, function);
    if (needs == CONTEXT && result >= STICKY_FROM && result < STICKY_TO)
        fake_current()->sticky = result;
    return needs == CONTEXT && fake_current()->sticky ? fake_current()->sticky : result;
}
cu_result fake_end(cu_result result) {
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- errors, start, devices ---- */

static cu_result error_text(cu_result error, const char **text, int name) {
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].number == error) {
            *text = name ? errors[i].name : errors[i].text;
            return 0;
        }
    *text = NULL; /* as the driver does for a number that it does not know */
    return INVALID_VALUE;
}
static cu_result get_error_name(cu_result error, const char **text) { return error_text(error, text, 1); }
static cu_result get_error_string(cu_result error, const char **text) { return error_text(error, text, 0); }

static cu_result init(unsigned flags) {
    cu_result result = fake_begin("cuInit", NOTHING);
    if (!result && flags != 0)
        result = INVALID_VALUE;
    if (!result && fake_state.num_devices == 0)
        result = NO_DEVICE;
    fake_state.initialized = !result;
    return fake_end(result);
}

static cu_result driver_version(int *version) {
    cu_result result = fake_begin("cuDriverGetVersion", NOTHING);
    if (!result)
        *version = fake_state.version;
    return fake_end(result);
}

static cu_result device_count(int *count) {
    cu_result result = fake_begin("cuDeviceGetCount", DRIVER);
    if (!result)
        *count = fake_state.num_devices;
    return fake_end(result);
}

static int is_device(cu_device device) { return device >= 0 && device < fake_state.num_devices; }

static cu_result device_get(cu_device *device, int index) {
    cu_result result = fake_begin("cuDeviceGet", DRIVER);
    if (!result && !is_device(index))
        result = INVALID_DEVICE;
    if (!result)
        *device = index;
    return fake_end(result);
}

static cu_result device_name(char *name, int size, cu_device device) {
    cu_result result = fake_begin("cuDeviceGetName", DRIVER);
    if (!result && !is_device(device))
        result = INVALID_DEVICE;
    if (!result)
        snprintf(name, (size_t)size, "%s", fake_state.devices[device].name);
    return fake_end(result);
}

static int attribute_of(cu_context device, int attribute) {
    switch (attribute) {
    case CU_NUM_MULTIPROCESSORS: return (int)number_of("EMULATED_SMS", 132); /* few: a block has many turns */
    case CU_MEMORY_CLOCK_KHZ: return 2619000;
    case CU_MEMORY_BUS_BITS: return 6144;
    case CU_L2_CACHE_BYTES: return 50 << 20;
    case CU_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_COMPUTE_MAJOR: return device->major;
    case CU_COMPUTE_MINOR: return device->minor;
    case CU_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_SHARED_BYTES_OPTIN: return device->shared_bytes;
    default: return -1;
    }
}

static cu_result device_attribute(int *value, int attribute, cu_device device) {
    cu_result result = fake_begin("cuDeviceGetAttribute", DRIVER);
    if (!result && !is_device(device))
        result = INVALID_DEVICE;
    if (!result && attribute_of(&fake_state.devices[device], attribute) < 0)
        result = INVALID_VALUE;
    if (!result)
        *value = attribute_of(&fake_state.devices[device], attribute);
    return fake_end(result);
}

/* ---- contexts ---- */

static cu_result primary_context_retain(cu_context *context, cu_device device) {
    cu_result result = fake_begin("cuDevicePrimaryCtxRetain", DRIVER);
    if (!result && !is_device(device))
        result = INVALID_DEVICE;
    if (!result) {
        *context = &fake_state.devices[device];
        fake_state.live.contexts_retained++;
    }
    return fake_end(result);
}

static cu_result context_current(cu_context *context) {
    cu_result result = fake_begin("cuCtxGetCurrent", DRIVER);
    if (!result)
        *context = fake_current();
    return fake_end(result);
}

static cu_result context_push(cu_context context) {
    cu_result result = fake_begin("cuCtxPushCurrent", DRIVER);
    if (!result && (!context || depth == STACK_MAX))
        result = INVALID_CONTEXT;
    if (!result)
        stack[depth++] = context;
    return fake_end(result);
}

static cu_result context_pop(cu_context *context) {
    cu_result result = fake_begin("cuCtxPopCurrent", DRIVER);
    if (!result && depth == 0)
        result = INVALID_CONTEXT;
    if (!result)
        *context = stack[--depth];
    return fake_end(result);
}

cu_result fake_finish(cu_context device) {
    const cu_result result = fake_hooks ? fake_hooks->finish() : 0;
    for (int i = 0; i < device->num_pending; i++) {
        struct pending *p = &device->pending[i];
        if (p->from)
            memmove(p->to, p->from, p->bytes);
        else
            memset(p->to, p->value, p->bytes);
    }
    device->num_pending = 0;
    return result;
}

static cu_result context_synchronize(void) {
    cu_result result = fake_begin("cuCtxSynchronize", CONTEXT);
    if (!result)
        result = fake_finish(fake_current());
    return fake_end(result);
}

/* ---- streams ---- */

/* Whatever address is a stream of the current device, but for the one that stands for those of another context. */
static cu_result stream_context(cu_stream stream, cu_context *context) {
    cu_result result = fake_begin("cuStreamGetCtx", CONTEXT);
    if (!result)
        *context = (void *)stream == (void *)&fake_state.foreign ? &fake_state.foreign : fake_current();
    return fake_end(result);
}

static cu_result stream_capturing(cu_stream stream, int *status) {
    cu_result result = fake_begin("cuStreamIsCapturing", CONTEXT);
    (void)stream;
    if (!result)
        *status = capture != NO_CAPTURE;
    return fake_end(result);
}

/* ---- captures ---- */

static cu_result capture_mode_exchange(int *mode) {
    cu_result result = fake_begin("cuThreadExchangeStreamCaptureMode", DRIVER);
    if (!result && (*mode < GLOBAL || *mode > RELAXED))
        result = INVALID_VALUE;
    if (!result) {
        const int before = capture_mode;
        capture_mode = *mode;
        *mode = before;
    }
    return fake_end(result);
}

static void begin_capture(int mode) {
    pthread_mutex_lock(&lock);
    fake_state.global_captures += mode == GLOBAL;
    pthread_mutex_unlock(&lock);
    capture = mode;
    capture_is_lost = 0;
}

static int end_capture(void) {
    pthread_mutex_lock(&lock);
    fake_state.global_captures -= capture == GLOBAL;
    pthread_mutex_unlock(&lock);
    capture = NO_CAPTURE;
    return !capture_is_lost;
}

static int mode_of_thread(void) { return capture_mode; }

/* ---- what is exported ---- */

static struct cuda_driver driver = {
    .get_error_name = get_error_name,
    .get_error_string = get_error_string,
    .init = init,
    .driver_version = driver_version,
    .device_count = device_count,
    .device_get = device_get,
    .device_name = device_name,
    .device_attribute = device_attribute,
    .primary_context_retain = primary_context_retain,
    .context_current = context_current,
    .context_push = context_push,
    .context_pop = context_pop,
    .context_synchronize = context_synchronize,
    .capture_mode_exchange = capture_mode_exchange,
    .stream_context = stream_context,
    .stream_capturing = stream_capturing,
};

/* The driver's one entry that the library looks up by symbol. What is not there is told by an error, or by no address
 * alone: every second one. */
FDM_API cu_result cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                                      int *found) {
    pthread_mutex_lock(&lock);
    get_ready();
    fake_fill_kernels(&driver);
    fake_fill_memory(&driver);
    cu_result result = injection_due(&fake_state.injection, "cuGetProcAddress");
    const int lacking = ++fake_state.asked == fake_state.lacks;
    *function = NULL;
    for (int i = 0; i < NUM_FUNCTIONS && !result && !lacking; i++)
        if (strcmp(functions[i].name, name) == 0)
            memcpy(function, (const char *)&driver + functions[i].place, sizeof *function);
    if (found)
        *found = !*function;
    if (!result && !*function && fake_state.lacks % 2 == 0)
        result = NOT_FOUND;
    return fake_end(result);
}

static void inject(const char *function, int result, int64_t nth) {
    pthread_mutex_lock(&lock);
    get_ready();
    fake_state.injection = (struct injection){.result = result, .nth = nth};
    snprintf(fake_state.injection.function, sizeof fake_state.injection.function, "%s", function);
    pthread_mutex_unlock(&lock);
}

static const char *injected(void) { return fake_state.injection.injected; }

static int64_t count(const char *function) {
    int64_t calls = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        if (strcmp(functions[i].name, function) == 0)
            calls = fake_state.counts[i];
    pthread_mutex_unlock(&lock);
    return calls;
}

static int64_t num_launches(void) {
    pthread_mutex_lock(&lock);
    int64_t launches = fake_state.num_launches;
    pthread_mutex_unlock(&lock);
    return launches;
}

static struct fake_launch launch_at(int64_t index) {
    pthread_mutex_lock(&lock);
    struct fake_launch launch =
        index >= 0 && index < fake_state.num_launches ? fake_state.launches[index] : (struct fake_launch){.device = -1};
    pthread_mutex_unlock(&lock);
    return launch;
}

void fake_note(const struct fake_order *order) {
    if (fake_state.num_orders == fake_state.max_orders) {
        fake_state.max_orders = 2 * fake_state.max_orders + 64;
        fake_state.orders = realloc(fake_state.orders, (size_t)fake_state.max_orders * sizeof *fake_state.orders);
    }
    fake_state.orders[fake_state.num_orders++] = *order;
}

static int64_t num_orders(void) {
    pthread_mutex_lock(&lock);
    const int64_t orders = fake_state.num_orders;
    pthread_mutex_unlock(&lock);
    return orders;
}

static struct fake_order order_at(int64_t index) {
    pthread_mutex_lock(&lock);
    const struct fake_order order = fake_state.orders[index];
    pthread_mutex_unlock(&lock);
    return order;
}

static struct fake_live live(void) {
    pthread_mutex_lock(&lock);
    struct fake_live now = fake_state.live;
    pthread_mutex_unlock(&lock);
    return now;
}

static void plant(double (*seconds)(const struct fake_launch *launch, const void *parameters)) {
    pthread_mutex_lock(&lock);
    fake_state.planted = seconds;
    pthread_mutex_unlock(&lock);
}

static int stack_depth(void) { return depth; }
static void push_foreign_context(void) { stack[depth++] = &fake_state.foreign; }
static void *foreign_stream(void) { return &fake_state.foreign; }
static int pop_foreign_context(void) { return depth > 0 && stack[--depth] == &fake_state.foreign; }

FDM_API const struct fake_cuda fake_cuda = {inject,
                                            injected,
                                            count,
                                            num_launches,
                                            launch_at,
                                            live,
                                            stack_depth,
                                            push_foreign_context,
                                            pop_foreign_context,
                                            begin_capture,
                                            end_capture,
                                            mode_of_thread,
                                            foreign_stream,
                                            plant,
                                            num_orders,
                                            order_at};
