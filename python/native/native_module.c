/* native_module.c: the extension module flash_dmattn._native: a thin, abi3 door to the C library. */
#include "native.h"

static PyObject *exception_for(fdm_status status) {
    switch (status) {
    case FDM_ERROR_INVALID_ARGUMENT: return PyExc_ValueError;
    case FDM_ERROR_UNSUPPORTED: return PyExc_NotImplementedError;
    case FDM_ERROR_OUT_OF_MEMORY: return PyExc_MemoryError;
    case FDM_ERROR_SYSTEM: return PyExc_OSError;
    default: return PyExc_RuntimeError;
    }
}

PyObject *native_result(fdm_status status) {
    if (status == FDM_OK)
        Py_RETURN_NONE;
    PyErr_SetString(exception_for(status), fdm_last_error());
    return NULL;
}

int native_expect(Py_ssize_t count, Py_ssize_t needed) {
    if (count == needed)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments are needed, %zd were given", needed, count);
    return -1;
}

/* device() -> facts of the CPU */
static PyObject *native_device(PyObject *module, PyObject *unused) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_status status = fdm_device_query(FDM_CPU, 0, &device);
    if (status)
        return native_result(status);
    return Py_BuildValue("{s:s,s:s,s:i,s:L,s:L,s:L}", "name", device.name, "isa", device.isa, "num_threads",
                         (int)device.num_threads, "l1_bytes", (long long)device.l1_bytes, "l2_bytes",
                         (long long)device.l2_bytes, "l3_bytes", (long long)device.l3_bytes);
}

/* cuda_devices() -> how many CUDA devices can be used; starts the driver */
static PyObject *native_cuda_devices(PyObject *module, PyObject *unused) {
    fdm_device device = {.struct_bytes = sizeof device};
    int32_t count = 0;
    while (fdm_device_query(FDM_CUDA, count, &device) == FDM_OK)
        count++;
    return PyLong_FromLong(count);
}

/* settings() -> [(name, description, value or None)] */
static PyObject *native_settings(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);
    fdm_setting_info info = {.struct_bytes = sizeof info};
    for (int32_t i = 0; list && fdm_setting_list(i, &info) == FDM_OK; i++) {
        PyObject *row = Py_BuildValue("(ssz)", info.name, info.description, info.value);
        if (!row || PyList_Append(list, row))
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *native_version(PyObject *module, PyObject *unused) { return PyUnicode_FromString(fdm_version()); }

#define FASTCALL(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL

static PyMethodDef methods[] = {
    {"forward", FASTCALL(native_forward), "Attention forward on caller-allocated tensors."},
    {"backward", FASTCALL(native_backward), "Attention backward on caller-allocated tensors."},
    {"attention_fields", native_attention_fields, METH_NOARGS, "Rows of native_fields.h: inputs, results, settings."},
    {"use_torch", native_use_torch, METH_O, "Takes what the functions on PyTorch tensors call, by name."},
    {"attend", FASTCALL(native_attend), "Attention on PyTorch tensors; None when it must go through the dispatcher."},
    {"node_forward", FASTCALL(native_node_forward), "Forward of the autograd node."},
    {"node_backward", FASTCALL(native_node_backward), "Backward of the autograd node."},
    {"operator_forward", FASTCALL(native_operator_forward), "Attention forward on PyTorch tensors."},
    {"operator_backward", FASTCALL(native_operator_backward), "Attention backward on PyTorch tensors."},
    {"xla_handlers", native_xla_handlers, METH_NOARGS, "Custom calls of XLA: (target, platform, capsule) of each."},
    {"cache_forward", FASTCALL(native_cache_forward), "Attention on a KV cache, on caller-allocated tensors."},
    {"cache_append", FASTCALL(native_cache_append), "New keys into a KV cache; queries turned."},
    {"cache_attend", FASTCALL(native_cache_attend), "cache_forward of PyTorch tensors, or NotImplemented."},
    {"append_to_cache", FASTCALL(native_append_to_cache), "cache_append of PyTorch tensors, or NotImplemented."},
    {"plan_cache", native_plan_cache, METH_VARARGS, "(family, kernel, reason) of a call on a KV cache."},
    {"merge", FASTCALL(native_merge), "Two partial results into one, on caller-allocated tensors."},
    {"gemm", FASTCALL(native_gemm), "A matrix product, on caller-allocated tensors."},
    {"softmax", FASTCALL(native_softmax), "Softmax along rows, on caller-allocated tensors."},
    {"count_visible", FASTCALL(native_count_visible), "Visible pairs of a forward call."},
    {"plan", FASTCALL(native_plan), "(family, kernel, choice, reason, block_m) of a forward call."},
    {"plan_backward", FASTCALL(native_plan_backward), "The same of a backward call."},
    {"inspect", native_inspect, METH_O, "(address, dtype, shape, strides, device type, index, read-only) of a tensor."},
    {"export", FASTCALL(native_export), "A tensor as a DLPack capsule."},
    {"allocate", FASTCALL(native_allocate), "Memory of a CUDA device."},
    {"release", FASTCALL(native_release_memory), "Gives memory of a CUDA device back."},
    {"synchronize", native_synchronize, METH_O, "Waits for all work on a CUDA device."},
    {"topk_workspace", FASTCALL(native_topk_workspace), "Bytes of workspace that topk_intervals takes."},
    {"topk_intervals", FASTCALL(native_topk_intervals), "Causal top-W of a bias."},
    {"key_bias", FASTCALL(native_key_bias), "The bias of a dynamic mask."},
    {"key_bias_backward", FASTCALL(native_key_bias_backward), "Its gradients."},
    {"topk_append", FASTCALL(native_topk_append), "A token of each head takes a slot of a top-W mask."},
    {"topk_fill", FASTCALL(native_topk_fill), "The slots of a top-W mask after a prompt."},
    {"rule_intervals", FASTCALL(native_rule_intervals), "Documents, prefixes, windows of heads at once."},
    {"document_intervals", FASTCALL(native_document_intervals), "Attention inside documents."},
    {"window_intervals", FASTCALL(native_window_intervals), "Causal and sliding window."},
    {"prefix_intervals", FASTCALL(native_prefix_intervals), "Prefix LM."},
    {"intervals_from_mask", FASTCALL(native_intervals_from_mask), "A dense mask as key intervals."},
    {"intervals_to_mask", FASTCALL(native_intervals_to_mask), "Key intervals as a dense mask."},
    {"mask_blocks", FASTCALL(native_mask_blocks), "What a dense mask shows of blocks."},
    {"mask_plan", FASTCALL(native_mask_plan), "Tiles that masks show, kept for calls."},
    {"mask_plan_drop", FASTCALL(native_mask_plan_drop), "Forgets a mask plan."},
    {"blocks_from_lists", FASTCALL(native_blocks_from_lists), "A block mask of counts and indices."},
    {"create_mask", FASTCALL(native_create_mask), "A dense mask of the largest biases."},
    {"device", native_device, METH_NOARGS, "Facts of the CPU."},
    {"cuda_devices", native_cuda_devices, METH_NOARGS, "Number of CUDA devices that can be used."},
    {"settings", native_settings, METH_NOARGS, "Environment variables the library reads."},
    {"run_as", native_run_as, METH_VARARGS, "A pass by the plan of a named device and kernel; the plan as JSON."},
    {"tune", native_tune, METH_VARARGS, "Times the ways to run a problem of given shapes."},
    {"tune_gemm", native_tune_gemm, METH_VARARGS, "Times the ways to run a matrix product."},
    {"tune_softmax", native_tune_softmax, METH_VARARGS, "Times the ways to run a softmax."},
    {"version", native_version, METH_NOARGS, "Version of the C library."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_native", "The C library.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_definition); }
