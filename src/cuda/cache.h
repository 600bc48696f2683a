/* cache.h: compiled kernels on disk. An entry that does not verify is no entry; nothing here can fail a call. */
#ifndef FDM_CUDA_CACHE_H
#define FDM_CUDA_CACHE_H

#include <stdio.h>

#include "cuda/compiler.h"
#include "system/files.h"

/* What the machine code depends on: sources, constants, options, architecture, library version; and the compiler, 0 for
 * any. */
struct cache_key {
    uint64_t half[2], compiler;
};
/* compiler NULL: any. options: those of every compilation; ends with NULL. */
struct cache_key cache_key_of(const struct cuda_compiler *compiler, const char *arch, const struct cuda_source *source,
                              const struct cuda_kernel_request *request, const char *const *options);

/* 1 and the binary (the caller's) when a valid entry is there. max_major: of any compiler, CUDA major version of the
 * newest whose code will do; 0 = any. */
int cache_load(const struct cache_key *key, int32_t max_major, struct cuda_binary *binary);
/* Writes the entry whole or not at all: a temporary file, fsync, rename; then removes what was not used for longest
 * until the folder keeps to its limit. 0 when nothing was written. */
int cache_store(const struct cache_key *key, const struct cuda_binary *binary);

/* ---- entries as they lie in files, for archives of them ---- */

enum { CACHE_HEADER_BYTES = 72 };
/* What stands before the code. */
void cache_make_header(const struct cache_key *key, const struct cuda_binary *binary, uint8_t made[CACHE_HEADER_BYTES]);
/* Header and code, from where `file` stands. Returns 1 with its key and the binary (the caller's), or 0 where they are
 * damaged or memory is short. */
int cache_read_entry(FILE *file, struct cache_key *key, struct cuda_binary *binary);
/* The same of a file of the cache's folder, which has nothing else. used: 1: it counts as used just now, and stays
 * longer. */
int cache_read_file(const struct system_folder *folder, const char *name, int used, struct cache_key *key,
                    struct cuda_binary *binary);
/* Whether an entry's key is the one that is looked for, where a compiler of 0 stands for any. */
int cache_is_wanted(const struct cache_key *key, const struct cache_key *wanted);
/* A checksum that goes on from `hash`; against damage, not against forgery. */
uint64_t cache_checksum(uint64_t hash, const void *data, size_t bytes);

#endif
