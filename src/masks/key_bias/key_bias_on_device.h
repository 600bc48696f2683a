/* key_bias_on_device.h: fdm_key_bias() and its backward on a CUDA device: their kernels and launches. */
#ifndef FDM_KEY_BIAS_ON_DEVICE_H
#define FDM_KEY_BIAS_ON_DEVICE_H

#include "cuda/cuda.h"
#include "masks/key_bias/key_bias.h"

/* How many blocks share the keys of a head. */
int32_t key_bias_parts(int backward, int32_t compute_major);
void key_bias_request(int backward, int32_t parts, struct cuda_kernel_request *request);
/* Tensors that were checked, on one CUDA device, none float64. Enqueues on `stream`. */
fdm_status key_bias_on_device(int backward, const struct key_bias_call *call, int32_t device, void *stream);

#endif
