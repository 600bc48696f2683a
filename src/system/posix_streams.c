/* posix_streams.c: streams.h on Linux and macOS. */
#define _GNU_SOURCE /* mkostemp */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "system/files.h"
#include "system/streams.h"

void system_start(void) { signal(SIGXFSZ, SIG_IGN); }
int system_has_terminal(void) { return isatty(STDERR_FILENO); }

/* ---- reading ---- */

/* Opened before its type is known, so the open must not wait for another process. */
int system_open_source(const char *path, struct system_source *source) {
    struct stat facts;
    source->file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (source->file < 0)
        return 0;
    const int known = fstat(source->file, &facts) == 0;
    source->kind = known && S_ISREG(facts.st_mode)    ? SYSTEM_REGULAR
                   : known && S_ISFIFO(facts.st_mode) ? SYSTEM_PIPE
                                                      : SYSTEM_NEITHER;
    source->bytes = source->kind == SYSTEM_REGULAR ? (uint64_t)facts.st_size : 0;
    return 1;
}
void system_close_source(const struct system_source *source) { close(source->file); }

void system_await_writer(const struct system_source *source, int milliseconds) {
    poll(&(struct pollfd){.fd = source->file, .events = POLLIN}, 1, milliseconds);
}

/* Where a pipe's writer has nothing yet, from then on a read waits for it. */
int64_t system_read(const struct system_source *source, void *data, size_t size) {
    enum { PART = 1 << 30 };
    size_t have = 0;
    while (have < size) {
        const ssize_t come = read(source->file, (char *)data + have, size - have < PART ? size - have : PART);
        if (come == 0)
            break;
        if (come > 0)
            have += (size_t)come;
        else if (errno == EAGAIN ? fcntl(source->file, F_SETFL, 0) != 0 : errno != EINTR)
            return -1;
    }
    return (int64_t)have;
}

FILE *system_open_text(const char *path) { return fopen(path, "r"); }

/* ---- writing ---- */

_Static_assert(PATH_MAX <= SYSTEM_OUTPUT_BYTES, "a path fits");

static int refuse(int error) {
    errno = error;
    return 0;
}

/* The last name of `path` as what it links to, if it is a link, whether that exists or not. */
static int follow_links(const char *path, char followed[PATH_MAX]) {
    enum { LINKS_MAX = 40 };
    char target[PATH_MAX];
    if (snprintf(followed, PATH_MAX, "%s", path) >= PATH_MAX)
        return refuse(ENAMETOOLONG);
    for (int links = 0; links < LINKS_MAX; links++) {
        const ssize_t length = readlink(followed, target, sizeof target - 1);
        if (length < 0)
            return 1;
        target[length] = 0;
        char *slash = target[0] == '/' ? NULL : strrchr(followed, '/');
        const size_t folder = slash ? (size_t)(slash - followed) + 1 : 0;
        if (folder + (size_t)length >= PATH_MAX)
            return refuse(ENAMETOOLONG);
        memcpy(followed + folder, target, (size_t)length + 1);
    }
    return refuse(ELOOP);
}

/* A file of a name that nobody can foretell, in the folder of what it is to replace; -1: it cannot be. */
static int make_temporary(struct system_output *output) {
    static const char name[] = ".fdm-XXXXXX";
    const size_t folder = (size_t)(system_last_name(output->path) - output->path);
    if (folder + sizeof name > PATH_MAX) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(output->temporary, output->path, folder);
    memcpy(output->temporary + folder, name, sizeof name);
    return mkostemp(output->temporary, O_CLOEXEC);
}

/* Whether a file can be made beside it. */
static int try_temporary(struct system_output *output) {
    const int file = make_temporary(output);
    if (file < 0)
        return 0;
    close(file);
    unlink(output->temporary);
    return 1;
}

/* Links of /proc lead to files that may have no name any more: those are written to. */
int system_look_at_output(const char *path, struct system_output *output) {
    struct stat old, there;
    if (!follow_links(path, output->path))
        return 0;
    output->exists = stat(path, &old) == 0;
    if (!output->exists && errno != ENOENT)
        return 0;
    output->replaces = !output->exists || (S_ISREG(old.st_mode) && stat(output->path, &there) == 0 &&
                                           there.st_dev == old.st_dev && there.st_ino == old.st_ino);
    if (!output->replaces)
        strcpy(output->path, path);
    if (!output->exists && (!*path || path[strlen(path) - 1] == '/'))
        return refuse(*path ? EISDIR : ENOENT);
    if (output->exists) {
        if (S_ISDIR(old.st_mode))
            return refuse(EISDIR);
        if (S_ISSOCK(old.st_mode))
            return refuse(ENXIO);
        if (faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) != 0)
            return 0;
        output->mode = old.st_mode;
        output->user = old.st_uid;
        output->group = old.st_gid;
    }
    return !output->replaces || try_temporary(output);
}

/* The owner and permissions of the old file, or those of a new one. */
static int set_permissions(int file, const struct system_output *output) {
    if (!output->exists) {
        const mode_t mask = umask(0);
        umask(mask);
        return fchmod(file, 0666 & ~mask) == 0;
    }
    if (fchown(file, output->user, output->group) != 0 && errno != EPERM)
        return 0;
    return fchmod(file, output->mode & 0777) == 0;
}

FILE *system_begin_output(struct system_output *output) {
    const int file =
        output->replaces ? make_temporary(output) : open(output->path, O_WRONLY | O_TRUNC | O_CLOEXEC | O_NOCTTY);
    if (file < 0)
        return NULL;
    FILE *stream = !output->replaces || set_permissions(file, output) ? fdopen(file, "wb") : NULL;
    if (!stream) {
        const int error = errno;
        close(file);
        if (output->replaces)
            unlink(output->temporary);
        errno = error;
        return NULL;
    }
    output->on_pipe = signal(SIGPIPE, SIG_IGN); /* a reader that leaves is an error like others */
    return stream;
}

int system_end_output(struct system_output *output, FILE *stream, int error) {
    if (!error && output->replaces && fsync(fileno(stream)) != 0 && errno != EINVAL)
        error = errno;
    if (fclose(stream) != 0 && !error)
        error = errno;
    signal(SIGPIPE, output->on_pipe);
    if (output->replaces) {
        if (!error && rename(output->temporary, output->path) != 0)
            error = errno;
        if (error)
            unlink(output->temporary);
    }
    return !error || refuse(error);
}
