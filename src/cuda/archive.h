/* archive.h: one file of many compiled kernels, made on one machine and read on others. */
#ifndef FDM_CUDA_ARCHIVE_H
#define FDM_CUDA_ARCHIVE_H

#include "cuda/cache.h"

/* Looks into the archive that FLASH_DMATTN_KERNEL_ARCHIVE names, then into the one of the architecture beside this
 * library, "kernels-sm_90.fdm". An entry of any compiler serves whose CUDA major version is at most max_major (0: any).
 * Returns 1 and the binary (the caller's). An archive that is damaged, of another version of the library, or, where the
 * variable names it, one that others may write, is passed over: FLASH_DMATTN_LOG says so. arch: "sm_90", "sm_90a". */
int archive_load(const struct cache_key *key, const char *arch, int32_t max_major, struct cuda_binary *binary);

#endif
