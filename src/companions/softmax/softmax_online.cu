/* softmax_online.cu: softmax of rows in two passes over memory.
 *
 * Idea: the online softmax (Milakov and Gimelshein, 2018). Largest element and sum are found in one pass: when a larger
 * element comes, the sum so far is rescaled to it. Threads do that for themselves and are combined by the same rule.
 * The second pass reads again and writes. With VECTOR ("softmax.vector") a thread takes 16 bytes at once, without
 * ("softmax.online") as many elements, THREADS apart. The backward has the same two passes over two inputs.
 *
 * A block of THREADS a row. Bound by memory: two reads and one write, the second read from L2 where the rows under way
 * fit there. Shared memory: two floats for each warp. */
#include "companions/softmax/softmax_rows.cuh"

static_assert(LANES == THREADS, "a block a row");

extern "C" __global__ void __launch_bounds__(THREADS) softmax_online(const __grid_constant__ struct softmax_params a) {
    __shared__ float scratch[THREADS / 32 * 2];
    const struct row r = row_of(a, blockIdx.x);
    const float scale2 = a.scale * LOG2_E;

    struct sums s = no_sums();
    struct chunk in, dout = {};
    for (uint32_t tile = 0; tile < a.chunks; tile += THREADS) {
        const struct place p = place_of(r, tile, threadIdx.x);
        if (!begins(p, a.columns))
            break;
        in = load_chunk(r.in, p, a.columns);
        if (BACKWARD)
            dout = load_chunk(r.dout, p, a.columns);
        apply_mask(in, a, r, p);
        add_chunk(s, in, dout, scale2);
    }
    sums_over_block(s, scratch);

    const struct totals t = totals_of(s);
    for (uint32_t tile = 0; tile < a.chunks; tile += THREADS) {
        const struct place p = place_of(r, tile, threadIdx.x);
        if (!begins(p, a.columns))
            break;
        in = load_chunk(r.in, p, a.columns);
        if (BACKWARD)
            dout = load_chunk(r.dout, p, a.columns);
        apply_mask(in, a, r, p);
        store_chunk(r.out, p, a.columns, results_of(in, dout, t, a.scale, scale2));
    }
}
