/* cache_folder.c: the folder of compiled kernels: where it is, whom it is trusted from, and what leaves it. */
#define _GNU_SOURCE /* O_DIRECTORY */
#include "cuda/cache_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/settings.h"
#include "base/struct_bytes.h"

fdm_status fdm_cache_folder(char *path, size_t size) {
    const char *own, *xdg = setting_get_foreign("XDG_CACHE_HOME"), *home = setting_get_foreign("HOME");
    const fdm_status status = setting_read(SETTING_CACHE_DIR, &own);
    if (status)
        return status;
    int written = own    ? snprintf(path, size, "%s", own)
                  : xdg  ? snprintf(path, size, "%s/flash_dmattn", xdg)
                  : home ? snprintf(path, size, "%s/.cache/flash_dmattn", home)
                         : 0;
    if (written <= 0)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "there is no cache folder: none of FLASH_DMATTN_CACHE_DIR, XDG_CACHE_HOME and HOME is set");
    return (size_t)written < size
               ? FDM_OK
               : error_set(FDM_ERROR_INVALID_ARGUMENT, "the path has %d bytes; size is %zu", written, size);
}

fdm_status cache_check_settings(void) {
    static const enum setting read[] = {SETTING_CACHE_DIR, SETTING_CACHE_SIZE, SETTING_LOG};
    fdm_status status = FDM_OK;
    for (size_t i = 0; i < sizeof read / sizeof read[0] && !status; i++)
        status = setting_check(read[i]);
    return status;
}

/* ---- whose it is ---- */

/* A clause; NULL when it is the user's or root's, and nobody else may write it. */
static const char *objection(const struct stat *facts) {
    if (facts->st_uid != geteuid() && facts->st_uid != 0)
        return "belongs to another user";
    return facts->st_mode & (S_IWGRP | S_IWOTH) ? "may be written by others than its owner" : NULL;
}

static void log_once(const char *name, const char *why) {
    static atomic_int said;
    int log;
    if (!setting_read_flag(SETTING_LOG, &log) && log && !atomic_exchange(&said, 1))
        fprintf(stderr, "flash_dmattn: compiled kernels are not taken from %s: it %s\n", name, why);
}

int cache_is_foreign(const struct stat *facts, const char *name) {
    const char *why = objection(facts);
    if (why)
        log_once(name, why);
    return why != NULL;
}

/* The folder and those above it, as mkdir -p; only the user may look into what is new. */
static void make_folder(char *path) {
    for (char *at = path + 1; *at; at++)
        if (*at == '/') {
            *at = 0;
            mkdir(path, 0700);
            *at = '/';
        }
    mkdir(path, 0700);
}

int cache_folder_open(int make, char *path) {
    struct stat facts;
    if (fdm_cache_folder(path, CACHE_FOLDER_BYTES))
        return -1;
    if (make)
        make_folder(path);
    const int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0 && fstat(folder, &facts) == 0 && !cache_is_foreign(&facts, path))
        return folder;
    if (folder >= 0)
        close(folder);
    return -1;
}

/* ---- what is in it ---- */

int cache_walk_begin(struct cache_walk *walk, int folder) {
    const int again = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    *walk = (struct cache_walk){.directory = again >= 0 ? fdopendir(again) : NULL, .folder = folder};
    if (!walk->directory && again >= 0)
        close(again);
    return walk->directory != NULL;
}

int cache_walk_next(struct cache_walk *walk) {
    for (struct dirent *entry; (entry = readdir(walk->directory));)
        if (strstr(entry->d_name, ".cubin") && strlen(entry->d_name) < sizeof walk->name &&
            fstatat(walk->folder, entry->d_name, &walk->facts, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(walk->facts.st_mode)) {
            snprintf(walk->name, sizeof walk->name, "%s", entry->d_name);
            return 1;
        }
    return 0;
}

void cache_walk_end(struct cache_walk *walk) { closedir(walk->directory); }

/* ---- how large it may be ---- */

int64_t cache_limit(void) {
    int64_t bytes;
    return setting_read_number(SETTING_CACHE_SIZE, &bytes) || bytes < 0 ? 1ll << 30 : bytes;
}

struct aged {
    char name[CACHE_NAME_BYTES];
    struct timespec used; /* an entry that is read gets a new time */
    int64_t bytes;
};
static int compare_ages(const void *a, const void *b) {
    const struct timespec x = ((const struct aged *)a)->used, y = ((const struct aged *)b)->used;
    if (x.tv_sec != y.tv_sec)
        return x.tv_sec < y.tv_sec ? -1 : 1;
    return (x.tv_nsec > y.tv_nsec) - (x.tv_nsec < y.tv_nsec);
}

/* The temporary file of a process that has had time enough. */
static int is_left_over(const struct cache_walk *walk) {
    enum { SECONDS = 3600 };
    return strcmp(strstr(walk->name, ".cubin"), ".cubin") != 0 && walk->facts.st_mtim.tv_sec + SECONDS < time(NULL);
}

/* At most `size` entries into `all`, which may be NULL; *bytes receives those of all. */
static int64_t list(int folder, struct aged *all, int64_t size, int64_t *bytes) {
    struct cache_walk walk;
    int64_t count = 0;
    *bytes = 0;
    if (!cache_walk_begin(&walk, folder))
        return 0;
    while (cache_walk_next(&walk)) {
        if (is_left_over(&walk) && unlinkat(folder, walk.name, 0) == 0)
            continue;
        if (all && count == size)
            break;
        if (all) {
            memcpy(all[count].name, walk.name, sizeof walk.name);
            all[count].used = walk.facts.st_mtim;
            all[count].bytes = walk.facts.st_size;
        }
        *bytes += walk.facts.st_size;
        count++;
    }
    cache_walk_end(&walk);
    return count;
}

void cache_evict(int folder) {
    const int64_t limit = cache_limit();
    int64_t bytes;
    const int64_t size = list(folder, NULL, 0, &bytes);
    if (bytes <= limit)
        return;
    struct aged *all = memory_allocate((size_t)size * sizeof *all);
    if (!all)
        return;
    const int64_t count = list(folder, all, size, &bytes), enough = limit - limit / 8;
    qsort(all, (size_t)count, sizeof *all, compare_ages);
    for (int64_t i = 0; i + 1 < count && bytes > enough; i++) /* the last was made just now */
        if (unlinkat(folder, all[i].name, 0) == 0)
            bytes -= all[i].bytes;
    memory_release(all);
}

/* ---- for reports ---- */

static void complain(fdm_cache_info *info, const char *name, const char *why) {
    snprintf(info->ignored, sizeof info->ignored, "%.150s is ignored: it %s", name, why);
}

fdm_status fdm_cache_query(fdm_cache_info *info) {
    struct cache_walk walk;
    struct stat facts;
    fdm_status status = cache_check_settings();
    if (status)
        return status;
    fdm_cache_info told = {.limit_bytes = cache_limit()};
    if ((status = fdm_cache_folder(told.folder, sizeof told.folder)))
        return status;
    const int folder = open(told.folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0 && fstat(folder, &facts) == 0) {
        const char *all = objection(&facts);
        const int walks = cache_walk_begin(&walk, folder);
        while (walks && cache_walk_next(&walk)) {
            const char *why = objection(&walk.facts);
            told.num_entries++;
            told.bytes += walk.facts.st_size;
            told.num_ignored += all || why;
            if (why)
                complain(&told, walk.name, why);
        }
        if (walks)
            cache_walk_end(&walk);
        if (all)
            complain(&told, told.folder, all);
    }
    if (folder >= 0)
        close(folder);
    return STRUCT_WRITE(fdm_cache_info, info, &told);
}
