/* native_merge.c: two partial results into one, for Python: the outputs are the caller's. */
#include "native.h"

enum { NUM_TENSORS = 9 };

/* merge(out1, lse1, lse_low1, out2, lse2, lse_low2, out, lse, lse_low, stream's address); low parts may be None */
PyObject *native_merge(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, NUM_TENSORS + 1))
        return NULL;
    struct tensor_argument storage[NUM_TENSORS] = {0};
    fdm_tensor *t[NUM_TENSORS];
    const int failed = native_tensors(arguments, storage, t, NUM_TENSORS);
    void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[NUM_TENSORS]);
    const fdm_merge_tensors tensors = {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]};
    NATIVE_RUN_AND_RETURN(failed, fdm_merge(&tensors, stream), storage, NUM_TENSORS);
}
