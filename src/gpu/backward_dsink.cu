/* backward_dsink.cu: the gradient of sinks where backward_finish, which makes it beside dQ, does not run.
 *
 * One block a head. Bound by memory: a word of each row is read once. */
#include "cuda/ptx/launch.cuh"
#include "gpu/dsink.cuh"

BACKWARD_ROWS_CONSTANTS(GPU_CONSTANT_GIVEN)

#define THREADS (32 * BACKWARD_DSINK_WARPS)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward_dsink(const __grid_constant__ struct gpu_backward_params a) {
    __shared__ float sums[BACKWARD_DSINK_WARPS];
    griddepcontrol_wait();
    store_dsink<THREADS>(a, blockIdx.x, sums);
}
