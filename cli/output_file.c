/* output_file.c: files that are written through what is there, or replaced whole; and the end of standard output. */
#define _GNU_SOURCE /* mkostemp */
#include "output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"

struct output {
    char path[PATH_MAX]; /* with the links that its last name may be followed */
    int replaces;        /* a regular file, or nothing yet: a temporary file takes its place */
    int exists;
    struct stat old; /* where it exists */
};

/* Like the functions of the system: 0, or -1 with errno. */
static int refuse(int error) {
    errno = error;
    return -1;
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
            return 0;
        target[length] = 0;
        char *slash = target[0] == '/' ? NULL : strrchr(followed, '/');
        const size_t folder = slash ? (size_t)(slash - followed) + 1 : 0;
        if (folder + (size_t)length >= PATH_MAX)
            return refuse(ENAMETOOLONG);
        memcpy(followed + folder, target, (size_t)length + 1);
    }
    return refuse(ELOOP);
}

/* What stands at the path. Links of /proc lead to files that may have no name any more: those are written to. */
static int look_at(const char *path, struct output *out) {
    struct stat there;
    if (follow_links(path, out->path))
        return -1;
    out->exists = stat(path, &out->old) == 0;
    if (!out->exists && errno != ENOENT)
        return -1;
    out->replaces = !out->exists || (S_ISREG(out->old.st_mode) && stat(out->path, &there) == 0 &&
                                     there.st_dev == out->old.st_dev && there.st_ino == out->old.st_ino);
    if (!out->exists)
        return *path && path[strlen(path) - 1] != '/' ? 0 : refuse(*path ? EISDIR : ENOENT);
    if (S_ISDIR(out->old.st_mode))
        return refuse(EISDIR);
    if (S_ISSOCK(out->old.st_mode))
        return refuse(ENXIO);
    return faccessat(AT_FDCWD, path, W_OK, AT_EACCESS);
}

/* A file of a name that nobody can foretell, in the folder of what it is to replace. */
static int make_temporary(const struct output *out, char temporary[PATH_MAX]) {
    static const char name[] = ".fdm-XXXXXX";
    const char *slash = strrchr(out->path, '/');
    const size_t folder = slash ? (size_t)(slash - out->path) + 1 : 0;
    if (folder + sizeof name > PATH_MAX)
        return refuse(ENAMETOOLONG);
    memcpy(temporary, out->path, folder);
    memcpy(temporary + folder, name, sizeof name);
    return mkostemp(temporary, O_CLOEXEC);
}

/* The owner and permissions of the old file, or those of a new one. */
static int set_permissions(int file, const struct output *out) {
    if (!out->exists) {
        const mode_t mask = umask(0);
        umask(mask);
        return fchmod(file, 0666 & ~mask);
    }
    if (fchown(file, out->old.st_uid, out->old.st_gid) != 0 && errno != EPERM)
        return -1;
    return fchmod(file, out->old.st_mode & 0777);
}

/* Everything, and to the disk where there is one; closes the file in any case. */
static int fill(int file, int to_disk, int (*write)(FILE *stream, const void *context), const void *context) {
    FILE *stream = fdopen(file, "wb");
    int error = 0;
    if (!stream) {
        close(file);
        return -1;
    }
    errno = 0;
    if (!write(stream, context) || fflush(stream) != 0)
        error = errno ? errno : EIO;
    else if (to_disk && fsync(file) != 0 && errno != EINVAL)
        error = errno;
    if (fclose(stream) != 0 && !error)
        error = errno;
    return error ? refuse(error) : 0;
}

static int replace(const struct output *out, int (*write)(FILE *stream, const void *context), const void *context) {
    char temporary[PATH_MAX];
    const int file = make_temporary(out, temporary);
    if (file < 0)
        return -1;
    int error = 0;
    if (set_permissions(file, out) != 0) {
        error = errno;
        close(file);
    } else if (fill(file, 1, write, context) != 0 || rename(temporary, out->path) != 0) {
        error = errno;
    }
    if (!error)
        return 0;
    unlink(temporary);
    return refuse(error);
}

/* A FIFO waits for its reader, and so does the tool. */
static int write_through(const char *path, int (*write)(FILE *stream, const void *context), const void *context) {
    progress("waiting for a reader of %s", path);
    const int file = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC | O_NOCTTY);
    progress(NULL);
    return file < 0 ? -1 : fill(file, 0, write, context);
}

int output_check(const char *path) {
    struct output out;
    char temporary[PATH_MAX];
    int file = -1;
    if (look_at(path, &out) == 0 && (!out.replaces || (file = make_temporary(&out, temporary)) >= 0)) {
        if (file >= 0) {
            close(file);
            unlink(temporary);
        }
        return 1;
    }
    return complain(0, "%s cannot be written: %s", path, strerror(errno));
}

int output_write(const char *path, int (*write)(FILE *stream, const void *context), const void *context) {
    struct output out;
    void (*on_pipe)(int) = signal(SIGPIPE, SIG_IGN); /* a reader that leaves is an error like others */
    const int failed = look_at(path, &out) != 0 ||
                       (out.replaces ? replace(&out, write, context) : write_through(path, write, context)) != 0;
    signal(SIGPIPE, on_pipe);
    return !failed || complain(0, "%s cannot be written: %s", path, strerror(errno));
}

int output_finish(int code) {
    const int failed = ferror(stdout);
    errno = 0;
    if ((fclose(stdout) == 0 && !failed) || code != EXIT_FINE)
        return code;
    return complain(EXIT_WRITE, "standard output cannot be written%s%s", errno ? ": " : "",
                    errno ? strerror(errno) : "");
}
