/* blackwell_epilogue.cuh: the softmax and correction warps of blackwell_forward.cu: P from scores, and the end of
 * rows of O. A kernel defines the tile, the offsets of tensor memory and shared memory, and the walk over items and
 * tiles before including it. */
#ifndef FDM_BLACKWELL_EPILOGUE_CUH
#define FDM_BLACKWELL_EPILOGUE_CUH

#include "cuda/ptx/copy.cuh"
#include "families/blackwell/forward/blackwell_softmax.cuh"
#include "families/blackwell/pipeline/blackwell_ring.cuh"

/* ---- softmax: a warpgroup of each block for each query tile, a thread a row ---- */

/* The tensor memory of the warp's lanes. */
__device__ __forceinline__ uint32_t lanes_of_warp(uint32_t base) {
    return ld_shared_4(base + COLUMNS) + (threadIdx.x / 32 % 4 << 21);
}

struct row_softmax {
    const struct blackwell_forward_params &a;
    uint32_t base, own, columns; /* own: with the barriers of the query tile, eight bytes each */
    ring_place<STAGES> stage;
    ring_place<FACTOR_SLOTS> factors;

    __device__ __forceinline__ row_softmax(const struct blackwell_forward_params &params, uint32_t shared)
        : a(params), base(shared), own(shared + 8 * q_tile()),
          columns(lanes_of_warp(shared) + S_COLUMN + q_tile() * TILE) {}
    static __device__ __forceinline__ int q_tile() { return Q_TILES == 2 ? (int)threadIdx.x / 128 : 0; }

    __device__ __forceinline__ void tell_factor(float factor) {
        const uint32_t slot = own + 8 * Q_TILES * factors.stage();
        mbarrier_wait(slot + FACTOR_EMPTY, factors.parity() ^ 1);
        st_shared_4(base + FACTORS + (factors.stage() * Q_TILES * TILE + threadIdx.x) * 4, __float_as_uint(factor));
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(slot + FACTOR_FULL);
        factors.next();
    }

    /* The row's scores of a tile of keys. */
    __device__ __forceinline__ void take_scores(score_row &s, uint32_t columns) {
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            tcgen05_ld_32x32b(s[part], columns + 32 * part);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            tcgen05_wait_ld(s[part]);
    }

    /* Writes P of a part over scores that are in registers or no longer needed. */
    template <int part>
    static __device__ __forceinline__ void store_p(float2 &sum, const score_row &s, float shift, float unit,
                                                   uint32_t at) {
        uint32_t p[16];
        make_p<part>(p, sum, s[part], shift, unit);
        tcgen05_st_32x32b(at + P_COLUMN + 16 * part, p);
    }

    /* One step of a row, which sees keys first <= key < last. */
    __device__ __forceinline__ void step(struct softmax_row &row, const struct item_facts &f, int own_row, int tile,
                                         int first, int last) {
        const uint32_t at = columns + stage.stage() * TILE;
        const float unit = exponent_unit(a.in);
        score_row s;
        stage_barriers<STAGES>{own + S_FULL}.wait(stage);
        tcgen05_fence_after_thread_sync();
        take_scores(s, at);
        scale_scores(s, a.in);
        [[maybe_unused]] const int seen_row = min(own_row, f.seqlen_q - 1);
#if BIAS
        add_bias(s,
                 a.in.bias.data + ((a.bias_batches == 1 ? 0 : f.batch) * a.in.bias.batch +
                                   f.head / a.bias_group * a.in.bias.head + (int64_t)seen_row * a.in.bias.row) *
                                      (BIAS == GPU_BIAS_FLOAT32 ? 4 : 2),
                 tile * TILE, f.seqlen_k);
#endif
#if MASK
        apply_mask(s,
                   a.in.mask.data + (a.mask_batches == 1 ? 0 : f.batch) * a.in.mask.batch +
                       f.head / a.mask_group * a.in.mask.head + (int64_t)seen_row * a.in.mask.row,
                   tile * TILE, f.seqlen_k);
#endif
        const bool hides = __any_sync(0xffffffff, first > tile * TILE || last < (tile + 1) * TILE);
        first -= tile * TILE;
        last -= tile * TILE;
        if (hides)
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                hide_columns(s[part], first - 32 * part, last - 32 * part);
        tell_factor(raise_max(row, s, unit)); /* the first step's factor is not read */
        const float shift = row.max == MINUS_INF ? 0.0f : MAXIMA_BARE ? row.max * unit : row.max;
        float2 sum = make_float2(0, 0);
        store_p<1>(sum, s, shift, unit, at);
        store_p<2>(sum, s, shift, unit, at);
        store_p<3>(sum, s, shift, unit, at);
        if (TAKES_TWICE) {
            tcgen05_ld_32x32b(s[0], at);
            tcgen05_wait_ld(s[0]);
            if (hides)
                hide_columns(s[0], first, last);
        }
        store_p<0>(sum, s, shift, unit, at);
        tcgen05_wait_st();
        arrive_warp_at_leader(stage_barriers<STAGES>{own + P_FULL}.barrier(stage));
        row.sum += sum.x + sum.y;
        stage.next();
    }

    __device__ __forceinline__ void run() {
        item_board board(base + BOARD);
        struct item_facts f;
        while (next_item(board, f)) {
            const int own_row =
                f.first_row + (q_tile() * PAIR + (int)cluster_ctarank()) * TILE + (int)threadIdx.x % TILE;
            const struct sequence at = sequence_of(f);
            const int first = first_key(a.in, at, own_row), last = last_key(a.in, at, own_row) + 1;
            struct softmax_row row = {MINUS_INF, 0};
            for (int tile = f.last_tile - 1; tile >= f.first_tile; tile = next_tile(a, f, tile))
                step(row, f, own_row, tile, first, last);
            tell_factor(row.sum);
            tell_factor(row.max);
        }
    }
};

/* ---- correction: a warpgroup of each block, a thread a row of each query tile ---- */

struct corrector {
    const struct blackwell_forward_params &a;
    uint32_t base, rank, tensor;
    ring_place<FACTOR_SLOTS> factors[Q_TILES];
    ring_place<2> sums[Q_TILES], ready[Q_TILES]; /* sums: that were not waited for yet */

    __device__ __forceinline__ corrector(const struct blackwell_forward_params &params, uint32_t shared,
                                         uint32_t block_rank)
        : a(params), base(shared), rank(block_rank), tensor(lanes_of_warp(shared) + O_COLUMN) {}

    __device__ __forceinline__ float take_factor(int tile) {
        const uint32_t number = factors[tile].stage() * Q_TILES + tile;
        mbarrier_wait(base + FACTOR_FULL + 8 * number, factors[tile].parity());
        const float factor = __uint_as_float(ld_shared_4(base + FACTORS + (number * TILE + threadIdx.x % TILE) * 4));
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(base + FACTOR_EMPTY + 8 * number);
        factors[tile].next();
        return factor;
    }
    __device__ __forceinline__ void wait_sums(int tile) {
        o_full(base, tile).wait(sums[tile]);
        sums[tile].next();
    }

    __device__ __forceinline__ void rescale(int tile, float factor) {
        tcgen05_fence_after_thread_sync();
#pragma unroll 1
        for (int column = 0; column < HEAD_DIM_V; column += CHUNK) {
            float o[CHUNK];
            tcgen05_ld_32x32b(o, tensor + tile * HEAD_DIM_V + column);
            tcgen05_wait_ld(o);
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
                o[i] *= factor;
            tcgen05_st_32x32b(tensor + tile * HEAD_DIM_V + column, o);
        }
        tcgen05_wait_st();
    }

    /* Writes the row's log-sum-exp, and returns the reciprocal of its sum. */
    __device__ __forceinline__ float finish(const struct item_facts &f, int row, float sum, float max) {
        return end_softmax(
            a.in, row < f.seqlen_q, VARLEN ? 0 : f.batch, f.head, f.q_begin + row, sum,
            [&] { return MAXIMA_BARE ? max * exponent_unit(a.in) * LN_2 : max; },
            [&](float x) { return lg2_approx(x) * LN_2; });
    }

    /* Writes the row's output. Without `computed` there are no sums, and it is 0. */
    __device__ __forceinline__ void store(const struct item_facts &f, int row, int tile, float inverse, bool computed) {
        char *to = a.in.out.data + ((VARLEN ? 0 : f.batch) * a.in.out.batch + f.head * a.in.out.head +
                                    (int64_t)(f.q_begin + row) * a.in.out.row) *
                                       2;
        const int columns = row < f.seqlen_q ? a.in.head_dim_v : 0;
#pragma unroll 1
        for (int column = 0; column < HEAD_DIM_V; column += CHUNK) {
            float o[CHUNK];
            if (computed) {
                tcgen05_ld_32x32b(o, tensor + tile * HEAD_DIM_V + column);
                tcgen05_wait_ld(o);
            }
#pragma unroll
            for (int i = 0; i < CHUNK; i += 8) {
                uint32_t word[4];
#pragma unroll
                for (int n = 0; n < 4; n++)
                    word[n] = computed ? pack(o[i + 2 * n] * inverse, o[i + 2 * n + 1] * inverse) : 0;
                const int count = columns - column - i;
                if (count >= 8)
                    *(uint4 *)(to + (column + i) * 2) = make_uint4(word[0], word[1], word[2], word[3]);
                else
#pragma unroll
                    for (int e = 0; e < 8; e++)
                        if (e < count)
                            ((uint16_t *)to)[column + i + e] = (uint16_t)(word[e / 2] >> (e % 2 * 16));
            }
        }
    }

    /* Recomputes and writes those of the warp's rows of a query tile that have become NaN by a key which they do not
     * see. `row` is the lane's row. Returns whether it is one of them. */
    __device__ __forceinline__ bool redo_rows(const struct item_facts &f, int row, int tile, float sum) const {
        const struct sequence at = find_sequence(a.in, f.batch);
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int column = 0; column < HEAD_DIM_V; column += CHUNK) {
            float o[CHUNK];
            tcgen05_ld_32x32b(o, tensor + tile * HEAD_DIM_V + column);
            tcgen05_wait_ld(o);
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
                sum += o[i];
        }
        const bool bad = sum != sum && row < f.seqlen_q;
        for_each_bit(__ballot_sync(0xffffffff, bad),
                     [&](int n) { redo_output(a.in, at, f.head, f.head / a.in.group, row - lane + n, 0, f.seqlen_k); });
        return bad;
    }

    /* A step of a query tile. Where O is rescaled the warp waits for the sums of the step before at once, else a
     * step later. Warps are therefore up to two steps apart, and one barrier for all steps could pass two phases of
     * one parity: O_FULL and O_READY have a barrier each for even and for odd steps. */
    __device__ __forceinline__ void step(int tile, bool has_o, bool &owed) {
        const float factor = take_factor(tile);
        if (has_o) {
            if (owed)
                wait_sums(tile);
            owed = true;
            if (__any_sync(0xffffffff, factor != 1.0f)) {
                wait_sums(tile);
                owed = false;
                rescale(tile, factor);
            }
        }
        arrive_warp_at_leader(o_ready(base, tile).barrier(ready[tile]));
        ready[tile].next();
    }

    __device__ __forceinline__ void run() {
        item_board board(base + BOARD);
        struct item_facts f;
        while (next_item(board, f)) {
            bool has_o = false, owed[Q_TILES] = {};
            for (int tile = f.last_tile - 1; tile >= f.first_tile; tile = next_tile(a, f, tile), has_o = true)
#pragma unroll
                for (int q_tile = 0; q_tile < Q_TILES; q_tile++)
                    step(q_tile, has_o, owed[q_tile]);
#pragma unroll
            for (int q_tile = 0; q_tile < Q_TILES; q_tile++) {
                const int row = f.first_row + (q_tile * PAIR + (int)rank) * TILE + (int)threadIdx.x % TILE;
                const float sum = take_factor(q_tile), inverse = finish(f, row, sum, take_factor(q_tile));
                if (owed[q_tile])
                    wait_sums(q_tile);
                if (has_o) {
                    wait_sums(q_tile);
                    tcgen05_fence_after_thread_sync();
                }
                const bool redone = REDO && has_o && redo_rows(f, row, q_tile, sum);
                store(f, redone ? f.seqlen_q : row, q_tile, inverse, has_o); /* a row past the end is not written */
            }
        }
    }
};

#endif
