/* native_companions.c: the companion operations for Python: outputs are the caller's, workspace is asked for. */
#include "native.h"

/* A str or None; NULL for None. */
static const char *name_or_null(PyObject *object) {
    return object == Py_None ? NULL : PyUnicode_AsUTF8AndSize(object, NULL);
}

/* softmax(x, mask, out, dout, dx, backward, scale, log, kernel, allocate, stream's address) */
PyObject *native_softmax(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 5, 5))
        return NULL;
    PyObject *const *others = read.others;
    const fdm_softmax_tensors tensors = {sizeof tensors, t[0], t[1], t[2], t[3], t[4]};
    const fdm_pass pass = PyObject_IsTrue(others[0]) == 1 ? FDM_BACKWARD : FDM_FORWARD;
    const fdm_softmax_options options = {.struct_bytes = sizeof options,
                                         .scale = PyFloat_AsDouble(others[1]),
                                         .log = PyObject_IsTrue(others[2]) == 1,
                                         .kernel = name_or_null(others[3]),
                                         .stream = read.stream};
    read.workspace.allocate = others[4];
    const fdm_allocator allocator = native_device_allocator(&read.workspace);
    NATIVE_RUN_AND_RETURN(&read, fdm_softmax(pass, &tensors, &options, &allocator));
}

/* gemm(a, b, c, out, alpha, beta, accumulate_float16, kernel, allocate, stream's address) */
PyObject *native_gemm(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 4, 5))
        return NULL;
    PyObject *const *others = read.others;
    const fdm_gemm_tensors tensors = {sizeof tensors, t[0], t[1], t[2], t[3]};
    const fdm_gemm_options options = {.struct_bytes = sizeof options,
                                      .alpha = PyFloat_AsDouble(others[0]),
                                      .beta = PyFloat_AsDouble(others[1]),
                                      .accumulate_float16 = PyObject_IsTrue(others[2]) == 1,
                                      .kernel = name_or_null(others[3]),
                                      .stream = read.stream};
    read.workspace.allocate = others[4];
    const fdm_allocator allocator = native_device_allocator(&read.workspace);
    NATIVE_RUN_AND_RETURN(&read, fdm_gemm(&tensors, &options, &allocator));
}
