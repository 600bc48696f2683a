/* topk_on_device.h: fdm_topk_intervals() on a CUDA device: its kernels, workspace and launches. */
#ifndef FDM_TOPK_ON_DEVICE_H
#define FDM_TOPK_ON_DEVICE_H

#include "cuda/cuda.h"
#include "masks/topk/topk_params.h"

/* How the keys of a head are cut; see topk_params.h. */
struct topk_cut {
    int32_t chunk; /* 32 .. 1024, a power of 2 */
    int32_t span;  /* a multiple of chunk; num_keys or more: one span */
};
struct topk_cut topk_cut_of(int64_t num_keys);

enum { TOPK_KEYS_MAX = 1 << 30 };
enum topk_kernel { TOPK_THRESHOLD, TOPK_CARRY, TOPK_RESOLVE, TOPK_NUM_KERNELS };
/* dtype: float32, float16 or bfloat16. */
void topk_request(enum topk_kernel kernel, fdm_dtype dtype, int32_t chunk, struct cuda_kernel_request *request);

/* start or end, [B, H, Sk]. */
struct topk_tensor topk_tensor_of(const fdm_tensor *tensor);

/* That the number of a key takes, at least 1. */
int32_t topk_index_bits(int64_t num_keys);

/* rows: heads of all batches. */
size_t topk_workspace_on_device(int64_t rows, int64_t num_keys, struct topk_cut cut);
/* Tensors that fdm_topk_intervals() has checked, on one CUDA device; padding may be NULL. A workspace of
 * topk_workspace_on_device() bytes, aligned to 16. Enqueues on `stream`. */
fdm_status topk_on_device(const fdm_tensor *bias, const fdm_tensor *padding, int64_t window, int64_t seqlen_q,
                          const fdm_tensor *start, const fdm_tensor *end, struct topk_cut cut, void *workspace,
                          void *stream);

#endif
