/* softmax_resident.cu: softmax of rows that are read once and stay on the multiprocessor until they are written.
 *
 * Idea: a row is loaded into registers with every load under way at once; its largest element and sum are found there,
 * and the results are made from the same registers: one read and one write of each element, which is what a copy does.
 * Exponentials are made once, relative to the thread's own largest element. Longer rows also lie in shared memory
 * (cp.async, each thread its own chunks, so nobody waits for another), and those longer still are shared by the blocks
 * of a cluster, whose sums meet in each block's shared memory.
 *
 * Tile: LANES threads a row, THREADS / LANES rows a block; of a row each thread has CHUNKS runs of 16 bytes in
 * registers and SHARED_CHUNKS in shared memory. Grid: blocks of rows; with CLUSTER, that many blocks a row.
 *
 * Shared memory: the chunks of in, then those of dout; two floats for each warp, and for each block of the cluster.
 *
 * Registers: of a thread the elements as floats (of the backward 4 a chunk, twice) and some 30 besides; of the forward
 * on whole chunks at most 64, so that a multiprocessor holds 1024 threads. */
#include "companions/softmax/softmax_rows.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"

static_assert(LANES == THREADS || LANES <= 32, "a row is a part of a warp, or a block's");
static_assert(CLUSTER == 1 || LANES == THREADS, "a cluster shares one row");

/* Where a row's ends, or two inputs, take more registers, as many blocks as they leave. */
#define BLOCKS_PER_SM (BACKWARD || VECTOR < SOFTMAX_WHOLE ? 1 : 1024 / THREADS)

constexpr int SUMS_SHARED = THREADS / 32 * 2;
constexpr uint32_t DOUT_OFFSET = THREADS * SHARED_CHUNKS * 16;

/* ---- chunks in shared memory ---- */

/* The address of this thread's chunk. */
__device__ __forceinline__ uint32_t slot_of(uint32_t base, int chunk) {
    return base + (chunk * THREADS + threadIdx.x) * 16;
}

__device__ __forceinline__ struct chunk read_slot(uint32_t slot) {
    struct chunk c;
    ld_shared_16(c.word, slot);
    return c;
}

/* Whole chunks come by themselves; what sticks out of the row, and what a mask changes, by way of registers. */
__device__ __forceinline__ void fetch_slot(uint32_t slot, const char *row, const struct softmax_params &a,
                                           const struct row &r, const struct place &p, bool masked) {
    if (is_whole(p, a.columns) && !(MASK && masked)) {
        cp_async_16(slot, row + (int64_t)p.first * ELEMENT_BYTES);
        return;
    }
    struct chunk c = load_chunk(row, p, a.columns);
    if (masked)
        apply_mask(c, a, r, p);
    st_shared_16(slot, c.word[0], c.word[1], c.word[2], c.word[3]);
}

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

/* ---- sums of a cluster ---- */

/* Each block's sums go to every block. The others have begun: `barrier_cluster_arrive` opened the kernel. */
__device__ __forceinline__ void sums_over_cluster(struct sums &s, float *scratch) {
    const uint32_t rank = cluster_ctarank(), lane = threadIdx.x % 32;
    barrier_cluster_wait();
    if (threadIdx.x < CLUSTER) {
        const uint32_t there = mapa_shared(shared_address(scratch + 2 * rank), threadIdx.x);
        st_cluster_4(there, __float_as_uint(s.n));
        st_cluster_4(there + 4, __float_as_uint(s.sum));
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();
    s = no_sums();
    if (lane < CLUSTER)
        s = {scratch[2 * lane], scratch[2 * lane + 1]};
    sums_over_lanes<32>(s);
}

/* ---- the kernel ---- */

/* This thread's part of its row: chunk i of it, and whether there is one. Blocks of a cluster have equal shares, whole
 * tiles of LANES chunks, at most CHUNKS + SHARED_CHUNKS of them. */
struct part {
    uint32_t first, share, lane, columns;
};
__device__ __forceinline__ struct place place_in(const struct part &p, const struct row &r, int i) {
    return place_of(r, (p.first + i) * LANES, p.lane);
}
__device__ __forceinline__ bool has(const struct part &p, const struct row &r, int i) {
    return VECTOR == SOFTMAX_FULL || ((CLUSTER == 1 || i < (int)p.share) && begins(place_in(p, r, i), p.columns));
}
/* So that what uses it needs no branch. */
__device__ __forceinline__ struct chunk load_or_hidden(const struct part &part, const struct row &r, const char *row,
                                                       int i) {
    return has(part, r, i) ? load_chunk(row, place_in(part, r, i), part.columns) : hidden_chunk();
}

__device__ __forceinline__ void fetch_shared(const struct softmax_params &a, const struct row &r,
                                             const struct part &part, uint32_t base) {
#pragma unroll 1
    for (int i = 0; i < SHARED_CHUNKS; i++)
        if (has(part, r, CHUNKS + i)) {
            const struct place p = place_in(part, r, CHUNKS + i);
            fetch_slot(slot_of(base, i), r.in, a, r, p, true);
            if (BACKWARD)
                fetch_slot(slot_of(base + DOUT_OFFSET, i), r.dout, a, r, p, false);
        }
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    softmax_resident(const __grid_constant__ struct softmax_params a) {
    extern __shared__ uint4 dynamic[];
    __shared__ float scratch[SUMS_SHARED], cluster_scratch[2 * CLUSTER];
    const uint32_t in_slots = shared_address(dynamic), dout_slots = in_slots + (BACKWARD ? DOUT_OFFSET : 0);
    const uint32_t number = blockIdx.x / CLUSTER * (THREADS / LANES) + threadIdx.x / LANES;
    const bool active = number < a.rows;
    const struct row r = row_of(a, active ? number : 0);
    const float scale2 = a.scale * LOG2_E;
    if (CLUSTER > 1)
        barrier_cluster_arrive();
    const uint32_t share = ((a.chunks + LANES - 1) / LANES + CLUSTER - 1) / CLUSTER;
    const struct part part = {blockIdx.x % CLUSTER * share, share, threadIdx.x % LANES, active ? a.columns : 0};

    /* Everything is asked for at once. */
    fetch_shared(a, r, part, in_slots);
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
    cp_async_wait<0>();
    for (int i = 0; i < SHARED_CHUNKS; i++)
        if (has(part, r, CHUNKS + i))
            add_chunk(s, read_slot(slot_of(in_slots, i)), read_slot(slot_of(dout_slots, i)), scale2);
    if (LANES <= 32)
        sums_over_lanes<(LANES <= 32 ? LANES : 32)>(s);
    else
        sums_over_block(s, scratch);
    if (CLUSTER > 1)
        sums_over_cluster(s, cluster_scratch);

    const struct totals t = totals_of(s);
    const float weight = (own == MINUS_INF ? 0.0f : ex2_approx(own - t.n)) * t.factor;
    if (!active)
        return; /* of no cluster: its blocks all have the same row */
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (has(part, r, i)) {
            const struct chunk result = BACKWARD
                                            ? results_of(in[i], dout[BACKWARD ? i : 0], t, a.scale, scale2)
                                            : scaled_chunk(x[BACKWARD ? 0 : i], finite(own) - t.n, t.factor, weight);
            store_chunk(r.out, place_in(part, r, i), part.columns, result);
        }
    for (int i = 0; i < SHARED_CHUNKS; i++)
        if (has(part, r, CHUNKS + i)) {
            const struct chunk y = read_slot(slot_of(in_slots, i)), d = read_slot(slot_of(dout_slots, i));
            store_chunk(r.out, place_in(part, r, CHUNKS + i), part.columns, results_of(y, d, t, a.scale, scale2));
        }
}
