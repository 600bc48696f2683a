/* hopper_dq_warpgroup.cuh: the producer warpgroup of hopper_backward.cu. It loads, adds dS K to dQ, writes the gradient
 * of a bias that one (row, key) pair has alone, and waits for and releases the semaphores of a fixed order.
 * hopper_backward.cu defines the views of shared memory. */
#ifndef FDM_HOPPER_DQ_WARPGROUP_CUH
#define FDM_HOPPER_DQ_WARPGROUP_CUH

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"
#include "families/hopper/backward/hopper_key_list.cuh"
#include "families/hopper/pipeline/hopper_panels.cuh"
#include "gpu/semaphores.cuh"

/* Stores the first `count` of eight elements to global memory, at a multiple of 16 bytes. */
__device__ __forceinline__ void store_words(char *at, const uint32_t (&word)[4], int count) {
    if (count == 8)
        *(uint4 *)at = make_uint4(word[0], word[1], word[2], word[3]);
    else
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < count)
                ((uint16_t *)at)[e] = (uint16_t)(word[e / 2] >> (e % 2 * 16));
}
struct dq_warpgroup {
    const struct hopper_backward_params &a;
    const struct key_block k;
    uint32_t base;
    struct step_rows loaded, added; /* the rows of the next step to load, and to add to dQ */
    struct step_rows dout_loaded;   /* the same of dO, which may be loaded later */
    struct step_rows scored;        /* SCORED: the rows of the next tile of bias and mask */
    uint32_t scores;                /* tiles of bias and mask loaded so far */
    int *semaphore, turn;  /* ORDERED_DQ: the semaphore of the step before, and its value, still to be released */
    int seen;              /* the value of the next step's semaphore when the warp last read it */
    uint64_t dq_order = 0; /* ORDERED_DQ, LISTED: the word of hopper_dq_order.cu for the step's rows */
    int dbias_turn = 0;    /* ORDERED_DBIAS: the value of the step's semaphore */

    template <int count>
    __device__ __forceinline__ void load_keys(uint32_t to, const struct cuda_tensor_map &map, uint32_t full) const {
        mbarrier_arrive_expect_tx(full, key_panels::BYTES * count);
        load_panels<count, BLOCK_N>(to, &map, full, k.k_begin + k.first_key, k.kv_head, VARLEN ? 0 : k.batch);
    }
    /* All threads load keys that lie scattered, and each arrives. */
    __device__ __forceinline__ void gather_keys() {
        const struct gpu_forward_params &in = a.in.in;
        gather_rows<HEAD_DIM / 8>(base, in.k, in.head_dim, a, k);
        cp_async_mbarrier_arrive_noinc(k_full(base).at);
        gather_rows<HEAD_DIM_V / 8>(base + V_OFFSET, in.v, in.head_dim_v, a, k);
        cp_async_mbarrier_arrive_noinc(v_full(base).at);
    }
    /* Loads Q of a step, and dO of the same step or, where dO has a stage less, of the step before. */
    __device__ __forceinline__ void load_step(int step) {
        const int dout_step = step - DOUT_LAG;
        const uint32_t q_there = q_full(base).barrier(step), dout_there = dout_full(base).barrier(dout_step);
        const struct step_rows of_dout = DOUT_LAG ? dout_loaded : loaded;
        const int64_t place = loaded.place(a, k.batch), dout_place = of_dout.place(a, k.batch);
        if (DOUT_LAG == 0 || step < k.steps) {
            mbarrier_arrive_expect_tx(q_there, Q_BYTES + BLOCK_M * (BIAS ? 8 : 4));
            load_panels<PANELS, BLOCK_M>(q_of(base, step).at, &a.q_map, q_there, k.q_begin + loaded.tile * BLOCK_M,
                                         loaded.head, VARLEN ? 0 : k.batch);
            cp_async_bulk(lse_of(base, step), a.in.lse_rows + place, BLOCK_M * 4, q_there);
            if (BIAS)
                cp_async_bulk(low_of(base, step), a.in.low_rows + place, BLOCK_M * 4, q_there);
        }
        if (step >= DOUT_LAG) {
            mbarrier_arrive_expect_tx(dout_there, DOUT_BYTES + BLOCK_M * 4);
            load_panels<PANELS_V, BLOCK_M>(dout_of(base, dout_step).at, &a.dout_map, dout_there,
                                           k.q_begin + of_dout.tile * BLOCK_M, of_dout.head, VARLEN ? 0 : k.batch);
            cp_async_bulk(delta_of(base, dout_step), a.in.delta_rows + dout_place, BLOCK_M * 4, dout_there);
            if (DOUT_LAG)
                dout_loaded.advance(k);
        }
        loaded.advance(k);
    }

    /* Loads the bias of a step, and its mask where that hides something. */
    __device__ __forceinline__ void load_scores() {
        const struct gpu_forward_params &in = a.in.in;
        const bool masked = MASK_TILE && hides_part(base + SEEN_OFFSET, scored.tile);
        const uint32_t full = score_ring(base).full(0); /* there is one stage */
        if (BIAS_TILE || masked) {
            score_ring(base).wait_empty(scores++);
            mbarrier_arrive_expect_tx(full, BIAS_TILE_BYTES + (masked ? MASK_TILE_BYTES : 0));
        }
        if (BIAS_TILE)
#pragma unroll
            for (int n = 0; n < WARPGROUPS; n++)
                cp_async_bulk_tensor_4d(row_panels{base + BIAS_OFFSET}.panel(n).at, &a.bias_map, full,
                                        k.first_key + n * 64, scored.tile * BLOCK_M, scored.head / in.bias.group,
                                        in.bias.batch ? k.batch : 0);
        if (masked)
            cp_async_bulk_tensor_4d(base + MASK_OFFSET, &a.mask_map, full, k.first_key, scored.tile * BLOCK_M,
                                    scored.head / in.mask.group, in.mask.batch ? k.batch : 0);
        scored.advance(k);
    }

    /* Writes the gradient of the bias from dS of a step, eight keys of a row at a time. */
    __device__ __forceinline__ void add_dbias(int step) {
        const struct gpu_forward_params &in = a.in.in;
        const int chunk = threadIdx.x % (BLOCK_N / 8), key = k.first_key + chunk * 8, count = min(in.seqlen_k - key, 8);
        const int64_t head = added.head / in.bias.group;
        const int first = added.tile * BLOCK_M;
        const row_panels from = ds_of(base, step).panel(chunk / 8);
        char *direct = (char *)a.in.dbias.data + (k.batch * a.in.dbias.batch + head * a.in.dbias.head + key) * 2;
#pragma unroll 2
        for (int row = threadIdx.x % 128 / (BLOCK_N / 8); row < BLOCK_M; row += 128 / (BLOCK_N / 8)) {
            uint32_t word[4];
            if (first + row >= in.seqlen_q || count <= 0)
                break;
            ld_shared_16(word, from.panel_chunk(row, chunk % 8));
            store_words(direct + (first + row) * a.in.dbias.row * 2, word, count);
        }
        __syncwarp(); /* all lanes have read */
    }

    /* ORDERED_DQ: how many blocks add to the step's rows before this one. */
    __device__ __forceinline__ int find_turn() const {
        return !ORDERED_DQ ? 0 : LISTED ? dq_order_before(dq_order, k.turn) : blocks_before(a, k, added.tile);
    }

    /* Adds dS K of a step to its rows of dQ, COLUMNS columns at a time. A warp's part lies together, in shared memory
     * and in the sums: 16 rows, in tiles of 16 x 8 in the order of the accumulators. */
    template <int columns, int first> __device__ __forceinline__ void add_columns(int step) {
        const row_panels ds = ds_of(base, step);
        const key_panels keys = key_panels{base}.panel(first / 64);
        constexpr bool under_product = DBIAS_TILE && columns <= 64; /* else registers are short */
        if (DBIAS_TILE && !under_product && first == 0)
            add_dbias(step);
        float dq[columns / 2];
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; n++)
            wgmma_m64k16<F16, 1>(dq, by_columns(ds, n), by_rows(keys, n), n > 0);
        wgmma_commit_group();
        if (under_product && first + columns == HEAD_DIM)
            add_dbias(step);
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int64_t rows = added.place(a, k.batch) + warp * 16;
        int *const own_semaphore = a.in.semaphores + rows / 16;
        const int own_turn = find_turn();
        if (ORDERED_DQ && first == 0 && lane == 0 && seen != own_turn)
            seen = ld_relaxed(own_semaphore);
        if (ORDERED_DQ && first == 0)
            release_step(step);
        if (ORDERED_DBIAS && first == 0)
            release_dbias();
        wgmma_wait_group<0>(dq);
        if (first + columns == HEAD_DIM)
            ds_ring(base).release(step);
        const uint32_t part = base + DQ_OFFSET + warp * 16 * HEAD_DIM * 4 + first * 64;
        if (DQ_ADDER) /* the adder has read the step before */
            dq_empty(base, first / columns).wait_before(step);
        else if (lane == 0)
            cp_async_bulk_wait_read<HEAD_DIM == columns ? 0 : HEAD_DIM / columns - 1>();
        __syncwarp();
#pragma unroll
        for (int n = 0; n < columns / 8; n++)
            st_shared_16(part + n * 512 + lane * 16, __float_as_uint(dq[4 * n]), __float_as_uint(dq[4 * n + 1]),
                         __float_as_uint(dq[4 * n + 2]), __float_as_uint(dq[4 * n + 3]));
        fence_proxy_async();
        __syncwarp();
        if (DQ_ADDER) {
            dq_full(base, first / columns).arrive_warp(step);
        } else if (lane == 0) {
            if (ORDERED_DQ && first == 0) {
                while (seen != own_turn)
                    seen = ld_relaxed(own_semaphore);
                fence_proxy_async_global();
            }
            cp_reduce_async_bulk_add(a.in.dq_sums + rows * HEAD_DIM + first * 16, part, columns * 64);
            cp_async_bulk_commit();
        }
        if (ORDERED_DQ && first + columns == HEAD_DIM) {
            semaphore = own_semaphore;
            turn = own_turn;
        }
    }

    /* ORDERED_DBIAS: the second warp waits for the semaphores of the gradient of a bias, and releases them, while the
     * first one loads. */
    __device__ __forceinline__ bool keeps_turns() const { return threadIdx.x / 32 % 4 == 1; }
    __device__ __forceinline__ int *dbias_semaphore() const {
        const struct gpu_scores &bias = a.in.in.bias;
        const int64_t head = (int64_t)(bias.batch ? k.batch : 0) * a.in.dbias_heads + added.head / bias.group;
        return a.in.dbias_semaphores +
               (head * a.key_blocks + k.first_key / BLOCK_N) * backward_semaphores(a.in.in.seqlen_q) +
               added.tile * (BLOCK_M / 32);
    }
    /* How many heads, of all batches where these share the bias, add dS of the same keys and rows before this one. */
    __device__ __forceinline__ int heads_before() const {
        const struct gpu_scores &bias = a.in.in.bias;
        const int first = added.head / bias.group * bias.group;
        const int others = (bias.batch ? 0 : k.batch * bias.group) + added.head - first;
        if (!LISTED)
            return others;
        int count = 0;
#pragma unroll 1
        for (int n = threadIdx.x % 32; n < others; n += 32) { /* heads whose block processes the rows */
            const int batch = bias.batch ? k.batch : n / bias.group, kv_head = (first + n % bias.group) / a.in.in.group;
            const uint64_t *word = dq_order_of(a, batch * a.in.in.heads_kv + kv_head, added.tile, k.turn / 32);
            count += (int)(*word >> k.turn % 32 & 1);
        }
        return __reduce_add_sync(0xffffffff, count);
    }
    __device__ __forceinline__ void await_dbias_turn() {
        if (!keeps_turns())
            return;
        dbias_turn = heads_before();
        if (threadIdx.x % 32 == 0) {
            wait_semaphore(dbias_semaphore(), dbias_turn);
            turn_full(base).arrive(0);
        }
        __syncwarp();
    }
    /* The consumers have added before they release dS of a step, so that the semaphore may be released then. */
    __device__ __forceinline__ void release_dbias() const {
        if (keeps_turns() && threadIdx.x % 32 == 0)
            release_semaphore(dbias_semaphore(), dbias_turn);
    }

    /* ORDERED_DQ: releases the semaphore of the step before `step` when the warp's additions to it are complete. No
     * other addition is in flight then: the fence would wait for it too. */
    __device__ __forceinline__ void release_step(int step) {
        if (threadIdx.x % 32 == 0 && step > 0) {
            cp_async_bulk_wait<0>();
            release_semaphore(semaphore, turn);
        }
    }

    __device__ __forceinline__ void run() {
        if (LISTED && k.steps == 0)
            return;
        if (threadIdx.x % 128 == 0) {
            int step = 0;
            if (!GATHER)
                load_keys<PANELS>(base, a.k_map, k_full(base).at);
            if (k.steps > 0) /* the first product reads it */
                load_step(step++);
            if (!GATHER)
                load_keys<PANELS_V>(base + V_OFFSET, a.v_map, v_full(base).at);
            for (; step < STAGES && step < k.steps + DOUT_LAG; step++)
                load_step(step);
            if (SCORED && k.steps > 0)
                load_scores();
        }
        __syncwarp();
        if (GATHER)
            gather_keys();
        k_full(base).wait(0);
        if (GATHER)
            fence_proxy_async();
#pragma unroll 1
        for (int step = 0; step < k.steps; step++) {
            if (SCORED) {
                if (threadIdx.x % 128 == 0 && step + 1 < k.steps)
                    load_scores(); /* waits until those of this step are read */
                __syncwarp();
            }
            if (ORDERED_DBIAS)
                await_dbias_turn();
            if (ORDERED_DQ && threadIdx.x % 32 == 0) /* in flight while the warp waits */
                seen = ld_relaxed(a.in.semaphores + added.place(a, k.batch) / 16 + threadIdx.x / 32 % 4);
            if (ORDERED_DQ && LISTED)
                dq_order = *dq_order_of(a, k.batch * a.in.in.heads_kv + k.kv_head, added.tile, k.turn / 32);
            ds_ring(base).wait_full(step);
            if (threadIdx.x % 128 == 0 && step > 0 && step - 1 + STAGES < k.steps + DOUT_LAG)
                load_step(step - 1 + STAGES);
            __syncwarp();
            if (!NEEDS_DQ) {
                if (DBIAS_TILE)
                    add_dbias(step);
                if (ORDERED_DBIAS)
                    release_dbias();
                ds_ring(base).release(step);
            } else if (HALVES == 2) {
                add_columns<64, 0>(step);
                add_columns<64, 64>(step);
            } else {
                add_columns<HEAD_DIM, 0>(step);
            }
            added.advance(k);
        }
        if (ORDERED_DQ)
            release_step(k.steps);
        else if (NEEDS_DQ && !DQ_ADDER && threadIdx.x % 32 == 0)
            cp_async_bulk_wait_read<0>();
    }
};

#endif
