/* softmax_resident.cu: softmax of rows that are read once and stay on the multiprocessor until they are written.
 *
 * Idea: a row is loaded into registers with every load under way at once; its largest element and sum are found there,
 * and the results are made from the same registers: one read and one write of each element, which is what a copy does.
 * Exponentials are made once, relative to the thread's own largest element. Longer rows are softmax_ring's.
 *
 * Tile: LANES threads a row, THREADS / LANES rows a block; of a row each thread has CHUNKS runs of 16 bytes in
 * registers. Grid: blocks of rows. Shared memory: two floats for each warp.
 *
 * Registers: of a thread the elements as floats (of the backward 4 a chunk, twice) and some 30 besides; of the forward
 * on whole chunks at most 64, so that a multiprocessor holds 1024 threads. */
#include "companions/softmax/softmax_rows.cuh"

static_assert(LANES == THREADS || LANES <= 32, "a row is a part of a warp, or a block's");

/* Where a row's ends, or two inputs, take more registers, as many blocks as they leave. */
#define BLOCKS_PER_SM (BACKWARD || VECTOR < SOFTMAX_WHOLE ? 1 : 1024 / THREADS)

/* ---- chunks in registers, forward ---- */

/* As floats; the largest z so far. */
__device__ __forceinline__ float widen_chunk(float (&x)[PER_CHUNK], const struct chunk &c, float scale2, float n) {
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++)
        x[j] = element_of(c, j);
    return chunk_largest(c, scale2, n);
}
/* Their exponentials relative to `n`, kept in their place (log-softmax: z - n), and the sum. */
__device__ __forceinline__ float exponentials(float (&x)[PER_CHUNK], float scale2, float n) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++) {
        const float z = fmaf(x[j], scale2, -n), e = ex2_approx(z);
        sum += e;
        x[j] = LOG ? z : e;
    }
    return sum;
}
/* The results; `weight` is what an exponential relative to the thread's own n becomes. */
__device__ __forceinline__ struct chunk scaled_chunk(const float (&x)[PER_CHUNK], float n_less, float factor,
                                                     float weight) {
    float y[PER_CHUNK];
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++)
        y[j] = LOG ? fmaf(x[j] + n_less, LN_2, -factor) : x[j] * weight;
    return chunk_of(y);
}

/* ---- the kernel ---- */

/* This thread's part of its row: chunk i of it, and whether there is one. */
struct part {
    uint32_t lane, columns;
};
__device__ __forceinline__ struct place place_in(const struct part &p, const struct row &r, int i) {
    return place_of(r, i * LANES, p.lane);
}
__device__ __forceinline__ bool has(const struct part &p, const struct row &r, int i) {
    return VECTOR == SOFTMAX_FULL || begins(place_in(p, r, i), p.columns);
}
/* So that what uses it needs no branch. */
__device__ __forceinline__ struct chunk load_or_hidden(const struct part &part, const struct row &r, const char *row,
                                                       int i) {
    return has(part, r, i) ? load_chunk(row, place_in(part, r, i), part.columns) : hidden_chunk();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    softmax_resident(const __grid_constant__ struct softmax_params a) {
    __shared__ float scratch[THREADS / 32 * 2];
    const uint32_t number = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const bool active = number < a.rows;
    const struct row r = row_of(a, active ? number : 0);
    const float scale2 = a.scale * LOG2_E;
    const struct part part = {threadIdx.x % LANES, active ? a.columns : 0};

    /* Everything is asked for at once. */
    struct chunk in[CHUNKS], dout[BACKWARD ? CHUNKS : 1] = {};
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        in[i] = load_or_hidden(part, r, r.in, i);
        if (BACKWARD)
            dout[i] = load_or_hidden(part, r, r.dout, i);
    }

    struct sums s = no_sums();
    float x[BACKWARD ? 1 : CHUNKS][PER_CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        if (has(part, r, i))
            apply_mask(in[i], a, r, place_in(part, r, i));
        if (BACKWARD)
            s.sum += chunk_product(in[i], dout[BACKWARD ? i : 0]);
        else
            s.n = widen_chunk(x[BACKWARD ? 0 : i], in[i], scale2, s.n);
    }
    const float own = s.n; /* what the exponentials in registers are relative to */
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (!BACKWARD)
            s.sum += exponentials(x[BACKWARD ? 0 : i], scale2, finite(own));
    if (LANES <= 32)
        sums_over_lanes<(LANES <= 32 ? LANES : 32)>(s);
    else
        sums_over_block(s, scratch);

    const struct totals t = totals_of(s);
    const float weight = (own == MINUS_INF ? 0.0f : ex2_approx(own - t.n)) * t.factor;
    if (!active)
        return;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (has(part, r, i)) {
            const struct chunk result = BACKWARD
                                            ? results_of(in[i], dout[BACKWARD ? i : 0], t, a.scale, scale2)
                                            : scaled_chunk(x[BACKWARD ? 0 : i], finite(own) - t.n, t.factor, weight);
            store_chunk(r.out, place_in(part, r, i), part.columns, result);
        }
}
