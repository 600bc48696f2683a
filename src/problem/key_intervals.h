/* key_intervals.h: masks as key intervals on the CPU; the arguments have been checked. */
#ifndef FDM_KEY_INTERVALS_H
#define FDM_KEY_INTERVALS_H

#include "flash_dmattn.h"

size_t topk_workspace_on_cpu(int64_t num_keys);
void topk_on_cpu(const fdm_tensor *bias, const fdm_tensor *padding, int64_t window, int64_t seqlen_q,
                 const fdm_tensor *start, const fdm_tensor *end, void *workspace);

#endif
