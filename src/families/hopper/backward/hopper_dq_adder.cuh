/* hopper_dq_adder.cuh: the adder warpgroup of hopper_backward.cu (DQ_ADDER). It adds to dQ in global memory what the dQ
 * warpgroup has left in shared memory, so that no addition stands between products. With DETERMINISTIC it waits for the
 * semaphore of a step's rows, adds, and releases the semaphore. hopper_backward.cu defines the views of shared memory.
 *
 * An addition between wait and release, with its fence, takes about as long as a step. Therefore a warp adds one
 * half of the columns of every ADDER_STEPS-th step. A semaphore counts the blocks that have added to its 64 rows. */
#ifndef FDM_HOPPER_DQ_ADDER_CUH
#define FDM_HOPPER_DQ_ADDER_CUH

#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ring.cuh"
#include "families/hopper/backward/hopper_key_list.cuh"
#include "gpu/semaphores.cuh"

struct dq_adder {
    const struct hopper_backward_params &a;
    const struct key_block k;
    uint32_t base;
    struct step_rows added; /* the rows of the next step to add */

    /* How many blocks add to the step's rows before this one. */
    __device__ __forceinline__ int find_turn() const {
        if (DETERMINISTIC && LISTED)
            return dq_order_before(*dq_order_of(a, k.batch * a.in.in.heads_kv + k.kv_head, added.tile, k.turn / 32),
                                   k.turn);
        return blocks_before(a, k, added.tile);
    }

    /* Adds 16 rows at a time, which lie together in shared memory and in the sums, as add_columns() leaves them. With
     * FIRST_STORES the first block that reaches a row stores; later ones add. */
    __device__ __forceinline__ void add(int64_t rows, int half, bool first) const {
        constexpr int columns = HEAD_DIM / HALVES;
#pragma unroll
        for (int row = 0; row < BLOCK_M; row += 16) {
            float *to = a.in.dq_sums + (rows + row) * HEAD_DIM + half * columns * 16;
            const uint32_t from = base + DQ_OFFSET + row * HEAD_DIM * 4 + half * columns * 64;
            if (FIRST_STORES && first)
                cp_async_bulk_store(to, from, columns * 64);
            else
                cp_reduce_async_bulk_add(to, from, columns * 64);
        }
        cp_async_bulk_commit();
    }

    /* One thread of each warp runs. */
    __device__ __forceinline__ void run() {
        const int warp = threadIdx.x / 32 % 4, half = warp % HALVES, first = warp / HALVES;
        if (threadIdx.x % 32 != 0)
            return;
#pragma unroll 1
        for (int step = 0; step < k.steps; step++, added.advance(k)) {
            if (step % ADDER_STEPS != first)
                continue;
            const int64_t rows = added.place(a, k.batch);
            int *const semaphore = a.in.semaphores + rows / 16 + half;
            const int turn = DETERMINISTIC ? find_turn() : 0;
            if (DETERMINISTIC)
                wait_semaphore(semaphore, turn);
            dq_full(base, half).wait(step);
            if (DETERMINISTIC)
                fence_proxy_async_global(); /* orders the additions of earlier blocks before this one */
            add(rows, half, turn == 0);
            cp_async_bulk_wait_read<0>();
            dq_empty(base, half).arrive(0);
            if (DETERMINISTIC) {
                cp_async_bulk_wait<0>();
                release_semaphore(semaphore, turn);
            }
        }
    }
};

#endif
