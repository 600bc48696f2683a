/* kernel_names.h: how the tool names a kernel's variants, finds them, and says why there are none. */
#ifndef FDM_KERNEL_NAMES_H
#define FDM_KERNEL_NAMES_H

#include "flash_dmattn.h"

enum { KERNEL_CODE_MAX = sizeof(((fdm_plan *)0)->choice), KERNEL_LABEL_MAX = 3 * KERNEL_CODE_MAX };

/* "cpu(forward.avx2)". For a CUDA kernel what its choice code adds to the name follows it: S2 as "stage2", Swizzle as
 * "swizzle"; Pad, the plain layout, is left out: "mma(split-q+share-qkv+stage2)". */
void kernel_label(const fdm_kernel_info *kernel, const char *code, char *label);

/* Distinct choice codes of the ways in which a kernel can run a problem, as fdm_plan_variant() lists them, at most
 * `most`; the first is the one that the kernel's name alone gets. 0 with fdm_last_error() when there is none. */
int32_t kernel_variants(const fdm_device *device, const fdm_problem *problem, const fdm_kernel_info *kernel,
                        int32_t most, char (*codes)[KERNEL_CODE_MAX]);

/* Why kernel_variants() found none, without the words that name kernel and device: "query rows ... are at most 256". An
 * error of another call is returned whole. */
const char *kernel_refusal(const fdm_device *device, const fdm_kernel_info *kernel);

#endif
