/* sources.h: the kernels' sources, embedded in the library by scripts/embed_sources.py. */
#ifndef FDM_CUDA_SOURCES_H
#define FDM_CUDA_SOURCES_H

#include <stdint.h>

/* A file by its path below src/. A program (.cu) also has the files it includes, directly or not, and a hash of all
 * their texts and names. */
struct cuda_source {
    const char *name, *text;
    const int32_t *includes; /* indices into cuda_sources[] */
    int32_t num_includes;
    uint64_t closure[2];
    int32_t arch_specific; /* 1: something in it has instructions that one architecture alone has */
};
extern const struct cuda_source cuda_sources[];
extern const int32_t cuda_num_sources;

#endif
