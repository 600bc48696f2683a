/* native_xla.c: attention as XLA's custom calls, for flash_dmattn.jax. XLA calls them on its own threads, without the
 * interpreter.
 *
 * Each call has two attributes: `places`, int64: of each argument and then of each result its position in
 * native_fields.h; `settings`, float64: in the order of NATIVE_SETTINGS, a NaN for a softmax scale that is not given.
 * An argument or result may have more axes than its row says: what vmap() has put in front is folded into the batch. */
#include "native_xla.h"
#include "native.h"
#include "native_fields.h"

#include <string.h>

/* ---- errors ---- */

static void *refuse(const struct xla_call *call, int32_t code, const char *message) {
    struct xla_error_create create = {{sizeof create, NULL}, message, code};
    return call->api->error_create(&create);
}

static void *result_of(const struct xla_call *call, fdm_status status) {
    if (status == FDM_OK)
        return NULL;
    const int32_t code = status == FDM_ERROR_INVALID_ARGUMENT ? XLA_INVALID_ARGUMENT
                         : status == FDM_ERROR_UNSUPPORTED    ? XLA_UNIMPLEMENTED
                         : status == FDM_ERROR_OUT_OF_MEMORY  ? XLA_RESOURCE_EXHAUSTED
                                                              : XLA_INTERNAL;
    return refuse(call, code, fdm_last_error());
}

/* ---- what is given ---- */

static const struct xla_array *find_array(const struct xla_call *call, const char *name, int32_t dtype) {
    for (int64_t i = 0; i < call->attributes.size; i++) {
        const struct xla_span *given = call->attributes.names[i];
        const struct xla_array *array = call->attributes.values[i];
        if (given->length == strlen(name) && memcmp(given->text, name, given->length) == 0)
            return call->attributes.types[i] == XLA_ATTRIBUTE_ARRAY && array->dtype == dtype ? array : NULL;
    }
    return NULL;
}

static int axes_of(int position) {
    for (int i = 0; i < NUM_FORWARD; i++)
        if (i == position || native_fields[i].gradient == position) {
            static const int counts[] = {[AXES_TOKENS] = 4,  [AXES_SCORES] = 4, [AXES_KEYS] = 3,  [AXES_ROWS] = 3,
                                         [AXES_OFFSETS] = 1, [AXES_HEADS] = 1,  [AXES_RANGES] = 4};
            return counts[native_fields[i].axes];
        }
    return 0;
}

static fdm_dtype dtype_of(int32_t dtype) {
    switch (dtype) {
    case XLA_BOOL: return FDM_BOOL;
    case XLA_INT32: return FDM_INT32;
    case XLA_FLOAT16: return FDM_FLOAT16;
    case XLA_FLOAT32: return FDM_FLOAT32;
    case XLA_FLOAT64: return FDM_FLOAT64;
    case XLA_BFLOAT16: return FDM_BFLOAT16;
    default: return FDM_NO_DTYPE;
    }
}

struct tensors {
    fdm_tensor tensor[NUM_TENSORS];
    int64_t shape[NUM_TENSORS][NATIVE_MAX_AXES], strides[NUM_TENSORS][NATIVE_MAX_AXES];
    fdm_tensor *given[NUM_TENSORS];
};

/* A buffer as the tensor of its position; 0 where it cannot be one. */
static int take(struct tensors *t, int64_t position, const struct xla_buffer *buffer, fdm_device_id device) {
    const fdm_dtype dtype = dtype_of(buffer->dtype);
    if (position < 0 || position >= NUM_TENSORS || dtype == FDM_NO_DTYPE)
        return 0;
    const int axes = axes_of((int)position), ndim = (int)buffer->rank;
    if (ndim > NATIVE_MAX_AXES)
        return 0;
    const int more = ndim > axes && axes > 1 ? ndim - axes : 0; /* what vmap() has put in front */
    int64_t *shape = t->shape[position], *strides = t->strides[position], stride = 1;
    for (int i = 0; i < ndim - more; i++)
        shape[i] = buffer->dims[i + more];
    for (int i = 0; i < more; i++)
        shape[0] *= buffer->dims[i];
    for (int i = ndim - more - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= shape[i] > 1 ? shape[i] : 1;
    }
    t->tensor[position] = (fdm_tensor){.data = buffer->data,
                                       .device = device,
                                       .ndim = ndim - more,
                                       .dtype = fdm_data_type_of(dtype),
                                       .shape = shape,
                                       .strides = strides};
    t->given[position] = &t->tensor[position];
    return 1;
}

static int take_all(struct tensors *t, const struct xla_call *call, fdm_device_id device) {
    const struct xla_array *places = find_array(call, "places", XLA_INT64);
    const int64_t count = call->arguments.size;
    if (!places || (int64_t)places->size != count + call->results.size)
        return 0;
    const int64_t *place = places->data;
    for (int64_t i = 0; i < (int64_t)places->size; i++)
        if (!take(t, place[i], i < count ? call->arguments.items[i] : call->results.items[i - count], device))
            return 0;
    return 1;
}

static int take_settings(const struct xla_call *call, fdm_options *options) {
    const struct xla_array *settings = find_array(call, "settings", XLA_FLOAT64);
    if (!settings || settings->size != NUM_SETTINGS)
        return 0;
    const double *value = settings->data;
    *options = fdm_options_default();
    options->has_softmax_scale = value[SETTING_SOFTMAX_SCALE] == value[SETTING_SOFTMAX_SCALE];
#define TAKE_NUMBER(position, member, ...)                               \
    if (position != SETTING_SOFTMAX_SCALE || options->has_softmax_scale) \
        options->member = value[position];
    NATIVE_SETTINGS(TAKE_NUMBER)
    return 1;
}

/* ---- running ---- */

struct scratch {
    const struct xla_call *call;
    void *data; /* as XLA gave it */
    size_t bytes;
    void *error; /* XLA's own, where it gave none */
};
/* XLA's memory of the call's stream. XLA takes no larger alignment than 16, and an allocator owes 64. */
enum { XLA_ALIGNMENT = 16, SCRATCH_ALIGNMENT = 64 };
static void *allocate_scratch(void *context, size_t bytes) {
    struct scratch *scratch = context;
    struct xla_memory memory = {{sizeof memory, NULL}, scratch->call->context, 0, XLA_ALIGNMENT, NULL};
    memory.size = bytes + SCRATCH_ALIGNMENT - XLA_ALIGNMENT;
    scratch->error = scratch->call->api->memory_allocate(&memory);
    scratch->data = scratch->error ? NULL : memory.data;
    scratch->bytes = memory.size;
    return (void *)(((uintptr_t)scratch->data + SCRATCH_ALIGNMENT - 1) / SCRATCH_ALIGNMENT * SCRATCH_ALIGNMENT);
}
static void release_scratch(void *context, void *memory) {
    struct scratch *scratch = context;
    struct xla_memory_free given = {{sizeof given, NULL}, scratch->call->context, scratch->bytes, scratch->data};
    if (memory)
        (void)scratch->call->api->memory_free(&given);
}

/* XLA asks once whom it speaks with. That CUDA graphs may capture the calls is not said: nobody has tried. */
static void answer(const struct xla_call *call) {
    struct xla_metadata *metadata = ((struct xla_metadata_extension *)call->head.extension)->metadata;
    metadata->version.major = call->api->version.major;
    metadata->version.minor = call->api->version.minor;
    metadata->traits = 0;
}

static void *run(const struct xla_call *call, int on_cuda, native_call function) {
    if (call->head.extension && call->head.extension->type == XLA_EXTENSION_METADATA) {
        answer(call);
        return NULL;
    }
    if (call->stage != XLA_EXECUTE)
        return NULL;
    if (on_cuda && call->api->head.struct_size < sizeof *call->api)
        return refuse(call, XLA_UNIMPLEMENTED, "this jaxlib is too old: flash_dmattn needs jax 0.10 or newer");
    struct tensors t = {0};
    struct xla_device_get device = {{sizeof device, NULL}, call->context, 0};
    fdm_options options;
    fdm_tensors tensors;
    void *error = on_cuda ? call->api->device_get(&device) : NULL;
    if (error)
        return error;
    if (!take_all(&t, call, (fdm_device_id){on_cuda ? FDM_CUDA : FDM_CPU, device.ordinal}) ||
        !take_settings(call, &options))
        return refuse(call, XLA_INVALID_ARGUMENT, "a custom call of flash_dmattn has operands that it does not know");
    native_bind(t.given, &tensors);
    if (!on_cuda)
        return result_of(call, function(&tensors, &options, NULL));
    struct xla_stream_get get = {{sizeof get, NULL}, call->context, NULL};
    if ((error = call->api->stream_get(&get)))
        return error;
    struct scratch scratch = {.call = call};
    const fdm_allocator allocator = {&scratch, allocate_scratch, release_scratch};
    options.stream = get.stream;
    const fdm_status status = function(&tensors, &options, &allocator);
    return scratch.error ? scratch.error : result_of(call, status);
}

static void *forward_on_cpu(struct xla_call *call) { return run(call, 0, fdm_attention_forward); }
static void *backward_on_cpu(struct xla_call *call) { return run(call, 0, fdm_attention_backward); }
static void *forward_on_cuda(struct xla_call *call) { return run(call, 1, fdm_attention_forward); }
static void *backward_on_cuda(struct xla_call *call) { return run(call, 1, fdm_attention_backward); }

/* xla_handlers() -> [(target, platform, capsule)], what jax.ffi.register_ffi_target() takes */
PyObject *native_xla_handlers(PyObject *module, PyObject *unused) {
    static const struct {
        const char *target, *platform;
        void *(*handler)(struct xla_call *);
    } handlers[] = {{"flash_dmattn_forward", "cpu", forward_on_cpu},
                    {"flash_dmattn_backward", "cpu", backward_on_cpu},
                    {"flash_dmattn_forward", "CUDA", forward_on_cuda},
                    {"flash_dmattn_backward", "CUDA", backward_on_cuda}};
    enum { COUNT = sizeof handlers / sizeof handlers[0] };
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < COUNT; i++) {
        void *address;
        memcpy(&address, &handlers[i].handler, sizeof address);
        PyObject *capsule = PyCapsule_New(address, NULL, NULL);
        PyObject *row = capsule ? Py_BuildValue("(ssN)", handlers[i].target, handlers[i].platform, capsule) : NULL;
        if (!row || PyList_Append(list, row))
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}
