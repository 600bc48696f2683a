/* kernel_names.h: how the tool names a kernel's variants, finds them, and says why there are none. */
#ifndef FDM_KERNEL_NAMES_H
#define FDM_KERNEL_NAMES_H

#include "flash_dmattn.h"

enum { KERNEL_CODE_MAX = sizeof(((fdm_plan *)0)->choice), KERNEL_LABEL_MAX = 3 * KERNEL_CODE_MAX };

/* "cpu(forward.avx2)". For a CUDA kernel what its choice code adds to the name follows it: S2 as "stage2", Swizzle as
 * "swizzle"; Pad, the plain layout, is left out: "mma(split-q+share-qkv+stage2)". */
void kernel_label(const fdm_kernel_info *kernel, const char *code, char *label);

/* Choice codes of the ways a kernel can run a problem, the one that its name alone gets first, at most `most`; 0 with
 * fdm_last_error() when there is none. Found by asking for every code that differs from the first in a size, a number
 * of stages, the layout or a word at its end. */
int32_t kernel_variants(const fdm_device *device, const fdm_problem *problem, const fdm_kernel_info *kernel,
                        int32_t most, char (*codes)[KERNEL_CODE_MAX]);

/* The clause of fdm_last_error() about this kernel: "cannot run it: query rows ... are at most 256". */
const char *kernel_refusal(const fdm_kernel_info *kernel);

#endif
