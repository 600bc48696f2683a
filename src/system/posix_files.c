/* posix_files.c: files.h on Linux and macOS. */
#define _GNU_SOURCE /* mkostemp, O_NOFOLLOW */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "system/files.h"

const char system_cache_variable[] = "HOME", system_cache_below[] = "/.cache/flash_dmattn";

static const char *foreign_to(const struct stat *s) {
    if (s->st_uid != geteuid() && s->st_uid != 0)
        return "belongs to another user";
    return s->st_mode & (S_IWGRP | S_IWOTH) ? "may be written by others than its owner" : NULL;
}

static struct system_file_facts facts_of(const struct stat *s) {
#ifdef __APPLE__
    const struct timespec changed = s->st_mtimespec;
#else
    const struct timespec changed = s->st_mtim;
#endif
    return (struct system_file_facts){.bytes = s->st_size,
                                      .changed = (int64_t)changed.tv_sec * 1000000000 + changed.tv_nsec,
                                      .regular = S_ISREG(s->st_mode),
                                      .foreign = foreign_to(s)};
}

const char *system_last_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

void system_make_folders(char *path) {
    for (char *at = path + 1; *at; at++)
        if (*at == '/') {
            *at = 0;
            mkdir(path, 0700);
            *at = '/';
        }
    mkdir(path, 0700);
}

int system_open_folder(struct system_folder *folder, const char *path, struct system_file_facts *facts) {
    struct stat s;
    if (strlen(path) >= sizeof folder->path) {
        errno = ENAMETOOLONG;
        return 0;
    }
    strcpy(folder->path, path);
    const int file = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    folder->handle = file;
    if (file >= 0 && fstat(file, &s) == 0) {
        *facts = facts_of(&s);
        return 1;
    }
    if (file >= 0)
        close(file);
    return 0;
}
void system_close_folder(struct system_folder *folder) { close((int)folder->handle); }

int system_begin_walk(struct system_walk *walk, const struct system_folder *folder) {
    const int again = openat((int)folder->handle, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    walk->folder = folder;
    walk->state = again >= 0 ? fdopendir(again) : NULL;
    if (!walk->state && again >= 0)
        close(again);
    return walk->state != NULL;
}

int system_walk_on(struct system_walk *walk) {
    struct stat s;
    for (struct dirent *entry; (entry = readdir(walk->state));)
        if (strlen(entry->d_name) < sizeof walk->name &&
            fstatat((int)walk->folder->handle, entry->d_name, &s, AT_SYMLINK_NOFOLLOW) == 0) {
            strcpy(walk->name, entry->d_name);
            walk->facts = facts_of(&s);
            return 1;
        }
    return 0;
}

void system_end_walk(struct system_walk *walk) { closedir(walk->state); }

/* Only regular files: a pipe would have no end. */
static FILE *take_file(int file, struct system_file_facts *facts) {
    struct stat s;
    if (file < 0)
        return NULL;
    FILE *stream = fstat(file, &s) == 0 && S_ISREG(s.st_mode) ? fdopen(file, "rb") : NULL;
    if (stream)
        *facts = facts_of(&s);
    else
        close(file);
    return stream;
}

FILE *system_open_in(const struct system_folder *folder, const char *name, struct system_file_facts *facts) {
    return take_file(openat((int)folder->handle, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW), facts);
}
FILE *system_open_file(const char *path, struct system_file_facts *facts) {
    return take_file(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), facts);
}

void system_touch(FILE *file) {
    static const struct timespec now[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_NOW}};
    (void)!futimens(fileno(file), now); /* in a folder of root's it may be refused */
}

int system_remove_in(const struct system_folder *folder, const char *name) {
    return unlinkat((int)folder->handle, name, 0) == 0;
}

int system_may_write(size_t bytes) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur;
}

static int write_all(int file, const void *data, size_t bytes) {
    const char *at = data;
    while (bytes > 0) {
        const ssize_t written = write(file, at, bytes);
        if (written <= 0)
            return 0;
        at += written;
        bytes -= (size_t)written;
    }
    return 1;
}

int system_replace_in(const struct system_folder *folder, const char *name, const void *head, size_t head_bytes,
                      const void *body, size_t body_bytes) {
    char path[SYSTEM_PATH_BYTES + SYSTEM_NAME_BYTES + 1], temporary[sizeof path + 8];
    snprintf(path, sizeof path, "%s/%s", folder->path, name);
    /* a random name: process numbers come again, in containers most of all, and killed processes leave files */
    snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
    const int file = mkostemp(temporary, O_CLOEXEC);
    if (file < 0)
        return 0;
    int whole = write_all(file, head, head_bytes) && write_all(file, body, body_bytes) && fsync(file) == 0;
    whole = close(file) == 0 && whole;
    if (whole && rename(temporary, path) == 0)
        return 1;
    unlink(temporary);
    return 0;
}
