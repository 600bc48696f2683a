/* softmax_ring.cu: softmax of long rows, each shared by many multiprocessors and read once.
 *
 * Idea: blocks live as long as the grid, and each passes its pieces of row after row through a ring in shared memory.
 * While a piece waits for the sums of its row's other pieces, the next rows' are summed and those after them are on
 * their way, the last of them to L2, so the memory is never idle for a row. A row's blocks are any blocks, not those of
 * a cluster: what they tell each other, largest element and sum of a piece, is eight bytes of the workspace, which were
 * EMPTY before and are read until they are not. One warp besides writes them and another reads them, so that the others
 * do not wait for memory: each of those sums a piece or writes one, whichever can be done. All blocks run at once (a
 * cooperative launch), so that everyone waits for blocks that live. Sums are added in a fixed order.
 *
 * The workspace is emptied by softmax_empty.cu, beside which the blocks begin.
 *
 * Tile: a piece is CHUNKS runs of 16 bytes of each of LANES threads; RING pieces are in shared memory, and with LAG ==
 * RING one more in registers. Grid: groups x pieces; group g takes rows g, g + groups and so on. Bound by memory: one
 * read and one write of each element.
 *
 * Shared memory: the ring, of the backward in and dout of each piece; of each piece 2 floats a warp, and barriers.
 * Without bulk copies a thread reads only what it has fetched, so that its ring needs none. Registers: at most 95 a
 * thread; a block has a multiprocessor to itself. */
#include "companions/softmax/softmax_rows.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mbarrier.cuh"

/* Whole pieces come by one copy each, which a warp besides asks for; else each thread fetches what it reads. */
#define BULK (THREADS == LANES + SOFTMAX_RING_SHARERS + 32)
#if BULK
#    include "cuda/ptx/mbarrier_test.cuh"
#    include "cuda/ptx/prefetch.cuh"
#    include "cuda/ptx/tma.cuh"
#endif

constexpr int WARPS = LANES / 32;
constexpr int INPUTS = BACKWARD ? 2 : 1;
constexpr uint64_t EMPTY = ~0ull; /* no sums: the largest element is never this NaN */
static_assert(LANES == SOFTMAX_MAX_LANES && (BULK ? VECTOR == SOFTMAX_WHOLE : THREADS == LANES + SOFTMAX_RING_SHARERS),
              "a block a piece, and warps besides; softmax_share()");
static_assert(LAG > 0 && (RING > LAG || BULK && RING == LAG) && WARPS <= 32, "one piece at least is on its way");

/* ---- this thread's chunks of a piece ---- */

struct part {
    uint32_t first, share; /* chunks of every row: where the piece begins, how many it has */
    uint32_t ring;         /* address of this thread's first chunk */
};
__device__ __forceinline__ struct place place_in(const struct part &part, const struct row &r, int i) {
    return place_of(r, part.first + i * LANES, threadIdx.x);
}
__device__ __forceinline__ bool has(const struct part &part, const struct place &p, int i, uint32_t columns) {
    return i * LANES + threadIdx.x < part.share && begins(p, columns);
}
__device__ __forceinline__ uint32_t slot_of(const struct part &part, uint32_t piece, int i, int input) {
    return part.ring + ((piece % RING * INPUTS + input) * CHUNKS + i) * (LANES * 16);
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

/* The piece that is written next waits in registers, and another has its place in the ring. */
constexpr bool IS_TAKEN_EARLY = LAG == RING;
/* The chunks are summed one after the other, where registers hold those of a piece that waits. */
constexpr bool ONLINE = IS_TAKEN_EARLY && !BACKWARD;

/* Of this thread's chunks. What a mask hides is hidden in the ring as well. */
__device__ __forceinline__ struct sums sums_of_piece(const struct softmax_params &a, const struct part &part,
                                                     uint32_t number, uint32_t piece, float scale2) {
    const struct row r = row_of(a, number);
    struct sums s = no_sums();
    struct chunk in[ONLINE ? 1 : CHUNKS];
    constexpr int together = ONLINE ? 2 : CHUNKS;
#pragma unroll together
    for (int i = 0; i < CHUNKS; i++) {
        const struct place p = place_in(part, r, i);
        struct chunk &c = in[ONLINE ? 0 : i];
        c = hidden_chunk();
        if (has(part, p, i, a.columns)) {
            c = read_slot(slot_of(part, piece, i, 0));
            if (MASK) {
                apply_mask(c, a, r, p);
                st_shared_16(slot_of(part, piece, i, 0), c.word[0], c.word[1], c.word[2], c.word[3]);
            }
            if (BACKWARD)
                s.sum += chunk_product(c, read_slot(slot_of(part, piece, i, 1)));
        }
        if (ONLINE)
            add_chunk(s, c, c, scale2);
        else if (!BACKWARD)
            s.n = chunk_largest(c, scale2, s.n);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (!BACKWARD && !ONLINE)
            s.sum += chunk_sum(in[ONLINE ? 0 : i], scale2, s.n);
    return s;
}

struct taken {
    struct chunk in[IS_TAKEN_EARLY ? CHUNKS : 1], dout[IS_TAKEN_EARLY && BACKWARD ? CHUNKS : 1];
};
__device__ __forceinline__ void take_piece(const struct softmax_params &a, const struct part &part, uint32_t number,
                                           uint32_t piece, struct taken &x) {
    const struct row r = row_of(a, number);
#pragma unroll
    for (int i = 0; i < (IS_TAKEN_EARLY ? CHUNKS : 0); i++)
        if (has(part, place_in(part, r, i), i, a.columns)) {
            x.in[i] = read_slot(slot_of(part, piece, i, 0));
            if (BACKWARD)
                x.dout[i] = read_slot(slot_of(part, piece, i, 1));
        }
}

__device__ __forceinline__ void finish_piece(const struct softmax_params &a, const struct part &part, uint32_t number,
                                             uint32_t piece, const struct taken &x, const struct totals &t) {
    const struct row r = row_of(a, number);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const struct place p = place_in(part, r, i);
        if (!has(part, p, i, a.columns))
            continue;
        const int at = IS_TAKEN_EARLY ? i : 0;
        const struct chunk y = IS_TAKEN_EARLY ? x.in[at] : read_slot(slot_of(part, piece, i, 0)),
                           d = !BACKWARD        ? y
                               : IS_TAKEN_EARLY ? x.dout[BACKWARD ? at : 0]
                                                : read_slot(slot_of(part, piece, i, 1));
        store_chunk(r.out, p, a.columns, results_of(y, d, t, a.scale, a.scale * LOG2_E));
    }
}

/* ---- the kernel ---- */

/* What the block's warps tell each other of a piece. */
constexpr int TOLD = RING + IS_TAKEN_EARLY;
struct told {
    float2 sums[TOLD][WARPS]; /* of each warp: largest element, sum */
    float2 totals[TOLD];      /* of the row */
    uint64_t summed[TOLD];    /* barriers: all warps have told their sums; */
    uint64_t totalled[TOLD];  /* the totals are there */
#if BULK
    uint64_t full[RING], empty[RING]; /* a piece has come; all warps have taken it */
#endif
};
template <int N> __device__ __forceinline__ void arrive(uint64_t (&barriers)[N], uint32_t piece) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(shared_address(&barriers[piece % N]));
}
template <int N> __device__ __forceinline__ void wait(uint64_t (&barriers)[N], uint32_t piece) {
    mbarrier_wait(shared_address(&barriers[piece % N]), piece / N % 2);
}

/* Rows of a group: first, first + groups and so on. */
__device__ __forceinline__ uint32_t rows_of(const struct softmax_params &a, uint32_t first, uint32_t groups) {
    return (a.rows - first + groups - 1) / groups;
}

/* Piece k, whose row is `number`: the warp tells its sums. */
__device__ __forceinline__ void sum_piece(const struct softmax_params &a, const struct part &part, uint32_t number,
                                          uint32_t k, struct told &told) {
    struct sums s = sums_of_piece(a, part, number, k, a.scale * LOG2_E);
    sums_over_lanes<32>(s);
    if (threadIdx.x % 32 == 0)
        told.sums[k % TOLD][threadIdx.x / 32] = make_float2(s.n, s.sum);
    arrive(told.summed, k);
}
__device__ __forceinline__ void write_piece(const struct softmax_params &a, const struct part &part, uint32_t number,
                                            uint32_t k, const struct taken &x, const struct told &told) {
    const float2 t = told.totals[k % TOLD];
    finish_piece(a, part, number, k, x, {t.x, t.y});
}

#if BULK
/* Pieces that are under way to the ring at a time. A multiprocessor gets what it asks for in the order in which it
 * asked, roughly: what else is under way delays the sums of rows. */
constexpr uint32_t UNDER_WAY = INPUTS * CHUNKS * LANES * 16 > 32 << 10 ? 1 : 2;

__device__ __forceinline__ void prefetch_piece(const struct row &r, const struct part &part, uint32_t bytes) {
    cp_async_bulk_prefetch(r.in + (int64_t)part.first * 16, bytes);
    if (BACKWARD)
        cp_async_bulk_prefetch(r.dout + (int64_t)part.first * 16, bytes);
}
__device__ __forceinline__ uint32_t bytes_of(const struct softmax_params &a, const struct part &part) {
    return part.first < a.chunks ? min(part.share, a.chunks - part.first) * 16 : 0;
}
/* What needs no result of kernels that may still run. */
__device__ __forceinline__ void prefetch_first(const struct softmax_params &a, const struct part &part, uint32_t first,
                                               uint32_t groups) {
    const uint32_t bytes = bytes_of(a, part);
    for (uint32_t k = 0; k < UNDER_WAY && first + k * groups < a.rows && bytes > 0; k++)
        prefetch_piece(row_of(a, first + k * groups), part, bytes);
}
/* One thread's: pieces as there is room for them; the one after those under way comes to the second-level cache. */
__device__ __forceinline__ void fetch_pieces(const struct softmax_params &a, const struct part &part, uint32_t first,
                                             uint32_t groups, struct told &told) {
    const uint32_t rows = rows_of(a, first, groups);
    const uint32_t bytes = bytes_of(a, part);
    for (uint32_t k = 0; k < rows; k++) {
        const struct row r = row_of(a, first + k * groups);
        const uint32_t full = shared_address(&told.full[k % RING]);
        if (k >= RING)
            wait(told.empty, k - RING);
        if (k >= UNDER_WAY)
            wait(told.full, k - UNDER_WAY);
        mbarrier_arrive_expect_tx(full, bytes * INPUTS);
        if (bytes == 0)
            continue;
        cp_async_bulk(slot_of(part, k, 0, 0), r.in + (int64_t)part.first * 16, bytes, full);
        if (BACKWARD)
            cp_async_bulk(slot_of(part, k, 0, 1), r.dout + (int64_t)part.first * 16, bytes, full);
        if (k + 1 >= UNDER_WAY && k + 1 < rows)
            prefetch_piece(row_of(a, first + (k + 1) * groups), part, bytes);
    }
}
__device__ __forceinline__ void init_pieces(struct told &told) {
    for (int i = 0; i < RING; i++) {
        mbarrier_init(shared_address(&told.full[i]), 1);
        mbarrier_init(shared_address(&told.empty[i]), WARPS);
    }
    fence_mbarrier_init();
}
template <int N> __device__ __forceinline__ bool is_over(uint64_t (&barriers)[N], uint32_t piece) {
    return __all_sync(0xffffffff, mbarrier_test(shared_address(&barriers[piece % N]), piece / N % 2));
}

/* A warp sums a piece when it has come and writes one when the row's totals are there, whichever can be done: sums
 * first, as other blocks wait for them, but for LAG pieces whose results are not written. */
__device__ __forceinline__ void move_pieces(const struct softmax_params &a, const struct part &part, uint32_t first,
                                            uint32_t groups, struct told &told) {
    const uint32_t rows = rows_of(a, first, groups);
    const auto leave = [&](uint32_t k) { /* the piece's place in the ring */
                                         if (MASK)
                                             fence_proxy_async(); /* what it hides was written */
                                         arrive(told.empty, k);
    };
    struct taken next;
    for (uint32_t summed = 0, taken = 0, written = 0; written < rows;) {
        if (IS_TAKEN_EARLY && taken == written && taken < summed) {
            take_piece(a, part, first + taken * groups, taken, next);
            leave(taken++);
        }
        const bool can_write = written < (IS_TAKEN_EARLY ? taken : summed) && is_over(told.totalled, written);
        if (summed < rows && !(can_write && summed - written >= LAG) && is_over(told.full, summed)) {
            sum_piece(a, part, first + summed * groups, summed, told);
            summed++;
        } else if (can_write) {
            write_piece(a, part, first + written * groups, written, next, told);
            if (!IS_TAKEN_EARLY)
                leave(written);
            written++;
        }
    }
}
#else
/* Row k of the group is summed in turn k and written in turn k + LAG, when row k + RING takes its place. */
__device__ __forceinline__ void move_pieces(const struct softmax_params &a, const struct part &part, uint32_t first,
                                            uint32_t groups, struct told &told) {
    for (int k = 0; k < RING - LAG; k++)
        fetch_piece(a, part, first + k * groups, k);
    const uint32_t rows = rows_of(a, first, groups);
    for (uint32_t k = 0, number = first; k < rows + LAG; k++, number += groups) {
        if (k < rows) {
            cp_async_wait<RING - LAG - 1>();
            sum_piece(a, part, number, k, told);
        }
        if (k >= LAG) {
            wait(told.totalled, k - LAG);
            write_piece(a, part, number - LAG * groups, k - LAG, {}, told);
        }
        fetch_piece(a, part, number + (RING - LAG) * groups, k + RING - LAG);
    }
    cp_async_wait<0>();
}
/* Each thread fetches by itself. */
__device__ __forceinline__ void init_pieces(struct told &) {}
__device__ __forceinline__ void prefetch_first(const struct softmax_params &, const struct part &, uint32_t, uint32_t) {
}
__device__ __forceinline__ void fetch_pieces(const struct softmax_params &, const struct part &, uint32_t, uint32_t,
                                             struct told &) {}
#endif

__device__ __forceinline__ uint64_t packed(const struct sums &s) {
    return (uint64_t)__float_as_uint(s.n) << 32 | __float_as_uint(s.sum);
}
__device__ __forceinline__ struct sums unpacked(uint64_t x) {
    return {__uint_as_float((uint32_t)(x >> 32)), __uint_as_float((uint32_t)x)};
}

/* The sums of a row's pieces, of each lane every 32nd; EMPTY is asked for, all at once. */
enum { ASKED = SOFTMAX_RING_PIECES_MAX / 32 };
__device__ __forceinline__ void ask_for_all(uint64_t (&x)[ASKED], uint32_t pieces, uint32_t lane) {
#pragma unroll
    for (int j = 0; j < ASKED; j++)
        x[j] = lane + j * 32 < pieces ? EMPTY : packed(no_sums());
}
__device__ __forceinline__ void ask(uint64_t (&x)[ASKED], const uint64_t *pieces, uint32_t lane) {
#pragma unroll
    for (int j = 0; j < ASKED; j++)
        if (x[j] == EMPTY)
            x[j] = ld_relaxed_8(pieces + lane + j * 32);
}
__device__ __forceinline__ bool is_missing(const uint64_t (&x)[ASKED]) {
    bool missing = false;
#pragma unroll
    for (int j = 0; j < ASKED; j++)
        missing |= x[j] == EMPTY;
    return missing;
}
__device__ __forceinline__ struct sums sum_of(const uint64_t (&x)[ASKED]) {
    struct sums s = no_sums();
#pragma unroll
    for (int j = 0; j < ASKED && !BACKWARD; j++)
        s.n = fmaxf(s.n, unpacked(x[j]).n);
#pragma unroll
    for (int j = 0; j < ASKED; j++)
        s.sum += BACKWARD ? unpacked(x[j]).sum : rescaled(unpacked(x[j]), s.n);
    return s;
}

/* A warp besides tells others what the block's pieces are. */
__device__ __forceinline__ void tell_sums(const struct softmax_params &a, uint32_t first, uint32_t groups, uint32_t own,
                                          struct told &told) {
    const uint32_t lane = threadIdx.x % 32, rows = rows_of(a, first, groups);
    for (uint32_t k = 0; k < rows; k++) {
        wait(told.summed, k);
        struct sums s = no_sums();
        if (lane < WARPS)
            s = {told.sums[k % TOLD][lane].x, told.sums[k % TOLD][lane].y};
        sums_over_lanes<32>(s);
        if (lane == 0)
            st_relaxed_8((uint64_t *)a.partials + (uint64_t)(first + k * groups) * a.pieces + own, packed(s));
        arrive(told.totalled, k); /* the warps' sums are read */
    }
}
/* Another tells this block what its rows are. */
__device__ __forceinline__ void find_totals(const struct softmax_params &a, uint32_t first, uint32_t groups,
                                            struct told &told) {
    const uint32_t lane = threadIdx.x % 32, rows = rows_of(a, first, groups);
    for (uint32_t k = 0; k < rows; k++) {
        uint64_t x[ASKED];
        ask_for_all(x, a.pieces, lane);
        wait(told.summed, k);
        while (__any_sync(0xffffffff, is_missing(x)))
            ask(x, (uint64_t *)a.partials + (uint64_t)(first + k * groups) * a.pieces, lane);
        struct sums s = sum_of(x);
        sums_over_lanes<32>(s);
        const struct totals t = totals_of(s);
        if (lane == 0)
            told.totals[k % TOLD] = make_float2(t.n, t.factor);
        arrive(told.totalled, k);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) softmax_ring(const __grid_constant__ struct softmax_params a) {
    extern __shared__ uint4 dynamic[];
    __shared__ struct told told;
    const uint32_t groups = gridDim.x / a.pieces, first = blockIdx.x / a.pieces, own = blockIdx.x % a.pieces;
    if (threadIdx.x == 0) {
        for (int i = 0; i < TOLD; i++) {
            mbarrier_init(shared_address(&told.summed[i]), WARPS);
            mbarrier_init(shared_address(&told.totalled[i]), 2);
        }
        init_pieces(told);
    }
    const uint32_t share = softmax_share(a.chunks, a.pieces, VECTOR), warp = threadIdx.x / 32;
    struct part part = {own * share, share, shared_address(dynamic)};
    griddepcontrol_launch_dependents(); /* a grid behind this one waits for its end by itself */
    if (BULK && threadIdx.x == LANES + SOFTMAX_RING_SHARERS)
        prefetch_first(a, part, first, groups);
    griddepcontrol_wait();
    __syncthreads();
    if (warp < WARPS) {
        part.ring += threadIdx.x * 16;
        move_pieces(a, part, first, groups, told);
    } else if (warp == WARPS) {
        tell_sums(a, first, groups, own, told);
    } else if (warp == WARPS + 1) {
        find_totals(a, first, groups, told);
    } else if (BULK && threadIdx.x % 32 == 0) {
        fetch_pieces(a, part, first, groups, told);
    }
}
