/* output_file.c: files that are written through what is there, or replaced whole; and the end of standard output. */
#include "output_file.h"

#include <errno.h>
#include <string.h>

#include "cli.h"
#include "system/streams.h"

static int refuse(const char *path) { return complain(0, "%s cannot be written: %s", path, strerror(errno)); }

int output_check(const char *path) {
    struct system_output output;
    return system_look_at_output(path, &output) || refuse(path);
}

int output_write(const char *path, int (*write)(FILE *stream, const void *context), const void *context) {
    struct system_output output;
    if (!system_look_at_output(path, &output))
        return refuse(path);
    if (!output.replaces) /* a FIFO waits for its reader, and so does the tool */
        progress("waiting for a reader of %s", path);
    FILE *stream = system_begin_output(&output);
    progress(NULL);
    if (!stream)
        return refuse(path);
    int error = 0;
    errno = 0;
    if (!write(stream, context) || fflush(stream) != 0)
        error = errno ? errno : EIO;
    return system_end_output(&output, stream, error) || refuse(path);
}

int output_finish(int code) {
    const int failed = ferror(stdout);
    errno = 0;
    if ((fclose(stdout) == 0 && !failed) || code != EXIT_FINE)
        return code;
    return complain(EXIT_WRITE, "standard output cannot be written%s%s", errno ? ": " : "",
                    errno ? strerror(errno) : "");
}
