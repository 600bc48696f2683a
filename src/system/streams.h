/* streams.h: files that a user names, as a program reads and writes them. posix_streams.c and windows_streams.c have
 * it; paths are those of files.h. What fails leaves its reason in errno. */
#ifndef FDM_SYSTEM_STREAMS_H
#define FDM_SYSTEM_STREAMS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* The first call of a program: its standard streams carry bytes as they are, text on a terminal is UTF-8, and a limit
 * on files makes writing fail and does not end the process. */
void system_start(void);
/* Whether standard error is a terminal that knows control sequences. */
int system_has_terminal(void);

/* ---- reading ---- */

enum system_kind { SYSTEM_REGULAR, SYSTEM_PIPE, SYSTEM_NEITHER };
struct system_source {
    enum system_kind kind;
    int file;
    uint64_t bytes; /* of a regular file */
};

/* Waits for no other process. Returns 1, and the source is to be closed, or 0. */
int system_open_source(const char *path, struct system_source *source);
void system_close_source(const struct system_source *source);
/* Waits until a process writes to the pipe, and so long at most. */
void system_await_writer(const struct system_source *source, int milliseconds);
/* Returns how many bytes came: fewer than `size` at the end alone; -1 at an error. A pipe's writer is waited for. */
int64_t system_read(const struct system_source *source, void *data, size_t size);
/* A file or pipe of text; NULL: it cannot be opened. */
FILE *system_open_text(const char *path);

/* ---- writing ---- */

enum { SYSTEM_OUTPUT_BYTES = 4096 };
struct system_output {
    int replaces; /* a regular file, or nothing yet, which a temporary file takes the place of; else it is written to */
    int exists;
    char path[SYSTEM_OUTPUT_BYTES], temporary[SYSTEM_OUTPUT_BYTES];
    uint32_t mode, user, group; /* of what exists; not on Windows */
    void (*on_pipe)(int);
};

/* What stands at `path`, where links are followed, and whether it can be written as far as that can be known without
 * writing. Returns 1 or 0. */
int system_look_at_output(const char *path, struct system_output *output);
/* The stream to write to; NULL: there is none. A FIFO's reader is waited for. What is replaced stays until the end:
 * a process that ends before, or is ended, leaves it as it was. */
FILE *system_begin_output(struct system_output *output);
/* Closes the stream. error: 0: all was written, and takes its place, with the permissions of what it replaces; else an
 * error number, and what was written is removed. Returns 1 where everything is written. */
int system_end_output(struct system_output *output, FILE *stream, int error);

#endif
