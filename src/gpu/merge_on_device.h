/* merge_on_device.h: fdm_merge() on a CUDA device: its kernel and its launch. */
#ifndef FDM_MERGE_ON_DEVICE_H
#define FDM_MERGE_ON_DEVICE_H

#include "cuda/cuda.h"
#include "gpu/merge.h"

/* dtype: float32, float16 or bfloat16. vector: chunks of 16 bytes, see merge.cu. */
void merge_request(fdm_dtype dtype, int vector, struct cuda_kernel_request *request);

/* Tensors that fdm_merge() has checked, on one CUDA device. Enqueues on `stream`. */
fdm_status merge_on_device(const fdm_merge_tensors *tensors, void *stream);

#endif
