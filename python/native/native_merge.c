/* native_merge.c: two partial results into one, for Python: the outputs are the caller's. */
#include "native.h"

/* merge(out1, lse1, lse_low1, out2, lse2, lse_low2, out, lse, lse_low, stream's address); low parts may be None */
PyObject *native_merge(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 9, 0))
        return NULL;
    const fdm_merge_tensors tensors = {sizeof tensors, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]};
    NATIVE_RUN_AND_RETURN(&read, fdm_merge(&tensors, read.stream));
}
