/* intervals_on_device.h: builders of key intervals on a CUDA device but top-W: their kernels and launches. The tensors
 * are checked and on one CUDA device. */
#ifndef FDM_INTERVALS_ON_DEVICE_H
#define FDM_INTERVALS_ON_DEVICE_H

#include "cuda/cuda.h"
#include "masks/intervals/key_intervals.h"
#include "masks/intervals/key_rules.h"

void interval_rules_request(struct cuda_kernel_request *request);
void key_rules_request(struct cuda_kernel_request *request);
void intervals_from_mask_request(struct cuda_kernel_request *request);

fdm_status rule_on_device(const struct interval_rule *rule, const fdm_tensor *start, const fdm_tensor *end,
                          void *stream);
/* Offsets are not looked at on the host; keys from the last on are never visible. */
fdm_status documents_on_device(const fdm_tensor *cu_seqlens, int32_t causal, const fdm_tensor *start,
                               const fdm_tensor *end, void *stream);
fdm_status key_rules_on_device(const struct key_rules *rules, const fdm_tensor *start, const fdm_tensor *end,
                               void *stream);
/* exact: in device memory; not zero when each key's rows are one run. Else the intervals have no meaning. */
fdm_status runs_on_device(const fdm_tensor *mask, const fdm_tensor *start, const fdm_tensor *end, int32_t *exact,
                          void *stream);

#endif
