/* native_torch.h: what calls on PyTorch tensors share; native_torch.c has it. An int of -1 says that an exception is
 * set. */
#ifndef FLASH_DMATTN_NATIVE_TORCH_H
#define FLASH_DMATTN_NATIVE_TORCH_H

#include "native.h"

/* Whether anything but autograd watches this call, or PyTorch is not here: then the call must go another way. */
int native_torch_is_watched(void);
/* Whether operations are recorded for gradients. */
int native_torch_records(void);

/* Whether PyTorch's object is an array on the CPU or a CUDA device that its address, shape and strides describe, and
 * (records) wants no gradient. The view of it is in `argument`, which need not be released. */
int native_torch_is_plain(PyObject *object, struct tensor_argument *argument, int records);

int native_torch_is_bool(PyObject *tensor); /* torch.bool; the library takes uint8 for it too */

/* New results of an attention, from number `first` to before `last`: 0 is out [B, Sq, H, head_dim_v], or packed
 * [total_q, H, head_dim_v], 1 lse and 2 what it rounded away, [B, H, Sq] or [H, total_q]; `arguments` has their
 * views. */
int native_torch_results(PyObject *query, const fdm_tensor *q, int64_t head_dim_v, int first, int last,
                         PyObject **objects, struct tensor_argument *arguments);
/* What torch.empty_like gives. */
PyObject *native_torch_empty_like(PyObject *like, const fdm_tensor *tensor, struct tensor_argument *argument);

/* PyTorch's current stream of a CUDA device. */
int native_torch_stream(fdm_device_id device, void **stream);
/* Runs a pass on the query's device, on PyTorch's current stream or with its number of threads. */
int native_torch_run(native_call call, const fdm_tensors *tensors, PyObject *query, fdm_options *options);

#endif
