/* request_constants.h: the constants of a kernel's request, from their list (constants.h); on the host. */
#ifndef FDM_REQUEST_CONSTANTS_H
#define FDM_REQUEST_CONSTANTS_H

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

/* How many arguments there are, to CUDA_CONSTANTS_MAX. */
#define GPU_COUNT_ARGUMENTS(...)                                                                                       \
    GPU_NUMBER_49(__VA_ARGS__, 48, 47, 46, 45, 44, 43, 42, 41, 40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, \
                  26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define GPU_NUMBER_49(n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15, n16, n17, n18, n19, n20, n21, \
                      n22, n23, n24, n25, n26, n27, n28, n29, n30, n31, n32, n33, n34, n35, n36, n37, n38, n39, n40,  \
                      n41, n42, n43, n44, n45, n46, n47, n48, count, ...)                                             \
    count

#define GPU_ADD_CONSTANTS(request, LIST, ...)                                                  \
    do {                                                                                       \
        static const char *const names_[] = {LIST(GPU_CONSTANT_NAME)};                         \
        enum { COUNT_ = sizeof names_ / sizeof names_[0] };                                    \
        _Static_assert((int)COUNT_ <= (int)CUDA_CONSTANTS_MAX, "a request has room for them"); \
        _Static_assert((int)COUNT_ == GPU_COUNT_ARGUMENTS(__VA_ARGS__), "a value for each");   \
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
