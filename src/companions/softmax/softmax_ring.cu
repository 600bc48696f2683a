/* softmax_ring.cu: softmax of long rows, each shared by many multiprocessors and read once.
 *
 * Idea: blocks live as long as the grid, and each passes its pieces of row after row through a ring in shared memory.
 * While one row's piece waits for the sums of the other pieces, the next row's is summed and those after it are on
 * their way (cp.async), so the memory is never idle for a barrier. A row's blocks are any blocks, not those of a
 * cluster: what they tell each other, largest element and sum of a piece, is eight bytes of the workspace, which were
 * EMPTY before and are read until they are not. All blocks run at once (a cooperative launch), so that everyone waits
 * for blocks that live. Sums are added in a fixed order.
 *
 * Tile: a piece is CHUNKS runs of 16 bytes of each thread; SHARED_CHUNKS / CHUNKS pieces fit in the ring. Grid: groups
 * x pieces; group g takes rows g, g + groups and so on. Bound by memory: one read and one write of each element.
 *
 * Shared memory: the ring, of the backward in and dout of each piece; 4 floats a warp, twice. A thread reads only what
 * it has fetched, so the ring needs no barrier; a row costs one, for its sums. Registers: two blocks on a
 * multiprocessor, 64 a thread. */
#include "companions/softmax/softmax_rows.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"

static_assert(LANES == THREADS && SHARED_CHUNKS % CHUNKS == 0, "a block a piece; whole pieces in the ring");
static_assert(THREADS == SOFTMAX_MAX_LANES, "softmax_share()");

constexpr int RING = SHARED_CHUNKS / CHUNKS; /* pieces */
constexpr int LAG = RING > 4 ? 2 : 1;        /* from a piece's sums to its results */
constexpr int WARPS = THREADS / 32;
constexpr int INPUTS = BACKWARD ? 2 : 1;
constexpr uint64_t EMPTY = ~0ull; /* no sums: the largest element is never this NaN */
static_assert(RING > LAG && WARPS <= 32, "one piece at least is on its way");

/* ---- this thread's chunks of a piece ---- */

struct part {
    uint32_t first, share; /* chunks of every row: where the piece begins, how many it has */
    uint32_t ring;         /* address of this thread's first chunk */
};
__device__ __forceinline__ struct place place_in(const struct part &part, const struct row &r, int i) {
    return place_of(r, part.first + i * THREADS, threadIdx.x);
}
__device__ __forceinline__ bool has(const struct part &part, const struct place &p, int i, uint32_t columns) {
    return i * THREADS + threadIdx.x < part.share && begins(p, columns);
}
__device__ __forceinline__ uint32_t slot_of(const struct part &part, uint32_t piece, int i, int input) {
    return part.ring + ((piece % RING * INPUTS + input) * CHUNKS + i) * (THREADS * 16);
}
__device__ __forceinline__ struct chunk read_slot(uint32_t slot) {
    struct chunk c;
    ld_shared_16(c.word, slot);
    return c;
}

/* Whole chunks come by themselves, a row's ends by way of registers. */
__device__ __forceinline__ void fetch_chunk(uint32_t slot, const char *row, const struct place &p, uint32_t columns) {
    if (is_whole(p, columns)) {
        cp_async_16(slot, row + (int64_t)p.first * ELEMENT_BYTES);
        return;
    }
    const struct chunk c = load_chunk(row, p, columns);
    st_shared_16(slot, c.word[0], c.word[1], c.word[2], c.word[3]);
}

__device__ __forceinline__ void fetch_piece(const struct softmax_params &a, const struct part &part, uint32_t number,
                                            uint32_t piece) {
    if (number < a.rows) {
        const struct row r = row_of(a, number);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const struct place p = place_in(part, r, i);
            if (has(part, p, i, a.columns)) {
                fetch_chunk(slot_of(part, piece, i, 0), r.in, p, a.columns);
                if (BACKWARD)
                    fetch_chunk(slot_of(part, piece, i, 1), r.dout, p, a.columns);
            }
        }
    }
    cp_async_commit();
}

/* Of this thread's chunks. What a mask hides is hidden in the ring as well. */
__device__ __forceinline__ struct sums sums_of_piece(const struct softmax_params &a, const struct part &part,
                                                     uint32_t number, uint32_t piece, float scale2) {
    const struct row r = row_of(a, number);
    struct sums s = no_sums();
    struct chunk in[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const struct place p = place_in(part, r, i);
        in[i] = hidden_chunk();
        if (has(part, p, i, a.columns)) {
            in[i] = read_slot(slot_of(part, piece, i, 0));
            if (MASK) {
                apply_mask(in[i], a, r, p);
                st_shared_16(slot_of(part, piece, i, 0), in[i].word[0], in[i].word[1], in[i].word[2], in[i].word[3]);
            }
            if (BACKWARD)
                s.sum += chunk_product(in[i], read_slot(slot_of(part, piece, i, 1)));
        }
        if (!BACKWARD)
            s.n = chunk_largest(in[i], scale2, s.n);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (!BACKWARD)
            s.sum += chunk_sum(in[i], scale2, s.n);
    return s;
}

__device__ __forceinline__ void finish_piece(const struct softmax_params &a, const struct part &part, uint32_t number,
                                             uint32_t piece, const struct totals &t, float scale2) {
    const struct row r = row_of(a, number);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const struct place p = place_in(part, r, i);
        if (has(part, p, i, a.columns)) {
            const struct chunk y = read_slot(slot_of(part, piece, i, 0)),
                               d = BACKWARD ? read_slot(slot_of(part, piece, i, 1)) : y;
            store_chunk(r.out, p, a.columns, results_of(y, d, t, a.scale, scale2));
        }
    }
}

/* ---- sums of a row ---- */

/* Of this thread's warp into its place. */
__device__ __forceinline__ void note_sums(float2 *scratch, struct sums s) {
    sums_over_lanes<32>(s);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = make_float2(s.n, s.sum);
}
/* Of all warps, the same bits in each. */
__device__ __forceinline__ struct sums noted_sums(const float2 *scratch) {
    struct sums s = no_sums();
    if (threadIdx.x % 32 < WARPS)
        s = {scratch[threadIdx.x % 32].x, scratch[threadIdx.x % 32].y};
    sums_over_lanes<32>(s);
    return s;
}
__device__ __forceinline__ uint64_t packed(const struct sums &s) {
    return (uint64_t)__float_as_uint(s.n) << 32 | __float_as_uint(s.sum);
}
__device__ __forceinline__ struct sums unpacked(uint64_t x) {
    return {__uint_as_float((uint32_t)(x >> 32)), __uint_as_float((uint32_t)x)};
}

/* ---- the kernel ---- */

extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax_ring(const __grid_constant__ struct softmax_params a) {
    extern __shared__ uint4 dynamic[];
    __shared__ float2 scratch[2][2][WARPS]; /* of pieces and of rows, in turns */
    const uint32_t groups = gridDim.x / a.pieces, own = blockIdx.x % a.pieces;
    const uint32_t share = softmax_share(a.chunks, a.pieces, VECTOR);
    const struct part part = {own * share, share, shared_address(dynamic) + threadIdx.x * 16};
    const float scale2 = a.scale * LOG2_E;
    uint64_t *partials = (uint64_t *)a.partials;

    /* Row k of the group is summed in turn k and written in turn k + LAG, when row k + RING takes its place. */
    const uint32_t first = blockIdx.x / a.pieces;
    for (int k = 0; k < RING - LAG; k++)
        fetch_piece(a, part, first + k * groups, k);
    for (uint32_t k = 0, number = first; number < a.rows + LAG * groups; k++, number += groups) {
        const bool sums = number < a.rows, finishes = k >= LAG;
        const uint32_t late = number - LAG * groups;
        const uint64_t *others = partials + (uint64_t)late * a.pieces + threadIdx.x;
        const bool asks = finishes && threadIdx.x < a.pieces;
        uint64_t other = EMPTY; /* most often there already, while this thread sums */
        if (asks)
            other = ld_relaxed_8(others);
        cp_async_wait<RING - LAG - 1>();
        if (sums)
            note_sums(scratch[k % 2][0], sums_of_piece(a, part, number, k, scale2));
        struct sums s = no_sums();
        if (asks) {
            while (other == EMPTY)
                other = ld_relaxed_8(others);
            s = unpacked(other);
        }
        __syncwarp();
        note_sums(scratch[k % 2][1], s);
        __syncthreads();
        if (sums && threadIdx.x < 32) {
            s = noted_sums(scratch[k % 2][0]);
            if (threadIdx.x == 0)
                st_relaxed_8(partials + (uint64_t)number * a.pieces + own, packed(s));
        }
        if (finishes)
            finish_piece(a, part, late, k - LAG, totals_of(noted_sums(scratch[k % 2][1])), scale2);
        fetch_piece(a, part, number + (RING - LAG) * groups, k + RING - LAG);
    }
    cp_async_wait<0>();
}
