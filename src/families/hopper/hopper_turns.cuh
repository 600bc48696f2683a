/* hopper_turns.cuh: the warpgroup of hopper_backward.cu that adds dQ in a fixed order (TURNS_APART): it awaits the turn
 * at a step's rows, adds what the serving warpgroup has left in shared memory, and hands the turn on. It stands on the
 * places in shared memory that are named there.
 *
 * A warp adds one half of dQ's columns (or all) of every TURN_STEPS-th step: a turn is under way for longer than a
 * step. A semaphore for each 64 rows and half counts the blocks that have added. */
#ifndef FDM_HOPPER_TURNS_CUH
#define FDM_HOPPER_TURNS_CUH

#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"
#include "families/hopper/hopper_keys.cuh"
#include "families/hopper/hopper_ring.cuh"
#include "gpu/turns.cuh"

struct turn_taker {
    const struct hopper_backward_params &a;
    const struct key_block k;
    uint32_t base;
    struct step_rows added; /* of the step */

    /* How many blocks add to the step's rows before this one. */
    __device__ __forceinline__ int find_turn() const {
#if ORDERED && LISTED
        return visits_before(*visits_of(a, k.batch * a.in.in.heads_kv + k.kv_head, added.tile, k.turn / 32), k.turn);
#else
        return blocks_before(a, k, added.tile);
#endif
    }

    /* A quarter of the rows lies together, as add_columns() has left it. */
    __device__ __forceinline__ void add_half(int64_t rows, int half) const {
        constexpr int columns = HEAD_DIM / HALVES;
#pragma unroll
        for (int quarter = 0; quarter < BLOCK_M / 16; quarter++)
            cp_reduce_async_bulk_add(a.in.dq_sums + (rows + quarter * 16) * HEAD_DIM + half * columns * 16,
                                     base + DQ_OFFSET + (quarter * HEAD_DIM + half * columns) * 64, columns * 64);
        cp_async_bulk_commit();
    }

    /* One thread of each warp. */
    __device__ __forceinline__ void run() {
        const int warp = threadIdx.x / 32 % 4, half = warp % HALVES, first = warp / HALVES;
        if (threadIdx.x % 32)
            return;
#pragma unroll 1
        for (int step = 0; step < k.steps; step++, added.advance(k)) {
            if (step % TURN_STEPS != first)
                continue;
            const int64_t rows = added.place(a, k.batch);
            int *const turns = a.in.semaphores + rows / 16 + half;
            const int turn = find_turn();
            await_turn(turns, turn);
            wait_full<TURN_STEPS>(base + DQ_FULL + half * TURN_STEPS * 8, step);
            fence_proxy_async_global();
            add_half(rows, half);
            cp_async_bulk_wait_read<0>();
            mbarrier_arrive(base + DQ_EMPTY + half * 8);
            cp_async_bulk_wait<0>();
            hand_on_turn(turns, turn);
        }
    }
};

#endif
