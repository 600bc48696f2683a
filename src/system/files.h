/* files.h: folders and files that a program must be able to trust, and to replace whole. posix_files.c and
 * windows_files.c have them. Paths are UTF-8, and '/' divides them on every system. Where a folder cannot be opened or
 * a file cannot be removed, errno says why. */
#ifndef FDM_SYSTEM_FILES_H
#define FDM_SYSTEM_FILES_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { SYSTEM_PATH_BYTES = 512, SYSTEM_NAME_BYTES = 128 };

/* Where a user's caches lie: a variable of the environment, and the path below it. */
extern const char system_cache_variable[], system_cache_below[];

struct system_file_facts {
    int64_t bytes, changed; /* changed: nanoseconds since 1970 */
    int32_t regular;        /* 1: a file; 0: a folder, a link, a pipe or a device */
    const char *foreign;    /* NULL: nobody but the user and the administrator can have written it; else a clause */
};

/* An open folder. Names in it mean this folder, even where it or one above it is renamed meanwhile (not on Windows). */
struct system_folder {
    intptr_t handle;
    char path[SYSTEM_PATH_BYTES];
};

/* Where the last name of a path begins; at its end where that divides. */
const char *system_last_name(const char *path);
/* Makes a folder that only the user may look into, and those above it; what is there stays. `path` is written to and
 * restored. */
void system_make_folders(char *path);
/* Returns 1, and the folder is to be closed, or 0. */
int system_open_folder(struct system_folder *folder, const char *path, struct system_file_facts *facts);
void system_close_folder(struct system_folder *folder);

/* A walk over the names of a folder, of which no more than SYSTEM_NAME_BYTES - 1 bytes are given. */
struct system_walk {
    void *state;
    const struct system_folder *folder;
    char name[SYSTEM_NAME_BYTES];
    struct system_file_facts facts;
};
int system_begin_walk(struct system_walk *walk, const struct system_folder *folder);
/* Returns 0 at the end. */
int system_walk_on(struct system_walk *walk);
void system_end_walk(struct system_walk *walk);

/* Opens a regular file of the folder for reading; NULL: there is none. */
FILE *system_open_in(const struct system_folder *folder, const char *name, struct system_file_facts *facts);
/* The same by its path, through links too. */
FILE *system_open_file(const char *path, struct system_file_facts *facts);
/* Sets the time of the last change to now, where that is allowed. */
void system_touch(FILE *file);
/* Returns 1 where it was removed. */
int system_remove_in(const struct system_folder *folder, const char *name);

/* Whether the system lets this process write a file so long; a signal ends a process that tries nevertheless. */
int system_may_write(size_t bytes);
/* Writes `bytes` of `head`, then those of `body`, as the whole file `name`, in the place of an older one: readers see
 * the old or the new, and a process that is killed leaves the old one and a file whose name begins with `name` and a
 * dot. Returns 1 where it is written. */
int system_replace_in(const struct system_folder *folder, const char *name, const void *head, size_t head_bytes,
                      const void *body, size_t body_bytes);

#endif
