/* softmax_resident.cu: softmax of rows that are read once and stay on the multiprocessor until they are written.
 *
 * Idea: a row is loaded into registers with every load under way at once; its largest element and sum are found there,
 * and the results are made from the same registers: one read and one write of each element, which is what a copy does.
 * Exponentials are made once, relative to the thread's own largest element, or twice, where 16-bit elements are too
 * many to be floats. Longer rows are shared by the blocks of a cluster, as few as hold the row, whose sums meet in each
 * block's shared memory, and those longer still are softmax_ring's.
 *
 * Tile: LANES threads a row, THREADS / LANES rows a block; of a row each thread has CHUNKS runs of 16 bytes in
 * registers. Grid: blocks of rows; with CLUSTER, a cluster a row. Shared memory: two floats for each warp, and for each
 * block of the cluster.
 *
 * Registers: on whole chunks at most 64 a thread, so that a multiprocessor holds 1024 threads, and one block loads
 * while the other computes. */
#include "companions/softmax/softmax_rows.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/opaque.cuh"

static_assert(LANES == THREADS || LANES <= 32, "a row is a part of a warp, or a block's");

static_assert(!CLUSTER || LANES == THREADS, "a cluster shares one row");

/* Where a row's ends take more registers, as many blocks as they leave; where those of a cluster would spill, one less.
 * Of log-softmax (forward) with few chunks more, or the compiler spends registers that rows under way need. */
#define THREADS_PER_SM (LOG && !BACKWARD && !CLUSTER && CHUNKS <= 4 ? CHUNKS == 4 ? 1152 : 1280 : 1024)
#define BLOCKS_PER_SM \
    (VECTOR < SOFTMAX_WHOLE ? 1 : THREADS_PER_SM / THREADS - (FLIP && THREADS == 320 || MASK && LOG && CLUSTER))

/* Elements become floats once, and then their exponentials, where the registers hold as many; else they stay as they
 * came, and become floats twice. */
constexpr bool WIDENED = !BACKWARD && (DTYPE == SOFTMAX_FLOAT32 || CHUNKS <= 4);

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
/* What an exponential relative to the thread's own n is multiplied by; of log-softmax what is added to z - n in units
 * of e, and as neither is above 0, nothing cancels. */
__device__ __forceinline__ float last_of(float own, const struct totals &t) {
    if (LOG)
        return fmaf(finite(own) - t.n, LN_2, -t.factor);
    return (own == MINUS_INF ? 0.0f : ex2_approx(own - t.n)) * t.factor;
}
/* The results. */
__device__ __forceinline__ struct chunk finished_chunk(const float (&x)[PER_CHUNK], float last) {
    float y[PER_CHUNK];
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++)
        y[j] = LOG ? fmaf(x[j], LN_2, last) : x[j] * last;
    return chunk_of(y);
}

#if CLUSTER
/* ---- sums of a cluster ---- */

/* What each of the cluster's blocks leaves in every one, and a barrier that counts its bytes. */
struct inbox {
    float2 sums[SOFTMAX_CLUSTER_MAX];
    uint64_t come;
};
__device__ __forceinline__ void open_inbox(struct inbox &inbox, uint32_t blocks) {
    const uint32_t come = shared_address(&inbox.come);
    if (threadIdx.x == 0) {
        mbarrier_init(come, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(come, blocks * sizeof inbox.sums[0]);
    }
    __syncwarp();
    barrier_cluster_arrive_relaxed();
}
/* No barrier that releases: it would wait for all that the block has under way. A block ends after all have written to
 * it. */
__device__ __forceinline__ void sums_over_cluster(struct sums &s, struct inbox &inbox, uint32_t blocks) {
    const uint32_t lane = threadIdx.x % 32, come = shared_address(&inbox.come);
    barrier_cluster_wait();
    if (threadIdx.x < blocks)
        st_async_8(mapa_shared(shared_address(&inbox.sums[cluster_ctarank()]), threadIdx.x), __float_as_uint(s.n),
                   __float_as_uint(s.sum), mapa_shared(come, threadIdx.x));
    mbarrier_wait_cluster(come, 0);
    s = no_sums();
    if (lane < blocks)
        s = {inbox.sums[lane].x, inbox.sums[lane].y};
    sums_over_lanes<32>(s);
}
#endif

/* ---- the kernel ---- */

/* This thread's part of its row: chunk i of it, and whether there is one. Blocks of a cluster have equal shares, whole
 * tiles of LANES chunks. */
struct part {
    uint32_t first, share, lane, columns;
};
__device__ __forceinline__ struct place place_in(const struct part &p, const struct row &r, int i) {
    return place_of(r, (p.first + i) * LANES, p.lane);
}
__device__ __forceinline__ bool has(const struct part &p, const struct row &r, int i) {
    return VECTOR == SOFTMAX_FULL || ((!CLUSTER || i < (int)p.share) && begins(place_in(p, r, i), p.columns));
}
/* So that what uses it needs no branch. */
__device__ __forceinline__ struct chunk load_or_hidden(const struct part &part, const struct row &r, const char *row,
                                                       int i) {
    return has(part, r, i) ? load_chunk(row, place_in(part, r, i), part.columns) : hidden_chunk();
}

/* Everything is asked for at once. */
__device__ __forceinline__ void load_part(struct chunk (&in)[CHUNKS], struct chunk (&dout)[BACKWARD ? CHUNKS : 1],
                                          const struct part &part, const struct row &r) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        in[i] = load_or_hidden(part, r, r.in, i);
        if (BACKWARD)
            dout[i] = load_or_hidden(part, r, r.dout, i);
    }
}

/* Makes the compiler widen 16-bit elements again, instead of keeping the floats in registers; `zero` is 0, which it
 * does not know. */
__device__ __forceinline__ void forget(struct chunk &c, uint32_t zero) {
    if (DTYPE == SOFTMAX_FLOAT32)
        return;
#pragma unroll
    for (int i = 0; i < 4; i++)
        c.word[i] = opaque(c.word[i] + zero);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    softmax_resident(const __grid_constant__ struct softmax_params a) {
    __shared__ float scratch[THREADS / 32 * 2];
    const uint32_t blocks = CLUSTER ? cluster_nctarank() : 1, rank = CLUSTER ? cluster_ctarank() : 0;
    const uint32_t number = blockIdx.x / blocks * (THREADS / LANES) + threadIdx.x / LANES;
    const bool active = number < a.rows;
    const struct row r = row_of(a, active ? number : 0);
    const float scale2 = a.scale * LOG2_E;
    const uint32_t zero = a.rows >> 31;
#if CLUSTER
    __shared__ struct inbox inbox;
    open_inbox(inbox, blocks);
#endif
    const uint32_t share = ((a.chunks + LANES - 1) / LANES + blocks - 1) / blocks;
    const struct part part = {rank * share, share, threadIdx.x % LANES, active ? a.columns : 0};
    if (THREADS >= SOFTMAX_EARLY_THREADS) {
        griddepcontrol_launch_dependents(); /* a grid behind this one waits for its end by itself */
        griddepcontrol_wait();              /* all before this may run beside the kernel ahead */
    }

    struct chunk in[CHUNKS], dout[BACKWARD ? CHUNKS : 1] = {};
    load_part(in, dout, part, r);

    struct sums s = no_sums();
    float x[WIDENED ? CHUNKS : 1][PER_CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        if (has(part, r, i))
            apply_mask(in[i], a, r, place_in(part, r, i));
        if (BACKWARD)
            s.sum += chunk_product(in[i], dout[BACKWARD ? i : 0]);
        else if (WIDENED)
            s.n = widen_chunk(x[WIDENED ? i : 0], in[i], scale2, s.n);
        else
            s.n = chunk_largest(in[i], scale2, s.n);
    }
    const float own = s.n; /* what the exponentials in registers are relative to */
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (WIDENED)
            s.sum += exponentials(x[WIDENED ? i : 0], scale2, finite(own));
        else if (!BACKWARD) {
            forget(in[i], zero);
            s.sum += chunk_sum(in[i], scale2, own);
        }
    if (LANES <= 32)
        sums_over_lanes<(LANES <= 32 ? LANES : 32)>(s);
    else
        sums_over_block(s, scratch);
#if CLUSTER
    sums_over_cluster(s, inbox, blocks);
#endif

    const struct totals t = totals_of(s);
    const float last = last_of(own, t);
    if (!active)
        return; /* of no cluster: its blocks all have the same row */
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (has(part, r, i)) {
            if (!WIDENED)
                forget(in[i], zero);
            if (BACKWARD)
                forget(dout[BACKWARD ? i : 0], zero);
            const struct chunk result = WIDENED ? finished_chunk(x[WIDENED ? i : 0], last)
                                                : results_of(in[i], dout[BACKWARD ? i : 0], t, a.scale, scale2);
            store_chunk(r.out, place_in(part, r, i), part.columns, result);
        }
}
