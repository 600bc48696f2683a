/* compiler.h: NVRTC, found and opened at run time: one kernel's source and constants to machine code. */
#ifndef FDM_CUDA_COMPILER_H
#define FDM_CUDA_COMPILER_H

#include "cuda/cuda.h"
#include "cuda/sources.h"

/* The compiler that would be used. `identity` changes with the file: path, size and time. */
struct cuda_compiler {
    char path[512];
    char identity[640];
    int32_t major; /* CUDA major version: 13 */
};
/* max_major: CUDA major version of the driver; 0 = any. A sentence when none is found. Opens it only where the dynamic
 * linker alone knows where it is. */
fdm_status cuda_compiler_find(int32_t max_major, struct cuda_compiler *compiler);
/* The same, but what was found before is taken again as long as the file is the same. */
fdm_status cuda_compiler_get(int32_t max_major, struct cuda_compiler *compiler);
/* 1 when there is one that can be found without opening anything. */
int cuda_compiler_known(int32_t max_major, struct cuda_compiler *compiler);

/* Its version, 12080 for 12.8, by the file of its built-in functions beside it; 0 where there is none or it is not
 * known. Opens nothing. */
int32_t cuda_compiler_version(int32_t max_major);

/* Options of every compilation beside the architecture and the constants; ends with NULL. */
extern const char *const cuda_compile_options[];

/* The embedded program with this name, NULL when there is none. */
const struct cuda_source *cuda_source_find(const char *name);

struct cuda_binary {
    void *code; /* a cubin, from memory_allocate(); the caller's */
    size_t bytes;
    struct cuda_resources resources;
    int32_t compiler_major; /* of the compiler that made it */
};
void cuda_binary_release(struct cuda_binary *binary);
/* What the source is compiled for on a device of `arch` ("sm_90"): that, or the architecture's own target ("sm_90a").
 * source may be NULL. */
enum { CUDA_TARGET_BYTES = 16 };
void cuda_target_of(const char *arch, const struct cuda_source *source, char *target);
/* arch: "sm_90", "sm_90a", ... One sentence with the compiler's first error when it refuses. Thread-safe. */
fdm_status cuda_compile(const struct cuda_compiler *compiler, const char *arch,
                        const struct cuda_kernel_request *request, struct cuda_binary *binary);

#endif
