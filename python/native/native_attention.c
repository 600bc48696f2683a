/* native_attention.c: attention forward and backward, and the plan, for Python. */
#include "native.h"
#include "native_fields.h"

#define DIFFERENTIABLE_FIELD(position, member, argument, axes, needed, gradient, gradient_member) \
    [position] = {#member, argument, #gradient_member, axes, needed, gradient},
#define PLAIN_FIELD(position, member, argument, axes, needed) [position] = {#member, argument, NULL, axes, needed, 0},
const struct native_field native_fields[] = {NATIVE_INPUTS(DIFFERENTIABLE_FIELD, PLAIN_FIELD)
                                                 NATIVE_RESULTS(DIFFERENTIABLE_FIELD, PLAIN_FIELD)};

void native_bind(fdm_tensor *const *given, fdm_tensors *tensors) {
#define BIND_DIFFERENTIABLE(position, member, argument, axes, needed, gradient, gradient_member) \
    .member = given[position], .gradient_member = given[gradient],
#define BIND(position, member, ...) .member = given[position],
    *tensors = (fdm_tensors){.struct_bytes = sizeof(fdm_tensors),
                             NATIVE_INPUTS(BIND_DIFFERENTIABLE, BIND) NATIVE_RESULTS(BIND_DIFFERENTIABLE, BIND)};
}

static double number_or_zero(PyObject *object) { return object == Py_None ? 0.0 : PyFloat_AsDouble(object); }

static int truth(PyObject *object) { return PyObject_IsTrue(object) == 1; }

int native_options(PyObject *const *setting, PyObject *num_threads, PyObject *family, fdm_options *options) {
#define TAKE(position, member, type, read) options->member = read(setting[position]);
    *options = fdm_options_default();
    NATIVE_SETTINGS(TAKE)
    options->has_softmax_scale = setting[SETTING_SOFTMAX_SCALE] != Py_None;
    options->num_threads = num_threads ? (int32_t)PyLong_AsLong(num_threads) : 0;
    if (family != Py_None)
        options->family = PyUnicode_AsUTF8AndSize(family, NULL);
    return PyErr_Occurred() ? -1 : 0;
}

/* ((name, argument of the public functions, axes, whether needed, name of the gradient or None), ..) */
static PyObject *rows(int first, int last) {
    static const char *const axes[] = {
        [AXES_TOKENS] = "tokens",   [AXES_SCORES] = "scores", [AXES_KEYS] = "keys",    [AXES_ROWS] = "rows",
        [AXES_OFFSETS] = "offsets", [AXES_HEADS] = "heads",   [AXES_RANGES] = "ranges"};
    PyObject *list = PyTuple_New(last - first);
    for (int i = first; list && i < last; i++) {
        const struct native_field *field = &native_fields[i];
        PyObject *row = Py_BuildValue("(sssOz)", field->name, field->argument, axes[field->axes],
                                      field->needed ? Py_True : Py_False, field->gradient_name);
        if (!row || PyTuple_SetItem(list, i - first, row))
            Py_CLEAR(list);
    }
    return list;
}

/* attention_fields() -> (rows of the inputs, rows of the results, ((setting, type in a schema), ..)) */
PyObject *native_attention_fields(PyObject *module, PyObject *unused) {
#define PAIR(position, member, type, read) #member, type,
#define PAIR_FORMAT(...)                   "(ss)"
    PyObject *settings =
        Py_BuildValue("(" NATIVE_SETTINGS(PAIR_FORMAT) "(ss))", NATIVE_SETTINGS(PAIR) "mask_plan", "int");
    return Py_BuildValue("(NNN)", rows(0, NUM_INPUTS), rows(NUM_INPUTS, NUM_FORWARD), settings);
}

/* Everything that a call of a pass was given. */
struct call {
    struct tensor_argument storage[NUM_TENSORS];
    int num_tensors;
    fdm_tensors tensors;
    fdm_tile_plan plan;
    fdm_options options;
    PyObject *allocate; /* NULL: host memory */
};

/* The tensors of a forward or backward, the settings, the number of threads, family or None, kernel or None, whether
 * dk and dv are added to; for CUDA tensors also the stream's address and what allocates, and perhaps sm_margin.
 * Returns -1 with an exception set; release() is needed either way. */
static int parse(PyObject *const *arguments, Py_ssize_t count, int num_tensors, struct call *call) {
    enum { THREADS = NUM_SETTINGS, FAMILY, KERNEL, ADD_DKV, NUM_ON_CPU };
    enum { STREAM = NUM_ON_CPU, ALLOCATE, NUM_ON_CUDA, MARGIN = NUM_ON_CUDA };
    const int has_margin = count == num_tensors + MARGIN + 1,
              on_cuda = has_margin || count == num_tensors + NUM_ON_CUDA;
    *call = (struct call){.num_tensors = num_tensors};
    if (!on_cuda && native_expect(count, num_tensors + NUM_ON_CPU))
        return -1;
    fdm_tensor *given[NUM_TENSORS] = {NULL};
    PyObject *const *setting = arguments + num_tensors;
    if (native_tensors(arguments, call->storage, given, num_tensors) ||
        native_options(setting, setting[THREADS], setting[FAMILY], &call->options))
        return -1;
    if (setting[KERNEL] != Py_None)
        call->options.kernel = PyUnicode_AsUTF8AndSize(setting[KERNEL], NULL);
    call->options.add_dkv = truth(setting[ADD_DKV]);
    native_bind(given, &call->tensors);
    if (native_take_plan(setting[SETTING_MASK_PLAN], &call->tensors, &call->plan))
        return -1;
    if (on_cuda) {
        call->options.stream = native_address(setting[STREAM]);
        call->allocate = setting[ALLOCATE];
        if (has_margin)
            call->options.sm_margin = PyLong_AsLong(setting[MARGIN]);
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
        memory = native_address(address);
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

/* forward(*inputs, *results, *settings) */
PyObject *native_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return pass(arguments, count, NUM_FORWARD, fdm_attention_forward);
}

/* backward(*inputs, *results, *gradients of results, *gradients of inputs, *settings) */
PyObject *native_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return pass(arguments, count, NUM_TENSORS, fdm_attention_backward);
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

/* The arguments of a pass -> the kernel that would run: (family, kernel, choice, reason, block_m). Of the tensors only
 * what describes them is looked at. */
static PyObject *plan(PyObject *const *arguments, Py_ssize_t count, int num_tensors, fdm_pass pass) {
    struct call call;
    PyObject *result = NULL;
    if (!parse(arguments, count, num_tensors, &call)) {
        fdm_problem problem;
        fdm_device device = {.struct_bytes = sizeof device};
        fdm_plan plan = {.struct_bytes = sizeof plan};
        const fdm_device_id where = call.tensors.q ? call.tensors.q->device : (fdm_device_id){FDM_CPU, 0};
        fdm_status status = fdm_describe(pass, &call.tensors, &call.options, &problem);
        if (!status)
            status = fdm_device_query(where.type, where.index, &device);
        if (!status)
            status = fdm_plan_attention(&device, &problem, &call.options, &plan);
        result = status ? native_result(status)
                        : Py_BuildValue("(ssssi)", plan.family, plan.kernel, plan.choice, plan.reason, plan.block_m);
    }
    release(&call);
    return result;
}

/* plan(forward()'s arguments) */
PyObject *native_plan(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return plan(arguments, count, NUM_FORWARD, FDM_FORWARD);
}

/* plan_backward(backward()'s arguments) */
PyObject *native_plan_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return plan(arguments, count, NUM_TENSORS, FDM_BACKWARD);
}
