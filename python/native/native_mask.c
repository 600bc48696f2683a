/* native_mask.c: masks as key intervals, for Python: the arrays are the caller's. */
#include "native.h"

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

/* The pair of outputs and the stream that end every call's arguments. */
struct pair {
    struct tensor_argument storage[2];
    fdm_tensor *start, *end;
    void *stream;
};

static int read_pair(PyObject *const *arguments, struct pair *pair) {
    int failed = 0;
    *pair = (struct pair){0};
    pair->start = native_tensor(arguments[0], &pair->storage[0], &failed);
    pair->end = native_tensor(arguments[1], &pair->storage[1], &failed);
    pair->stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[2]);
    return failed || PyErr_Occurred() ? -1 : 0;
}

/* document_intervals(cu_seqlens, causal, start, end, stream's address) */
PyObject *native_document_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 5))
        return NULL;
    struct tensor_argument storage = {0};
    struct pair pair;
    int failed = 0, causal = PyObject_IsTrue(arguments[1]) == 1;
    fdm_tensor *cu_seqlens = native_tensor(arguments[0], &storage, &failed);
    PyObject *result = NULL;
    if (read_pair(arguments + 2, &pair) == 0 && !failed)
        result = native_result(fdm_document_intervals(cu_seqlens, causal, pair.start, pair.end, pair.stream));
    native_release(pair.storage, 2);
    native_release(&storage, 1);
    return result;
}

/* window_intervals(seqlen_q, causal, window_left, window_right, start, end, stream's address) */
PyObject *native_window_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 7))
        return NULL;
    struct pair pair;
    int64_t s[4];
    for (int i = 0; i < 4; i++)
        s[i] = PyLong_AsLongLong(arguments[i]);
    PyObject *result = NULL;
    if (read_pair(arguments + 4, &pair) == 0)
        result = native_result(fdm_window_intervals(s[0], s[1] != 0, s[2], s[3], pair.start, pair.end, pair.stream));
    native_release(pair.storage, 2);
    return result;
}

/* prefix_intervals(seqlen_q, prefix, start, end, stream's address) */
PyObject *native_prefix_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 5))
        return NULL;
    struct pair pair;
    int64_t seqlen_q = PyLong_AsLongLong(arguments[0]), prefix = PyLong_AsLongLong(arguments[1]);
    PyObject *result = NULL;
    if (read_pair(arguments + 2, &pair) == 0)
        result = native_result(fdm_prefix_intervals(seqlen_q, prefix, pair.start, pair.end, pair.stream));
    native_release(pair.storage, 2);
    return result;
}

/* intervals_from_mask(mask [B, h, Sq, Sk] bool, start, end, stream's address, address of an int32 on a CUDA device or
 * 0)
 * -> on the CPU whether the mask is one interval per key; else None */
PyObject *native_intervals_from_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 5))
        return NULL;
    struct tensor_argument storage = {0};
    struct pair pair;
    int failed = 0;
    int32_t here = 0, *there = (int32_t *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[4]);
    fdm_tensor *mask = native_tensor(arguments[0], &storage, &failed);
    PyObject *result = NULL;
    if (read_pair(arguments + 1, &pair) == 0 && !failed) {
        fdm_status status;
        Py_BEGIN_ALLOW_THREADS;
        status = fdm_intervals_from_mask(mask, pair.start, pair.end, there ? there : &here, pair.stream);
        Py_END_ALLOW_THREADS;
        result = status || there ? native_result(status) : PyBool_FromLong(here);
    }
    native_release(pair.storage, 2);
    native_release(&storage, 1);
    return result;
}

/* What both functions of slots begin with: bias, k or None, v or None, key, bias, length, k or None, v or None. */
enum { SLOT_TENSORS = 8 };

static fdm_topk_slots read_slots(PyObject *const *arguments, struct tensor_argument *storage, fdm_tensor **given,
                                 int *failed) {
    fdm_tensor *t[SLOT_TENSORS];
    for (int i = 0; i < SLOT_TENSORS; i++)
        t[i] = native_tensor(arguments[i], &storage[i], failed);
    for (int i = 0; i < 3; i++)
        given[i] = t[i];
    return (fdm_topk_slots){t[3], t[4], t[5], t[6], t[7]};
}

/* topk_append(the tensors above, real or None, slot or None, stream's address) */
PyObject *native_topk_append(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, SLOT_TENSORS + 3))
        return NULL;
    struct tensor_argument storage[SLOT_TENSORS + 2] = {0};
    fdm_tensor *given[3];
    int failed = 0;
    const fdm_topk_slots slots = read_slots(arguments, storage, given, &failed);
    fdm_tensor *real = native_tensor(arguments[SLOT_TENSORS], &storage[SLOT_TENSORS], &failed);
    fdm_tensor *slot = native_tensor(arguments[SLOT_TENSORS + 1], &storage[SLOT_TENSORS + 1], &failed);
    void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[SLOT_TENSORS + 2]);
    PyObject *result = NULL;
    if (!failed && !PyErr_Occurred())
        result = native_result(fdm_topk_append(given[0], real, given[1], given[2], &slots, slot, stream));
    native_release(storage, SLOT_TENSORS + 2);
    return result;
}

/* topk_fill(the tensors above, end, stream's address) */
PyObject *native_topk_fill(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, SLOT_TENSORS + 2))
        return NULL;
    struct tensor_argument storage[SLOT_TENSORS + 1] = {0};
    fdm_tensor *given[3];
    int failed = 0;
    const fdm_topk_slots slots = read_slots(arguments, storage, given, &failed);
    fdm_tensor *end = native_tensor(arguments[SLOT_TENSORS], &storage[SLOT_TENSORS], &failed);
    void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[SLOT_TENSORS + 1]);
    PyObject *result = NULL;
    if (!failed && !PyErr_Occurred())
        result = native_result(fdm_topk_fill(given[0], end, given[1], given[2], &slots, stream));
    native_release(storage, SLOT_TENSORS + 1);
    return result;
}
