/* softmax_empty.cu: fills the workspace of softmax_ring.cu with what no sums are.
 *
 * Idea: from 9.0 on the ring's blocks may begin as soon as this kernel has: they wait by themselves for its end, and
 * have their first pieces on the way to L2 meanwhile. Grid: blocks of THREADS x 16 bytes. */
#include "companions/softmax/softmax.h"
#include "cuda/ptx/launch.cuh"

SOFTMAX_CONSTANTS(GPU_CONSTANT_GIVEN)

extern "C" __global__ void __launch_bounds__(THREADS) softmax_empty(const __grid_constant__ struct softmax_params a) {
    const uint64_t word = (uint64_t)blockIdx.x * THREADS + threadIdx.x, words = ((uint64_t)a.rows * a.pieces + 1) / 2;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait(); /* kernels ahead may still use the memory */
    if (word < words)
        ((uint4 *)a.partials)[word] = make_uint4(~0u, ~0u, ~0u, ~0u);
}
