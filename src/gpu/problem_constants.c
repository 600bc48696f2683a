/* problem_constants.c: the values of the constants that every attention kernel gets. */
#include "gpu/problem_constants.h"

#include "gpu/features.h"

void gpu_set_problem_constants(struct cuda_kernel_request *request, const fdm_problem *p, uint32_t alike) {
#define GPU_PROBLEM_CONSTANT_NAME(name, value, alike)  #name,
#define GPU_PROBLEM_CONSTANT_VALUE(name, value, alike) value,
#define GPU_PROBLEM_CONSTANT_ALIKE(name, value, alike) alike,
    static const char *const names[] = {GPU_PROBLEM_CONSTANTS(GPU_PROBLEM_CONSTANT_NAME)};
    static const int32_t same[] = {GPU_PROBLEM_CONSTANTS(GPU_PROBLEM_CONSTANT_ALIKE)};
    const int32_t values[] = {GPU_PROBLEM_CONSTANTS(GPU_PROBLEM_CONSTANT_VALUE)};
    gpu_clear_request(request);
    for (int32_t n = 0; n < GPU_NUM_PROBLEM_CONSTANTS; n++)
        request->constants[request->num_constants++] =
            (struct cuda_constant){names[n], alike >> n & 1 ? same[n] : values[n]};
}
