/* native_merge.c: two partial results into one, for Python: the outputs are the caller's. */
#include "native.h"

enum { NUM_TENSORS = 6 };

/* merge(out1, lse1, out2, lse2, out, lse, stream's address) */
PyObject *native_merge(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, NUM_TENSORS + 1))
        return NULL;
    struct tensor_argument storage[NUM_TENSORS] = {0};
    fdm_tensor *t[NUM_TENSORS];
    int failed = 0;
    for (int i = 0; i < NUM_TENSORS; i++)
        t[i] = native_tensor(arguments[i], &storage[i], &failed);
    void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[NUM_TENSORS]);
    PyObject *result = NULL;
    if (!failed && !PyErr_Occurred()) {
        fdm_status status;
        Py_BEGIN_ALLOW_THREADS;
        status = fdm_merge(t[0], t[1], t[2], t[3], t[4], t[5], stream);
        Py_END_ALLOW_THREADS;
        result = native_result(status);
    }
    native_release(storage, NUM_TENSORS);
    return result;
}
