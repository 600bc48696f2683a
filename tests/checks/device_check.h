/* device_check.h: what programs that compare a CUDA device, or the emulated one, with the CPU share: random draws that
 * a seed repeats, the two devices, and how a program ends that cannot go on. */
#ifndef FDM_DEVICE_CHECK_H
#define FDM_DEVICE_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flash_dmattn.h"
#include "rotation.h"

enum { EXIT_NO_DEVICE = 77 };
static const fdm_device_id cuda = {FDM_CUDA, 0}, host = {FDM_CPU, 0};
static uint64_t state = 1;

static inline uint64_t random_bits(void) { return state = state * 6364136223846793005ull + 1442695040888963407ull; }
/* From 0 to n - 1. */
static inline int64_t below(int64_t n) { return (int64_t)((random_bits() >> 33) % (uint64_t)n); }
/* From -1 to 1. */
static inline double random_number(void) { return (double)(random_bits() >> 40) / (1 << 23) - 1; }
/* The draws of one case. */
static inline void begin_case(uint64_t number) { state = number * 0x9e3779b97f4a7c15u; }

static inline void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, fdm_last_error());
    exit(1);
}

/* 0 after a line that says why nothing can be checked. */
static inline int has_device(void) {
    fdm_device device;
    if (!fdm_device_query(FDM_CUDA, 0, &device))
        return 1;
    printf("not covered: %s\n", fdm_last_error());
    return 0;
}

/* The number of the first case: that of the command line, 1 where there is none, or for "commit" what FDM_CHECK_SEED
 * names, which is said. */
static inline uint64_t first_case(const char *text) {
    if (!text || strcmp(text, "commit") != 0)
        return text ? strtoull(text, NULL, 10) : 1;
    const uint64_t first = rotated_seed(1);
    printf("cases from %llu on\n", (unsigned long long)first);
    return first;
}

/* The end of a program that ran so many cases: its exit code. One that ran none has found nothing right. */
static inline int exit_code(int64_t cases, int64_t wrong) {
    printf("%lld cases, %lld wrong\n", (long long)cases, (long long)wrong);
    if (cases < 1)
        printf("WRONG no case was run\n");
    return wrong > 0 || cases < 1;
}

#endif
