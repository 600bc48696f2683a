/* native_attention.c: attention forward and backward, and the plan, for Python. */
#include "native.h"

#include <string.h>

/* The tensors of a pass, in the order of the Python call; then the settings, and on CUDA two more. */
enum { NUM_FORWARD = NATIVE_NUM_INPUTS + 3, NUM_BACKWARD = NUM_FORWARD + 6, NUM_CUDA = 2 };

void native_inputs(fdm_tensor *const *given, fdm_tensors *tensors) {
    *tensors = (fdm_tensors){.q = given[0],
                             .k = given[1],
                             .v = given[2],
                             .mask = given[3],
                             .bias = given[4],
                             .interval_start = given[5],
                             .interval_end = given[6],
                             .cu_seqlens_q = given[7],
                             .cu_seqlens_k = given[8]};
}

int native_options(PyObject *const *setting, PyObject *num_threads, PyObject *family, fdm_options *options) {
    *options = fdm_options_default();
    options->max_seqlen_q = PyLong_AsLongLong(setting[0]);
    options->max_seqlen_k = PyLong_AsLongLong(setting[1]);
    options->has_softmax_scale = setting[2] != Py_None;
    if (options->has_softmax_scale)
        options->softmax_scale = PyFloat_AsDouble(setting[2]);
    options->causal = PyObject_IsTrue(setting[3]) == 1;
    options->softcap = PyFloat_AsDouble(setting[4]);
    options->window_left = PyLong_AsLongLong(setting[5]);
    options->window_right = PyLong_AsLongLong(setting[6]);
    options->deterministic = PyObject_IsTrue(setting[7]) == 1;
    options->num_threads = num_threads ? (int32_t)PyLong_AsLong(num_threads) : 0;
    if (family != Py_None)
        options->family = PyUnicode_AsUTF8AndSize(family, NULL);
    return PyErr_Occurred() ? -1 : 0;
}

/* Everything that a call of a pass was given. */
struct call {
    struct tensor_argument storage[NUM_BACKWARD];
    int num_tensors;
    fdm_tensors tensors;
    fdm_options options;
    PyObject *allocate; /* NULL: host memory */
};

/* The tensors of a forward or backward, the settings, the number of threads, family or None; for CUDA tensors also the
 * stream's address and what allocates. Returns -1 with an exception set; release() is needed either way. */
static int parse(PyObject *const *arguments, Py_ssize_t count, int num_tensors, struct call *call) {
    enum { NUM_SETTINGS = NATIVE_NUM_SETTINGS + 2 };
    const int on_cuda = count == num_tensors + NUM_SETTINGS + NUM_CUDA;
    *call = (struct call){.num_tensors = num_tensors};
    if (count != num_tensors + NUM_SETTINGS && !on_cuda) {
        PyErr_Format(PyExc_TypeError, "%d arguments are needed, %zd were given", num_tensors + NUM_SETTINGS, count);
        return -1;
    }
    fdm_tensor *given[NUM_BACKWARD] = {NULL};
    const int failed = native_tensors(arguments, call->storage, given, num_tensors);
    PyObject *const *setting = arguments + num_tensors;
    if (failed ||
        native_options(setting, setting[NATIVE_NUM_SETTINGS], setting[NATIVE_NUM_SETTINGS + 1], &call->options))
        return -1;
    native_inputs(given, &call->tensors);
    fdm_tensor *const *own = given + NATIVE_NUM_INPUTS;
    fdm_tensors *t = &call->tensors;
    t->out = own[0], t->lse = own[1], t->lse_low = own[2];
    t->dout = own[3], t->dlse = own[4];
    t->dq = own[5], t->dk = own[6], t->dv = own[7], t->dbias = own[8];
    if (on_cuda) {
        call->options.stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(setting[NUM_SETTINGS]);
        call->allocate = setting[NUM_SETTINGS + 1];
    }
    return PyErr_Occurred() ? -1 : 0;
}

static void release(struct call *call) { native_release(call->storage, call->num_tensors); }

static void *allocate_on_device(void *context, size_t bytes) {
    struct native_device_workspace *workspace = context;
    PyGILState_STATE state = PyGILState_Ensure();
    void *memory = NULL;
    workspace->kept = PyObject_CallFunction(workspace->allocate, "n", (Py_ssize_t)bytes);
    PyObject *address = workspace->kept ? PyTuple_GetItem(workspace->kept, 0) : NULL;
    if (address)
        memory = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
    PyGILState_Release(state);
    return memory;
}
static void release_on_device(void *context, void *memory) {} /* when `kept` goes, with the GIL */

fdm_allocator native_device_allocator(struct native_device_workspace *workspace) {
    return (fdm_allocator){workspace, allocate_on_device, release_on_device};
}

PyObject *native_run(native_call call, const fdm_tensors *tensors, const fdm_options *options,
                     const fdm_allocator *allocator) {
    fdm_status status;
    struct native_workspace workspace = {NULL, 0};
    fdm_allocator kept;
    if (!allocator) {
        workspace = native_workspace_take();
        kept = native_allocator(&workspace);
    }
    Py_BEGIN_ALLOW_THREADS;
    status = call(tensors, options, allocator ? allocator : &kept);
    Py_END_ALLOW_THREADS;
    if (!allocator)
        native_workspace_return(workspace);
    return PyErr_Occurred() ? NULL : native_result(status);
}

static PyObject *pass(PyObject *const *arguments, Py_ssize_t count, int num_tensors, native_call function) {
    struct call call;
    PyObject *result = NULL;
    if (!parse(arguments, count, num_tensors, &call)) {
        struct native_device_workspace workspace = {call.allocate, NULL};
        fdm_allocator allocator = native_device_allocator(&workspace);
        result = native_run(function, &call.tensors, &call.options, call.allocate ? &allocator : NULL);
        Py_XDECREF(workspace.kept);
    }
    release(&call);
    return result;
}

/* forward(q, k, v, mask, bias, start, end, cu_seqlens_q, cu_seqlens_k, out, lse, lse_low, *settings) */
PyObject *native_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return pass(arguments, count, NUM_FORWARD, fdm_attention_forward);
}

/* backward(q, k, v, mask, bias, start, end, cu_seqlens_q, cu_seqlens_k, out, lse, lse_low, dout, dlse, dq, dk, dv,
 * dbias, *settings) */
PyObject *native_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return pass(arguments, count, NUM_BACKWARD, fdm_attention_backward);
}

/* forward()'s arguments -> the number of visible pairs. */
PyObject *native_count_visible(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct call call;
    PyObject *result = NULL;
    if (!parse(arguments, count, NUM_FORWARD, &call)) {
        fdm_problem problem;
        int64_t pairs = 0;
        fdm_status status = fdm_describe(FDM_FORWARD, &call.tensors, &call.options, &problem);
        if (!status)
            status = fdm_count_visible(&problem, &call.tensors, &pairs);
        result = status ? native_result(status) : PyLong_FromLongLong(pairs);
    }
    release(&call);
    return result;
}

/* forward()'s arguments -> the kernel that would run: (family, kernel, choice, reason). */
PyObject *native_plan(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct call call;
    PyObject *result = NULL;
    if (!parse(arguments, count, NUM_FORWARD, &call)) {
        fdm_problem problem;
        fdm_device device;
        fdm_plan plan;
        const fdm_device_id where = call.tensors.q ? call.tensors.q->device : (fdm_device_id){FDM_CPU, 0};
        fdm_status status = fdm_describe(FDM_FORWARD, &call.tensors, &call.options, &problem);
        if (!status)
            status = fdm_device_query(where.type, where.index, &device);
        if (!status)
            status = fdm_plan_attention(&device, &problem, &call.options, &plan);
        result = status ? native_result(status)
                        : Py_BuildValue("(ssss)", plan.family, plan.kernel, plan.choice, plan.reason);
    }
    release(&call);
    return result;
}
