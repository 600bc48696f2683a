/* cache_folder.h: the folder of compiled kernels: whose it is, and how large it may be; for src/cuda and src/tuning. */
#ifndef FDM_CUDA_CACHE_FOLDER_H
#define FDM_CUDA_CACHE_FOLDER_H

#include "base/settings.h"
#include "system/files.h"

enum { CACHE_FOLDER_BYTES = SETTING_PATH_BYTES };

/* The settings that the functions below read: those have no status to return, so who calls them asks first. */
fdm_status cache_check_settings(void);

/* Opens the folder, which is to be closed. Returns 0 when it is not there or not to be trusted. make: 1: it and those
 * above it are made where they are missing, for the user alone. */
int cache_folder_open(int make, struct system_folder *folder);
/* The same of a folder in it, which holds something else. *foreign: the clause about one of the two that is not to be
 * trusted, or NULL. */
int cache_folder_open_below(const char *below, int make, struct system_folder *folder, const char **foreign);
/* Whether others could have written it. Says so where FLASH_DMATTN_LOG asks for it, once a process. */
int cache_is_foreign(const struct system_file_facts *facts, const char *name);

/* Says that `name` is not used and why, where FLASH_DMATTN_LOG asks for it, once a process. */
void cache_log_ignored(const char *name, const char *why);

/* Bytes that all entries together may have. */
int64_t cache_limit(void);
/* Removes what was not used for longest of the files with this suffix, down to a little below the limit, where it is
 * passed, and what processes that were killed left. */
void cache_evict(const struct system_folder *folder, const char *suffix, int64_t limit);

/* Walks on to the next entry, or what became of one; 0 at the end. */
int cache_walk_on(struct system_walk *walk);
/* The same to files that have `suffix` in their names. */
int cache_walk_to(struct system_walk *walk, const char *suffix);

#endif
