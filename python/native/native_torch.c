/* native_torch.c: attention on PyTorch tensors, one call a pass: which way it goes, outputs, workspace, stream,
 * autograd. Nothing is built against PyTorch: tensors are read through DLPack's exchange table, and the functions of
 * PyTorch that are called are handed over by _torch.py. */
#include "native.h"

enum {
    NUM_INPUTS = NATIVE_NUM_INPUTS,
    NUM_FORWARD = NUM_INPUTS + 3,
    NUM_BACKWARD = NUM_INPUTS + 9,
    NUM_MADE = 3,      /* out, lse, lse_low */
    NUM_GRADIENTS = 4, /* of q, k, v and bias */
    MASK = 3,
    BIAS = 4,
    CU_SEQLENS_Q = 7
};

/* What use_torch() takes. DESCRIBE: makes a tuple of a tensor where PyTorch has no exchange table, else None. EMPTY_CPU
 * and EMPTY_CUDA: (shape, strides, dtype) on the CPU and on the current CUDA device, or None. From TRANSFORMS to
 * TRACER: whether somebody watches. */
enum {
    TENSOR,
    PARAMETER,
    DESCRIBE,
    FLOAT32,
    FLOAT64,
    UINT8,
    BOOL,
    IS_NEG,
    EMPTY_LIKE,
    ZEROS_LIKE,
    EMPTY_CPU,
    EMPTY_CUDA,
    NUM_THREADS,
    CUDA_STREAM,
    GRAD_ENABLED,
    AUTOCAST_ENABLED,
    TRANSFORMS,
    DISPATCH_MODES,
    PROFILER,
    TRACER,
    FORWARD_AD,
    ARGUMENTS,
    APPLY,
    NUM_TORCH
};
static const char *const torch_names[NUM_TORCH] = {[TENSOR] = "Tensor",
                                                   [PARAMETER] = "Parameter",
                                                   [DESCRIBE] = "describe",
                                                   [FLOAT32] = "float32",
                                                   [FLOAT64] = "float64",
                                                   [UINT8] = "uint8",
                                                   [BOOL] = "bool",
                                                   [IS_NEG] = "is_neg",
                                                   [EMPTY_LIKE] = "empty_like",
                                                   [ZEROS_LIKE] = "zeros_like",
                                                   [EMPTY_CPU] = "empty_cpu",
                                                   [EMPTY_CUDA] = "empty_cuda",
                                                   [NUM_THREADS] = "num_threads",
                                                   [CUDA_STREAM] = "cuda_stream",
                                                   [GRAD_ENABLED] = "grad_enabled",
                                                   [AUTOCAST_ENABLED] = "autocast_enabled",
                                                   [TRANSFORMS] = "transforms",
                                                   [DISPATCH_MODES] = "dispatch_modes",
                                                   [PROFILER] = "profiler",
                                                   [TRACER] = "tracer",
                                                   [FORWARD_AD] = "forward_ad",
                                                   [ARGUMENTS] = "arguments",
                                                   [APPLY] = "apply"};
static PyObject *torch[NUM_TORCH]; /* kept for the life of the process */

/* Attributes and names of devices, as Python's strings. */
enum {
    DTYPE,
    REQUIRES_GRAD,
    CONTIGUOUS,
    NEW_EMPTY,
    CURRENT_LEVEL,
    FORCED_FAMILY,
    TO_SAVE,
    SETTINGS,
    MATERIALIZE,
    CPU,
    CUDA,
    NUM_TEXTS
};
static const char *const text_values[NUM_TEXTS] = {[DTYPE] = "dtype",
                                                   [REQUIRES_GRAD] = "requires_grad",
                                                   [CONTIGUOUS] = "contiguous",
                                                   [NEW_EMPTY] = "new_empty",
                                                   [CURRENT_LEVEL] = "_current_level",
                                                   [FORCED_FAMILY] = "forced_family",
                                                   [TO_SAVE] = "to_save",
                                                   [SETTINGS] = "settings",
                                                   [MATERIALIZE] = "materialize_grads",
                                                   [CPU] = "cpu",
                                                   [CUDA] = "cuda"};
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

/* What torch.empty_like gives. */
static PyObject *new_like(PyObject *like, const fdm_tensor *tensor, struct tensor_argument *argument) {
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

/* Runs a pass on the query's device, on PyTorch's current stream or with its number of threads. */
static int run(native_call call, const fdm_tensors *tensors, PyObject *query, PyObject *settings) {
    const fdm_device_id device = tensors->q->device;
    const int on_cuda = device.type == FDM_CUDA;
    PyObject *setting[NATIVE_NUM_SETTINGS], *family = PyObject_GetAttr(torch[ARGUMENTS], texts[FORCED_FAMILY]);
    PyObject *index = on_cuda ? PyLong_FromLong(device.index) : NULL, *result = NULL;
    PyObject *where = on_cuda ? PyObject_CallFunctionObjArgs(torch[CUDA_STREAM], index, NULL)
                              : PyObject_CallNoArgs(torch[NUM_THREADS]);
    int complete = family && where;
    for (int i = 0; complete && i < NATIVE_NUM_SETTINGS; i++)
        complete = (setting[i] = PyTuple_GetItem(settings, i)) != NULL;
    fdm_options options;
    if (complete && !native_options(setting, on_cuda ? NULL : where, family, &options)) {
        struct workspace workspace = {query, NULL, device};
        const fdm_allocator allocator = {&workspace, allocate, release};
        if (on_cuda)
            options.stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(where);
        if (!PyErr_Occurred())
            result = native_run(call, tensors, &options, on_cuda ? &allocator : NULL);
        Py_XDECREF(workspace.tensor);
    }
    Py_XDECREF(family);
    Py_XDECREF(index);
    Py_XDECREF(where);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static void clear(PyObject **objects, int count) {
    for (int i = 0; i < count; i++)
        Py_CLEAR(objects[i]);
}

/* made[0] = out [B, Sq, H, Dv], or packed [total_q, H, Dv]; the others are [B, H, Sq] or [H, total_q]: made[1] = lse,
 * if more than one is wanted, and made[2] = lse_low. */
static int new_outputs(PyObject *query, fdm_tensor *const *given, int wanted, struct tensor_argument *arguments,
                       PyObject **made) {
    const fdm_tensor *q = given[0], *v = given[2];
    const int32_t axes = given[CU_SEQLENS_Q] ? 3 : 4;
    if (!q || !v || q->ndim != axes || v->ndim != axes) {
        PyErr_Format(PyExc_ValueError, "query and value need %d axes", (int)axes);
        return -1;
    }
    int64_t shape[] = {q->shape[0], q->shape[1], q->shape[2], 0}, rows[3] = {0};
    shape[axes - 1] = v->shape[axes - 1];
    for (int i = 0; i < axes - 1; i++) /* the last two axes change places */
        rows[i] = q->shape[i < axes - 3 ? i : 2 * axes - 5 - i];
    PyObject *dtype = PyObject_GetAttr(query, texts[DTYPE]);
    if (!dtype)
        return -1;
    made[0] = new_tensor(query, q->device, dtype, axes, shape, &arguments[0]);
    for (int i = 1; i < wanted && made[i - 1]; i++)
        made[i] = new_tensor(query, q->device, torch[fdm_dtype_of(q) == FDM_FLOAT64 ? FLOAT64 : FLOAT32], axes - 1,
                             rows, &arguments[i]);
    Py_DECREF(dtype);
    return made[wanted - 1] ? 0 : -1;
}

/* made: the first `wanted` of out, lse and lse_low; all NULL with an exception set. */
static int forward(PyObject *const *inputs, PyObject *settings, int wanted, PyObject **made) {
    struct tensor_argument arguments[NUM_FORWARD];
    fdm_tensor *given[NUM_INPUTS];
    fdm_tensors tensors;
    int failed = 0;
    made[0] = made[1] = made[2] = NULL;
    for (int i = 0; i < NUM_FORWARD; i++)
        arguments[i].owner = NULL;
    for (int i = 0; i < NUM_INPUTS; i++)
        given[i] = view(inputs[i], &arguments[i], &failed);
    int status = failed ? -1 : new_outputs(inputs[0], given, wanted, arguments + NUM_INPUTS, made);
    if (!status) {
        native_inputs(given, &tensors);
        tensors.out = &arguments[NUM_INPUTS].tensor;
        tensors.lse = wanted > 1 ? &arguments[NUM_INPUTS + 1].tensor : NULL;
        tensors.lse_low = wanted > 2 ? &arguments[NUM_INPUTS + 2].tensor : NULL;
        status = run(fdm_attention_forward, &tensors, inputs[0], settings);
    }
    native_release(arguments, NUM_FORWARD);
    if (status)
        clear(made, NUM_MADE);
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

/* given: out, lse, dout, dlse, lse_low or None. needs: which gradients are wanted. grads: NULL where not wanted, or on
 * an exception. */
static int backward(PyObject *const *inputs, PyObject *const *given, const int *needs, PyObject *settings,
                    PyObject **grads) {
    static const int sources[NUM_GRADIENTS] = {0, 1, 2, BIAS};
    struct tensor_argument arguments[NUM_BACKWARD], *own = arguments + NUM_INPUTS;
    fdm_tensor *tensor[NUM_BACKWARD] = {NULL};
    fdm_tensors tensors;
    int failed = 0;
    for (int i = 0; i < NUM_BACKWARD; i++)
        arguments[i].owner = NULL;
    for (int i = 0; i < NUM_INPUTS; i++)
        tensor[i] = view(inputs[i], &arguments[i], &failed);
    native_inputs(tensor, &tensors);
    tensors.out = view(given[0], &own[0], &failed);
    tensors.lse = view(given[1], &own[1], &failed);
    tensors.dlse = view(given[3], &own[3], &failed);
    tensors.lse_low = view(given[4], &own[8], &failed);
    PyObject *dout = failed ? NULL : upstream(given[2], given[0], &own[2]);
    tensors.dout = &own[2].tensor;
    failed = !dout;
    for (int i = 0; i < NUM_GRADIENTS; i++) {
        grads[i] = NULL;
        if (needs[i] && tensor[sources[i]] && !failed)
            failed = !(grads[i] = new_like(inputs[sources[i]], tensor[sources[i]], &own[4 + i]));
    }
    tensors.dq = grads[0] ? &own[4].tensor : NULL;
    tensors.dk = grads[1] ? &own[5].tensor : NULL;
    tensors.dv = grads[2] ? &own[6].tensor : NULL;
    tensors.dbias = grads[3] ? &own[7].tensor : NULL;
    int status = failed ? -1 : run(fdm_attention_backward, &tensors, inputs[0], settings);
    native_release(arguments, NUM_BACKWARD);
    Py_XDECREF(dout);
    if (status)
        clear(grads, NUM_GRADIENTS);
    return status;
}

/* ---- which way -------------------------------------------------------------------------------------------------- */

/* Whether PyTorch's object is what its address, shape and strides say; axes 0: any number. -1 with an exception set. */
static int is_plain(PyObject *object, int32_t axes) {
    struct tensor_argument argument;
    PyObject *type = (PyObject *)Py_TYPE(object);
    int failed = 0, plain = 0;
    if (type != torch[TENSOR] && type != torch[PARAMETER])
        return 0;
    const fdm_tensor *tensor = view(object, &argument, &failed);
    if (tensor)
        plain =
            (axes == 0 || tensor->ndim == axes) && (tensor->device.type == FDM_CPU || tensor->device.type == FDM_CUDA);
    else
        PyErr_Clear(); /* what it is, the dispatcher will say */
    if (plain && axes > 0) {
        PyObject *negated = PyObject_CallFunctionObjArgs(torch[IS_NEG], object, NULL);
        plain = negated ? negated == Py_False : -1;
        Py_XDECREF(negated);
    }
    return plain;
}

/* Whether the dtype is (bool_wanted) or is not torch.bool. */
static int suits(PyObject *object, int bool_wanted) {
    PyObject *dtype = PyObject_GetAttr(object, texts[DTYPE]);
    Py_XDECREF(dtype);
    return dtype ? (dtype == torch[BOOL]) == bool_wanted : -1;
}

/* Whether all tensors are plain, mask and bias in the form the library takes. -1 with an exception set. */
static int are_plain(PyObject *const *inputs) {
    const int32_t axes = inputs[CU_SEQLENS_Q] == Py_None ? 4 : 3;
    int plain = 1;
    for (int i = 0; i < NUM_INPUTS && plain == 1; i++)
        if (i < MASK || inputs[i] != Py_None)
            plain = is_plain(inputs[i], i < MASK ? axes : i <= BIAS ? 4 : 0);
    if (plain == 1 && inputs[MASK] != Py_None)
        plain = suits(inputs[MASK], 1);
    if (plain == 1 && inputs[BIAS] != Py_None)
        plain = suits(inputs[BIAS], 0);
    return plain;
}

/* Whether anything but autograd watches this call. -1 with an exception set. */
static int is_watched(void) {
    int watched = 0;
    for (int which = TRANSFORMS; which <= TRACER && watched == 0; which++)
        watched = ask(which);
    if (watched)
        return watched;
    PyObject *level = PyObject_GetAttr(torch[FORWARD_AD], texts[CURRENT_LEVEL]);
    watched = level ? PyLong_AsLong(level) >= 0 : -1;
    Py_XDECREF(level);
    return PyErr_Occurred() ? -1 : watched;
}

static int autocasts(PyObject *query) {
    struct tensor_argument argument;
    int failed = 0;
    const fdm_tensor *q = view(query, &argument, &failed);
    PyObject *device = texts[q && q->device.type == FDM_CUDA ? CUDA : CPU];
    PyObject *answer = failed ? NULL : PyObject_CallFunctionObjArgs(torch[AUTOCAST_ENABLED], device, NULL);
    Py_XDECREF(answer);
    return answer ? answer == Py_True : -1;
}

/* Whether a gradient is wanted of q, k, v or bias. -1 with an exception set. */
static int wants_gradients(PyObject *const *inputs) {
    int wants = ask(GRAD_ENABLED);
    if (wants != 1)
        return wants;
    wants = 0;
    for (int i = 0; i <= BIAS && wants == 0; i++)
        if (i != MASK && inputs[i] != Py_None) {
            PyObject *flag = PyObject_GetAttr(inputs[i], texts[REQUIRES_GRAD]);
            wants = flag ? flag == Py_True : -1;
            Py_XDECREF(flag);
        }
    return wants;
}

/* out, or (out, lse); takes the references. */
static PyObject *outputs(PyObject **made, int want_lse) {
    if (!want_lse)
        return made[0];
    PyObject *pair = PyTuple_Pack(2, made[0], made[1]);
    clear(made, 2);
    return pair;
}

/* attend(*inputs, settings, want_lse, autocast applied) -> out or (out, lse); None when the call must go through the
 * dispatcher, or its arguments need another form first. */
PyObject *native_attend(PyObject *module, PyObject *const *inputs, Py_ssize_t count) {
    if (native_expect(count, NUM_INPUTS + 3))
        return NULL;
    PyObject *settings = inputs[NUM_INPUTS], *made[NUM_MADE];
    const int want_lse = PyObject_IsTrue(inputs[NUM_INPUTS + 1]) == 1;
    int way = is_watched();
    if (way == 0)
        way = (way = are_plain(inputs)) == 1 ? 0 : way == 0 ? 1 : -1;
    if (way == 0 && inputs[NUM_INPUTS + 2] != Py_True)
        way = autocasts(inputs[0]);
    if (way)
        return way < 0 ? NULL : Py_NewRef(Py_None);
    const int gradients = wants_gradients(inputs);
    if (gradients < 0)
        return NULL;
    if (gradients) {
        PyObject *rest = PyTuple_Pack(7, settings, want_lse ? Py_True : Py_False, inputs[MASK], inputs[5], inputs[6],
                                      inputs[7], inputs[8]);
        PyObject *bias = inputs[BIAS] == Py_None ? NULL : inputs[BIAS];
        PyObject *result =
            rest ? PyObject_CallFunctionObjArgs(torch[APPLY], rest, inputs[0], inputs[1], inputs[2], bias, NULL) : NULL;
        Py_XDECREF(rest);
        return result;
    }
    return forward(inputs, settings, 1 + want_lse, made) ? NULL : outputs(made, want_lse);
}

/* ---- autograd --------------------------------------------------------------------------------------------------- */

/* What a node saves: q, k, v, out, lse, and only where one of them is given, bias, mask, intervals, cu_seqlens, and
 * with a bias lse_low. */
enum { NUM_SAVED_ALWAYS = 5, NUM_SAVED = NUM_INPUTS + 3 };

/* node_forward(ctx, (settings, want_lse, mask, start, end, cu_seqlens_q, cu_seqlens_k), q, k, v[, bias]) */
PyObject *native_node_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 5 && native_expect(count, 6))
        return NULL;
    PyObject *ctx = arguments[0], *rest[7], *made[NUM_MADE];
    for (int i = 0; i < 7; i++)
        if (!(rest[i] = PyTuple_GetItem(arguments[1], i)))
            return NULL;
    PyObject *bias = count == 6 ? arguments[5] : Py_None;
    PyObject *inputs[NUM_INPUTS] = {arguments[2], arguments[3], arguments[4], rest[2], bias,
                                    rest[3],      rest[4],      rest[5],      rest[6]};
    if (forward(inputs, rest[0], bias == Py_None ? 2 : 3, made))
        return NULL;
    int extras = 0;
    for (int i = MASK; i < NUM_INPUTS; i++)
        extras |= inputs[i] != Py_None;
    PyObject *saved =
        extras ? PyTuple_Pack(NUM_SAVED, inputs[0], inputs[1], inputs[2], made[0], made[1], bias, inputs[MASK],
                              inputs[5], inputs[6], inputs[7], inputs[8], made[2] ? made[2] : Py_None)
               : PyTuple_Pack(NUM_SAVED_ALWAYS, inputs[0], inputs[1], inputs[2], made[0], made[1]);
    const int failed = !saved || PyObject_SetAttr(ctx, texts[TO_SAVE], saved) ||
                       PyObject_SetAttr(ctx, texts[SETTINGS], rest[0]) ||
                       PyObject_SetAttr(ctx, texts[MATERIALIZE], Py_False);
    Py_XDECREF(saved);
    Py_CLEAR(made[2]);
    if (failed || rest[1] == Py_True) {
        PyObject *pair = failed ? NULL : PyTuple_Pack(2, made[0], made[1]);
        clear(made, 2);
        return pair;
    }
    Py_CLEAR(made[1]);
    return made[0];
}

/* node_backward(saved tensors, needs_input_grad, settings, dout, dlse) -> gradients of node_forward's arguments */
PyObject *native_node_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 5))
        return NULL;
    PyObject *saved[NUM_SAVED], *grads[NUM_GRADIENTS];
    const Py_ssize_t num_saved = PyTuple_Size(arguments[0]), num_needs = PyTuple_Size(arguments[1]);
    if (num_saved < 0 || num_needs < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < NUM_SAVED; i++)
        saved[i] = i < num_saved ? PyTuple_GetItem(arguments[0], i) : Py_None;
    int needs[NUM_GRADIENTS] = {0};
    for (Py_ssize_t i = 1; i < num_needs && i <= NUM_GRADIENTS; i++)
        needs[i - 1] = PyTuple_GetItem(arguments[1], i) == Py_True;
    PyObject *const inputs[NUM_INPUTS] = {saved[0], saved[1], saved[2], saved[6], saved[5],
                                          saved[7], saved[8], saved[9], saved[10]};
    PyObject *const given[] = {saved[3], saved[4], arguments[3], arguments[4], saved[11]};
    if (backward(inputs, given, needs, arguments[2], grads))
        return NULL;
    PyObject *result = PyTuple_New(num_needs);
    for (Py_ssize_t i = 0; result && i < num_needs; i++)
        PyTuple_SetItem(result, i, Py_NewRef(i > 0 && grads[i - 1] ? grads[i - 1] : Py_None));
    clear(grads, NUM_GRADIENTS);
    return result;
}

/* ---- operators -------------------------------------------------------------------------------------------------- */

/* operator_forward(*inputs, settings, with lse_low) -> (out, lse), or (out, lse, lse_low) */
PyObject *native_operator_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    PyObject *made[NUM_MADE];
    if (native_expect(count, NUM_INPUTS + 2))
        return NULL;
    const int with_low = arguments[NUM_INPUTS + 1] == Py_True;
    if (forward(arguments, arguments[NUM_INPUTS], 2 + with_low, made))
        return NULL;
    PyObject *result = PyTuple_Pack(2 + with_low, made[0], made[1], made[2]);
    clear(made, NUM_MADE);
    return result;
}

/* operator_backward(*inputs, out, lse, dout, dlse, needs_dq, needs_dk, needs_dv, needs_dbias, settings, lse_low or
 * None)
 * -> gradients, None where not wanted */
PyObject *native_operator_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    PyObject *grads[NUM_GRADIENTS], *const *own = arguments + NUM_INPUTS;
    if (native_expect(count, NUM_INPUTS + 10))
        return NULL;
    PyObject *const given[] = {own[0], own[1], own[2], own[3], own[9]};
    int needs[NUM_GRADIENTS];
    for (int i = 0; i < NUM_GRADIENTS; i++)
        needs[i] = PyObject_IsTrue(own[4 + i]) == 1;
    if (backward(arguments, given, needs, own[8], grads))
        return NULL;
    PyObject *result = PyTuple_New(NUM_GRADIENTS);
    for (int i = 0; result && i < NUM_GRADIENTS; i++)
        PyTuple_SetItem(result, i, Py_NewRef(grads[i] ? grads[i] : Py_None));
    clear(grads, NUM_GRADIENTS);
    return result;
}
