/* native_mask.c: masks as key intervals and as dense masks, for Python: the arrays are the caller's. */
#include "native.h"

static void *address_of(PyObject *number) { return (void *)(uintptr_t)PyLong_AsUnsignedLongLong(number); }

/* ---- key intervals ---- */

/* topk_workspace(bias, padding or None) -> bytes */
PyObject *native_topk_workspace(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 2))
        return NULL;
    struct tensor_argument storage[2] = {0};
    fdm_tensor *t[2];
    const int failed = native_tensors(arguments, storage, t, 2);
    PyObject *result = failed ? NULL : PyLong_FromSize_t(fdm_topk_intervals_workspace(t[0], t[1]));
    native_release(storage, 2);
    return result;
}

/* topk_intervals(bias, padding or None, start, end, window, seqlen_q, workspace: its address, its bytes, stream's
 * address); workspace 0: none is given */
PyObject *native_topk_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 9))
        return NULL;
    struct tensor_argument storage[4] = {0};
    fdm_tensor *t[4];
    const int failed = native_tensors(arguments, storage, t, 4);
    const int64_t window = PyLong_AsLongLong(arguments[4]), seqlen_q = PyLong_AsLongLong(arguments[5]);
    void *workspace = address_of(arguments[6]), *stream = address_of(arguments[8]);
    const size_t bytes = PyLong_AsSize_t(arguments[7]);
    NATIVE_RUN_AND_RETURN(
        failed, fdm_topk_intervals(t[0], t[1], window, seqlen_q, t[2], t[3], workspace, bytes, stream), storage, 4);
}

/* document_intervals(cu_seqlens, start, end, causal, stream's address) */
PyObject *native_document_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 5))
        return NULL;
    struct tensor_argument storage[3] = {0};
    fdm_tensor *t[3];
    const int failed = native_tensors(arguments, storage, t, 3), causal = PyObject_IsTrue(arguments[3]) == 1;
    void *stream = address_of(arguments[4]);
    NATIVE_RUN_AND_RETURN(failed, fdm_document_intervals(t[0], causal, t[1], t[2], stream), storage, 3);
}

/* window_intervals(start, end, seqlen_q, causal, window_left, window_right, stream's address) */
PyObject *native_window_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 7))
        return NULL;
    struct tensor_argument storage[2] = {0};
    fdm_tensor *t[2];
    int64_t s[4];
    const int failed = native_tensors(arguments, storage, t, 2);
    for (int i = 0; i < 4; i++)
        s[i] = PyLong_AsLongLong(arguments[2 + i]);
    void *stream = address_of(arguments[6]);
    NATIVE_RUN_AND_RETURN(failed, fdm_window_intervals(s[0], s[1] != 0, s[2], s[3], t[0], t[1], stream), storage, 2);
}

/* prefix_intervals(start, end, seqlen_q, prefix, stream's address) */
PyObject *native_prefix_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 5))
        return NULL;
    struct tensor_argument storage[2] = {0};
    fdm_tensor *t[2];
    const int failed = native_tensors(arguments, storage, t, 2);
    const int64_t seqlen_q = PyLong_AsLongLong(arguments[2]), prefix = PyLong_AsLongLong(arguments[3]);
    void *stream = address_of(arguments[4]);
    NATIVE_RUN_AND_RETURN(failed, fdm_prefix_intervals(seqlen_q, prefix, t[0], t[1], stream), storage, 2);
}

/* intervals_from_mask(mask [B, h, Sq, Sk], start, end, address of an int32 on the mask's device, stream's address) */
PyObject *native_intervals_from_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 5))
        return NULL;
    struct tensor_argument storage[3] = {0};
    fdm_tensor *t[3];
    const int failed = native_tensors(arguments, storage, t, 3);
    int32_t *exact = address_of(arguments[3]);
    void *stream = address_of(arguments[4]);
    NATIVE_RUN_AND_RETURN(failed, fdm_intervals_from_mask(t[0], t[1], t[2], exact, stream), storage, 3);
}

/* ---- dense masks ---- */

/* intervals_to_mask(start, end, mask [B, h, Sq, Sk], stream's address) */
PyObject *native_intervals_to_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 4))
        return NULL;
    struct tensor_argument storage[3] = {0};
    fdm_tensor *t[3];
    const int failed = native_tensors(arguments, storage, t, 3);
    void *stream = address_of(arguments[3]);
    NATIVE_RUN_AND_RETURN(failed, fdm_intervals_to_mask(t[0], t[1], t[2], stream), storage, 3);
}

/* mask_blocks(mask [B, h, Sq, Sk], blocks, block_q, block_k, stream's address) */
PyObject *native_mask_blocks(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 5))
        return NULL;
    struct tensor_argument storage[2] = {0};
    fdm_tensor *t[2];
    const int failed = native_tensors(arguments, storage, t, 2);
    const int64_t block_q = PyLong_AsLongLong(arguments[2]), block_k = PyLong_AsLongLong(arguments[3]);
    void *stream = address_of(arguments[4]);
    NATIVE_RUN_AND_RETURN(failed, fdm_mask_blocks(t[0], block_q, block_k, t[1], stream), storage, 2);
}

/* create_mask(bias, attention_mask or None, mask, window, min_value, block_size, stream's address) */
PyObject *native_create_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 7))
        return NULL;
    struct tensor_argument storage[3] = {0};
    fdm_tensor *t[3];
    const int failed = native_tensors(arguments, storage, t, 3);
    const int64_t window = PyLong_AsLongLong(arguments[3]), block_size = PyLong_AsLongLong(arguments[5]);
    const double min_value = PyFloat_AsDouble(arguments[4]);
    void *stream = address_of(arguments[6]);
    NATIVE_RUN_AND_RETURN(failed, fdm_create_mask(t[0], t[1], window, min_value, block_size, t[2], stream), storage, 3);
}

/* ---- biases ---- */

/* key_bias(dt, a, padding or None, bias, exponential, stream's address) */
PyObject *native_key_bias(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 6))
        return NULL;
    struct tensor_argument storage[4] = {0};
    fdm_tensor *t[4];
    const int failed = native_tensors(arguments, storage, t, 4), exponential = PyObject_IsTrue(arguments[4]) == 1;
    void *stream = address_of(arguments[5]);
    NATIVE_RUN_AND_RETURN(failed, fdm_key_bias(t[0], t[1], t[2], exponential, t[3], stream), storage, 4);
}

/* key_bias_backward(dt, a, padding or None, dbias, ddt or None, da or None, exponential, stream's address) */
PyObject *native_key_bias_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 8))
        return NULL;
    struct tensor_argument storage[6] = {0};
    fdm_tensor *t[6];
    const int failed = native_tensors(arguments, storage, t, 6), exponential = PyObject_IsTrue(arguments[6]) == 1;
    void *stream = address_of(arguments[7]);
    NATIVE_RUN_AND_RETURN(failed, fdm_key_bias_backward(t[0], t[1], t[2], exponential, t[3], t[4], t[5], stream),
                          storage, 6);
}

/* ---- slots ---- */

/* What the arguments of both functions of slots begin with: bias, k or None, v or None, and the slots' key, bias,
 * length, k or None, v or None. */
enum { SLOT_TENSORS = 8 };

static fdm_topk_slots slots_of(fdm_tensor *const *t) { return (fdm_topk_slots){t[3], t[4], t[5], t[6], t[7]}; }

/* topk_append(the tensors above, real or None, slot or None, stream's address) */
PyObject *native_topk_append(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    enum { NUM_TENSORS = SLOT_TENSORS + 2 };
    if (native_expect(count, NUM_TENSORS + 1))
        return NULL;
    struct tensor_argument storage[NUM_TENSORS] = {0};
    fdm_tensor *t[NUM_TENSORS];
    const int failed = native_tensors(arguments, storage, t, NUM_TENSORS);
    void *stream = address_of(arguments[NUM_TENSORS]);
    const fdm_topk_slots slots = slots_of(t);
    NATIVE_RUN_AND_RETURN(failed, fdm_topk_append(t[0], t[8], t[1], t[2], &slots, t[9], stream), storage, NUM_TENSORS);
}

/* topk_fill(the tensors above, end, block_table or None, stream's address) */
PyObject *native_topk_fill(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    enum { NUM_TENSORS = SLOT_TENSORS + 2 };
    if (native_expect(count, NUM_TENSORS + 1))
        return NULL;
    struct tensor_argument storage[NUM_TENSORS] = {0};
    fdm_tensor *t[NUM_TENSORS];
    const int failed = native_tensors(arguments, storage, t, NUM_TENSORS);
    void *stream = address_of(arguments[NUM_TENSORS]);
    const fdm_topk_slots slots = slots_of(t);
    NATIVE_RUN_AND_RETURN(failed, fdm_topk_fill(t[0], t[8], t[1], t[2], t[9], &slots, stream), storage, NUM_TENSORS);
}
