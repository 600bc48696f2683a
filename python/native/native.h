/* native.h: what the files of the extension share: tensors from Python objects, errors, workspace. */
#ifndef FLASH_DMATTN_NATIVE_H
#define FLASH_DMATTN_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "flash_dmattn.h"

enum { NATIVE_MAX_AXES = 8 };

/* One argument as a tensor. `tensor.shape` and `.strides` point into the object, into `owner`, or into the arrays here,
 * so the struct must not be moved while it is in use. */
struct tensor_argument {
    fdm_tensor tensor;
    int64_t shape[NATIVE_MAX_AXES], strides[NATIVE_MAX_AXES];
    PyObject *owner; /* what must outlive the call; NULL when nothing */
};

/* Accepts None, any type with a DLPack exchange table, (address, dtype name, shape, strides), and any DLPack capsule or
 * producer. Returns the tensor, or NULL; NULL with *failed set to 1 means that an exception is set. Nothing is copied.
 */
fdm_tensor *native_tensor(PyObject *object, struct tensor_argument *argument, int *failed);
/* `count` of them, into `tensors`; 1 when an exception is set. */
int native_tensors(PyObject *const *objects, struct tensor_argument *arguments, fdm_tensor **tensors, int count);
PyObject *native_extents(const int64_t *values, int32_t count); /* as a tuple */
void native_release(struct tensor_argument *arguments, Py_ssize_t count);
/* A tensor of this size is mapped anew by the C library, and faulted in page by page as it is written: for the gradient
 * of a bias of every pair that took a third of the backward's time. Linux gives large pages where it is asked. */
void native_ask_for_large_pages(const fdm_tensor *tensor);

/* FDM_OK: None. Otherwise NULL with the library's sentence as the exception that suits the status. */
PyObject *native_result(fdm_status status);
/* For flash_dmattn.jax: native_xla.c. */
PyObject *native_xla_handlers(PyObject *module, PyObject *unused);

/* 0, or -1 with an exception set. */
int native_expect(Py_ssize_t count, Py_ssize_t needed);

/* Workspace kept between calls, a few buffers per process. All three need the GIL, except that the allocator made by
 * native_allocator() may be used without it. */
struct native_workspace {
    void *memory;
    size_t bytes;
};
struct native_workspace native_workspace_take(void);
void native_workspace_return(struct native_workspace workspace);
fdm_allocator native_allocator(struct native_workspace *workspace);

/* `given` by position, NUM_TENSORS of native_fields.h, NULL where there is none. */
void native_bind(fdm_tensor *const *given, fdm_tensors *tensors);

/* num_threads may be NULL: as many as the library likes. `family`, a str or None, must outlive the options. Returns -1
 * with an exception set. */
int native_options(PyObject *const *setting, PyObject *num_threads, PyObject *family, fdm_options *options);

/* Hands the tensors the mask plan of a number, copied to *room; number 0: none. -1 with an exception set. */
int native_take_plan(PyObject *number, fdm_tensors *tensors, fdm_tile_plan *room);

/* Runs a pass without the GIL. allocator NULL: workspace in host memory, kept between calls. None, or NULL with an
 * exception set. */
typedef fdm_status (*native_call)(const fdm_tensors *, const fdm_options *, const fdm_allocator *);
PyObject *native_run(native_call call, const fdm_tensors *tensors, const fdm_options *options,
                     const fdm_allocator *allocator);

/* Workspace on the tensors' device: `allocate(bytes)` returns (address, what keeps it alive). The allocator may be used
 * without the GIL; what is kept is released with it. */
struct native_device_workspace {
    PyObject *allocate, *kept;
};
fdm_allocator native_device_allocator(struct native_device_workspace *workspace);

/* The arguments of a function that begin with tensors and end with a stream's address; `others` lie between. */
enum { NATIVE_MAX_TENSORS = 10 };
struct native_arguments {
    fdm_tensor *tensors[NATIVE_MAX_TENSORS];
    struct tensor_argument storage[NATIVE_MAX_TENSORS];
    int num_tensors;
    PyObject *const *others;
    void *stream;
    struct native_device_workspace workspace; /* the function's own */
};
/* 0, or -1 with an exception set and nothing to release. */
int native_read(struct native_arguments *read, PyObject *const *arguments, Py_ssize_t count, int num_tensors,
                int num_others);
void *native_address(PyObject *number);

/* Ends a function: calls without the GIL unless an exception is set. None, or NULL with an exception set. */
#define NATIVE_RUN_AND_RETURN(read, call)                               \
    do {                                                                \
        PyObject *result_ = NULL;                                       \
        if (!PyErr_Occurred()) {                                        \
            fdm_status status_;                                         \
            Py_BEGIN_ALLOW_THREADS;                                     \
            status_ = (call);                                           \
            Py_END_ALLOW_THREADS;                                       \
            result_ = PyErr_Occurred() ? NULL : native_result(status_); \
        }                                                               \
        Py_XDECREF((read)->workspace.kept);                             \
        native_release((read)->storage, (read)->num_tensors);           \
        return result_;                                                 \
    } while (0)

/* METH_NOARGS */
PyObject *native_attention_fields(PyObject *module, PyObject *unused);
/* METH_O */
PyObject *native_use_torch(PyObject *module, PyObject *names);
PyObject *native_inspect(PyObject *module, PyObject *object);
PyObject *native_synchronize(PyObject *module, PyObject *index);
/* METH_FASTCALL */
PyObject *native_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_attend(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_node_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_node_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_operator_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_operator_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_merge(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_cache_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_cache_append(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_cache_attend(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_append_to_cache(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_plan_cache(PyObject *module, PyObject *arguments);
PyObject *native_gemm(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_softmax(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_count_visible(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_plan(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_plan_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_export(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_allocate(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_release_memory(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_topk_workspace(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_topk_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_rule_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_document_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_window_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_prefix_intervals(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_intervals_from_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_intervals_to_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_mask_blocks(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_mask_plan(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_mask_plan_drop(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_blocks_from_lists(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_create_mask(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_key_bias(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_key_bias_backward(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_topk_append(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *native_topk_fill(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
/* METH_VARARGS */
PyObject *native_run_as(PyObject *module, PyObject *arguments);
PyObject *native_tune(PyObject *module, PyObject *arguments);
PyObject *native_tune_gemm(PyObject *module, PyObject *arguments);
PyObject *native_tune_softmax(PyObject *module, PyObject *arguments);

#endif
