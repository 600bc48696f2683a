/* driver.h: the CUDA driver, opened at run time: its functions by name, contexts, and its errors as sentences.
 *
 * Types and numbers are those of the CUDA Driver API reference (CUDA 12 and later); no CUDA header is used. */
#ifndef FDM_CUDA_DRIVER_H
#define FDM_CUDA_DRIVER_H

#include "flash_dmattn.h"

typedef int cu_result; /* 0 = success */
typedef int cu_device;
typedef struct cu_context *cu_context;
typedef struct cu_module *cu_module;
typedef struct cu_function *cu_function;
typedef struct cu_stream *cu_stream;
typedef struct cu_event *cu_event;
typedef unsigned long long cu_address;

enum {
    CU_ERROR_OUT_OF_MEMORY = 2,
    CU_ERROR_INVALID_CONTEXT = 201,
    CU_ERROR_INVALID_HANDLE = 400,
    CU_ERROR_NOT_READY = 600
};
enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum { CU_STREAM_NON_BLOCKING = 1, CU_EVENT_DISABLE_TIMING = 2 };
enum cu_device_attribute {
    CU_NUM_MULTIPROCESSORS = 16,
    CU_MEMORY_CLOCK_KHZ = 36,
    CU_MEMORY_BUS_BITS = 37,
    CU_L2_CACHE_BYTES = 38,
    CU_THREADS_PER_MULTIPROCESSOR = 39,
    CU_COMPUTE_MAJOR = 75,
    CU_COMPUTE_MINOR = 76,
    CU_REGISTERS_PER_MULTIPROCESSOR = 82,
    CU_SHARED_BYTES_OPTIN = 97
};
enum cu_function_attribute {
    CU_FUNCTION_MAX_THREADS = 0,
    CU_FUNCTION_STATIC_SHARED_BYTES = 1,
    CU_FUNCTION_LOCAL_BYTES = 3,
    CU_FUNCTION_REGISTERS = 4,
    CU_FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8,
    CU_FUNCTION_SHARED_CARVEOUT = 9,
    CU_FUNCTION_NON_PORTABLE_CLUSTER = 14
};

/* CUlaunchAttribute and CUlaunchConfig. */
enum cu_launch_attribute_id {
    CU_LAUNCH_COOPERATIVE = 2,
    CU_LAUNCH_CLUSTER_DIMENSION = 4,
    CU_LAUNCH_PROGRAMMATIC_SERIALIZATION = 6
};
struct cu_launch_attribute {
    int id;
    char padding[4];
    union {
        char bytes[64];
        struct {
            unsigned x, y, z;
        } cluster;
        int cooperative, programmatic_serialization;
    } value;
};
struct cu_launch_config {
    unsigned grid[3], block[3], shared_bytes;
    cu_stream stream;
    struct cu_launch_attribute *attributes;
    unsigned num_attributes;
};
_Static_assert(sizeof(struct cu_launch_attribute) == 72, "CUlaunchAttribute");
_Static_assert(sizeof(struct cu_launch_config) == 56, "CUlaunchConfig");

/* X(our name, the driver's name, parameters); all return cu_result. */
#define CU_FUNCTIONS(X)                                                                                               \
    X(get_error_name, "cuGetErrorName", (cu_result error, const char **text))                                         \
    X(get_error_string, "cuGetErrorString", (cu_result error, const char **text))                                     \
    X(init, "cuInit", (unsigned flags))                                                                               \
    X(driver_version, "cuDriverGetVersion", (int *version))                                                           \
    X(device_count, "cuDeviceGetCount", (int *count))                                                                 \
    X(device_get, "cuDeviceGet", (cu_device * device, int index))                                                     \
    X(device_name, "cuDeviceGetName", (char *name, int size, cu_device device))                                       \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, cu_device device))                        \
    X(primary_context_retain, "cuDevicePrimaryCtxRetain", (cu_context * context, cu_device device))                   \
    X(context_current, "cuCtxGetCurrent", (cu_context * context))                                                     \
    X(context_push, "cuCtxPushCurrent", (cu_context context))                                                         \
    X(context_pop, "cuCtxPopCurrent", (cu_context * context))                                                         \
    X(context_synchronize, "cuCtxSynchronize", (void))                                                                \
    X(module_load, "cuModuleLoadData", (cu_module * module, const void *image))                                       \
    X(module_unload, "cuModuleUnload", (cu_module module))                                                            \
    X(module_function, "cuModuleGetFunction", (cu_function * function, cu_module module, const char *name))           \
    X(function_set, "cuFuncSetAttribute", (cu_function function, int attribute, int value))                           \
    X(function_get, "cuFuncGetAttribute", (int *value, int attribute, cu_function function))                          \
    X(launch, "cuLaunchKernelEx",                                                                                     \
      (const struct cu_launch_config *config, cu_function function, void **arguments, void **extra))                  \
    X(memory_allocate, "cuMemAlloc", (cu_address * memory, size_t bytes))                                             \
    X(memory_free, "cuMemFree", (cu_address memory))                                                                  \
    X(copy_to_device, "cuMemcpyHtoD", (cu_address to, const void *from, size_t bytes))                                \
    X(copy_to_host, "cuMemcpyDtoH", (void *to, cu_address from, size_t bytes))                                        \
    X(copy_on_device, "cuMemcpyDtoD", (cu_address to, cu_address from, size_t bytes))                                 \
    X(memory_fill, "cuMemsetD8", (cu_address memory, unsigned char value, size_t bytes))                              \
    X(memory_fill_async, "cuMemsetD8Async", (cu_address memory, unsigned char value, size_t bytes, cu_stream stream)) \
    X(event_create, "cuEventCreate", (cu_event * event, unsigned flags))                                              \
    X(event_record, "cuEventRecord", (cu_event event, cu_stream stream))                                              \
    X(event_synchronize, "cuEventSynchronize", (cu_event event))                                                      \
    X(event_elapsed, "cuEventElapsedTime", (float *milliseconds, cu_event from, cu_event to))                         \
    X(event_destroy, "cuEventDestroy", (cu_event event))                                                              \
    X(tensor_map_encode, "cuTensorMapEncodeTiled",                                                                    \
      (void *map, int dtype, unsigned rank, void *address, const unsigned long long *extents,                         \
       const unsigned long long *stride_bytes, const unsigned *box, const unsigned *element_strides, int interleave,  \
       int swizzle, int l2_promotion, int out_of_bounds_fill))                                                        \
    X(capture_mode_exchange, "cuThreadExchangeStreamCaptureMode", (int *mode))                                        \
    X(stream_context, "cuStreamGetCtx", (cu_stream stream, cu_context * context))                                     \
    X(stream_capturing, "cuStreamIsCapturing", (cu_stream stream, int *status))                                       \
    X(stream_query, "cuStreamQuery", (cu_stream stream))                                                              \
    X(stream_priorities, "cuCtxGetStreamPriorityRange", (int *least, int *greatest))                                  \
    X(stream_create, "cuStreamCreateWithPriority", (cu_stream * stream, unsigned flags, int priority))                \
    X(stream_wait, "cuStreamWaitEvent", (cu_stream stream, cu_event event, unsigned flags))                           \
    X(stream_destroy, "cuStreamDestroy", (cu_stream stream))

struct cuda_driver {
#define CU_MEMBER(member, name, parameters) cu_result(*member) parameters;
    CU_FUNCTIONS(CU_MEMBER)
#undef CU_MEMBER
    int version;     /* 13000 = CUDA 13.0 */
    int num_devices; /* at most CUDA_DEVICES_MAX are used */
};
enum { CUDA_DEVICES_MAX = 64 };

/* The driver, opened by the first call of the process; a sentence when there is none, it is too old, or the process
 * is a child of the one that opened it. */
fdm_status cuda_driver_get(const struct cuda_driver **driver);

/* Status and sentence for a failed driver call: what was tried, and the driver's own words. */
fdm_status cuda_driver_error(const struct cuda_driver *driver, cu_result result, const char *what);

/* While a stream is captured, in this thread or, in the default mode, in any other, the driver refuses what is not
 * enqueued, and that ends the capture (CUDA Driver API, cuThreadExchangeStreamCaptureMode). Between these two calls it
 * lets this thread do it. */
struct cuda_capture_scope {
    int relaxed, mode; /* the thread's mode before */
};
fdm_status cuda_capture_relax(const struct cuda_driver *driver, struct cuda_capture_scope *scope);
void cuda_capture_restore(const struct cuda_driver *driver, const struct cuda_capture_scope *scope);

/* Makes the device's primary context current until cuda_context_leave(); costs one driver call when it already is. For
 * what is enqueued. */
struct cuda_context_scope {
    int pushed;
    struct cuda_capture_scope capture;
};
fdm_status cuda_context_enter(const struct cuda_driver *driver, int32_t device, struct cuda_context_scope *scope);
/* The same for everything else: no capture of a stream forbids it. */
fdm_status cuda_context_enter_relaxed(const struct cuda_driver *driver, int32_t device,
                                      struct cuda_context_scope *scope);
void cuda_context_leave(const struct cuda_driver *driver, const struct cuda_context_scope *scope);

#endif
