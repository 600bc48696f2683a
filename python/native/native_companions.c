/* native_companions.c: the companion operations for Python: outputs are the caller's, workspace is asked for. */
#include "native.h"

/* A str or None; NULL for None. */
static const char *name_or_null(PyObject *object) {
    return object == Py_None ? NULL : PyUnicode_AsUTF8AndSize(object, NULL);
}

/* softmax(backward, x, mask, out, dout, dx, scale, log, kernel, stream's address, allocate) */
PyObject *native_softmax(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    enum { NUM_TENSORS = 5, NUM_ARGUMENTS = 11 };
    if (native_expect(count, NUM_ARGUMENTS))
        return NULL;
    struct tensor_argument storage[NUM_TENSORS] = {0};
    fdm_tensor *t[NUM_TENSORS];
    const int failed = native_tensors(arguments + 1, storage, t, NUM_TENSORS);
    const fdm_softmax_tensors tensors = {t[0], t[1], t[2], t[3], t[4]};
    const fdm_pass pass = PyObject_IsTrue(arguments[0]) == 1 ? FDM_BACKWARD : FDM_FORWARD;
    const fdm_softmax_options options = {.scale = PyFloat_AsDouble(arguments[6]),
                                         .log = PyObject_IsTrue(arguments[7]) == 1,
                                         .kernel = name_or_null(arguments[8]),
                                         .stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[9])};
    struct native_device_workspace workspace = {arguments[10], NULL};
    const fdm_allocator allocator = native_device_allocator(&workspace);
    PyObject *result = NULL;
    if (!failed && !PyErr_Occurred()) {
        fdm_status status;
        Py_BEGIN_ALLOW_THREADS;
        status = fdm_softmax(pass, &tensors, &options, &allocator);
        Py_END_ALLOW_THREADS;
        result = PyErr_Occurred() ? NULL : native_result(status);
    }
    Py_XDECREF(workspace.kept);
    native_release(storage, NUM_TENSORS);
    return result;
}

/* gemm(a, b, c, out, alpha, beta, accumulate_float16, kernel, stream's address, allocate) */
PyObject *native_gemm(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    enum { NUM_TENSORS = 4, NUM_ARGUMENTS = 10 };
    if (native_expect(count, NUM_ARGUMENTS))
        return NULL;
    struct tensor_argument storage[NUM_TENSORS] = {0};
    fdm_tensor *t[NUM_TENSORS];
    const int failed = native_tensors(arguments, storage, t, NUM_TENSORS);
    const fdm_gemm_tensors tensors = {t[0], t[1], t[2], t[3]};
    const fdm_gemm_options options = {.alpha = PyFloat_AsDouble(arguments[4]),
                                      .beta = PyFloat_AsDouble(arguments[5]),
                                      .accumulate_float16 = PyObject_IsTrue(arguments[6]) == 1,
                                      .kernel = name_or_null(arguments[7]),
                                      .stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[8])};
    struct native_device_workspace workspace = {arguments[9], NULL};
    const fdm_allocator allocator = native_device_allocator(&workspace);
    PyObject *result = NULL;
    if (!failed && !PyErr_Occurred()) {
        fdm_status status;
        Py_BEGIN_ALLOW_THREADS;
        status = fdm_gemm(&tensors, &options, &allocator);
        Py_END_ALLOW_THREADS;
        result = PyErr_Occurred() ? NULL : native_result(status);
    }
    Py_XDECREF(workspace.kept);
    native_release(storage, NUM_TENSORS);
    return result;
}
