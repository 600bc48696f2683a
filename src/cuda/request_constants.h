/* request_constants.h: the constants of a kernel's request, from their list (constants.h); on the host. */
#ifndef FDM_REQUEST_CONSTANTS_H
#define FDM_REQUEST_CONSTANTS_H

#include "base/count_arguments.h"
#include "cuda/constants.h"
#include "cuda/cuda.h"

/* No constant, no cluster, no allowed spill. */
static inline void gpu_clear_request(struct cuda_kernel_request *request) {
    request->num_constants = request->cluster = request->spill_bytes_max = 0;
}
/* GPU_ADD_CONSTANTS(request, LIST, .NAME = value, ...). */
static inline void gpu_add_constants(struct cuda_kernel_request *request, const char *const *names,
                                     const int64_t *values, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        request->constants[request->num_constants++] = (struct cuda_constant){names[i], values[i]};
}

#define GPU_ADD_CONSTANTS(request, LIST, ...)                                                  \
    do {                                                                                       \
        static const char *const names_[] = {LIST(GPU_CONSTANT_NAME)};                         \
        enum { COUNT_ = sizeof names_ / sizeof names_[0] };                                    \
        _Static_assert((int)COUNT_ <= (int)CUDA_CONSTANTS_MAX, "a request has room for them"); \
        _Static_assert((int)COUNT_ == COUNT_ARGUMENTS(__VA_ARGS__), "a value for each");       \
        const union {                                                                          \
            struct {                                                                           \
                LIST(GPU_CONSTANT_VALUE)                                                       \
            };                                                                                 \
            int64_t all[COUNT_];                                                               \
        } values_ = {{__VA_ARGS__}};                                                           \
        gpu_add_constants(request, names_, values_.all, COUNT_);                               \
    } while (0)
/* The same of a request that is cleared first. */
#define GPU_SET_CONSTANTS(request, LIST, ...)          \
    do {                                               \
        gpu_clear_request(request);                    \
        GPU_ADD_CONSTANTS(request, LIST, __VA_ARGS__); \
    } while (0)

#endif
