/* mma_decode.cu: few query rows, many keys: split along the keys.
 *
 * Idea: FlashDecoding (Dao et al., 2023): each block walks a range of the keys and leaves a partial result. Up to eight of
 * them are merged by their own blocks, which are a cluster and read each other's shared memory (9.0): that saves a launch.
 * More go by way of global memory to mma_combine.cu. The heads of a group are packed as rows (row i * group + g), so that K
 * and V are read once for each KV head. Bound by memory: the least time is that of reading K and V once.
 *
 * Tile: 64 keys, 16 for each of the four warps, which work on all 16 rows and never wait for each other: each has its
 * own maxima, sums and output, merged at the end. Lane l holds rows l / 4 and l / 4 + 8.
 *
 * Shared memory: Q [16][HEAD_DIM], then [STAGES] x (K [64][HEAD_DIM], V [64][HEAD_DIM_V]), all swizzled; at the end the
 * ring holds [4][16][HEAD_DIM_V] floats and the warps' maxima and sums.
 *
 * Grid: x splits, y batch times KV heads. Registers: O takes HEAD_DIM_V / 2. */
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "families/mma/mma_decode.h"

#define ROWS      MMA_DECODE_ROWS
#define THREADS   (32 * MMA_DECODE_WARPS)
#define WARP_KEYS 16
#define OUT_TILES (HEAD_DIM_V / 8)
#define UNBOUNDED 0x7fffffff
#define KEEP_Q    (HEAD_DIM + HEAD_DIM_V <= 320) /* in registers; else read anew, so that nothing spills */
#define LOG2_E    1.4426950408889634f
#define LN_2      0.6931471805599453f
#define MINUS_INF (-__int_as_float(0x7f800000))

template <int chunks> __device__ __forceinline__ int chunk_offset(int row, int chunk) {
    const int swizzle = chunks % 8 == 0 ? row & 7 : chunks % 4 == 0 ? (row >> 1) & 3 : (row >> 2) & 1;
    return (row * chunks + (chunk ^ swizzle)) * 16;
}

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if DTYPE == GPU_BFLOAT16
    mma_m16n8k16_bf16(c, a, b0, b1);
#else
    mma_m16n8k16_f16(c, a, b0, b1);
#endif
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
#if DTYPE == GPU_BFLOAT16
    return cvt_bf16x2(low, high);
#else
    return cvt_f16x2(low, high);
#endif
}

/* The warp's 16 rows of a tile of K or V; rows and columns past the ends become zero. */
template <int chunks>
__device__ __forceinline__ void load_rows(uint32_t tile, int first_row, const char *data, int64_t row_bytes, int rows,
                                          int columns) {
    /* Unrolled where each copy's place follows from the first's; else all the places would be kept in registers. */
    constexpr int copies = (WARP_KEYS * chunks + 31) / 32;
#pragma unroll chunks <= 16 || chunks == 32 ? copies : 2
    for (int n = 0; n < copies; n++) {
        const int index = n * 32 + threadIdx.x % 32, row = index / chunks, chunk = index % chunks;
        if (WARP_KEYS * chunks % 32 && row >= WARP_KEYS)
            break;
        const int count = row < rows ? min(max(columns - chunk * 8, 0), 8) : 0;
        cp_async_16_fill(tile + chunk_offset<chunks>(first_row + row, chunk),
                         count ? data + row * row_bytes + chunk * 16 : data, count * 2);
    }
}

struct warp_state {
    float o[OUT_TILES][4];
    float row_max[2], row_sum[2]; /* maxima of scaled scores in units of log2 */
};

/* One step: the scores of 16 keys, their weights, and what they add to the output. `last` and `first`: keys of the tile
 * that each of the lane's two rows sees. */
__device__ __forceinline__ void take_keys(struct warp_state &w, const uint32_t (&kept)[HEAD_DIM / 16][4],
                                          uint32_t q_tile, uint32_t k_tile, uint32_t v_tile, int warp_row, float unit,
                                          const int (&first)[2], const int (&last)[2]) {
    const int lane = threadIdx.x % 32;
    float s[2][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        uint32_t b[4];
        ldmatrix_x4(b, k_tile + chunk_offset<HEAD_DIM / 8>(warp_row + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#if KEEP_Q
        mma_16x8x16(s[0], kept[k], b[0], b[1]);
        mma_16x8x16(s[1], kept[k], b[2], b[3]);
#else
        uint32_t q[4];
        ldmatrix_x4(q, q_tile + chunk_offset<HEAD_DIM / 8>(lane % 16, 2 * k + lane / 16));
        mma_16x8x16(s[0], q, b[0], b[1]);
        mma_16x8x16(s[1], q, b[2], b[3]);
#endif
    }
    float next[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float m = w.row_max[half];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int key = n * 8 + lane % 4 * 2 + c;
                float &x = s[n][half * 2 + c];
                x = key >= first[half] && key <= last[half] ? x * unit : MINUS_INF;
                m = fmaxf(m, x);
            }
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
        next[half] = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
    }
    if (__any_sync(0xffffffff, next[0] > w.row_max[0] || next[1] > w.row_max[1])) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float factor = next[half] == w.row_max[half] ? 1.0f : ex2_approx(w.row_max[half] - next[half]);
            w.row_max[half] = next[half];
            w.row_sum[half] *= factor;
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++) {
                w.o[n][half * 2] *= factor;
                w.o[n][half * 2 + 1] *= factor;
            }
        }
    }
    uint32_t p[4];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float shift = w.row_max[half] == MINUS_INF ? 0.0f : w.row_max[half];
            const float a = ex2_approx(s[n][half * 2] - shift), b = ex2_approx(s[n][half * 2 + 1] - shift);
            w.row_sum[half] += a + b;
            p[n * 2 + half] = pack(a, b);
        }
#pragma unroll
    for (int n = 0; n < OUT_TILES; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, v_tile + chunk_offset<HEAD_DIM_V / 8>(warp_row + lane % 16, n + lane / 16));
        mma_16x8x16(w.o[n], p, b[0], b[1]);
        mma_16x8x16(w.o[n + 1], p, b[2], b[3]);
    }
}

/* Two neighbouring columns of a row of the output, and with the first its lse. */
__device__ __forceinline__ void store_pair(const struct gpu_forward_params &a, int batch, int head, int64_t row,
                                           int column, float x, float y, float lse) {
    *(uint32_t *)(a.out.data + (batch * a.out.batch + row * a.out.row + head * a.out.head + column) * 2) = pack(x, y);
    if (column == 0 && a.lse.data)
        a.lse.data[batch * a.lse.batch + head * a.lse.head + row * a.lse.row] = lse == MINUS_INF ? -MINUS_INF : lse;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    mma_decode(const __grid_constant__ struct gpu_forward_params a) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t q_tile = shared_address(shared), ring = q_tile + ROWS * HEAD_DIM * 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int batch = blockIdx.y / a.heads_kv, head_kv = blockIdx.y % a.heads_kv;
    int seqlen_q = a.seqlen_q, seqlen_k = a.seqlen_k;
    int64_t q_begin = 0, k_begin = 0;
#if VARLEN
    q_begin = a.cu_seqlens_q[batch];
    k_begin = a.cu_seqlens_k[batch];
    seqlen_q = a.cu_seqlens_q[batch + 1] - (int)q_begin;
    seqlen_k = a.cu_seqlens_k[batch + 1] - (int)k_begin;
#endif
    const int num_rows = min(seqlen_q * a.group, ROWS); /* more only where cu_seqlens contradicts max_seqlen_q */
#if MERGE == MMA_MERGE_WORKSPACE
    griddepcontrol_launch_dependents(); /* mma_combine waits for this grid's end by itself */
#endif
    if (num_rows == 0)
        return;

    /* This split's tiles: an equal share of those with keys that some row sees. */
    const int diagonal = seqlen_k - seqlen_q;
    int low = 0, high = seqlen_k; /* keys of the sequence that some row sees */
#if WINDOW
    if (a.window_left != UNBOUNDED)
        low = (int)max((int64_t)0, (int64_t)diagonal - a.window_left);
    if (a.window_right != UNBOUNDED)
        high = (int)max((int64_t)0, min((int64_t)seqlen_k, (int64_t)seqlen_q + diagonal + a.window_right));
#endif
    const int low_tile = low / MMA_DECODE_KEYS;
    const int tiles = max((high + MMA_DECODE_KEYS - 1) / MMA_DECODE_KEYS - low_tile, 0);
    const int each = (tiles + (int)gridDim.x - 1) / (int)gridDim.x;
    const int first_tile = low_tile + (int)blockIdx.x * each;
    const int count = max(min(each, tiles - (int)blockIdx.x * each), 0);

    /* Q: packed row r is row r / group of head r % group of the group. */
    const char *q = a.q.data + (batch * a.q.batch + q_begin * a.q.row + (int64_t)head_kv * a.group * a.q.head) * 2;
    for (int index = threadIdx.x; index < ROWS * (HEAD_DIM / 8); index += THREADS) {
        const int row = index / (HEAD_DIM / 8), chunk = index % (HEAD_DIM / 8);
        const int bytes = row < num_rows ? min(max(a.head_dim - chunk * 8, 0), 8) * 2 : 0;
        const char *from = q + (row / a.group * a.q.row + row % a.group * a.q.head) * 2 + chunk * 16;
        cp_async_16_fill(q_tile + chunk_offset<HEAD_DIM / 8>(row, chunk), bytes ? from : q, bytes);
    }
    cp_async_commit();
    const char *k = a.k.data + (batch * a.k.batch + k_begin * a.k.row + head_kv * a.k.head) * 2;
    const char *v = a.v.data + (batch * a.v.batch + k_begin * a.v.row + head_kv * a.v.head) * 2;
    constexpr int k_bytes = MMA_DECODE_KEYS * HEAD_DIM * 2, v_bytes = MMA_DECODE_KEYS * HEAD_DIM_V * 2;
    auto fetch = [&](int t) {
        if (t < count) {
            const int key = (first_tile + t) * MMA_DECODE_KEYS + warp * WARP_KEYS;
            const uint32_t stage = ring + t % STAGES * (k_bytes + v_bytes);
            load_rows<HEAD_DIM / 8>(stage, warp * WARP_KEYS, k + key * a.k.row * 2, a.k.row * 2, seqlen_k - key,
                                    a.head_dim);
            load_rows<HEAD_DIM_V / 8>(stage + k_bytes, warp * WARP_KEYS, v + key * a.v.row * 2, a.v.row * 2,
                                      seqlen_k - key, a.head_dim_v);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++)
        fetch(t);
    cp_async_wait<STAGES - 1>();
    __syncthreads();
    uint32_t q_fragments[HEAD_DIM / 16][4];
#pragma unroll
    for (int step = 0; KEEP_Q && step < HEAD_DIM / 16; step++)
        ldmatrix_x4(q_fragments[step], q_tile + chunk_offset<HEAD_DIM / 8>(lane % 16, 2 * step + lane / 16));

    struct warp_state w = {};
    w.row_max[0] = w.row_max[1] = MINUS_INF;
    const float unit = a.scale * LOG2_E;
    int first_key[2], last_key[2]; /* of the sequence, that the lane's rows see */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t aligned = (int64_t)(lane / 4 + half * 8) / a.group + diagonal;
        first_key[half] = WINDOW && a.window_left != UNBOUNDED ? (int)max((int64_t)0, aligned - a.window_left) : 0;
        last_key[half] = WINDOW && a.window_right != UNBOUNDED
                             ? (int)max((int64_t)-1, min((int64_t)seqlen_k - 1, aligned + a.window_right))
                             : seqlen_k - 1;
    }
#pragma unroll 1
    for (int t = 0; t < count; t++) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        fetch(t + STAGES - 1); /* into the stage of tile t - 1, which this warp alone has read */
        const int key = (first_tile + t) * MMA_DECODE_KEYS + warp * WARP_KEYS;
        const int first[2] = {first_key[0] - key, first_key[1] - key};
        const int last[2] = {last_key[0] - key, last_key[1] - key};
        const uint32_t stage = ring + t % STAGES * (k_bytes + v_bytes);
        take_keys(w, q_fragments, q_tile, stage, stage + k_bytes, warp * WARP_KEYS, unit, first, last);
        __syncwarp();
    }
    cp_async_wait<0>();
    __syncthreads();

    /* The warps' results side by side, then merged. */
    float *outs = (float *)(shared + ROWS * HEAD_DIM * 2), *maxima = outs + MMA_DECODE_WARPS * ROWS * HEAD_DIM_V,
          *sums = maxima + MMA_DECODE_WARPS * ROWS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = lane / 4 + half * 8;
        float sum = w.row_sum[half];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        if (lane % 4 == 0) {
            maxima[warp * ROWS + row] = w.row_max[half];
            sums[warp * ROWS + row] = sum;
        }
#pragma unroll
        for (int n = 0; n < OUT_TILES; n++)
            *(float2 *)&outs[(warp * ROWS + row) * HEAD_DIM_V + n * 8 + lane % 4 * 2] =
                make_float2(w.o[n][half * 2], w.o[n][half * 2 + 1]);
    }
    __syncthreads();
#if MERGE == MMA_MERGE_WORKSPACE
    const int64_t all_rows = VARLEN ? (int64_t)a.heads * a.total_q : (int64_t)a.batch * a.heads * a.seqlen_q;
#elif MERGE == MMA_MERGE_CLUSTER
    float *lses = sums + MMA_DECODE_WARPS * ROWS;
#endif
    for (int index = threadIdx.x; index < num_rows * (HEAD_DIM_V / 2); index += THREADS) {
        const int row = index / (HEAD_DIM_V / 2), column = index % (HEAD_DIM_V / 2) * 2;
        float most = MINUS_INF, sum = 0, x = 0, y = 0;
#pragma unroll
        for (int n = 0; n < MMA_DECODE_WARPS; n++)
            most = fmaxf(most, maxima[n * ROWS + row]);
        const bool empty = most == MINUS_INF;
#pragma unroll
        for (int n = 0; n < MMA_DECODE_WARPS; n++) {
            const float weight = empty ? 0.0f : ex2_approx(maxima[n * ROWS + row] - most);
            const float2 o = *(const float2 *)&outs[(n * ROWS + row) * HEAD_DIM_V + column];
            sum += weight * sums[n * ROWS + row];
            x += weight * o.x;
            y += weight * o.y;
        }
        const float inverse = empty ? 0.0f : 1.0f / sum;
        const float lse = empty ? MINUS_INF : most * LN_2 + __logf(sum);
        const int i = row / a.group, head = head_kv * a.group + row % a.group;
        if (column >= a.head_dim_v)
            continue;
#if MERGE == MMA_MERGE_CLUSTER
        *(float2 *)&outs[row * HEAD_DIM_V + column] = make_float2(x * inverse, y * inverse); /* only this thread reads it */
        if (column == 0)
            lses[row] = lse;
#elif MERGE == MMA_MERGE_WORKSPACE
        const int64_t place =
            VARLEN ? head * (int64_t)a.total_q + q_begin + i : ((int64_t)batch * a.heads + head) * a.seqlen_q + i;
        const int64_t slot = blockIdx.x * all_rows + place;
        *(float2 *)&a.partial_out[slot * a.head_dim_v + column] = make_float2(x * inverse, y * inverse);
        if (column == 0)
            a.partial_lse[slot] = lse;
#else
        store_pair(a, batch, head, q_begin + i, column, x * inverse, y * inverse, lse);
#endif
    }
#if MERGE == MMA_MERGE_CLUSTER
    /* Each block of the cluster merges its share of the columns. */
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    const uint32_t their_lses = shared_address(lses), their_outs = shared_address(outs);
    for (int index = blockIdx.x * THREADS + threadIdx.x; index < num_rows * (HEAD_DIM_V / 2);
         index += gridDim.x * THREADS) {
        const int row = index / (HEAD_DIM_V / 2), column = index % (HEAD_DIM_V / 2) * 2;
        float lse[MMA_MERGE_CLUSTER_MAX], most = MINUS_INF, sum = 0, x = 0, y = 0;
#    pragma unroll
        for (int n = 0; n < MMA_MERGE_CLUSTER_MAX; n++) {
            lse[n] = n < gridDim.x ? __uint_as_float(ld_cluster_4(mapa_shared(their_lses, n) + row * 4)) : MINUS_INF;
            most = fmaxf(most, lse[n]);
        }
        const bool empty = most == MINUS_INF;
#    pragma unroll
        for (int n = 0; n < MMA_MERGE_CLUSTER_MAX; n++)
            if (n < gridDim.x && column < a.head_dim_v) {
                uint32_t low, high;
                ld_cluster_8(low, high, mapa_shared(their_outs, n) + (row * HEAD_DIM_V + column) * 4);
                const float weight = empty ? 0.0f : __expf(lse[n] - most);
                sum += weight;
                x += weight * __uint_as_float(low);
                y += weight * __uint_as_float(high);
            }
        const float inverse = empty ? 0.0f : 1.0f / sum;
        if (column < a.head_dim_v)
            store_pair(a, batch, head_kv * a.group + row % a.group, q_begin + row / a.group, column, x * inverse,
                       y * inverse, empty ? MINUS_INF : most + __logf(sum));
    }
    __syncwarp();
    barrier_cluster_arrive(); /* others may still read this block's */
    barrier_cluster_wait();
#endif
}
