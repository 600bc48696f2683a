/* tally.h: what each kernel of a run has done. */
#ifndef FDM_TALLY_H
#define FDM_TALLY_H

#include "flash_dmattn.h"

struct tally {
    char name[64];
    char family[16]; /* "" with a choice code */
    char code[64];   /* this problem's way to run it; "": the rules' */
    fdm_pass pass;
    int64_t accepted, refused, wrong, by_code;
};
enum { KERNELS_MAX = 64 };

/* The kernels of this machine whose names hold `only` (NULL: all), or for a choice code one row for each pass. `cuda`,
 * 1: none of the CPU. Prints which kernels this machine cannot run. Returns how many there are. */
int32_t tally_kernels(struct tally *kernels, const char *only, int cuda);
/* What runs this problem: the kernel's name, or a choice code; and its family, NULL with a choice code. */
const char *tally_runner(const struct tally *k);
const char *tally_family(const struct tally *k);
int tally_any_wrong(const struct tally *kernels, int32_t count);
/* Prints a line for each kernel, and adds up what they accepted; returns how many problems were wrong. A kernel that
 * took none of more than a few problems fails. */
int64_t tally_report(struct tally *kernels, int32_t count, uint64_t problems, int64_t *accepted);
/* Appends a line of JSON for each kernel: device, first seed, and how many problems it did right, wrong and refused. 0
 * where the file cannot be written. */
int tally_write(const char *path, const struct tally *kernels, int32_t count, uint64_t seed, uint64_t seeds);

#endif
