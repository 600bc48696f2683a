/* integers.h: arithmetic of integers that C does not have. */
#ifndef FDM_INTEGERS_H
#define FDM_INTEGERS_H

#include <stdint.h>

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
