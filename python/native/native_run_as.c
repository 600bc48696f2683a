/* native_run_as.c: a pass by a plan of one's choice, for benchmarks that compare plans. */
#include "native.h"
#include "native_fields.h"

/* For the device of that name in place of the tensors' own; NULL: for that. */
static fdm_status plan_for(const char *name, fdm_pass pass, const fdm_tensors *tensors, const fdm_options *options,
                           fdm_plan *plan) {
    fdm_problem problem;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_status status = fdm_describe(pass, tensors, options, &problem);
    if (!status)
        status = name ? fdm_device_from_name(name, &device)
                      : fdm_device_query(tensors->q->device.type, tensors->q->device.index, &device);
    if (status)
        return status;
    device.id.index = tensors->q->device.index;
    return fdm_plan_attention(&device, &problem, options, plan);
}

/* allocate(bytes) -> (address, what keeps it alive); None: host memory. The plan as JSON. */
static PyObject *run(const fdm_plan *plan, const fdm_tensors *tensors, void *stream, PyObject *allocate) {
    char json[4096];
    size_t needed;
    const fdm_launch launch = {sizeof launch, stream, NULL};
    const size_t bytes = (size_t)plan->workspace_bytes;
    struct native_workspace on_host = {NULL, 0};
    PyObject *kept = NULL;
    void *workspace = NULL;
    if (allocate == Py_None) {
        on_host = native_workspace_take();
        const fdm_allocator allocator = native_allocator(&on_host);
        workspace = bytes ? allocator.allocate(allocator.context, bytes) : NULL;
    } else if (bytes) {
        kept = PyObject_CallFunction(allocate, "n", (Py_ssize_t)bytes);
        PyObject *address = kept ? PyTuple_GetItem(kept, 0) : NULL;
        workspace = address ? native_address(address) : NULL;
    }
    fdm_status status = FDM_OK;
    if (!PyErr_Occurred())
        status = fdm_execute(plan, tensors, workspace, bytes, &launch);
    if (!status)
        status = fdm_plan_to_json(plan, json, sizeof json, &needed);
    if (allocate == Py_None)
        native_workspace_return(on_host);
    Py_XDECREF(kept);
    if (PyErr_Occurred())
        return NULL;
    return status ? native_result(status) : PyUnicode_FromString(json);
}

/* run_as(device or None, kernel or None, tensors by position, causal, softcap, stream, allocate or None, deterministic
 * = False) -> the plan as JSON; a backward where dout is given */
PyObject *native_run_as(PyObject *module, PyObject *arguments) {
    struct tensor_argument storage[NUM_TENSORS] = {0};
    fdm_tensor *given[NUM_TENSORS];
    fdm_options options = fdm_options_default();
    const char *device;
    unsigned long long stream;
    int causal, deterministic = 0, failed = 0;
    PyObject *listed, *allocate, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "zzO!pdKO|p", &device, &options.kernel, &PyTuple_Type, &listed, &causal,
                          &options.softcap, &stream, &allocate, &deterministic))
        return NULL;
    if (PyTuple_Size(listed) != NUM_TENSORS) {
        PyErr_Format(PyExc_TypeError, "%d tensors are needed, %zd were given", NUM_TENSORS, PyTuple_Size(listed));
        return NULL;
    }
    options.causal = causal;
    options.deterministic = deterministic;
    for (int i = 0; i < NUM_TENSORS; i++)
        given[i] = native_tensor(PyTuple_GetItem(listed, i), &storage[i], &failed);
    if (!failed) {
        fdm_tensors tensors;
        fdm_plan plan = {.struct_bytes = sizeof plan};
        native_bind(given, &tensors);
        const fdm_pass pass = given[ARG_DOUT] ? FDM_BACKWARD : FDM_FORWARD;
        const fdm_status status = plan_for(device, pass, &tensors, &options, &plan);
        result = status ? native_result(status) : run(&plan, &tensors, (void *)(uintptr_t)stream, allocate);
    }
    native_release(storage, NUM_TENSORS);
    return result;
}
