/* hopper_probe_fill.cu: writes the operands of hopper_probe.cu, after it has let that kernel begin. */
#include "cuda/ptx/launch.cuh"
#include "cuda_probe/hopper_probe.h"

/* The operands, late: whoever did not wait for this kernel finds what was there before. */
extern "C" __global__ void hopper_probe_fill(const struct hopper_probe_operands o) {
    griddepcontrol_launch_dependents();
    const long long start = clock64();
    while (clock64() - start < HOPPER_PROBE_DELAY_CLOCKS)
        ;
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = first; i < o.a_elements; i += step) /* exact: an eighth has four bits */
        o.a[i] = (uint16_t)(__float_as_uint((float)hopper_probe_eighths((uint32_t)i, 0) / 8) >> 16);
    for (int64_t i = first; i < o.b_elements; i += step)
        o.b[i] = (uint16_t)(__float_as_uint((float)hopper_probe_eighths((uint32_t)i, 1) / 8) >> 16);
}
