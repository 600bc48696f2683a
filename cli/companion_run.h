/* companion_run.h: what the benchmarks and plans of the companion operations share: device, buffers, time. */
#ifndef FDM_CLI_COMPANION_RUN_H
#define FDM_CLI_COMPANION_RUN_H

#include <getopt.h>

#include "cli.h"

/* The options of a subcommand: what they are, and what takes one into `request`; 1, or 0 after a complaint. */
struct companion_command {
    const char *operation, *help;
    const struct option *options;
    int help_option;
    int (*set)(void *request, int option, const char *text);
};
/* -1: go on; else the exit code. */
int companion_read_options(const struct companion_command *command, void *request, int argc, char **argv);

/* --device cuda, cuda:N or, where plan_only, a name like sm_90; emulated:NAME. 1, or 0 after a complaint. */
int companion_device(const char *text, int plan_only, fdm_device *device);

/* A tensor of a device with its host copy, contiguous, up to four axes. */
struct companion_buffer {
    fdm_tensor tensor; /* on the device */
    int64_t shape[4];
    int64_t elements, bytes;
    fdm_dtype dtype;
    void *host;
};
/* Random numbers, about normal times `size`, on both sides; size 0: NaN bytes. Ends the process where memory is short.
 */
void companion_make(struct companion_buffer *b, fdm_device_id device, fdm_dtype dtype, int32_t ndim,
                    const int64_t *shape, double size);
void companion_release(struct companion_buffer *b);
double companion_get(const struct companion_buffer *b, int64_t index);

/* Seconds of one call: the median of `iters` samples, each the mean of as many calls as take a millisecond. */
struct companion_time {
    double median, quartile_low, quartile_high;
};
struct companion_row {
    char kernel[48], choice[64];
    struct companion_time time;
    double rate; /* in the unit of the table */
    double worst_error;
};
/* Measures `call` by the plan whose choice this is, with a workspace that `*workspace` holds meanwhile; the row gets
 * all but rate and error. */
fdm_status companion_time_plan(fdm_device_id device, const fdm_companion_choice *choice,
                               fdm_status (*call)(void *context), void *context, void **workspace, int32_t iters,
                               struct companion_row *row);

/* Every kernel of an operation by name: a line as they come, then the table by speed, or JSON. */
struct companion_bench {
    const char *operation, *subject; /* "gemm", and what a kernel takes: "product" */
    const char *unit, *json_unit;
    fdm_status (*kernel)(int32_t index, const char **name, const char **description);
    /* Fills a row, or says why the kernel of that name cannot: FDM_ERROR_UNSUPPORTED leaves it out. */
    fdm_status (*time)(void *context, const char *name, struct companion_row *row);
    void *context;
    const char *only; /* NULL: all kernels */
    double limit;     /* of worst_error, where check is 1 */
    int check, json;
};
/* The exit code. */
int companion_bench(const struct companion_bench *bench);

void companion_print_choice(const char *device, const fdm_companion_choice *choice, int explain, int json);

/* The subcommands: fdm bench OP, fdm plan --op OP. */
int bench_gemm(int argc, char **argv);
int plan_gemm(int argc, char **argv);
int bench_softmax(int argc, char **argv);
/* The problem that words of `fdm plan --op OP` say, for `fdm tune`: 1, or 0 after a complaint or --help. */
int tune_words_gemm(int argc, char **argv, fdm_gemm_problem *problem);
int tune_words_softmax(int argc, char **argv, fdm_softmax_problem *problem);
int plan_softmax(int argc, char **argv);

#endif
