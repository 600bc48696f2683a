/* native_plan.c: mask plans for Python, which knows each by a number: a setting of the calls that read it. */
#include "native.h"
#include "native_fields.h"

#include <string.h>

/* number -> bytes of its fdm_tile_plan. With the GIL. */
static PyObject *plans;
static long last_number;

int native_take_plan(PyObject *number, fdm_tensors *tensors, fdm_tile_plan *room) {
    const long which = PyLong_AsLong(number);
    if (which == 0 || PyErr_Occurred())
        return PyErr_Occurred() ? -1 : 0;
    PyObject *bytes = plans ? PyDict_GetItemWithError(plans, number) : NULL;
    if (!bytes) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError,
                            "the MaskPlan of this call is gone; it must live until the backward of its calls");
        return -1;
    }
    memcpy(room, PyBytes_AsString(bytes), sizeof *room);
    tensors->mask_plan = room;
    return 0;
}

/* The number that a plan is kept by from now on. */
static PyObject *keep(const fdm_tile_plan *plan) {
    if (!plans && !(plans = PyDict_New()))
        return NULL;
    PyObject *number = PyLong_FromLong(++last_number);
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)plan, sizeof *plan);
    if (!number || !bytes || PyDict_SetItem(plans, number, bytes))
        Py_CLEAR(number);
    Py_XDECREF(bytes);
    return number;
}

/* mask_plan(q, k, v, mask, interval_start, interval_end, cu_seqlens_q, cu_seqlens_k, row_start, row_end, block_mask,
 * memory, *settings, stream's address) -> the plan's number; memory None: the bytes that it needs */
PyObject *native_mask_plan(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    enum { Q, K, V, MASK, START, END, CU_Q, CU_K, ROW_START, ROW_END, BLOCKS, MEMORY, NUM };
    enum { STREAM = NUM_SETTINGS, NUM_OTHERS };
    struct tensor_argument storage[NUM];
    fdm_tensor *t[NUM] = {NULL};
    fdm_options options;
    fdm_tile_plan plan = {.struct_bytes = sizeof plan};
    PyObject *const *others = arguments + NUM, *result = NULL;
    if (native_expect(count, NUM + NUM_OTHERS))
        return NULL;
    if (!native_tensors(arguments, storage, t, NUM) && !native_options(others, NULL, Py_None, &options)) {
        const fdm_tensors tensors = {.struct_bytes = sizeof tensors,
                                     .q = t[Q],
                                     .k = t[K],
                                     .v = t[V],
                                     .mask = t[MASK],
                                     .interval_start = t[START],
                                     .interval_end = t[END],
                                     .cu_seqlens_q = t[CU_Q],
                                     .cu_seqlens_k = t[CU_K],
                                     .row_start = t[ROW_START],
                                     .row_end = t[ROW_END],
                                     .block_mask = t[BLOCKS]};
        void *stream = native_address(others[STREAM]);
        fdm_status status;
        if (t[MEMORY]) {
            plan.memory = (char *)t[MEMORY]->data + t[MEMORY]->byte_offset;
            plan.memory_bytes = (uint64_t)t[MEMORY]->shape[0];
        }
        Py_BEGIN_ALLOW_THREADS;
        status = fdm_mask_plan(&tensors, &options, &plan, stream);
        Py_END_ALLOW_THREADS;
        PyObject *done = PyErr_Occurred() ? NULL : native_result(status);
        if (done)
            result = t[MEMORY] ? keep(&plan) : PyLong_FromUnsignedLongLong(plan.memory_bytes);
        Py_XDECREF(done);
    }
    native_release(storage, NUM);
    return result;
}

/* mask_plan_drop(number) */
PyObject *native_mask_plan_drop(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (native_expect(count, 1))
        return NULL;
    if (plans && PyDict_GetItemWithError(plans, arguments[0]) && PyDict_DelItem(plans, arguments[0]))
        return NULL;
    return PyErr_Occurred() ? NULL : native_result(FDM_OK);
}
