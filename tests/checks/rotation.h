/* rotation.h: which seeds and which share of the cases a run takes that asks for those of the commit: CI tries others
 * with each commit, and the same ones again for the same commit. */
#ifndef FDM_ROTATION_H
#define FDM_ROTATION_H

#include <stdint.h>
#include <stdlib.h>

/* A number made of FDM_CHECK_SEED, which scripts/test.sh sets to the commit; 0 where it is not set. */
static inline uint64_t rotation(void) {
    const char *text = getenv("FDM_CHECK_SEED");
    uint64_t number = 0;
    for (; text && *text; text++)
        number = (number ^ (unsigned char)*text) * 0x100000001b3u + 0x9e3779b97f4a7c15u;
    return number ^ number >> 31;
}

/* Streams of seeds begin a million apart: one moves among the first 900,000 of its own. */
static inline uint64_t rotated_seed(uint64_t seed) { return seed + rotation() % 900 * 1000; }

#endif
