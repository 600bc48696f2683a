/* planted_tile.cu: one tile by tcgen05 for each block, or for a pair of blocks; without faults. */
#include "instructions/tile_product.cuh"
#include "planted/planted.h"

extern "C" __global__ void __launch_bounds__(TILE_THREADS) __cluster_dims__(2, 1, 1)
    planted_tile(const __grid_constant__ struct planted_arguments p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint16_t *a = (const uint16_t *)p.in + blockIdx.x * ROWS_A * TILE_K;
    const uint16_t *b = (const uint16_t *)p.in + 256 * TILE_K + (GROUP == 2 ? blockIdx.x * ROWS_B * TILE_K : 0);
    tile_product(a, b, p.out + blockIdx.x * 128 * COLUMNS, shared_address(memory), FAULT == 1);
}
