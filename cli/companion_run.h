/* companion_run.h: what the benchmarks and plans of the companion operations share: device, buffers, time. */
#ifndef FDM_CLI_COMPANION_RUN_H
#define FDM_CLI_COMPANION_RUN_H

#include "cli.h"

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
fdm_status companion_measure(fdm_device_id device, fdm_status (*call)(void *context), void *context, int32_t iters,
                             struct companion_time *time);

/* Kernel rows: one line as they come, then the table by speed, as JSON where asked. */
struct companion_row {
    char kernel[48], choice[64];
    struct companion_time time;
    double rate; /* in the unit of the table */
    double worst_error;
};
void companion_print_row(const struct companion_row *row, const char *unit, double *best);
void companion_print_table(struct companion_row *rows, int32_t count, const char *unit, int has_errors);
void companion_print_json(const struct companion_row *rows, int32_t count, const char *unit, int has_errors);

void companion_print_choice(const char *device, const fdm_companion_choice *choice, int explain, int json);

/* The subcommands: fdm bench OP, fdm plan --op OP. */
int bench_gemm(int argc, char **argv);
int plan_gemm(int argc, char **argv);
int bench_softmax(int argc, char **argv);
int plan_softmax(int argc, char **argv);

#endif
