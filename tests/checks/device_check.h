/* device_check.h: what checks that compare a CUDA device, or the emulated one, with the CPU share: random draws that
 * a seed repeats, the two devices, and how a check ends that cannot go on. */
#ifndef FDM_DEVICE_CHECK_H
#define FDM_DEVICE_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flash_dmattn.h"
#include "options.h"

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
    fdm_device device = {.struct_bytes = sizeof device};
    if (!fdm_device_query(FDM_CUDA, 0, &device))
        return 1;
    printf("not covered: %s\n", fdm_last_error());
    return 0;
}

/* The end of a check that ran so many cases: its exit code. One that ran none has found nothing right. */
static inline int exit_code(int64_t cases, int64_t wrong) {
    printf("%lld cases, %lld wrong\n", (long long)cases, (long long)wrong);
    if (cases < 1)
        printf("WRONG no case was run\n");
    return wrong > 0 || cases < 1;
}

/* Runs random cases, as many as --repeat says, without it `usual`, and prints a line for each; returns the exit code.
 * `check` draws and runs one: it describes the case in so many bytes, and returns what was wrong, or NULL. */
typedef const char *case_function(const struct options *options, char *about, size_t bytes);
static inline int run_cases(const struct options *o, uint64_t usual, case_function *check) {
    const uint64_t first = given_or(o->seed, 1), cases = given_or(o->repeat, usual);
    int64_t wrong = 0;
    for (uint64_t n = 0; n < cases; n++) {
        char about[256] = "";
        begin_case(first + n);
        const char *fault = check(o, about, sizeof about);
        printf("%s%s: %s; replay: %s --repeat 1 --seed %llu", fault ? "WRONG, " : "right", fault ? fault : "", about,
               checks_program(), (unsigned long long)(first + n));
        if (o->keys != NOT_GIVEN)
            printf(" --keys %llu", (unsigned long long)o->keys);
        printf("\n");
        wrong += fault != NULL;
        if (fault && o->until_wrong)
            return exit_code((int64_t)n + 1, wrong);
    }
    return exit_code((int64_t)cases, wrong);
}

#endif
