/* mma_backward.cu: gradients of attention on mma.sync: dK and dV of a block's keys, and what they add to dQ.
 *
 * Idea: a block owns BLOCK_N keys and walks the queries that see them. Scores are made transposed, S^T = K Q^T, with 16
 * or 32 keys to a warp: then P^T and dS^T are already the left operands of dV += P^T dO and dK += dS^T Q. dS passes
 * through shared memory, for dQ += dS K, which the warps share by rows and columns; where warps share keys by columns
 * (BY_COLUMNS), so does P, for the rows whose scores another warp made. A warp's tiles are near to 32 x 32 in every
 * product: shared-memory reads are what bounds the kernel next to the tensor cores. Scores are made SUB_ROWS rows at a
 * time, so that they and the sums fit the registers. What a key may be seen by is one range of rows (causal, window,
 * intervals and ends together).
 *
 * Staged rows: BLOCK_M at a time, the next ones loaded under dQ; or, where shared memory has room for it (RING), stages
 * of 64 rows in a ring of two or three, filled by TMA (TMA) or by all threads, each with an mbarrier
 * that says when it is there. One more says when all warps have staged a stage's scores: a warp arrives, works on its
 * own rows, and then waits; that is the stage's only wait for other warps. Whether rows have a visible pair is known
 * before their loads begin.
 *
 * Grid: x key blocks, y KV heads (the query heads of the group one after the other: dK and dV are summed in fp32
 * without traffic; SPLIT: parts of groups, backward_combine adds them), z batches. Bound by: tensor cores and the
 * shared-memory reads that feed them, five products a pair. */
#include "families/mma/backward/mma_backward_ring.cuh"
#include "families/mma/backward/mma_backward_staged.cuh"

/* Releases the block's semaphores where a sequence has no keys for it: blocks of other sequences may wait for them. */
__device__ __forceinline__ void release_all(const struct gpu_backward_params &a, const struct place &at) {
    for (int g = 0; g < num_heads(a); g++) {
        struct unreleased unreleased = {0, NO_ROW};
        release_rest(unreleased, a, at, {0, 0, 0, 0}, at.part * num_heads(a) + g);
    }
}

__device__ __forceinline__ void init_barriers(const struct tiles &tiles) {
    if (threadIdx.x != 0)
        return;
    for (int slot = 0; slot < RING; slot++)
        mbarrier_init(stage_at(tiles, slot).full, TMA ? 1 : ALIGNED ? THREADS : 2 * THREADS);
    mbarrier_init(scores_barrier(tiles), WARPS);
    if (TMA)
        fence_mbarrier_init();
}

/* Loads K and V. A V that goes to registers passes through the shared memory of Q. */
__device__ __forceinline__ void load_keys(value_fragments &values, const struct gpu_backward_params &a,
                                          const struct place &at, const struct tiles &tiles) {
    load_keys_tile<HEAD_DIM_V / 8>(V_IN_REGISTERS ? tiles.q : tiles.v, a.in.v, a, at, a.in.head_dim_v);
    load_keys_tile<HEAD_DIM / 8>(tiles.k, a.in.k, a, at, a.in.head_dim);
    cp_async_commit();
    if (!V_IN_REGISTERS)
        return;
    const int warp_key = tiles.self.warp % KEY_WARPS * WARP_KEYS;
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < HEAD_DIM_V / 16; step++)
        ldmatrix_x4(values[step], by_rows<HEAD_DIM_V / 8, 0>(tiles.self, tiles.q, warp_key).at_step(0, 2 * step));
    __syncthreads();
}

/* Adds the rows of query head h to dK and dV, and the products with dS to the rows' dQ. */
__device__ __forceinline__ void add_head(struct carried &carried, const struct mma_backward_params &params,
                                         const struct place &at, const struct tiles &tiles,
                                         const value_fragments &values, int h) {
    const struct gpu_backward_params &a = params.shared;
    if (KEYED) {
        store_keys(a, at, find_head(a, at, h), tiles.keys);
        __syncthreads();
    }
    const struct walk all = plan_walk(a, at), walk = KEYED ? narrow(all, tiles.keys, tiles.rows) : all;
    if (DETERMINISTIC)
        carried.unreleased = first_unreleased(plan_walk(a, at));
    const struct work on = {params, at, tiles, walk, values, h, carried.spoiled};
    if (RING)
        walk_ring(carried, on);
    else
        walk_staged(carried, on);
    if (DBIAS == GPU_DBIAS_KEYS)
        store_key_dbias(carried.sums, a, at, h);
    cp_async_wait<0>();
    __syncthreads();
    if (DETERMINISTIC)
        release_rest(carried.unreleased, a, at, plan_walk(a, at), h);
}

extern "C" __global__ void __launch_bounds__(THREADS, HALF_BLOCK ? 2 : 1)
    mma_backward(const __grid_constant__ struct mma_backward_params params) {
    const struct gpu_backward_params &a = params.shared;
    extern __shared__ __align__(128) char shared[];
    const struct tiles tiles = lay_out(shared_address(shared));
    const struct place at = find_block(params, (int *)shared);
    if (at.first_key >= at.seqlen_k) {
        if (ORDERED_DBIAS && UNEVEN)
            release_all(a, at);
        return;
    }
    value_fragments values;
    if (RING)
        init_barriers(tiles);
    load_keys(values, a, at, tiles);
    struct carried carried = {};
    if (TMA)
        fence_proxy_async(); /* the ticket, and V on its way to registers, lay where TMA will write */
    if (RING)
        __syncthreads(); /* its barriers are ready */
#pragma unroll 1
    for (int g = 0; g < num_heads(a); g++)
        add_head(carried, params, at, tiles, values, at.part * num_heads(a) + g);
    gather_shares(carried.sums.dk[0], (float *)shared);
    if (SPLIT)
        store_part<HEAD_DIM>(carried.sums.dk, a.dk_parts, a, at);
    else
        store_sums<HEAD_DIM>(carried.sums.dk, a.in.scale, tiles.q, a.dk, a, at, a.in.head_dim);
    gather_shares(carried.sums.dv[0], (float *)shared);
    if (SPLIT)
        store_part<HEAD_DIM_V>(carried.sums.dv, a.dv_parts, a, at);
    else
        store_sums<HEAD_DIM_V>(carried.sums.dv, 1.0f, tiles.q, a.dv, a, at, a.in.head_dim_v);
}
