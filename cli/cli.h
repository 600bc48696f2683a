/* cli.h: what the subcommands of fdm share. */
#ifndef FDM_CLI_H
#define FDM_CLI_H

#include <stdio.h>

#include "flash_dmattn.h"

enum { EXIT_FINE = 0, EXIT_WRONG = 1, EXIT_USAGE = 2 };

int command_info(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_attend(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_cache(int argc, char **argv);

/* "fdm: ..." on one line of stderr; returns `code`. */
int complain(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Whole-number and real options: 1, or 0 after a complaint that names the option. */
int parse_integer(const char *option, const char *text, int64_t least, int64_t most, int64_t *value);
int parse_real(const char *option, const char *text, double *value);
/* "L,R", each >= -1. */
int parse_window(const char *text, int64_t *left, int64_t *right);

double seconds_now(void);
/* Middle of the samples, which it sorts. */
double median_of(double *samples, int32_t count);
/* 64-byte aligned; ends the process with a complaint when there is none: the tool has nothing to unwind. */
void *allocate_or_exit(size_t bytes);

#endif
