/* cache.h: compiled kernels on disk. An entry that does not verify is no entry; nothing here can fail a call. */
#ifndef FDM_CUDA_CACHE_H
#define FDM_CUDA_CACHE_H

#include "cuda/compiler.h"

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

#endif
