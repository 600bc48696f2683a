/* native_mask.c: masks as key intervals, for Python: the arrays are the caller's. */
#include "native.h"

/* A contiguous int32 [length] or [1, .., length] array, never NULL; or NULL with an exception set. */
static int32_t *row_data(const fdm_tensor *tensor, int64_t length) {
    static int32_t none;
    int64_t elements = 1;
    for (int32_t i = 0; i < tensor->ndim; i++)
        elements *= tensor->shape[i];
    if (fdm_dtype_of(tensor) == FDM_INT32 && elements == 0 && length == 0)
        return &none;
    if (fdm_dtype_of(tensor) == FDM_INT32 && elements == length)
        return (int32_t *)((char *)tensor->data + tensor->byte_offset);
    PyErr_Format(PyExc_ValueError, "an interval array must be int32 with %lld elements", (long long)length);
    return NULL;
}

/* topk_workspace(bias, padding or None) -> bytes */
PyObject *native_topk_workspace(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 2))
        return NULL;
    struct tensor_argument storage[2] = {0};
    int failed = 0;
    fdm_tensor *bias = native_tensor(arguments[0], &storage[0], &failed);
    fdm_tensor *padding = native_tensor(arguments[1], &storage[1], &failed);
    PyObject *result = failed ? NULL : PyLong_FromSize_t(fdm_topk_intervals_workspace(bias, padding));
    native_release(storage, 2);
    return result;
}

/* topk_intervals(bias, padding or None, window, seqlen_q, start, end, workspace: its address, its bytes, stream's
 * address); workspace 0: none is given */
PyObject *native_topk_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 9))
        return NULL;
    struct tensor_argument storage[4] = {0};
    int failed = 0;
    fdm_tensor *bias = native_tensor(arguments[0], &storage[0], &failed);
    fdm_tensor *padding = native_tensor(arguments[1], &storage[1], &failed);
    fdm_tensor *start = native_tensor(arguments[4], &storage[2], &failed);
    fdm_tensor *end = native_tensor(arguments[5], &storage[3], &failed);
    int64_t window = PyLong_AsLongLong(arguments[2]), seqlen_q = PyLong_AsLongLong(arguments[3]);
    void *workspace = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[6]);
    size_t bytes = PyLong_AsSize_t(arguments[7]);
    void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[8]);
    PyObject *result = NULL;
    if (!failed && !PyErr_Occurred()) {
        fdm_status status;
        Py_BEGIN_ALLOW_THREADS;
        status = fdm_topk_intervals(bias, padding, window, seqlen_q, start, end, workspace, bytes, stream);
        Py_END_ALLOW_THREADS;
        result = native_result(status);
    }
    native_release(storage, 4);
    return result;
}

/* document_intervals(cu_seqlens, causal, start, end) */
PyObject *native_document_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 4))
        return NULL;
    struct tensor_argument storage[3] = {0};
    int failed = 0;
    fdm_tensor *cu = native_tensor(arguments[0], &storage[0], &failed);
    int causal = PyObject_IsTrue(arguments[1]) == 1;
    fdm_tensor *start = native_tensor(arguments[2], &storage[1], &failed);
    fdm_tensor *end = native_tensor(arguments[3], &storage[2], &failed);
    PyObject *result = NULL;
    int32_t *offsets = failed ? NULL : row_data(cu, cu->shape[0]);
    if (offsets) {
        int64_t documents = cu->shape[0] - 1, keys = documents >= 0 ? offsets[documents] : 0;
        int32_t *first = row_data(start, keys), *last = first ? row_data(end, keys) : NULL;
        if (last)
            result = native_result(fdm_document_intervals(offsets, documents, causal, first, last));
    }
    native_release(storage, 3);
    return result;
}

/* The settings (up to five integers), then start and end, each [seqlen_k]; which setting is seqlen_k is the second. */
static int read_rows(PyObject *const *arguments, int num_settings, struct tensor_argument *storage, int64_t *settings,
                     int32_t **rows) {
    int failed = 0;
    for (int i = 0; i < num_settings; i++)
        settings[i] = PyLong_AsLongLong(arguments[i]);
    if (PyErr_Occurred())
        return -1;
    for (int i = 0; i < 2; i++) {
        fdm_tensor *tensor = native_tensor(arguments[num_settings + i], &storage[i], &failed);
        if (failed || !(rows[i] = row_data(tensor, settings[1])))
            return -1;
    }
    return 0;
}

/* window_intervals(seqlen_q, seqlen_k, causal, window_left, window_right, start, end) */
PyObject *native_window_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 7))
        return NULL;
    struct tensor_argument storage[2] = {0};
    int64_t s[5];
    int32_t *rows[2];
    PyObject *result = NULL;
    if (!read_rows(arguments, 5, storage, s, rows))
        result = native_result(fdm_window_intervals(s[0], s[1], s[2] != 0, s[3], s[4], rows[0], rows[1]));
    native_release(storage, 2);
    return result;
}

/* prefix_intervals(seqlen_q, seqlen_k, prefix, start, end) */
PyObject *native_prefix_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 5))
        return NULL;
    struct tensor_argument storage[2] = {0};
    int64_t s[3];
    int32_t *rows[2];
    PyObject *result = NULL;
    if (!read_rows(arguments, 3, storage, s, rows))
        result = native_result(fdm_prefix_intervals(s[0], s[1], s[2], rows[0], rows[1]));
    native_release(storage, 2);
    return result;
}

/* intervals_from_mask(mask [rows, keys] bool, start, end) -> whether the mask is one interval per key */
PyObject *native_intervals_from_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 3))
        return NULL;
    struct tensor_argument storage[3] = {0};
    int failed = 0;
    fdm_tensor *tensor[3];
    for (int i = 0; i < 3; i++)
        tensor[i] = native_tensor(arguments[i], &storage[i], &failed);
    PyObject *result = NULL;
    if (!failed && (tensor[0]->ndim != 2 || fdm_dtype_of(tensor[0]) != FDM_BOOL || !tensor[0]->strides))
        PyErr_SetString(PyExc_ValueError, "mask must be a bool array of 2 axes with strides");
    else if (!failed) {
        const fdm_tensor *mask = tensor[0];
        int32_t *start = row_data(tensor[1], mask->shape[1]), *end = start ? row_data(tensor[2], mask->shape[1]) : NULL;
        int32_t exact = 0;
        fdm_status status = FDM_OK;
        if (end)
            status = fdm_intervals_from_mask((const uint8_t *)mask->data + mask->byte_offset, mask->shape[0],
                                             mask->shape[1], mask->strides[0], mask->strides[1], start, end, &exact);
        if (end)
            result = status ? native_result(status) : PyBool_FromLong(exact);
    }
    native_release(storage, 3);
    return result;
}
