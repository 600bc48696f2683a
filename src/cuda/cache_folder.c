/* cache_folder.c: the folder of compiled kernels: where it is, whom it is trusted from, and what leaves it. */
#include "cuda/cache_folder.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/settings.h"
#include "base/struct_bytes.h"

fdm_status fdm_cache_folder(char *path, size_t size) {
    const char *own, *xdg = setting_get_foreign("XDG_CACHE_HOME"), *home = setting_get_foreign(system_cache_variable);
    const fdm_status status = setting_read(SETTING_CACHE_DIR, &own);
    if (status)
        return status;
    int written = own    ? snprintf(path, size, "%s", own)
                  : xdg  ? snprintf(path, size, "%s/flash_dmattn", xdg)
                  : home ? snprintf(path, size, "%s%s", home, system_cache_below)
                         : 0;
    if (written <= 0)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "there is no cache folder: none of FLASH_DMATTN_CACHE_DIR, XDG_CACHE_HOME and %s is set",
                         system_cache_variable);
    return (size_t)written < size
               ? FDM_OK
               : error_set(FDM_ERROR_INVALID_ARGUMENT, "the path has %d bytes; size is %zu", written, size);
}

fdm_status cache_check_settings(void) {
    static const enum setting read[] = {SETTING_CACHE_DIR, SETTING_CACHE_SIZE, SETTING_KERNEL_ARCHIVE, SETTING_LOG};
    fdm_status status = FDM_OK;
    for (size_t i = 0; i < sizeof read / sizeof read[0] && !status; i++)
        status = setting_check(read[i]);
    return status;
}

/* ---- whose it is ---- */

void cache_log_ignored(const char *name, const char *why) {
    static atomic_int said;
    int log;
    if (!setting_read_flag(SETTING_LOG, &log) && log && !atomic_exchange(&said, 1))
        fprintf(stderr, "flash_dmattn: compiled kernels are not taken from %s: it %s\n", name, why);
}

int cache_is_foreign(const struct system_file_facts *facts, const char *name) {
    if (facts->foreign)
        cache_log_ignored(name, facts->foreign);
    return facts->foreign != NULL;
}

int cache_folder_open(int make, struct system_folder *folder) {
    char path[CACHE_FOLDER_BYTES];
    struct system_file_facts facts;
    if (fdm_cache_folder(path, sizeof path))
        return 0;
    if (make)
        system_make_folders(path);
    if (!system_open_folder(folder, path, &facts))
        return 0;
    if (!cache_is_foreign(&facts, path))
        return 1;
    system_close_folder(folder);
    return 0;
}

int cache_folder_open_below(const char *below, int make, struct system_folder *folder, const char **foreign) {
    char path[CACHE_FOLDER_BYTES];
    struct system_file_facts facts;
    *foreign = NULL;
    if (fdm_cache_folder(path, sizeof path))
        return 0;
    const size_t above = strlen(path);
    if (snprintf(path + above, sizeof path - above, "/%s", below) >= (int)(sizeof path - above))
        return 0;
    if (make)
        system_make_folders(path);
    path[above] = 0;
    for (int level = 0; level < 2; level++) {
        if (!system_open_folder(folder, path, &facts))
            return 0;
        *foreign = facts.foreign;
        if (level == 1 && !*foreign)
            return 1;
        system_close_folder(folder);
        if (*foreign)
            return 0;
        path[above] = '/';
    }
    return 0;
}

/* ---- what is in it ---- */

int cache_walk_to(struct system_walk *walk, const char *suffix) {
    while (system_walk_on(walk))
        if (walk->facts.regular && strstr(walk->name, suffix))
            return 1;
    return 0;
}

int cache_walk_on(struct system_walk *walk) { return cache_walk_to(walk, ".cubin"); }

/* ---- how large it may be ---- */

int64_t cache_limit(void) {
    int64_t bytes;
    return setting_read_number(SETTING_CACHE_SIZE, &bytes) || bytes < 0 ? 1ll << 30 : bytes;
}

struct aged {
    char name[SYSTEM_NAME_BYTES];
    int64_t used; /* an entry that is read gets a new time */
    int64_t bytes;
};
static int compare_ages(const void *a, const void *b) {
    const int64_t x = ((const struct aged *)a)->used, y = ((const struct aged *)b)->used;
    return (x > y) - (x < y);
}

/* The temporary file of a process that has had time enough. */
static int is_left_over(const struct system_walk *walk, const char *suffix) {
    enum { SECONDS = 3600 };
    return strcmp(strstr(walk->name, suffix), suffix) != 0 && walk->facts.changed / 1000000000 + SECONDS < time(NULL);
}

/* At most `size` entries into `all`, which may be NULL; *bytes receives those of all. */
static int64_t list(const struct system_folder *folder, const char *suffix, struct aged *all, int64_t size,
                    int64_t *bytes) {
    struct system_walk walk;
    int64_t count = 0;
    *bytes = 0;
    if (!system_begin_walk(&walk, folder))
        return 0;
    while (cache_walk_to(&walk, suffix)) {
        if (is_left_over(&walk, suffix) && system_remove_in(folder, walk.name))
            continue;
        if (all && count == size)
            break;
        if (all) {
            memcpy(all[count].name, walk.name, sizeof walk.name);
            all[count].used = walk.facts.changed;
            all[count].bytes = walk.facts.bytes;
        }
        *bytes += walk.facts.bytes;
        count++;
    }
    system_end_walk(&walk);
    return count;
}

void cache_evict(const struct system_folder *folder, const char *suffix, int64_t limit) {
    int64_t bytes;
    const int64_t size = list(folder, suffix, NULL, 0, &bytes);
    if (bytes <= limit)
        return;
    struct aged *all = memory_allocate((size_t)size * sizeof *all);
    if (!all)
        return;
    const int64_t count = list(folder, suffix, all, size, &bytes), enough = limit - limit / 8;
    qsort(all, (size_t)count, sizeof *all, compare_ages);
    for (int64_t i = 0; i + 1 < count && bytes > enough; i++) /* the last was made just now */
        if (system_remove_in(folder, all[i].name))
            bytes -= all[i].bytes;
    memory_release(all);
}

/* ---- for reports ---- */

static void complain(fdm_cache_info *info, const char *name, const char *why) {
    snprintf(info->ignored, sizeof info->ignored, "%.150s is ignored: it %s", name, why);
}

fdm_status fdm_cache_query(fdm_cache_info *info) {
    struct system_folder folder;
    struct system_walk walk;
    struct system_file_facts facts;
    fdm_status status = cache_check_settings();
    if (status)
        return status;
    fdm_cache_info told = {.limit_bytes = cache_limit()};
    if ((status = fdm_cache_folder(told.folder, sizeof told.folder)))
        return status;
    if (system_open_folder(&folder, told.folder, &facts)) {
        const int walks = system_begin_walk(&walk, &folder);
        while (walks && cache_walk_on(&walk)) {
            told.num_entries++;
            told.bytes += walk.facts.bytes;
            told.num_ignored += facts.foreign || walk.facts.foreign;
            if (walk.facts.foreign)
                complain(&told, walk.name, walk.facts.foreign);
        }
        if (walks)
            system_end_walk(&walk);
        if (facts.foreign)
            complain(&told, told.folder, facts.foreign);
        system_close_folder(&folder);
    }
    return STRUCT_WRITE(fdm_cache_info, info, &told);
}
