/* native_tune.c: timing the ways to run a problem of given shapes, for Python. */
#include <math.h>

#include "native.h"

enum { ROWS_MAX = 256 };

/* (kernel, choice, state, is the rules', seconds or None, why) */
static PyObject *row_of(const fdm_tune_row *row) {
    static const char *const states[] = {"timed", "not timed", "wrong", "failed"};
    PyObject *seconds = row->num_samples ? PyFloat_FromDouble(row->seconds) : Py_NewRef(Py_None);
    return Py_BuildValue("(sssNNs)", row->kernel, row->choice, states[row->state], PyBool_FromLong(row->is_rule),
                         seconds, row->why);
}

static PyObject *result_of(const fdm_tune_row *rows, const fdm_tune_result *result) {
    PyObject *list = PyList_New(0);
    for (int32_t i = 0; list && i < result->num_rows; i++) {
        PyObject *row = row_of(&rows[i]);
        if (!row || PyList_Append(list, row))
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return Py_BuildValue("(iiddN)", (int)result->best, (int)result->kept, result->compile_seconds,
                         result->device_seconds, list);
}

/* tune(device type, index, backward, dtype, B, H, Hkv, Sq, Sk, D, Dv, causal, left, right, window of intervals or 0,
 * seconds, keep) -> (best row, kept, seconds of compilation, of the device, rows) */
PyObject *native_tune(PyObject *module, PyObject *arguments) {
    static fdm_tune_row rows[ROWS_MAX]; /* under the GIL's absence: one call at a time, below */
    static PyThread_type_lock lock;
    fdm_problem p = fdm_problem_default();
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_tune_options options = {.struct_bytes = sizeof options};
    fdm_tune_result result = {.struct_bytes = sizeof result};
    const char *dtype;
    int type, index, backward, causal, keep;
    long long left, right, window;
    if (!PyArg_ParseTuple(arguments, "iipsLLLLLLLpLLLdp", &type, &index, &backward, &dtype, &p.batch, &p.heads,
                          &p.heads_kv, &p.seqlen_q, &p.seqlen_k, &p.head_dim, &p.head_dim_v, &causal, &left, &right,
                          &window, &options.seconds, &keep))
        return NULL;
    p.pass = backward ? FDM_BACKWARD : FDM_FORWARD;
    p.dtype = fdm_dtype_from_name(dtype);
    p.causal = causal;
    p.window_left = left;
    p.window_right = right;
    p.softmax_scale = p.head_dim > 0 ? 1.0 / sqrt((double)p.head_dim) : 1.0;
    if (window > 0) { /* as masks.topk_intervals() and its bias make them */
        p.has_intervals = p.has_bias = p.causal = 1;
        p.interval_batch = p.bias_shape[0] = p.batch;
        p.interval_heads = p.bias_shape[1] = p.heads_kv;
        p.bias_shape[3] = p.seqlen_k;
        p.bias_dtype = p.dtype;
        p.needs_dbias = backward;
    }
    options.window = window;
    options.keep = keep;
    if (!lock && !(lock = PyThread_allocate_lock()))
        return PyErr_NoMemory();
    fdm_status status;
    Py_BEGIN_ALLOW_THREADS;
    PyThread_acquire_lock(lock, WAIT_LOCK);
    rows[0].struct_bytes = sizeof rows[0];
    status = fdm_device_query(type, index, &device);
    if (!status)
        status = fdm_tune(&device, &p, &options, rows, ROWS_MAX, &result);
    Py_END_ALLOW_THREADS;
    PyObject *made = status ? native_result(status) : result_of(rows, &result);
    PyThread_release_lock(lock);
    return made;
}
