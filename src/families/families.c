/* families.c: the one ordered list of families. */
#include "families/families.h"

const struct family *const families[] = {&family_blackwell, &family_hopper,    &family_mma,
                                         &family_cpu,       &family_reference, NULL};
