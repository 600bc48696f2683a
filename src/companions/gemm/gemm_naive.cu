/* gemm_naive.cu: C = alpha A B + beta C, a thread an element; and the end of a product whose k was split.
 *
 * Idea: the definition. Neighbouring threads compute neighbours of one row of C, so that they read one element of A
 * together and neighbours of B where B's rows are contiguous. Every element of A is read n times, of B m times, mostly
 * from the caches: bound by their loads, two for each fma. Any strides and any extents, also k = 0, where C = beta C.
 *
 * Tile: GEMM_ELEMENT_THREADS elements of C in the order of its rows, all batches. */
#include "companions/gemm/gemm_elements.cuh"

GEMM_ELEMENT_CONSTANTS(GPU_CONSTANT_GIVEN)

/* The element of C that this thread computes; false past the last. */
struct place {
    int batch, row, column;
};
__device__ __forceinline__ bool place_of(const struct gemm_params &a, struct place *p) {
    const int64_t number = (int64_t)blockIdx.x * GEMM_ELEMENT_THREADS + threadIdx.x, row = number / a.n;
    *p = {(int)(row / a.m), (int)(row % a.m), (int)(number % a.n)};
    return p->batch < a.batch;
}

extern "C" __global__ void __launch_bounds__(GEMM_ELEMENT_THREADS)
    gemm_naive(const __grid_constant__ struct gemm_params a) {
    struct place p;
    if (!place_of(a, &p))
        return;
    float sum = 0.0f;
    for (int k = 0; k < a.k; k++) {
        sum = fmaf(widened(*element_of(a.a, p.batch, p.row, k)), widened(*element_of(a.b, p.batch, k, p.column)), sum);
        if (ACCUMULATE16)
            sum = cvt_f32_f16((uint16_t)cvt_f16x2(sum, 0.0f));
    }
    *element_of(a.out, p.batch, p.row, p.column) = (uint16_t)narrowed(finished(a, sum, p.batch, p.row, p.column), 0.0f);
}

/* The parts of a sum in the order of their splits. */
extern "C" __global__ void __launch_bounds__(GEMM_ELEMENT_THREADS)
    gemm_combine(const __grid_constant__ struct gemm_params a) {
    struct place p;
    if (!place_of(a, &p))
        return;
    const int64_t all = (int64_t)a.batch * a.m * a.n;
    const float *part = a.partials + ((int64_t)p.batch * a.m + p.row) * a.n + p.column;
    float sum = 0.0f;
    for (int split = 0; split < a.splits; split++)
        sum += part[split * all];
    *element_of(a.out, p.batch, p.row, p.column) = (uint16_t)narrowed(finished(a, sum, p.batch, p.row, p.column), 0.0f);
}
