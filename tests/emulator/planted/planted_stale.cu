/* planted_stale.cu: sums the active ones of a row of tiles, from the last to the first, two buffers deep.
 *
 * FAULT 1 is that of another library's backward with a block mask, found by reading: the tile before is fetched only if
 * the present one is active, so that after an inactive tile an active one finds what was in its buffer before. FAULT 2
 * writes 16 bytes past the end of shared memory. */
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "planted/planted.h"

__device__ __forceinline__ void fetch(const struct planted_arguments &a, uint32_t buffers, int tile) {
    if (threadIdx.x % 4 == 0 && tile >= 0)
        cp_async_16(buffers + (tile % 2 * PLANTED_THREADS + threadIdx.x) * 4,
                    a.in + tile * PLANTED_THREADS + threadIdx.x);
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(PLANTED_THREADS)
    planted_stale(const __grid_constant__ struct planted_arguments a) {
    extern __shared__ __align__(128) float tiles[];
    const uint32_t buffers = shared_address(tiles);
    float sum = 0;
    fetch(a, buffers, PLANTED_TILES - 1);
    for (int tile = PLANTED_TILES - 1; tile >= 0; tile--) {
        const bool active = a.flags[tile];
        if (FAULT == 0 || active)
            fetch(a, buffers, tile - 1);
        else
            cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        if (active)
            sum += tiles[tile % 2 * PLANTED_THREADS + (threadIdx.x + 33) % PLANTED_THREADS];
        __syncthreads();
    }
    cp_async_wait<0>();
    if (FAULT == 2 && threadIdx.x == 0)
        st_shared_16(buffers + 2 * PLANTED_THREADS * 4, 0, 0, 0, 0);
    a.out[threadIdx.x] = sum;
}
