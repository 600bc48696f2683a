/* cache_folder.h: the folder of compiled kernels: whose it is, and how large it may be; inside src/cuda. */
#ifndef FDM_CUDA_CACHE_FOLDER_H
#define FDM_CUDA_CACHE_FOLDER_H

#include <sys/stat.h>

#include "base/settings.h"

enum { CACHE_FOLDER_BYTES = SETTING_PATH_BYTES, CACHE_NAME_BYTES = 96 };

/* The settings that the functions below read: those have no status to return, so who calls them asks first. */
fdm_status cache_check_settings(void);

/* A descriptor of the folder, to be closed; -1 when it is not there or not to be trusted. `path` receives
 * CACHE_FOLDER_BYTES. make: 1: it and those above it are made where they are missing, for the user alone. */
int cache_folder_open(int make, char *path);
/* Others could have written it: it belongs to neither the effective user nor root, or group or others may write. Says
 * so where FLASH_DMATTN_LOG asks for it, once a process. */
int cache_is_foreign(const struct stat *facts, const char *name);

/* Bytes that all entries together may have. */
int64_t cache_limit(void);
/* Removes what was not used for longest, down to a little below the limit, where it is passed, and what processes that
 * were killed left. */
void cache_evict(int folder);

/* What stands in the folder: 1 while `name` is an entry's or what became of one; without end 0. */
struct cache_walk {
    void *directory;
    int folder;
    char name[CACHE_NAME_BYTES];
    struct stat facts;
};
int cache_walk_begin(struct cache_walk *walk, int folder);
int cache_walk_next(struct cache_walk *walk);
void cache_walk_end(struct cache_walk *walk);

#endif
