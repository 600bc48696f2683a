/* mma_forward32.cu: attention forward on float32 tensors, with every feature of the library, by 3xTF32 products.
 *
 * Idea: FlashAttention-2 (Dao, 2023): a block owns BLOCK_M query rows and walks the keys with an online softmax; scores
 * and P stay in registers. Both products are three of tf32 operands, split where they are loaded (mma_tf32.cuh):
 * the splitting costs about as many instructions as the products, so where registers allow it each warp has two groups
 * of 16 rows to share the split keys and values.
 *
 * Tile: BLOCK_M = 16 * ROW_TILES * WARPS / SHARE rows x BLOCK_N keys; with SHARE 2, two warps make the same P and
 * each sums half of the columns of O, where all of them would fill the registers. Lane l of a warp holds rows l / 4 and
 * l / 4 + 8 of each row tile and columns 2 (l % 4), +1 of each group of eight.
 *
 * Shared memory: Q [BLOCK_M][HEAD_DIM], K [BLOCK_N][HEAD_DIM], V [BLOCK_N][HEAD_DIM_V], then the key bounds of two
 * tiles' keys where something depends on the key alone. Rows are chunks of 16 bytes, swizzled as in mma_tile.cuh.
 *
 * Barriers: three a tile: K is there; S is made and V is there, so the next tile's K may come; O is made, so its V may.
 *
 * Registers: O HEAD_DIM_V / 2 / SHARE * ROW_TILES, S BLOCK_N / 2 * ROW_TILES, and twice S for the split P. */
#define THREADS (32 * WARPS)

#include "cuda/ptx/special.cuh"
#include "families/mma/float32/mma_forward32.h"
#include "families/mma/float32/mma_tf32.cuh"
#include "gpu/numbers.h"
#include "gpu/quad.cuh"
#include "gpu/redo.cuh"
#include "gpu/scores.cuh"
#include "gpu/seen_tiles.cuh"
#include "gpu/unused_rows.cuh"
#include "gpu/visible.cuh"

MMA_FORWARD32_CONSTANTS(GPU_CONSTANT_GIVEN)

#define GROUPS    (WARPS / SHARE) /* of warps: each has its own rows */
#define BLOCK_M   (16 * ROW_TILES * GROUPS)
#define KEY_TILES (BLOCK_N / 8)            /* groups of eight keys: one accumulator of S each */
#define OUT_TILES (HEAD_DIM_V / 8 / SHARE) /* groups of eight columns of O that a warp sums */

static_assert(BLOCK_N % 16 == 0 && HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "tiles are multiples of 16 and 32");
static_assert(HEAD_DIM_V % (16 * SHARE) == 0 && WARPS % SHARE == 0, "equal shares");
static_assert(SHARE == 1 || HEAD_DIM_V / SHARE % 32 == 0 || HEAD_DIM_V == 32, "addresses of a share's columns");
static_assert(THREADS >= BLOCK_N, "one thread looks at a key");

/* The block's rows, and the keys that window and ends leave them. */
struct place {
    struct sequence s;
    int head, first_row;
    int first_key, last_key;   /* some row sees keys first_key <= j <= last_key */
    int first_full, last_full; /* and every row these */
};
__device__ __forceinline__ struct place find_place(const struct gpu_forward_params &a, int index) {
    struct place at;
    const int blocks = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M, block = index % blocks, head = index / blocks;
    at.s = find_sequence(a, head / a.heads);
    at.head = head % a.heads;
    at.first_row = (WINDOW ? blocks - 1 - block : block) * BLOCK_M; /* causal: the longest first */
    const int last = min(at.first_row + BLOCK_M, at.s.seqlen_q) - 1;
    at.first_key = first_key(a, at.s, at.first_row);
    at.first_full = first_key(a, at.s, last);
    at.last_key = last_key(a, at.s, last);
    at.last_full = last_key(a, at.s, at.first_row);
    return at;
}

/* Shared memory: what depends on the keys of one tile alone: [BLOCK_N] first rows, last rows (none of the rows sees the
 * key from there on), biases. */
__device__ __forceinline__ uint32_t bounds_of(uint32_t bounds, int step) {
    return bounds + step % 2 * BLOCK_N * MMA_KEY_BOUNDS_BYTES;
}

__device__ __forceinline__ int mask_kind(const struct gpu_forward_params &a, const struct place &at, int tile) {
    return a.block_mask[at.s.batch * a.block_mask_batch + at.head / a.block_mask_group * a.block_mask_head +
                        (int64_t)(at.first_row / BLOCK_M) * a.block_mask_row + tile];
}

/* The next tile from `tile` down in which some row sees some key, -1 when there is none; what depends on its keys alone
 * is then in `bounds`. */
__device__ __forceinline__ int next_active(const struct gpu_forward_params &a, const struct place &at, int tile,
                                           uint32_t bounds) {
    for (; tile >= at.first_key / BLOCK_N; tile--) {
        bool any = !BLOCK_MASKED || mask_kind(a, at, tile) != GPU_BLOCK_HIDDEN;
        if constexpr (SEEN_TILES)
            if (hides_keys<BLOCK_M, BLOCK_N>(a, at.s.batch, at.head, at.first_row, tile * BLOCK_N))
                continue;
        if (KEYED) {
            bool mine = false;
            if (any && threadIdx.x < BLOCK_N) {
                const struct key_bounds key = look_at_key(a, at.s, at.head, tile * BLOCK_N + (int)threadIdx.x);
                st_shared_4(bounds + threadIdx.x * 4, (uint32_t)key.first);
                st_shared_4(bounds + (BLOCK_N + threadIdx.x) * 4, (uint32_t)key.last);
                st_shared_4(bounds + (2 * BLOCK_N + threadIdx.x) * 4, __float_as_uint(key.bias));
                mine = max(key.first, at.first_row) < min(key.last, at.first_row + BLOCK_M);
            }
            any = __syncthreads_or(mine);
        }
        if (any)
            return tile;
    }
    return -1;
}

struct fragments {
    float s[ROW_TILES][KEY_TILES][4], o[ROW_TILES][OUT_TILES][4];
    float row_max[ROW_TILES][2], row_sum[ROW_TILES][2];
};

/* From products to scores: scale, softcap, bias, and -inf where a key is not visible. */
__device__ __forceinline__ void finish_scores(float (&s)[ROW_TILES][KEY_TILES][4], const struct gpu_forward_params &a,
                                              const struct place &at, int warp_row, int tile, uint32_t bounds,
                                              bool partial) {
    /* Read anew where registers are short: where they are not, it costs time. */
    const int lane = (MASK && MASK_ROWS) || (BIAS && VARLEN) ? tid_x_reread() % 32 : threadIdx.x % 32;
    const int tile_key = tile * BLOCK_N, first = at.first_row + warp_row + lane / 4;
    const int count = at.s.seqlen_k - tile_key;
    uint32_t held[2 * ROW_TILES];
#pragma unroll
    for (int half = 0; half < 2 * ROW_TILES && ROW_RUNS && partial; half++)
        held[half] = keys_held<2 * KEY_TILES>(
            a, ranges_of_row(a, at.s.batch, at.s.q_begin, at.head, min(first + half * 8, at.s.seqlen_q - 1)),
            [&](int i) { return tile_key + i / 2 * 8 + lane % 4 * 2 + i % 2; });
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
        const int column = n * 8 + lane % 4 * 2;
        uint32_t rows_first[2], rows_last[2], key_bias[2] = {0, 0};
        if (KEYED) {
            ld_shared_8(rows_first[0], rows_first[1], bounds + column * 4);
            ld_shared_8(rows_last[0], rows_last[1], bounds + (BLOCK_N + column) * 4);
        }
        if (BIAS && !BIAS_ROWS)
            ld_shared_8(key_bias[0], key_bias[1], bounds + (2 * BLOCK_N + column) * 4);
#pragma unroll
        for (int half = 0; half < 2 * ROW_TILES; half++) {
            const int row = first + half * 8;
            const int64_t inside = min(row, at.s.seqlen_q - 1);
            float b[2] = {__uint_as_float(key_bias[0]), __uint_as_float(key_bias[1])};
            bool seen[2] = {true, true};
            if (BIAS && BIAS_ROWS)
                read_bias(b, bias_of(a, at.s.batch, at.head) + inside * a.bias.row + tile_key * a.bias.key, a.bias.key,
                          column, count);
            if (MASK_TILE && partial)
                read_mask(seen, mask_of(a, at.s.batch, at.head) + inside * a.mask.row + tile_key * a.mask.key,
                          a.mask.key, column, count);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int j = tile_key + column + c;
                float x = cap_score(a, s[half / 2][n][half % 2 * 2 + c] * a.scale);
                if (BIAS)
                    x += b[c];
                bool visible = !partial || (j >= first_key(a, at.s, row) && j <= last_key(a, at.s, row) && seen[c]);
                if (ROW_RUNS && partial)
                    visible = visible && (held[half] >> (2 * n + c) & 1);
                if (KEYED)
                    visible = visible && row >= (int)rows_first[c] && row < (int)rows_last[c];
                s[half / 2][n][half % 2 * 2 + c] = visible ? x : MINUS_INF;
            }
        }
    }
}

/* Scores become P with the raised maxima; sums and output are rescaled where a maximum grew. */
__device__ __forceinline__ void weigh(struct fragments &f) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = MINUS_INF;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
                most = fmaxf(most, fmaxf(f.s[r][n][half * 2], f.s[r][n][half * 2 + 1]));
            most = quad_max(most);
            const float before = f.row_max[r][half], next = fmaxf(most, before);
            if (__any_sync(0xffffffff, next > before)) {
                const float factor = next == before ? 1.0f : ex2_approx((before - next) * LOG2_E);
                f.row_max[r][half] = next;
                f.row_sum[r][half] *= factor;
#pragma unroll
                for (int n = 0; n < OUT_TILES; n++) {
                    f.o[r][n][half * 2] *= factor;
                    f.o[r][n][half * 2 + 1] *= factor;
                }
            }
            const float shift = next == MINUS_INF ? 0.0f : next;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const float w = ex2_approx((f.s[r][n][half * 2 + c] - shift) * LOG2_E);
                    sum += w;
                    f.s[r][n][half * 2 + c] = w;
                }
            f.row_sum[r][half] += sum;
        }
}

/* A bit for each row of the warp that has become NaN by a key which it does not see. Warps that share rows agree on
 * them. */
__device__ __forceinline__ uint32_t find_spoiled(const struct fragments &f, uint32_t shared) {
    const uint32_t spoiled = spoiled_rows<2 * ROW_TILES>([&](int half) {
        float sum = f.row_sum[half / 2][half % 2];
#pragma unroll
        for (int n = 0; n < OUT_TILES; n++)
            sum += f.o[half / 2][n][half % 2 * 2] + f.o[half / 2][n][half % 2 * 2 + 1];
        return sum;
    });
    return marked_by_any<SHARE, GROUPS>(spoiled, shared);
}
__device__ __forceinline__ void redo_rows(const struct gpu_forward_params &a, const struct place &at, int warp_row,
                                          uint32_t spoiled) {
    for_each_bit(spoiled, [&](int n) {
        const int row = at.first_row + warp_row + n;
        if (row < at.s.seqlen_q)
            redo_output(a, at.s, at.head, at.head / a.group, row, at.first_key, at.last_key + 1);
    });
}

/* Does not write rows whose bit is set in `spoiled`. */
__device__ __forceinline__ void store_rows(const struct fragments &f, const struct gpu_forward_params &a,
                                           const struct place &at, int warp_row, int share, uint32_t spoiled) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = f.row_sum[r][half];
            sum = quad_sum(sum);
            const int row = at.first_row + warp_row + r * 16 + half * 8 + lane / 4;
            if (row >= at.s.seqlen_q || (spoiled >> (r * 16 + half * 8 + lane / 4) & 1))
                continue;
            const int64_t i = (int64_t)at.s.q_begin + row;
            const float inverse = end_softmax(
                a, lane % 4 == 0 && share == 0, at.s.batch, at.head, i, sum, [&] { return f.row_max[r][half]; },
                [&](float x) { return logf(x); });
            float *out = (float *)a.out.data + at.s.batch * a.out.batch + i * a.out.row + at.head * a.out.head;
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++)
                store_pair(out, (share * OUT_TILES + n) * 8 + lane % 4 * 2, a.head_dim_v, f.o[r][n][half * 2] * inverse,
                           f.o[r][n][half * 2 + 1] * inverse);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    mma_forward32(const __grid_constant__ struct gpu_forward_params a) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t q_tile = shared_address(shared), k_tile = q_tile + BLOCK_M * HEAD_DIM * 4,
                   v_tile = k_tile + BLOCK_N * HEAD_DIM * 4, bounds = v_tile + BLOCK_N * HEAD_DIM_V * 4;
    const int share = threadIdx.x / 32 / GROUPS, warp_row = threadIdx.x / 32 % GROUPS * ROW_TILES * 16;
    const struct place at = find_place(a, (int)blockIdx.x);
    if (at.first_row == 0)
        clear_unused_of_forward(a, at.s.batch, at.head, threadIdx.x, THREADS);
    if (at.first_row >= at.s.seqlen_q)
        return;
    const int64_t batch = at.s.batch, head_kv = at.head / a.group;
    const char *q =
        a.q.data + (batch * a.q.batch + ((int64_t)at.s.q_begin + at.first_row) * a.q.row + at.head * a.q.head) * 4;
    const char *k = a.k.data + (batch * a.k.batch + at.s.k_begin * a.k.row + head_kv * a.k.head) * 4;
    const char *v = a.v.data + (batch * a.v.batch + at.s.k_begin * a.v.row + head_kv * a.v.head) * 4;
    auto load_k = [&](int tile) {
        if (tile >= 0)
            load_tile<HEAD_DIM / 4, BLOCK_N>(k_tile, k + (int64_t)tile * BLOCK_N * a.k.row * 4, a.k.row * 4,
                                             at.s.seqlen_k - tile * BLOCK_N, a.head_dim);
        cp_async_commit();
    };
    auto load_v = [&](int tile) {
        if (tile >= 0)
            load_tile<HEAD_DIM_V / 4, BLOCK_N>(v_tile, v + (int64_t)tile * BLOCK_N * a.v.row * 4, a.v.row * 4,
                                               at.s.seqlen_k - tile * BLOCK_N, a.head_dim_v);
        cp_async_commit();
    };
    struct fragments f = {};
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
        f.row_max[r][0] = f.row_max[r][1] = MINUS_INF;

    const int last = at.last_key < 0 ? -1 : at.last_key / BLOCK_N;
    int tile = next_active(a, at, last, bounds_of(bounds, 0));
    load_tile<HEAD_DIM / 4, BLOCK_M>(q_tile, q, a.q.row * 4, at.s.seqlen_q - at.first_row, a.head_dim);
    load_k(tile);
    load_v(tile);
#pragma unroll 1
    for (int step = 0; tile >= 0; step++) {
        const int next = next_active(a, at, tile - 1, bounds_of(bounds, step + 1));
        bool partial = tile * BLOCK_N < at.first_full || tile * BLOCK_N + BLOCK_N - 1 > at.last_full;
        if (BLOCK_MASKED)
            partial = partial || mask_kind(a, at, tile) != GPU_BLOCK_FULL;
        cp_async_wait<1>();
        __syncthreads();
        multiply_scores<HEAD_DIM>(f.s, left_of<HEAD_DIM / 4>(q_tile, warp_row), right_of<HEAD_DIM / 4>(k_tile, 0));
        cp_async_wait<0>();
        __syncthreads();
        load_k(next);
        finish_scores(f.s, a, at, warp_row, tile, bounds_of(bounds, step), partial);
        weigh(f);
        add_product<HEAD_DIM_V / 4>(f.o, f.s, v_tile, share * OUT_TILES * 8);
        __syncthreads();
        load_v(next);
        tile = next;
    }
    cp_async_wait<0>();
    const uint32_t spoiled = REDO ? find_spoiled(f, q_tile) : 0;
    const struct place then = find_place(a, (int)ctaid_x_reread()); /* not kept: registers are short in the loop */
    store_rows(f, a, then, warp_row, share, spoiled);
    if (REDO && share == 0)
        redo_rows(a, then, warp_row, spoiled);
}
