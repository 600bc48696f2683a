/* gpu_launches.h: what a plan launches on a call's tensors, as values: an algorithm offers them in their order, and
 * gpu_family.c gets their kernels and launches them. */
#ifndef FDM_GPU_LAUNCHES_H
#define FDM_GPU_LAUNCHES_H

#include "contract/family.h"
#include "cuda/cuda.h"

enum { GPU_PARAMS_BYTES = 24 << 10 };

struct gpu_launch {
    int64_t grid[3]; /* blocks; 0 of the last two stand for 1, and of the first for no launch */
    int32_t cluster; /* blocks of a cluster along x; 0 or 1: none */
    int32_t early;   /* may begin before the launch ahead of it has ended (griddepcontrol) */
    const void *params;
    size_t params_bytes;
    void *zeros; /* device memory that is set to 0 before */
    size_t zero_bytes;
    int32_t kernel; /* index of its request */
};

struct gpu_launches {
    const fdm_problem *problem;
    const struct attention *attention; /* NULL: which kernels there are is asked, and nothing will be launched */
    char *workspace;
    int32_t device;
    int32_t num_kernels, count;
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    struct gpu_launch list[FAMILY_LAUNCHES_MAX];
    void *zeros; /* of the next launch */
    size_t zero_bytes;
    size_t params_used;
    _Alignas(64) char params[GPU_PARAMS_BYTES];
};

/* No launch yet. attention, workspace: NULL where kernels alone are asked. */
void gpu_launches_begin(struct gpu_launches *launches, int32_t device, const fdm_problem *problem,
                        const struct attention *attention, void *workspace);
/* The request of one kernel more, which the caller fills. */
struct cuda_kernel_request *gpu_add_kernel(struct gpu_launches *launches);
/* A launch of the kernel that was added last, with a copy of its parameters. Where it has no blocks, neither the launch
 * nor its kernel remain. */
void gpu_add_launch(struct gpu_launches *launches, struct gpu_launch launch);
/* The same of an earlier kernel, by its index. */
void gpu_add_launch_of(struct gpu_launches *launches, int32_t kernel, struct gpu_launch launch);
/* Memory that is set to 0 before the launch that is added next, which sets none by itself. */
void gpu_add_zeros(struct gpu_launches *launches, void *zeros, size_t bytes);
/* Gets the kernels and launches all in order. */
fdm_status gpu_launches_run(const struct gpu_launches *launches, void *stream);

#endif
