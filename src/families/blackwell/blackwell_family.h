/* blackwell_family.h: the algorithms of the blackwell family, and what they share on the host. */
#ifndef FDM_BLACKWELL_FAMILY_H
#define FDM_BLACKWELL_FAMILY_H

#include "gpu/gpu_family.h"

extern const struct gpu_algorithm blackwell_forward_algorithm, blackwell_backward_algorithm;

/* Why no kernel of the family takes the device or the problem, whatever the pass: dtype, head dims, TMA's limits; else
 * NULL. */
const char *blackwell_refusal(const fdm_device *device, const fdm_problem *problem, char *text, size_t size);

#endif
