/* native_merge.c: two partial results into one, for Python: the outputs are the caller's. */
#include "native.h"

enum { NUM_TENSORS = 6 };

/* merge(out1, lse1, out2, lse2, out, lse, stream's address) */
PyObject *native_merge(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, NUM_TENSORS + 1))
        return NULL;
    struct tensor_argument storage[NUM_TENSORS] = {0};
    fdm_tensor *t[NUM_TENSORS];
    const int failed = native_tensors(arguments, storage, t, NUM_TENSORS);
    void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[NUM_TENSORS]);
    NATIVE_RUN_AND_RETURN(failed, fdm_merge(t[0], t[1], t[2], t[3], t[4], t[5], stream), storage, NUM_TENSORS);
}
