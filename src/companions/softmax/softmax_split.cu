/* softmax_split.cu: softmax of few long rows, each over many blocks, by two kernels.
 *
 * Idea: the online softmax's rule combines any parts of a row, so parts may be different blocks' (as FlashDecoding does
 * with keys). softmax_split_sums leaves largest element and sum of each piece in the workspace; softmax_split_write
 * combines a row's pieces in each of its blocks, reads again and writes. Blocks of the second kernel run backwards over
 * the rows, so that what the first has read last is still in L2.
 *
 * Tile: a piece is an equal share of a row's chunks, a block's. Grid: pieces x rows. Bound by memory: two reads and one
 * write of each element, less what L2 keeps. Shared memory: two floats for each warp. */
#include "companions/softmax/softmax_rows.cuh"
#include "cuda/ptx/launch.cuh"

static_assert(LANES == THREADS, "a block a piece");

/* The chunks of a block's piece: a whole number of tiles, but for the last. */
struct piece {
    uint32_t row, number, begin, end;
};
__device__ __forceinline__ struct piece piece_of(const struct softmax_params &a, uint32_t block) {
    const uint32_t tiles = (a.chunks + THREADS - 1) / THREADS, share = (tiles + a.pieces - 1) / a.pieces * THREADS;
    const uint32_t number = block % a.pieces;
    return {block / a.pieces, number, number * share, min((number + 1) * share, a.chunks)};
}

/* Batches of CHUNKS chunks of the piece, with all of a batch's loads under way at once; `use(in, dout, place)`. */
template <class Use>
__device__ __forceinline__ void for_each_chunk(const struct softmax_params &a, const struct row &r,
                                               const struct piece &piece, Use use) {
    struct chunk in[CHUNKS], dout[BACKWARD ? CHUNKS : 1] = {};
    for (uint32_t tile = piece.begin; tile < piece.end; tile += CHUNKS * THREADS) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const struct place p = place_of(r, tile + i * THREADS, threadIdx.x);
            if (tile + i * THREADS < piece.end && begins(p, a.columns)) {
                in[i] = load_chunk(r.in, p, a.columns);
                if (BACKWARD)
                    dout[i] = load_chunk(r.dout, p, a.columns);
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const struct place p = place_of(r, tile + i * THREADS, threadIdx.x);
            if (tile + i * THREADS < piece.end && begins(p, a.columns)) {
                apply_mask(in[i], a, r, p);
                use(in[i], dout[BACKWARD ? i : 0], p);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_split_sums(const __grid_constant__ struct softmax_params a) {
    __shared__ float scratch[THREADS / 32 * 2];
    const struct piece piece = piece_of(a, blockIdx.x);
    const struct row r = row_of(a, piece.row);
    struct sums s = no_sums();
    for_each_chunk(a, r, piece, [&](const struct chunk &in, const struct chunk &dout, const struct place &) {
        add_chunk(s, in, dout, a.scale * LOG2_E);
    });
    sums_over_block(s, scratch);
    if (threadIdx.x == 0)
        *(float2 *)(a.partials + 2 * (int64_t)blockIdx.x) = make_float2(s.n, s.sum);
    griddepcontrol_launch_dependents();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_split_write(const __grid_constant__ struct softmax_params a) {
    __shared__ float scratch[THREADS / 32 * 2];
    const struct piece piece = piece_of(a, gridDim.x - 1 - blockIdx.x);
    const struct row r = row_of(a, piece.row);
    struct sums s = no_sums();
    griddepcontrol_wait();
    for (uint32_t number = threadIdx.x; number < a.pieces; number += THREADS) {
        const float2 part = *(const float2 *)(a.partials + 2 * ((int64_t)piece.row * a.pieces + number));
        const float n = fmaxf(s.n, part.x);
        s.sum = BACKWARD ? s.sum + part.y : rescaled(s, n) + rescaled({part.x, part.y}, n);
        s.n = n;
    }
    sums_over_block(s, scratch);
    const struct totals t = totals_of(s);
    for_each_chunk(a, r, piece, [&](const struct chunk &in, const struct chunk &dout, const struct place &p) {
        store_chunk(r.out, p, a.columns, results_of(in, dout, t, a.scale, a.scale * LOG2_E));
    });
}
