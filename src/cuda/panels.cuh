/* panels.cuh: a matrix of 16-bit elements in shared memory as TMA leaves it: panels of 64 columns, each of `height`
 * rows of 128 bytes, with the 128-byte swizzle. */
#ifndef FDM_CUDA_PANELS_CUH
#define FDM_CUDA_PANELS_CUH

#include "cuda/ptx/types.cuh"

template <int height> struct panels {
    enum { BYTES = height * 128 }; /* of a panel */
    uint32_t at;                   /* address; for chunk() that of a row whose number is a multiple of 8 */

    /* The panels from the n-th on; the rows from `first` on. */
    __device__ __forceinline__ panels panel(int n) const { return {at + n * BYTES}; }
    __device__ __forceinline__ panels rows(int first) const { return {at + first * 128}; }
    /* Address of 16 bytes: of a row the columns 8 n .. 8 n + 7. The same in the first panel, n up to 7. */
    __device__ __forceinline__ uint32_t chunk(int row, int n) const {
        return at + n / 8 * BYTES + row * 128 + ((n % 8 ^ (row & 7)) << 4);
    }
    __device__ __forceinline__ uint32_t panel_chunk(int row, int n) const {
        return at + row * 128 + ((n ^ (row & 7)) << 4);
    }
    /* Where a product begins that takes, of all rows, columns 16 n .. 16 n + 15; of 64 columns, rows 16 n .. 16 n + 15.
     */
    __device__ __forceinline__ uint32_t columns_16(int n) const { return at + n / 4 * BYTES + n % 4 * 32; }
    __device__ __forceinline__ uint32_t rows_16(int n) const { return at + n * 2048; }
};

#endif
