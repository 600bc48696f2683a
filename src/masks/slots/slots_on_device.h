/* slots_on_device.h: fdm_topk_append() and fdm_topk_fill() on a CUDA device. */
#ifndef FDM_SLOTS_ON_DEVICE_H
#define FDM_SLOTS_ON_DEVICE_H

#include "cuda/cuda.h"
#include "masks/slots/topk_slots.h"

/* fill: of topk_fill.cu, else of topk_append.cu. dtype: float32, float16 or bfloat16. window: W. */
void topk_slots_request(int fill, fdm_dtype dtype, int32_t window, struct cuda_kernel_request *request);
/* Tensors that were checked, on one CUDA device. Enqueues on `stream`. */
fdm_status topk_slots_on_device(int fill, const struct slot_call *call, int32_t device, void *stream);

#endif
