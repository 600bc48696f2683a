/* native_torch.c: attention on PyTorch tensors, one call a pass: which way it goes, outputs, workspace, stream,
 * autograd. Nothing is built against PyTorch: tensors are read through DLPack's exchange table, and the functions of
 * PyTorch that are called are handed over by _torch.py. */
#include "native_torch.h"

#include "native_fields.h"

/* What use_torch() takes, by name. DESCRIBE: makes a tuple of a tensor where PyTorch has no exchange table, else None.
 * EMPTY_CPU and EMPTY_CUDA: (shape, strides, dtype) on the CPU and on the current CUDA device, or None. From TRANSFORMS
 * to TRACER: whether somebody watches. */
#define FROM_TORCH(X)                       \
    X(TENSOR, "Tensor")                     \
    X(PARAMETER, "Parameter")               \
    X(DESCRIBE, "describe")                 \
    X(FLOAT32, "float32")                   \
    X(FLOAT64, "float64")                   \
    X(UINT8, "uint8")                       \
    X(BOOL, "bool")                         \
    X(IS_NEG, "is_neg")                     \
    X(EMPTY_LIKE, "empty_like")             \
    X(ZEROS_LIKE, "zeros_like")             \
    X(EMPTY_CPU, "empty_cpu")               \
    X(EMPTY_CUDA, "empty_cuda")             \
    X(NUM_THREADS, "num_threads")           \
    X(CUDA_STREAM, "cuda_stream")           \
    X(GRAD_ENABLED, "grad_enabled")         \
    X(AUTOCAST_ENABLED, "autocast_enabled") \
    X(TRANSFORMS, "transforms")             \
    X(DISPATCH_MODES, "dispatch_modes")     \
    X(PROFILER, "profiler")                 \
    X(TRACER, "tracer")                     \
    X(FORWARD_AD, "forward_ad")             \
    X(ARGUMENTS, "arguments")               \
    X(APPLY, "apply")

/* Attributes and names of devices, as Python's strings. */
#define TEXTS(X)                        \
    X(DTYPE, "dtype")                   \
    X(REQUIRES_GRAD, "requires_grad")   \
    X(CONTIGUOUS, "contiguous")         \
    X(NEW_EMPTY, "new_empty")           \
    X(CURRENT_LEVEL, "_current_level")  \
    X(FORCED_FAMILY, "forced_family")   \
    X(TO_SAVE, "to_save")               \
    X(SETTINGS, "settings")             \
    X(MATERIALIZE, "materialize_grads") \
    X(CPU, "cpu")                       \
    X(CUDA, "cuda")

#define POSITION(position, text) position,
#define TEXT(position, text)     text,
enum { FROM_TORCH(POSITION) NUM_TORCH };
enum { TEXTS(POSITION) NUM_TEXTS };
static const char *const torch_names[] = {FROM_TORCH(TEXT)};
static const char *const text_values[] = {TEXTS(TEXT)};
static PyObject *torch[NUM_TORCH]; /* kept for the life of the process */
static PyObject *texts[NUM_TEXTS];

/* use_torch({name: object}) */
PyObject *native_use_torch(PyObject *module, PyObject *names) {
    for (int i = 0; i < NUM_TEXTS; i++)
        if (!texts[i] && !(texts[i] = PyUnicode_InternFromString(text_values[i])))
            return NULL;
    for (int i = 0; i < NUM_TORCH; i++) {
        PyObject *object = PyDict_GetItemString(names, torch_names[i]);
        if (!object) {
            PyErr_Format(PyExc_KeyError, "%s", torch_names[i]);
            return NULL;
        }
        torch[i] = Py_NewRef(object);
    }
    Py_RETURN_NONE;
}

/* Whether torch_names[which]() is true; -1 with an exception set. */
static int ask(int which) {
    PyObject *answer = PyObject_CallNoArgs(torch[which]);
    int truth = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return truth;
}

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

/* native_tensor() of a PyTorch tensor. */
static fdm_tensor *view(PyObject *object, struct tensor_argument *argument, int *failed) {
    if (torch[DESCRIBE] == Py_None || object == Py_None)
        return native_tensor(object, argument, failed);
    PyObject *description = PyObject_CallFunctionObjArgs(torch[DESCRIBE], object, NULL);
    fdm_tensor *tensor = description ? native_tensor(description, argument, failed) : NULL;
    *failed |= !description;
    Py_XDECREF(description); /* its extents were copied */
    return tensor;
}

static int is_contiguous(const fdm_tensor *tensor) {
    int64_t step = 1;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->strides && tensor->strides[i] != step)
            return 0;
        step *= tensor->shape[i];
    }
    return 1;
}

/* A new contiguous tensor where `like` is. The quick functions allocate on the current device; a tensor on another one
 * is made again the general way. */
static PyObject *new_tensor(PyObject *like, fdm_device_id device, PyObject *dtype, int32_t ndim, const int64_t *shape,
                            struct tensor_argument *argument) {
    int64_t steps[NATIVE_MAX_AXES], step = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        steps[i] = step;
        step *= shape[i] > 1 ? shape[i] : 1;
    }
    int failed = 0;
    PyObject *quick = torch[device.type == FDM_CUDA ? EMPTY_CUDA : EMPTY_CPU], *tensor = NULL;
    PyObject *extents = native_extents(shape, ndim), *strides = native_extents(steps, ndim);
    if (extents && strides && quick != Py_None) {
        tensor = PyObject_CallFunctionObjArgs(quick, extents, strides, dtype, NULL);
        if (tensor && view(tensor, argument, &failed) && argument->tensor.device.index != device.index)
            Py_CLEAR(tensor);
    }
    if (!tensor && !PyErr_Occurred()) {
        PyObject *method = PyObject_GetAttr(like, texts[NEW_EMPTY]);
        PyObject *positional = PyTuple_Pack(1, extents), *named = Py_BuildValue("{sO}", "dtype", dtype);
        tensor = method && positional && named ? PyObject_Call(method, positional, named) : NULL;
        Py_XDECREF(method);
        Py_XDECREF(positional);
        Py_XDECREF(named);
        if (tensor)
            view(tensor, argument, &failed);
    }
    Py_XDECREF(extents);
    Py_XDECREF(strides);
    if (failed)
        Py_CLEAR(tensor);
    if (tensor)
        native_ask_for_large_pages(&argument->tensor);
    return tensor;
}

PyObject *native_torch_empty_like(PyObject *like, const fdm_tensor *tensor, struct tensor_argument *argument) {
    int failed = 0;
    PyObject *made;
    if (is_contiguous(tensor)) {
        PyObject *dtype = PyObject_GetAttr(like, texts[DTYPE]);
        made = dtype ? new_tensor(like, tensor->device, dtype, tensor->ndim, tensor->shape, argument) : NULL;
        Py_XDECREF(dtype);
    } else {
        made = PyObject_CallFunctionObjArgs(torch[EMPTY_LIKE], like, NULL);
        if (made)
            view(made, argument, &failed);
    }
    if (failed)
        Py_CLEAR(made);
    return made;
}

/* ---- a pass ----------------------------------------------------------------------------------------------------- */

/* Workspace on a CUDA device: a tensor of PyTorch's, which may reuse it on the current stream right after the call. */
struct workspace {
    PyObject *query, *tensor;
    fdm_device_id device;
};

static void *allocate(void *context, size_t bytes) {
    struct workspace *workspace = context;
    struct tensor_argument argument;
    const int64_t shape[] = {(int64_t)bytes};
    PyGILState_STATE state = PyGILState_Ensure();
    workspace->tensor = new_tensor(workspace->query, workspace->device, torch[UINT8], 1, shape, &argument);
    PyGILState_Release(state);
    return workspace->tensor ? (char *)argument.tensor.data + argument.tensor.byte_offset : NULL;
}

static void release(void *context, void *memory) {} /* with the workspace, which needs the GIL */

int native_torch_stream(fdm_device_id device, void **stream) {
    PyObject *index = PyLong_FromLong(device.index);
    PyObject *where = index ? PyObject_CallFunctionObjArgs(torch[CUDA_STREAM], index, NULL) : NULL;
    *stream = where ? native_address(where) : NULL;
    Py_XDECREF(index);
    Py_XDECREF(where);
    return PyErr_Occurred() ? -1 : 0;
}

static int num_threads(int32_t *threads) {
    PyObject *number = PyObject_CallNoArgs(torch[NUM_THREADS]);
    *threads = number ? (int32_t)PyLong_AsLong(number) : 0;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

int native_torch_run(native_call call, const fdm_tensors *tensors, PyObject *query, fdm_options *options) {
    struct workspace workspace = {query, NULL, tensors->q->device};
    const fdm_allocator allocator = {&workspace, allocate, release};
    const int on_cuda = workspace.device.type == FDM_CUDA;
    PyObject *family = PyObject_GetAttr(torch[ARGUMENTS], texts[FORCED_FAMILY]), *result = NULL;
    int failed = !family || (on_cuda ? native_torch_stream(workspace.device, &options->stream)
                                     : num_threads(&options->num_threads));
    if (!failed && family != Py_None)
        failed = !(options->family = PyUnicode_AsUTF8AndSize(family, NULL));
    if (!failed)
        result = native_run(call, tensors, options, on_cuda ? &allocator : NULL);
    Py_XDECREF(workspace.tensor);
    Py_XDECREF(family);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* The same with settings as a tuple. */
static int run(native_call call, fdm_tensors *tensors, PyObject *query, PyObject *settings) {
    PyObject *setting[NUM_SETTINGS];
    fdm_options options;
    fdm_tile_plan plan;
    for (int i = 0; i < NUM_SETTINGS; i++)
        if (!(setting[i] = PyTuple_GetItem(settings, i)))
            return -1;
    if (native_options(setting, NULL, Py_None, &options) ||
        native_take_plan(setting[SETTING_MASK_PLAN], tensors, &plan))
        return -1;
    return native_torch_run(call, tensors, query, &options);
}

static void clear(PyObject **objects, int count) {
    for (int i = 0; i < count; i++)
        Py_CLEAR(objects[i]);
}

/* Objects of a pass lie by position, NULL where there is none: the inputs, and what the pass makes. */
static void take_inputs(PyObject *const *inputs, PyObject **objects) {
    for (int i = 0; i < NUM_TENSORS; i++)
        objects[i] = i < NUM_INPUTS ? inputs[i] : NULL;
}

int native_torch_results(PyObject *query, const fdm_tensor *q, int64_t head_dim_v, int first, int last,
                         PyObject **objects, struct tensor_argument *arguments) {
    const int32_t axes = q->ndim;
    int64_t shape[] = {q->shape[0], q->shape[1], q->shape[2], head_dim_v}, rows[3] = {0};
    shape[axes - 1] = head_dim_v;
    for (int i = 0; i < axes - 1; i++) /* the last two axes change places */
        rows[i] = q->shape[i < axes - 3 ? i : 2 * axes - 5 - i];
    PyObject *dtype = PyObject_GetAttr(query, texts[DTYPE]);
    PyObject *of_rows = torch[fdm_dtype_of(q) == FDM_FLOAT64 ? FLOAT64 : FLOAT32];
    int failed = !dtype;
    for (int i = first; i < last && !failed; i++) {
        objects[i] = i == 0 ? new_tensor(query, q->device, dtype, axes, shape, &arguments[i])
                            : new_tensor(query, q->device, of_rows, axes - 1, rows, &arguments[i]);
        failed = !objects[i];
    }
    Py_XDECREF(dtype);
    return failed ? -1 : 0;
}

/* The first `wanted` results. */
static int new_results(PyObject **objects, fdm_tensor **given, int wanted, struct tensor_argument *arguments) {
    const fdm_tensor *q = given[ARG_Q], *v = given[ARG_V];
    const int32_t axes = given[ARG_CU_SEQLENS_Q] ? 3 : 4;
    if (!q || !v || q->ndim != axes || v->ndim != axes) {
        PyErr_Format(PyExc_ValueError, "query and value need %d axes", (int)axes);
        return -1;
    }
    for (int i = ARG_OUT; i < ARG_OUT + wanted; i++)
        given[i] = &arguments[i].tensor;
    return native_torch_results(objects[ARG_Q], q, v->shape[axes - 1], 0, wanted, objects + ARG_OUT,
                                arguments + ARG_OUT);
}

/* Makes the first `wanted` results, by position in `objects`; none with an exception set. */
static int forward(PyObject **objects, PyObject *settings, int wanted) {
    struct tensor_argument arguments[NUM_FORWARD];
    fdm_tensor *given[NUM_TENSORS] = {NULL};
    fdm_tensors tensors;
    int failed = 0;
    for (int i = 0; i < NUM_FORWARD; i++)
        arguments[i].owner = NULL;
    for (int i = 0; i < NUM_INPUTS; i++)
        given[i] = view(objects[i], &arguments[i], &failed);
    int status = failed ? -1 : new_results(objects, given, wanted, arguments);
    if (!status) {
        native_bind(given, &tensors);
        status = run(fdm_attention_forward, &tensors, objects[ARG_Q], settings);
    }
    native_release(arguments, NUM_FORWARD);
    if (status)
        clear(objects + ARG_OUT, NUM_RESULTS);
    return status;
}

/* The upstream gradient with a contiguous last axis; zeros where there is none. */
static PyObject *upstream(PyObject *dout, PyObject *out, struct tensor_argument *argument) {
    int failed = 0;
    if (dout == Py_None)
        dout = PyObject_CallFunctionObjArgs(torch[ZEROS_LIKE], out, NULL);
    else
        Py_INCREF(dout);
    const fdm_tensor *tensor = dout ? view(dout, argument, &failed) : NULL;
    const int32_t last = tensor ? tensor->ndim - 1 : -1;
    if (last >= 0 && tensor->strides && tensor->strides[last] != 1 && tensor->shape[last] != 1) {
        PyObject *strided = dout;
        native_release(argument, 1);
        dout = PyObject_CallMethodObjArgs(strided, texts[CONTIGUOUS], NULL);
        Py_DECREF(strided);
        if (dout)
            view(dout, argument, &failed);
    }
    if (failed)
        Py_CLEAR(dout);
    return dout;
}

/* objects: by position, what the backward reads; the gradients of inputs that are wanted are made there, none of them
 * with an exception set. needs: which gradients of inputs are wanted, in their order. */
static int backward(PyObject **objects, const int *needs, PyObject *settings) {
    struct tensor_argument arguments[NUM_TENSORS];
    fdm_tensor *given[NUM_TENSORS] = {NULL};
    fdm_tensors tensors;
    int failed = 0;
    for (int i = 0; i < NUM_TENSORS; i++)
        arguments[i].owner = NULL;
    for (int i = 0; i < NUM_READ; i++)
        if (i != ARG_DOUT)
            given[i] = view(objects[i], &arguments[i], &failed);
    PyObject *dout = failed ? NULL : upstream(objects[ARG_DOUT], objects[ARG_OUT], &arguments[ARG_DOUT]);
    given[ARG_DOUT] = &arguments[ARG_DOUT].tensor;
    failed = !dout;
    for (int i = 0; i < NUM_INPUTS; i++) {
        const int gradient = native_fields[i].gradient;
        if (gradient && needs[gradient - NUM_READ] && given[i] && !failed) {
            objects[gradient] = native_torch_empty_like(objects[i], given[i], &arguments[gradient]);
            given[gradient] = &arguments[gradient].tensor;
            failed = !objects[gradient];
        }
    }
    native_bind(given, &tensors);
    int status = failed ? -1 : run(fdm_attention_backward, &tensors, objects[ARG_Q], settings);
    native_release(arguments, NUM_TENSORS);
    Py_XDECREF(dout);
    if (status)
        clear(objects + NUM_READ, NUM_GRADIENTS);
    return status;
}

/* ---- which way -------------------------------------------------------------------------------------------------- */

int native_torch_is_plain(PyObject *object, struct tensor_argument *argument, int records) {
    enum { DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4 };
    PyObject *type = (PyObject *)Py_TYPE(object);
    int failed = 0;
    if (type != torch[TENSOR] && type != torch[PARAMETER])
        return 0;
    const fdm_tensor *tensor = view(object, argument, &failed);
    if (!tensor) {
        PyErr_Clear(); /* what it is, the dispatcher will say */
        return 0;
    }
    if (tensor->device.type != FDM_CPU && tensor->device.type != FDM_CUDA)
        return 0;
    PyObject *answer = PyObject_CallFunctionObjArgs(torch[IS_NEG], object, NULL);
    if (records && answer == Py_False && (tensor->dtype.code == DLPACK_FLOAT || tensor->dtype.code == DLPACK_BFLOAT)) {
        Py_DECREF(answer);
        answer = PyObject_GetAttr(object, texts[REQUIRES_GRAD]);
    }
    Py_XDECREF(answer);
    return answer ? answer == Py_False : -1;
}

/* Whether it is plain and has so many axes; axes 0: any number. */
static int is_plain(PyObject *object, int32_t axes) {
    struct tensor_argument argument;
    const int plain = native_torch_is_plain(object, &argument, 0);
    return plain == 1 ? axes == 0 || argument.tensor.ndim == axes : plain;
}

int native_torch_is_bool(PyObject *object) {
    PyObject *dtype = PyObject_GetAttr(object, texts[DTYPE]);
    Py_XDECREF(dtype);
    return dtype ? dtype == torch[BOOL] : -1;
}

/* Whether the dtype is (bool_wanted) or is not torch.bool. */
static int suits(PyObject *object, int bool_wanted) {
    const int is_bool = native_torch_is_bool(object);
    return is_bool < 0 ? -1 : is_bool == bool_wanted;
}

/* Whether all tensors are plain, mask and bias in the form the library takes. -1 with an exception set. */
static int are_plain(PyObject *const *inputs) {
    const int32_t of_tokens = inputs[ARG_CU_SEQLENS_Q] == Py_None ? 4 : 3;
    int plain = 1;
    for (int i = 0; i < NUM_INPUTS && plain == 1; i++)
        if (native_fields[i].needed || inputs[i] != Py_None) {
            const enum native_axes axes = native_fields[i].axes;
            plain = is_plain(inputs[i], axes == AXES_TOKENS ? of_tokens : axes == AXES_SCORES ? 4 : 0);
        }
    if (plain == 1 && inputs[ARG_MASK] != Py_None)
        plain = suits(inputs[ARG_MASK], 1);
    if (plain == 1 && inputs[ARG_BIAS] != Py_None)
        plain = suits(inputs[ARG_BIAS], 0);
    if (plain == 1 && inputs[ARG_SINK] != Py_None)
        plain = suits(inputs[ARG_SINK], 0);
    return plain;
}

int native_torch_is_watched(void) {
    int watched = !torch[TENSOR];
    for (int which = TRANSFORMS; which <= TRACER && watched == 0; which++)
        watched = ask(which);
    if (watched)
        return watched;
    PyObject *level = PyObject_GetAttr(torch[FORWARD_AD], texts[CURRENT_LEVEL]);
    watched = level ? PyLong_AsLong(level) >= 0 : -1;
    Py_XDECREF(level);
    return PyErr_Occurred() ? -1 : watched;
}

int native_torch_records(void) { return ask(GRAD_ENABLED); }

static int autocasts(PyObject *query) {
    struct tensor_argument argument;
    int failed = 0;
    const fdm_tensor *q = view(query, &argument, &failed);
    PyObject *device = texts[q && q->device.type == FDM_CUDA ? CUDA : CPU];
    PyObject *answer = failed ? NULL : PyObject_CallFunctionObjArgs(torch[AUTOCAST_ENABLED], device, NULL);
    Py_XDECREF(answer);
    return answer ? answer == Py_True : -1;
}

/* Whether the gradient of an input is wanted. -1 with an exception set. */
static int wants_gradients(PyObject *const *inputs) {
    int wants = ask(GRAD_ENABLED);
    if (wants != 1)
        return wants;
    wants = 0;
    for (int i = 0; i < NUM_INPUTS && wants == 0; i++)
        if (native_fields[i].gradient && inputs[i] != Py_None) {
            PyObject *flag = PyObject_GetAttr(inputs[i], texts[REQUIRES_GRAD]);
            wants = flag ? flag == Py_True : -1;
            Py_XDECREF(flag);
        }
    return wants;
}

/* `count` objects as a tuple, None where there is none. */
static PyObject *tuple_of(PyObject *const *objects, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++)
        PyTuple_SetItem(tuple, i, Py_NewRef(objects[i] ? objects[i] : Py_None));
    return tuple;
}

/* out, or a tuple of the results. */
static PyObject *results(PyObject **objects, int wanted) {
    PyObject *result = wanted == 1 ? Py_NewRef(objects[ARG_OUT]) : tuple_of(objects + ARG_OUT, wanted);
    clear(objects + ARG_OUT, NUM_RESULTS);
    return result;
}

/* What a node is applied to: the arguments of a call, and again the inputs that have a gradient. */
static PyObject *node_arguments(PyObject *call, PyObject *const *inputs) {
    PyObject *objects[1 + NUM_GRADIENTS] = {call}, **next = objects + 1;
    for (int i = 0; i < NUM_INPUTS; i++)
        if (native_fields[i].gradient)
            *next++ = inputs[i];
    return tuple_of(objects, 1 + NUM_GRADIENTS);
}

/* attend(*inputs, settings, want_lse, autocast applied) -> out or (out, lse); None when the call must go through the
 * dispatcher, or its arguments need another form first. */
PyObject *native_attend(PyObject *module, PyObject *const *inputs, Py_ssize_t count) {
    if (native_expect(count, NUM_INPUTS + 3))
        return NULL;
    PyObject *settings = inputs[NUM_INPUTS], *want_lse = inputs[NUM_INPUTS + 1];
    int way = native_torch_is_watched();
    if (way == 0)
        way = (way = are_plain(inputs)) == 1 ? 0 : way == 0 ? 1 : -1;
    if (way == 0 && inputs[NUM_INPUTS + 2] != Py_True)
        way = autocasts(inputs[ARG_Q]);
    if (way)
        return way < 0 ? NULL : Py_NewRef(Py_None);
    const int gradients = wants_gradients(inputs);
    if (gradients < 0)
        return NULL;
    PyObject *objects[NUM_TENSORS];
    if (gradients) {
        PyObject *call = tuple_of(inputs, NUM_INPUTS + 2);
        PyObject *arguments = call ? node_arguments(call, inputs) : NULL;
        PyObject *result = arguments ? PyObject_CallObject(torch[APPLY], arguments) : NULL;
        Py_XDECREF(call);
        Py_XDECREF(arguments);
        return result;
    }
    const int wanted = want_lse == Py_True ? 2 : 1;
    take_inputs(inputs, objects);
    return forward(objects, settings, wanted) ? NULL : results(objects, wanted);
}

/* ---- autograd --------------------------------------------------------------------------------------------------- */

/* What a node saves: the results, then the inputs up to the last that is given. */
static int saved_position(int i) { return (i + NUM_INPUTS) % NUM_FORWARD; }

static PyObject *saved_of(PyObject *const *objects) {
    PyObject *saved[NUM_FORWARD];
    int count = 0;
    for (int i = 0; i < NUM_FORWARD; i++) {
        saved[i] = objects[saved_position(i)];
        if (saved[i] && saved[i] != Py_None)
            count = i + 1;
    }
    return tuple_of(saved, count);
}

/* node_forward(ctx, (*inputs, settings, want_lse), *inputs with a gradient) -> out or (out, lse) */
PyObject *native_node_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    PyObject *ctx = arguments[0], *call[NUM_INPUTS + 2], *objects[NUM_TENSORS];
    if (native_expect(count, 2 + NUM_GRADIENTS))
        return NULL;
    for (int i = 0; i < NUM_INPUTS + 2; i++)
        if (!(call[i] = PyTuple_GetItem(arguments[1], i)))
            return NULL;
    PyObject *settings = call[NUM_INPUTS], *want_lse = call[NUM_INPUTS + 1];
    take_inputs(call, objects);
    if (forward(objects, settings, objects[ARG_BIAS] == Py_None ? 2 : 3))
        return NULL;
    PyObject *saved = saved_of(objects), *result = NULL;
    if (saved && !PyObject_SetAttr(ctx, texts[TO_SAVE], saved) && !PyObject_SetAttr(ctx, texts[SETTINGS], settings) &&
        !PyObject_SetAttr(ctx, texts[MATERIALIZE], Py_False))
        result = results(objects, want_lse == Py_True ? 2 : 1);
    Py_XDECREF(saved);
    clear(objects + ARG_OUT, NUM_RESULTS);
    return result;
}

/* node_backward(saved tensors, needs_input_grad, settings, dout, dlse) -> gradients of node_forward's arguments */
PyObject *native_node_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    PyObject *objects[NUM_TENSORS] = {NULL}, *grads[1 + NUM_GRADIENTS] = {NULL};
    int needs[NUM_GRADIENTS];
    if (native_expect(count, 5))
        return NULL;
    const Py_ssize_t num_saved = PyTuple_Size(arguments[0]);
    for (int i = 0; i < NUM_FORWARD; i++)
        objects[saved_position(i)] = i < num_saved ? PyTuple_GetItem(arguments[0], i) : Py_None;
    for (int i = 0; i < NUM_GRADIENTS; i++)
        needs[i] = PyTuple_GetItem(arguments[1], 1 + i) == Py_True;
    objects[ARG_DOUT] = arguments[3];
    objects[ARG_DLSE] = arguments[4];
    if (PyErr_Occurred() || backward(objects, needs, arguments[2]))
        return NULL;
    for (int i = 0; i < NUM_GRADIENTS; i++)
        grads[1 + i] = objects[NUM_READ + i];
    PyObject *result = tuple_of(grads, 1 + NUM_GRADIENTS);
    clear(objects + NUM_READ, NUM_GRADIENTS);
    return result;
}

/* ---- operators -------------------------------------------------------------------------------------------------- */

/* operator_forward(*inputs, settings, number of results) -> the first of out, lse, lse_low */
PyObject *native_operator_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    PyObject *objects[NUM_TENSORS];
    if (native_expect(count, NUM_INPUTS + 2))
        return NULL;
    const long wanted = PyLong_AsLong(arguments[NUM_INPUTS + 1]);
    take_inputs(arguments, objects);
    return forward(objects, arguments[NUM_INPUTS], (int)wanted) ? NULL : results(objects, (int)wanted);
}

/* operator_backward(*inputs, *results, *gradients of results, which gradients of inputs are wanted, settings) -> those,
 * None where not wanted */
PyObject *native_operator_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    PyObject *objects[NUM_TENSORS] = {NULL};
    int needs[NUM_GRADIENTS];
    if (native_expect(count, NUM_READ + 2))
        return NULL;
    for (int i = 0; i < NUM_READ; i++)
        objects[i] = arguments[i];
    for (int i = 0; i < NUM_GRADIENTS; i++)
        needs[i] = PyTuple_GetItem(arguments[NUM_READ], i) == Py_True;
    if (PyErr_Occurred() || backward(objects, needs, arguments[NUM_READ + 1]))
        return NULL;
    PyObject *result = tuple_of(objects + NUM_READ, NUM_GRADIENTS);
    clear(objects + NUM_READ, NUM_GRADIENTS);
    return result;
}
