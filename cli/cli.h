/* cli.h: what the subcommands of fdm share. */
#ifndef FDM_CLI_H
#define FDM_CLI_H

#include <stdio.h>

#include "flash_dmattn.h"

enum { EXIT_FINE = 0, EXIT_WRONG = 1, EXIT_USAGE = 2, EXIT_WRITE = 3 };

int command_info(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_attend(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_mask(int argc, char **argv);
int command_cache(int argc, char **argv);
int command_tune(int argc, char **argv);

/* "fdm: ..." on one line of stderr; returns `code`. */
int complain(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The library's sentence about a call that failed, and its exit code: EXIT_USAGE for what is wrong on every machine. */
int fail(fdm_status status);
int fail_with(fdm_status status, const char *sentence); /* one that was kept */
/* Whole-number and real options: 1, or 0 after a complaint that names the option. */
int parse_integer(const char *option, const char *text, int64_t least, int64_t most, int64_t *value);
int parse_real(const char *option, const char *text, double *value);
/* "L,R", each >= -1. */
int parse_window(const char *text, int64_t *left, int64_t *right);

/* --device cpu, cuda, cuda:N, auto. 1, or 0 after a complaint. `automatic`: the first CUDA device where its kernels
 * take the problem, else the CPU. */
struct device_choice {
    int automatic;
    fdm_device_id id;
};
int parse_device(const char *text, struct device_choice *choice);
/* emulated.c: from now on the only CUDA device is an emulated one of this name. 1, or 0 after a complaint. */
int use_emulated_device(const char *name);
const char *emulated_device(void); /* its name; NULL: there is none */

/* What the tool is doing, and since when, on one line of stderr where that is a terminal and the work takes longer than
 * a second. NULL: done; the line is cleared, and nothing is written until the next call. */
void progress(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Middle of the samples, which it sorts. */
double median_of(double *samples, int32_t count);
/* 64-byte aligned, for release(); NULL when there is none. */
void *allocate(size_t bytes);
void release(void *memory);
/* The same; ends the process with a complaint when there is none: the tool has nothing to unwind. */
void *allocate_or_exit(size_t bytes);

#endif
