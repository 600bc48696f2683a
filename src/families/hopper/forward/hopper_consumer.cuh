/* hopper_consumer.cuh: a consumer warpgroup of 64 query rows in the forwards: its rows, its ping-pong with the other
 * warpgroups, its two products, and what begins and ends an item. A kernel defines the tile, its rings (q_ring, k_ring,
 * v_ring, work_ring), PING_PONG_BARRIER and WARPGROUP_BARRIER before including it. */
#ifndef FDM_HOPPER_CONSUMER_CUH
#define FDM_HOPPER_CONSUMER_CUH

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "families/hopper/forward/hopper_rows.cuh"
#include "families/hopper/forward/hopper_softmax.cuh"
#include "families/hopper/forward/hopper_work.cuh"
#include "families/hopper/pipeline/hopper_panels.cuh"

struct q_consumer {
    uint32_t base, item, step;
    int warpgroup;
    float s[BLOCK_N / 2], o[HEAD_DIM_V / 2];
    uint32_t p[BLOCK_N / 16][4];
    struct softmax_rows rows;
    struct row_sinks sinks;

    __device__ __forceinline__ q_consumer(uint32_t shared)
        : base(shared), item(0), step(0), warpgroup(uniform((int)threadIdx.x / 128 - 1)) {}

    /* Facts of the item and the thread's row are cheap to compute again, and are not kept in registers. */
    __device__ __forceinline__ struct item_facts facts() const { return read_facts(work_ring(base).tile(item)); }
    /* A shuffle tells the compiler that the warp does not diverge. */
    static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
    /* Of half 0, in the block tile. */
    __device__ __forceinline__ int local_row() const {
        return warpgroup * 64 + (int)threadIdx.x / 32 % 4 * 16 + (int)threadIdx.x % 32 / 4;
    }

    /* PING_PONG: waits until the warpgroup may issue products, and lets the next warpgroup issue its own. */
    __device__ __forceinline__ void begin_products() {
        if (PING_PONG)
            barrier_sync(PING_PONG_BARRIER + warpgroup, 256);
    }
    __device__ __forceinline__ void end_products() {
        if (PING_PONG)
            barrier_arrive(PING_PONG_BARRIER + (warpgroup + 1) % WARPGROUPS, 256);
    }

    /* The last warpgroup lets the first one begin, which drains the last arrival: a named barrier must be balanced at
     * exit. */
    __device__ __forceinline__ void begin_ping_pong() {
        if (PING_PONG && warpgroup == WARPGROUPS - 1)
            end_products();
    }
    __device__ __forceinline__ void end_ping_pong() {
        if (PING_PONG && warpgroup == 0)
            begin_products();
    }

    /* Copies the facts of the item to registers, and gives their place back to the producer. */
    __device__ __forceinline__ struct item_facts take_facts() {
        const struct item_facts f = facts();
        __syncwarp();
        work_ring(base).release(item);
        return f;
    }
    /* Stores the log-sum-exp and the output of the warp's rows (store_rows()). */
    template <bool redo = false>
    __device__ __forceinline__ uint32_t store_item(const struct gpu_forward_params &a, const struct item_facts &f,
                                                   bool computed) {
        float inverse[2];
        finish_rows(a, f, rows, sinks, local_row(), inverse);
        barrier_sync(WARPGROUP_BARRIER + warpgroup, 128); /* all warps' products with Q are complete */
        return store_rows<redo>(a, f, o, inverse, computed, q_ring(base).tile(item), local_row());
    }
    __device__ __forceinline__ void release_q() {
        fence_proxy_async(); /* TMA writes there next */
        __syncwarp();
        q_ring(base).release(item);
    }

    /* S = Q K^T */
    __device__ __forceinline__ void multiply_qk() {
        const panels<BLOCK_M> q = panels<BLOCK_M>{q_ring(base).tile(item)}.rows(warpgroup * 64);
        const panels<BLOCK_N> k = {k_ring(base).tile(step)};
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; n++)
            wgmma_m64k16<F16, 0>(s, by_columns(q, n), by_columns(k, n), n > 0);
    }
    /* O = P V + (add ? O : 0), V of the step before */
    __device__ __forceinline__ void multiply_pv(bool add) {
        const panels<BLOCK_N> v = {v_ring(base).tile(step - 1)};
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; n++)
            wgmma_m64k16<F16, 1>(o, p[n], by_rows(v, n), n > 0 || add);
    }
};

#endif
