/* families.h: the families of kernels, and the one ordered list of them. */
#ifndef FDM_FAMILIES_H
#define FDM_FAMILIES_H

#include "contract/family.h"

/* In order of preference; NULL-terminated. */
extern const struct family *const families[];

extern const struct family family_reference;
extern const struct family family_cpu;
extern const struct family family_mma;
extern const struct family family_hopper;
extern const struct family family_blackwell;

#endif
