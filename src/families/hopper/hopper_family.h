/* hopper_family.h: the algorithms of the hopper family. */
#ifndef FDM_HOPPER_FAMILY_H
#define FDM_HOPPER_FAMILY_H

#include "gpu/gpu_family.h"

extern const struct gpu_algorithm hopper_forward_algorithm, hopper_gather_algorithm, hopper_backward_algorithm,
    hopper_backward_2pass_algorithm, hopper_latent_algorithm;

#endif
