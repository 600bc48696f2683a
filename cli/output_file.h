/* output_file.h: a file that the tool writes. What is there and is no regular file, a device, a FIFO, is written to; a
 * regular file is replaced whole or stays as it was. Links are followed. */
#ifndef FDM_OUTPUT_FILE_H
#define FDM_OUTPUT_FILE_H

#include <stdio.h>

/* Before the work: whether `path` can be written, as far as that can be known without writing. 1, or 0 after a
 * complaint. */
int output_check(const char *path);
/* `write` puts everything on the stream; nonzero where all went well. 1, or 0 after a complaint. */
int output_write(const char *path, int (*write)(FILE *stream, const void *context), const void *context);

/* At the end of the process: the exit code, which is EXIT_WRITE after a complaint where it was EXIT_FINE and not
 * everything that was printed has reached standard output. */
int output_finish(int code);

#endif
