/* native_memory.c: device memory for callers whose array library lends none, arrays of ours as DLPack capsules, and
 * large pages for tensors of the CPU. */
#include "native.h"

#include <stdlib.h>

#ifdef __linux__
#    include <sys/mman.h>
#endif

/* DLPack's managed tensor (versions 0.x), which a capsule named "dltensor" points to. */
struct managed_tensor {
    fdm_tensor tensor;
    void *context;
    void (*deleter)(struct managed_tensor *self);
};

struct exported {
    struct managed_tensor managed;
    struct tensor_argument argument; /* holds shape and strides */
    PyObject *memory;                /* what the data belong to */
};

/* The consumer calls it once, from any thread. */
static void delete_exported(struct managed_tensor *managed) {
    struct exported *exported = managed->context;
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(exported->memory);
    PyGILState_Release(state);
    free(exported);
}

/* A capsule that nobody consumed still has its first name. */
static void delete_capsule(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor"))
        delete_exported(PyCapsule_GetPointer(capsule, "dltensor"));
}

/* export(tensor as a tuple, memory) -> a DLPack capsule that keeps `memory` alive */
PyObject *native_export(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "2 arguments are needed, %zd were given", count);
        return NULL;
    }
    struct exported *exported = calloc(1, sizeof *exported);
    if (!exported)
        return PyErr_NoMemory();
    int failed = 0;
    fdm_tensor *tensor = native_tensor(arguments[0], &exported->argument, &failed);
    if (!tensor || exported->argument.owner) {
        if (!failed)
            PyErr_SetString(PyExc_TypeError, "the tensor must be a tuple (address, dtype, shape, strides, device)");
        native_release(&exported->argument, 1);
        free(exported);
        return NULL;
    }
    exported->managed = (struct managed_tensor){*tensor, exported, delete_exported};
    exported->memory = Py_NewRef(arguments[1]);
    PyObject *capsule = PyCapsule_New(&exported->managed, "dltensor", delete_capsule);
    if (!capsule)
        delete_exported(&exported->managed);
    return capsule;
}

/* allocate(CUDA device, bytes) -> address */
PyObject *native_allocate(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    long long index = count == 2 ? PyLong_AsLongLong(arguments[0]) : -1;
    long long bytes = count == 2 ? PyLong_AsLongLong(arguments[1]) : -1;
    if (PyErr_Occurred())
        return NULL;
    if (index < 0 || bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "a device index and a number of bytes are needed, both >= 0");
        return NULL;
    }
    void *memory = NULL;
    fdm_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fdm_memory_allocate((fdm_device_id){FDM_CUDA, (int32_t)index}, (size_t)bytes, &memory);
    Py_END_ALLOW_THREADS;
    return status ? native_result(status) : PyLong_FromUnsignedLongLong((uintptr_t)memory);
}

/* release(CUDA device, address): waits for all work on the device first, which may use the memory */
PyObject *native_release_memory(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    long long index = count == 2 ? PyLong_AsLongLong(arguments[0]) : -1;
    unsigned long long address = count == 2 ? PyLong_AsUnsignedLongLong(arguments[1]) : 0;
    if (PyErr_Occurred())
        return NULL;
    const fdm_device_id device = {FDM_CUDA, (int32_t)index};
    fdm_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fdm_synchronize(device);
    if (!status)
        status = fdm_memory_release(device, (void *)(uintptr_t)address);
    Py_END_ALLOW_THREADS;
    return native_result(status);
}

/* synchronize(CUDA device) */
PyObject *native_synchronize(PyObject *module, PyObject *index) {
    const fdm_device_id device = {FDM_CUDA, (int32_t)PyLong_AsLong(index)};
    if (PyErr_Occurred())
        return NULL;
    fdm_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fdm_synchronize(device);
    Py_END_ALLOW_THREADS;
    return native_result(status);
}

void native_ask_for_large_pages(const fdm_tensor *tensor) {
#ifdef MADV_HUGEPAGE
    enum { MAPPED_ANEW = 32 << 20, PAGE = 4096 }; /* glibc's largest threshold */
    int64_t bytes = fdm_dtype_bytes(fdm_dtype_of(tensor));
    for (int32_t i = 0; i < tensor->ndim; i++)
        bytes *= tensor->shape[i];
    if (tensor->device.type != FDM_CPU || bytes < MAPPED_ANEW)
        return;
    const uintptr_t first = (uintptr_t)tensor->data + tensor->byte_offset, begin = (first + PAGE - 1) / PAGE * PAGE;
    madvise((void *)begin, (first + (uintptr_t)bytes - begin) / PAGE * PAGE, MADV_HUGEPAGE);
#endif
}
