/* dense_on_device.h: builders of dense masks on a CUDA device: their kernels and launches. The tensors are checked and
 * on one CUDA device. */
#ifndef FDM_DENSE_ON_DEVICE_H
#define FDM_DENSE_ON_DEVICE_H

#include "cuda/cuda.h"
#include "masks/dense/dense_on_cpu.h"

void intervals_to_mask_request(struct cuda_kernel_request *request);
void blocks_from_lists_request(struct cuda_kernel_request *request);
/* dtype: float32, float16 or bfloat16. threads: of a block, a power of 2 from 32 to 1024. */
void create_mask_request(fdm_dtype dtype, int32_t threads, struct cuda_kernel_request *request);
int32_t create_mask_threads(int64_t num_keys);

fdm_status intervals_to_mask_on_device(const fdm_tensor *start, const fdm_tensor *end, const fdm_tensor *mask,
                                       void *stream);
fdm_status blocks_on_device(const fdm_tensor *mask, int64_t block_q, int64_t block_k, const fdm_tensor *blocks,
                            void *stream);
fdm_status blocks_from_lists_on_device(const fdm_tensor *counts, const fdm_tensor *indices, const fdm_tensor *blocks,
                                       void *stream);
fdm_status create_mask_on_device(const struct mask_source *source, const struct mask_choice *choice,
                                 const fdm_tensor *mask, void *stream);

#endif
