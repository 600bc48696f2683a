/* cache.h: compiled kernels on disk. An entry that does not verify is no entry; nothing here can fail a call. */
#ifndef FDM_CUDA_CACHE_H
#define FDM_CUDA_CACHE_H

#include "cuda/compiler.h"

/* What the machine code depends on: sources, constants, compiler, architecture, library version. */
struct cache_key {
    uint64_t half[2];
};
struct cache_key cache_key_of(const struct cuda_compiler *compiler, const char *arch, const struct cuda_source *source,
                              const struct cuda_kernel_request *request);

/* 1 and the binary (the caller's) when a sound entry is there. */
int cache_load(const struct cache_key *key, struct cuda_binary *binary);
/* Writes the entry whole or not at all: a temporary file, fsync, rename. 0 when the folder cannot be written. */
int cache_store(const struct cache_key *key, const struct cuda_binary *binary);

#endif
