/* native_tensor.c: Python objects as tensors, without a copy and without building against any tensor library. */
#include "native.h"

#include <string.h>

/* DLPack's exchange table (DLPack 1.3), found on a type as `__dlpack_c_exchange_api__`: only what is used here. */
struct exchange_table {
    uint32_t major, minor;
    const void *previous;
    void (*allocate)(void);
    void (*from_object)(void);
    void (*to_object)(void);
    int (*view)(void *object, fdm_tensor *tensor); /* borrows; may be NULL */
};

/* Types seen so far and their tables; entries are only added, under the GIL, and keep the type alive. */
static struct {
    PyTypeObject *type;
    const struct exchange_table *table;
} known_types[8];
enum { NUM_KNOWN_TYPES = sizeof known_types / sizeof known_types[0] };

static const struct exchange_table *table_of(PyTypeObject *type) {
    int slot = 0;
    for (; slot < NUM_KNOWN_TYPES && known_types[slot].type; slot++)
        if (known_types[slot].type == type)
            return known_types[slot].table;
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    const struct exchange_table *table =
        capsule ? (const struct exchange_table *)PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyErr_Clear();
    Py_XDECREF(capsule);
    if (!table || table->major != 1 || !table->view)
        return NULL;
    if (slot < NUM_KNOWN_TYPES) {
        Py_INCREF(type);
        known_types[slot].table = table;
        known_types[slot].type = type;
    }
    return table;
}

static int read_extents(PyObject *tuple, int64_t *out, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        out[i] = item ? PyLong_AsLongLong(item) : -1;
        if (out[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* (address, dtype name, shape, strides in elements[, DLPack device type, device index]) */
static int from_tuple(PyObject *tuple, struct tensor_argument *argument) {
    PyObject *shape, *strides;
    unsigned long long address;
    const char *name;
    int device_type = FDM_CPU, device_index = 0;
    if (!PyArg_ParseTuple(tuple, "KsO!O!|ii", &address, &name, &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                          &device_type, &device_index))
        return -1;
    Py_ssize_t ndim = PyTuple_Size(shape);
    fdm_dtype dtype = fdm_dtype_from_name(name);
    if (ndim > NATIVE_MAX_AXES || PyTuple_Size(strides) != ndim) {
        PyErr_Format(PyExc_ValueError, "a tensor has %zd axes; at most %d are supported", ndim, NATIVE_MAX_AXES);
        return -1;
    }
    if (dtype == FDM_NO_DTYPE) {
        PyErr_Format(PyExc_TypeError, "dtype %s is not supported", name);
        return -1;
    }
    if (read_extents(shape, argument->shape, ndim) || read_extents(strides, argument->strides, ndim))
        return -1;
    argument->tensor = (fdm_tensor){.data = (void *)(uintptr_t)address,
                                    .device = {device_type, device_index},
                                    .ndim = (int32_t)ndim,
                                    .dtype = fdm_data_type_of(dtype),
                                    .shape = argument->shape,
                                    .strides = argument->strides};
    return 0;
}

/* What a capsule named "dltensor_versioned" points to. */
struct versioned_tensor {
    uint32_t major, minor;
    void *context;
    void (*deleter)(void);
    uint64_t flags; /* bit 0: read-only */
    fdm_tensor tensor;
};

/* The tensor inside a DLPack capsule of either form. */
static fdm_tensor *capsule_tensor(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        struct versioned_tensor *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (managed->major == 1)
            return &managed->tensor;
        PyErr_Format(PyExc_BufferError, "DLPack version %u is not supported; versions 0 and 1 are", managed->major);
        return NULL;
    }
    return PyCapsule_GetPointer(capsule, "dltensor");
}

/* A capsule, or an object that makes one. */
static int from_producer(PyObject *object, struct tensor_argument *argument) {
    PyObject *capsule =
        PyCapsule_CheckExact(object) ? Py_NewRef(object) : PyObject_CallMethod(object, "__dlpack__", NULL);
    if (!capsule) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%R is not a tensor: it needs to be an array or to have __dlpack__",
                         (PyObject *)Py_TYPE(object));
        }
        return -1;
    }
    argument->owner = capsule;
    fdm_tensor *tensor = capsule_tensor(capsule);
    if (!tensor)
        return -1;
    argument->tensor = *tensor;
    return 0;
}

fdm_tensor *native_tensor(PyObject *object, struct tensor_argument *argument, int *failed) {
    argument->owner = NULL;
    if (object == Py_None || *failed)
        return NULL;
    int status;
    const struct exchange_table *table;
    if (PyTuple_Check(object))
        status = from_tuple(object, argument);
    else if ((table = table_of(Py_TYPE(object))))
        status = table->view(object, &argument->tensor);
    else
        status = from_producer(object, argument);
    if (status) {
        *failed = 1;
        return NULL;
    }
    return &argument->tensor;
}

int native_tensors(PyObject *const *objects, struct tensor_argument *arguments, fdm_tensor **tensors, int count) {
    int failed = 0;
    for (int i = 0; i < count; i++)
        tensors[i] = native_tensor(objects[i], &arguments[i], &failed);
    return failed;
}

void *native_address(PyObject *number) { return (void *)(uintptr_t)PyLong_AsUnsignedLongLong(number); }

int native_read(struct native_arguments *read, PyObject *const *arguments, Py_ssize_t count, int num_tensors,
                int num_others) {
    if (native_expect(count, num_tensors + num_others + 1))
        return -1;
    read->num_tensors = num_tensors;
    read->others = arguments + num_tensors;
    read->workspace = (struct native_device_workspace){NULL, NULL};
    const int failed = native_tensors(arguments, read->storage, read->tensors, num_tensors);
    if (failed)
        native_release(read->storage, num_tensors);
    else
        read->stream = native_address(arguments[count - 1]);
    return failed ? -1 : 0;
}

PyObject *native_extents(const int64_t *values, int32_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (int32_t i = 0; tuple && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (!value || PyTuple_SetItem(tuple, i, value))
            Py_CLEAR(tuple);
    }
    return tuple;
}

static int is_read_only(PyObject *object) {
    if (!PyCapsule_IsValid(object, "dltensor_versioned"))
        return 0;
    const struct versioned_tensor *managed = PyCapsule_GetPointer(object, "dltensor_versioned");
    return (managed->flags & 1) != 0;
}

/* "float32", or for dtypes the library has no name for what DLPack says, "int64". */
static PyObject *dtype_text(const fdm_tensor *tensor) {
    static const char *const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    const fdm_data_type type = tensor->dtype;
    if (fdm_dtype_of(tensor) != FDM_NO_DTYPE)
        return PyUnicode_FromString(fdm_dtype_name(fdm_dtype_of(tensor)));
    if (type.code < sizeof kinds / sizeof kinds[0] && type.lanes == 1)
        return PyUnicode_FromFormat("%s%d", kinds[type.code], type.bits);
    return PyUnicode_FromFormat("DLPack dtype (%d, %d, %d)", type.code, type.bits, type.lanes);
}

/* inspect(object) -> (address, dtype name, shape, strides in elements, DLPack device type and index, read-only). The
 * last is known of versioned capsules only. */
PyObject *native_inspect(PyObject *module, PyObject *object) {
    struct tensor_argument argument;
    int failed = 0;
    PyObject *result = NULL;
    fdm_tensor *tensor = native_tensor(object, &argument, &failed);
    if (tensor) {
        int64_t step = 1;
        for (int32_t i = tensor->ndim - 1; !tensor->strides && tensor->ndim <= NATIVE_MAX_AXES && i >= 0; i--) {
            argument.strides[i] = step;
            step *= tensor->shape[i];
        }
        PyObject *shape = native_extents(tensor->shape, tensor->ndim);
        PyObject *strides = native_extents(tensor->strides ? tensor->strides : argument.strides, tensor->ndim);
        unsigned long long address = (unsigned long long)(uintptr_t)tensor->data + tensor->byte_offset;
        if (shape && strides)
            result = Py_BuildValue("KNOOiiN", address, dtype_text(tensor), shape, strides, (int)tensor->device.type,
                                   (int)tensor->device.index, PyBool_FromLong(is_read_only(object)));
        Py_XDECREF(shape);
        Py_XDECREF(strides);
    }
    native_release(&argument, 1);
    return result;
}

void native_release(struct tensor_argument *arguments, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        Py_CLEAR(arguments[i].owner);
}
