/* native_mask.c: masks as key intervals and as dense masks, for Python: the arrays are the caller's. */
#include "native.h"

/* ---- key intervals ---- */

/* topk_workspace(bias, padding or None) -> bytes */
PyObject *native_topk_workspace(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 2))
        return NULL;
    struct tensor_argument storage[2];
    fdm_tensor *t[2];
    const int failed = native_tensors(arguments, storage, t, 2);
    PyObject *result = failed ? NULL : PyLong_FromSize_t(fdm_topk_intervals_workspace(t[0], t[1]));
    native_release(storage, 2);
    return result;
}

/* topk_intervals(bias, padding or None, start, end, window, seqlen_q, workspace: its address, its bytes, stream's
 * address); workspace 0: none is given */
PyObject *native_topk_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 4, 4))
        return NULL;
    const int64_t window = PyLong_AsLongLong(read.others[0]), seqlen_q = PyLong_AsLongLong(read.others[1]);
    void *workspace = native_address(read.others[2]);
    const size_t bytes = PyLong_AsSize_t(read.others[3]);
    NATIVE_RUN_AND_RETURN(&read,
                          fdm_topk_intervals(t[0], t[1], window, seqlen_q, t[2], t[3], workspace, bytes, read.stream));
}

/* document_intervals(cu_seqlens, start, end, causal, stream's address) */
PyObject *native_document_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 3, 1))
        return NULL;
    const int causal = PyObject_IsTrue(read.others[0]) == 1;
    NATIVE_RUN_AND_RETURN(&read, fdm_document_intervals(t[0], causal, t[1], t[2], read.stream));
}

/* window_intervals(start, end, seqlen_q, causal, window_left, window_right, stream's address) */
PyObject *native_window_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 2, 4))
        return NULL;
    const int64_t seqlen_q = PyLong_AsLongLong(read.others[0]);
    const int causal = PyObject_IsTrue(read.others[1]) == 1;
    const int64_t left = PyLong_AsLongLong(read.others[2]), right = PyLong_AsLongLong(read.others[3]);
    NATIVE_RUN_AND_RETURN(&read, fdm_window_intervals(seqlen_q, causal, left, right, t[0], t[1], read.stream));
}

/* prefix_intervals(start, end, seqlen_q, prefix, stream's address) */
PyObject *native_prefix_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 2, 2))
        return NULL;
    const int64_t seqlen_q = PyLong_AsLongLong(read.others[0]), prefix = PyLong_AsLongLong(read.others[1]);
    NATIVE_RUN_AND_RETURN(&read, fdm_prefix_intervals(seqlen_q, prefix, t[0], t[1], read.stream));
}

/* rule_intervals(document_ids, prefix_lengths, window_sizes, interval_start, interval_end, cu_seqlens_q, cu_seqlens_k,
 * each or None, start, end, seqlen_q, stream's address) */
PyObject *native_rule_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 9, 1))
        return NULL;
    const fdm_key_rules rules = {.struct_bytes = sizeof rules,
                                 .document_ids = t[0],
                                 .prefix_lengths = t[1],
                                 .window_sizes = t[2],
                                 .interval_start = t[3],
                                 .interval_end = t[4],
                                 .cu_seqlens_q = t[5],
                                 .cu_seqlens_k = t[6]};
    const int64_t seqlen_q = PyLong_AsLongLong(read.others[0]);
    NATIVE_RUN_AND_RETURN(&read, fdm_rule_intervals(&rules, seqlen_q, t[7], t[8], read.stream));
}

/* intervals_from_mask(mask [B, h, Sq, Sk], start, end, address of an int32 on the mask's device, stream's address) */
PyObject *native_intervals_from_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 3, 1))
        return NULL;
    int32_t *exact = native_address(read.others[0]);
    NATIVE_RUN_AND_RETURN(&read, fdm_intervals_from_mask(t[0], t[1], t[2], exact, read.stream));
}

/* ---- dense masks ---- */

/* intervals_to_mask(start, end, mask [B, h, Sq, Sk], stream's address) */
PyObject *native_intervals_to_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 3, 0))
        return NULL;
    NATIVE_RUN_AND_RETURN(&read, fdm_intervals_to_mask(t[0], t[1], t[2], read.stream));
}

/* mask_blocks(mask [B, h, Sq, Sk], blocks, block_q, block_k, stream's address) */
PyObject *native_mask_blocks(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 2, 2))
        return NULL;
    const int64_t block_q = PyLong_AsLongLong(read.others[0]), block_k = PyLong_AsLongLong(read.others[1]);
    NATIVE_RUN_AND_RETURN(&read, fdm_mask_blocks(t[0], block_q, block_k, t[1], read.stream));
}

/* blocks_from_lists(counts, indices, blocks, stream's address) */
PyObject *native_blocks_from_lists(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 3, 0))
        return NULL;
    NATIVE_RUN_AND_RETURN(&read, fdm_blocks_from_lists(t[0], t[1], t[2], read.stream));
}

/* create_mask(bias, attention_mask or None, mask, window, min_value, block_size, stream's address) */
PyObject *native_create_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 3, 3))
        return NULL;
    const int64_t window = PyLong_AsLongLong(read.others[0]), block_size = PyLong_AsLongLong(read.others[2]);
    const double min_value = PyFloat_AsDouble(read.others[1]);
    NATIVE_RUN_AND_RETURN(&read, fdm_create_mask(t[0], t[1], window, min_value, block_size, t[2], read.stream));
}

/* ---- biases ---- */

/* key_bias(dt, a, padding or None, bias, exponential, stream's address) */
PyObject *native_key_bias(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 4, 1))
        return NULL;
    const int exponential = PyObject_IsTrue(read.others[0]) == 1;
    NATIVE_RUN_AND_RETURN(&read, fdm_key_bias(t[0], t[1], t[2], exponential, t[3], read.stream));
}

/* key_bias_backward(dt, a, padding or None, dbias, ddt or None, da or None, exponential, stream's address) */
PyObject *native_key_bias_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, 6, 1))
        return NULL;
    const int exponential = PyObject_IsTrue(read.others[0]) == 1;
    NATIVE_RUN_AND_RETURN(&read, fdm_key_bias_backward(t[0], t[1], t[2], exponential, t[3], t[4], t[5], read.stream));
}

/* ---- slots ---- */

/* Both functions of slots begin with bias, k or None, v or None, and the slots' key, bias, length, k or None, v or
 * None; two tensors follow. */
enum { NUM_SLOT_TENSORS = 10 };

static fdm_topk_slots slots_of(fdm_tensor *const *t) {
    return (fdm_topk_slots){sizeof(fdm_topk_slots), t[3], t[4], t[5], t[6], t[7]};
}

/* topk_append(the tensors above, real or None, slot or None, stream's address) */
PyObject *native_topk_append(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, NUM_SLOT_TENSORS, 0))
        return NULL;
    const fdm_topk_slots slots = slots_of(t);
    NATIVE_RUN_AND_RETURN(&read, fdm_topk_append(t[0], t[8], t[1], t[2], &slots, t[9], read.stream));
}

/* topk_fill(the tensors above, end, block_table or None, stream's address) */
PyObject *native_topk_fill(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct native_arguments read;
    fdm_tensor **t = read.tensors;
    if (native_read(&read, arguments, count, NUM_SLOT_TENSORS, 0))
        return NULL;
    const fdm_topk_slots slots = slots_of(t);
    NATIVE_RUN_AND_RETURN(&read, fdm_topk_fill(t[0], t[8], t[1], t[2], t[9], &slots, read.stream));
}
