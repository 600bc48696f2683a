/* softmax_naive.cu: softmax of rows in three passes over memory, the first rung of the ladder.
 *
 * Idea: safe softmax as it is written down. Read the row for its largest element, read it again for the sum of
 * exponentials relative to that, read it a third time and write. A block of THREADS a row; each thread takes every
 * THREADS-th element. Bound by memory: three reads and one write of each element where two accesses would do, and
 * elements of 2 or 4 bytes a load.
 *
 * Shared memory: two floats for each warp, for each of the two reductions. Forward alone. */
#include "companions/softmax/softmax_rows.cuh"

static_assert(!VECTOR && LANES == THREADS && !BACKWARD, "elements one by one");

/* One element; a masked one is the infinity that scale makes -inf of. */
__device__ __forceinline__ float element_at(const struct softmax_params &a, const struct row &r, uint32_t column) {
    struct chunk one = load_chunk(r.in, {(int32_t)column}, column + 1); /* the others are outside */
    apply_mask(one, a, r, {(int32_t)column});
    return element_of(one, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) softmax_naive(const __grid_constant__ struct softmax_params a) {
    __shared__ float scratch[2][THREADS / 32 * 2];
    const struct row r = row_of(a, blockIdx.x);
    const float scale2 = a.scale * LOG2_E;

    struct sums s = no_sums();
    for (uint32_t column = threadIdx.x; column < a.columns; column += THREADS)
        s.n = fmaxf(s.n, element_at(a, r, column) * scale2);
    sums_over_block(s, scratch[0]);

    for (uint32_t column = threadIdx.x; column < a.columns; column += THREADS)
        s.sum += ex2_approx(fmaf(element_at(a, r, column), scale2, -finite(s.n)));
    sums_over_block(s, scratch[1]);

    const struct totals t = totals_of(s);
    for (uint32_t column = threadIdx.x; column < a.columns; column += THREADS) {
        float x[PER_CHUNK] = {result_of(element_at(a, r, column), 0.0f, t, a.scale, scale2)};
        store_chunk(r.out, {(int32_t)column}, column + 1, chunk_of(x));
    }
}
