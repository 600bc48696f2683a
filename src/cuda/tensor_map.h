/* tensor_map.h: what TMA knows of a tensor; a member of argument structs, in C and in CUDA C. */
#ifndef FDM_CUDA_TENSOR_MAP_H
#define FDM_CUDA_TENSOR_MAP_H

/* CUtensorMap: made by cuda_tensor_maps_make(), read by TMA alone. A kernel takes its struct of arguments
 * as const __grid_constant__ and hands on the member's address. */
struct cuda_tensor_map {
#ifdef __CUDACC__
    alignas(64)
#else
    _Alignas(64)
#endif
        unsigned char bytes[128];
};

#endif
