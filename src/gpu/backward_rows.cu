/* backward_rows.cu: what is done once for each query row: before the backward of a family its lse and the sum of
 * dO * O, and zeros where sums begin; after it, dQ rounded from its sums, the gradient of sinks, and dK and dV from the
 * sums of the parts of a group.
 *
 * One warp for 16 rows of one head. Bound by memory: out and dout are read and the sums zeroed once; then the sums are
 * read and dQ written once.
 *
 * Grid: x groups of 16 WARPS rows, y heads, z batches; FOLDED: in one dimension. */
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/opaque.cuh"
#include "gpu/backward_params.h"
#include "gpu/numbers.h"
#include "gpu/packed.cuh"
#include "gpu/scores.cuh"

BACKWARD_ROWS_CONSTANTS(GPU_CONSTANT_GIVEN)

#define WARPS   BACKWARD_ROWS_WARPS
#define THREADS (32 * WARPS)

#include "gpu/dsink.cuh"
#include "gpu/tile.cuh"
#include "gpu/unused_rows.cuh"

#define CHUNKS       (HEAD_DIM_V / CHUNK_ELEMENTS)
#define GROUP        (CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4) /* lanes that read one row */
#define ROWS_AT_ONCE (32 / GROUP)
#define ROUNDS       (16 / ROWS_AT_ONCE)
#define TOGETHER     (DTYPE == GPU_FLOAT32 || ROUNDS < 8 ? (ROUNDS < 4 ? ROUNDS : 4) : 8)

/* The coordinates of the block. */
#define GRID_X     (FOLDED ? blockIdx.x % a.grid_x : blockIdx.x)
#define GRID_HEAD  ((int)(FOLDED ? blockIdx.x / a.grid_x % a.grid_y : blockIdx.y))
#define GRID_BATCH ((int)(FOLDED ? blockIdx.x / a.grid_x / a.grid_y : blockIdx.z))

struct rows {
    int first, seqlen_q;
    int64_t packed, begin; /* of the sequence's row 0: in the packed tensors; in the workspace's arrays of head 0 */
};
__device__ __forceinline__ struct rows find_rows(const struct gpu_backward_params &a, int block) {
    struct rows at;
    at.first = (block * WARPS + threadIdx.x / 32) * 16;
    at.seqlen_q = a.in.seqlen_q;
    at.packed = 0;
    at.begin = (int64_t)GRID_BATCH * a.in.heads * a.rows;
    if (VARLEN) {
        const struct packed q = find_packed_q(a.in, GRID_BATCH);
        at.packed = q.begin;
        at.seqlen_q = q.length;
        at.begin = backward_begin(at.packed, GRID_BATCH, ROW_STEP);
    }
    if (SEQUSED)
        at.seqlen_q = used_of(a.in.seqused_q, GRID_BATCH, at.seqlen_q);
    at.begin += GRID_HEAD * a.rows;
    return at;
}

/* Gradients of rows and keys of no sequence, around the block's and behind what of it counts: the first block of each
 * head and sequence. */
__device__ __forceinline__ void clear_rest(const struct gpu_backward_params &a) {
    const struct gpu_forward_params &in = a.in;
    const int b = GRID_BATCH, h = GRID_HEAD, h_kv = h / in.group;
    const auto clear = [&](struct gpu_matrix m, struct row_range rows, int head, int columns) {
        if (!VARLEN)
            m.data += m.data ? b * m.batch * ELEMENT_BYTES : 0;
        if (m.data)
            clear_unused_rows(m, rows, head, columns, threadIdx.x, THREADS);
    };
    const auto clear_all = [&](struct row_range q, struct row_range k) {
        clear(a.dq, q, h, in.head_dim);
        if (h % in.group == 0) {
            clear(a.dk, k, h_kv, in.head_dim);
            clear(a.dv, k, h_kv, in.head_dim_v);
        }
    };
    if (VARLEN && in.batch == 0)
        return clear_all({0, in.total_q}, {0, in.total_k});
    if (SEQUSED && b < in.batch) {
        const struct sequence used = find_sequence(in, b);
        const int rows = VARLEN ? find_packed_q(in, b).length : in.seqlen_q;
        const int keys = VARLEN ? find_packed_k(in, b).length : in.seqlen_k;
        clear_all({used.q_begin + used.seqlen_q, used.q_begin + rows},
                  {used.k_begin + used.seqlen_k, used.k_begin + keys});
    }
    if (!VARLEN)
        return;
    if (b == 0)
        clear_all(unused_before_all(in.cu_seqlens_q, in.total_q), unused_before_all(in.cu_seqlens_k, in.total_k));
    clear_all(unused_after(in.cu_seqlens_q, b, in.batch, in.total_q, in.seqlen_q),
              unused_after(in.cu_seqlens_k, b, in.batch, in.total_k, in.seqlen_k));
}

/* Sets the sums of the bias' gradient to 0. */
__device__ __forceinline__ void clear_sums(const struct gpu_backward_params &a) {
    const int64_t block = blockIdx.x + (int64_t)gridDim.x * (blockIdx.y + (int64_t)gridDim.y * blockIdx.z);
    const int64_t blocks = (int64_t)gridDim.x * gridDim.y * gridDim.z;
    for (int64_t n = block * THREADS + threadIdx.x; n < a.dbias_count; n += blocks * THREADS)
        a.dbias_sums[n] = 0;
}

/* Sets 16 rows of the gradient of a bias of one batch and head to 0, as pairs may leave elements unwritten. */
__device__ __forceinline__ void clear_dbias(const struct gpu_backward_params &a, int first_row) {
    for (int i = first_row; i < min(first_row + 16, a.dbias_rows); i++) {
        char *to = (char *)a.dbias.data +
                   (GRID_BATCH * a.dbias.batch + GRID_HEAD * a.dbias.head + i * a.dbias.row) * BIAS_BYTES;
        for (int j = threadIdx.x % 32; j < a.dbias_keys; j += 32)
            if (BIAS_BYTES == 4)
                *(float *)(to + j * a.dbias.key * 4) = 0;
            else
                *(uint16_t *)(to + j * a.dbias.key * 2) = 0;
    }
}

#if DTYPE == GPU_FLOAT32
typedef float element;
__device__ __forceinline__ float number(element x) { return x; }
#else
typedef uint16_t element;
__device__ __forceinline__ float number(element x) { return unpack(x); }
#endif

/* The sum of x * y over elements, one by one. */
__device__ __forceinline__ float add_elements(const char *x, const char *y, int count) {
    float sum = 0;
    for (int e = 0; e < count; e++)
        sum += number(((const element *)x)[e]) * number(((const element *)y)[e]);
    return sum;
}

/* Adds x * y of one chunk of each round's row, from `row` on, below `rows`: first the loads of TOGETHER rounds, then
 * their sums. */
__device__ __forceinline__ void add_chunks(float (&sums)[ROUNDS], const char *x, int64_t x_row, const char *y,
                                           int64_t y_row, int row, int rows) {
#pragma unroll
    for (int begin = 0; begin < ROUNDS; begin += TOGETHER) {
        uint4 left[TOGETHER], right[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) {
            const int64_t i = row + (begin + n) * ROWS_AT_ONCE;
            left[n] = right[n] = make_uint4(0, 0, 0, 0);
            if (i < rows) {
                left[n] = *(const uint4 *)(x + i * x_row);
                right[n] = *(const uint4 *)(y + i * y_row);
            }
        }
#pragma unroll
        for (int n = 0; n < TOGETHER; n++)
#pragma unroll
            for (int e = 0; e < CHUNK_ELEMENTS; e++)
                sums[begin + n] += number(((const element *)&left[n])[e]) * number(((const element *)&right[n])[e]);
        if (begin + TOGETHER < ROUNDS)
            opaque_memory(); /* later loads are not made before, in registers */
    }
}

/* The sum of dO * O of row `lane` of the warp's 16. All loads come before the first store that follows from them, so
 * that they are under way together. */
__device__ __forceinline__ float sum_of_row(const struct gpu_backward_params &a, const struct rows &at) {
    const int lane = threadIdx.x % 32, h = GRID_HEAD, b = GRID_BATCH;
    const char *out =
        a.in.out.data + (b * a.in.out.batch + at.packed * a.in.out.row + h * a.in.out.head) * ELEMENT_BYTES;
    const char *dout = a.dout.data + (b * a.dout.batch + at.packed * a.dout.row + h * a.dout.head) * ELEMENT_BYTES;
    float sums[ROUNDS] = {};
    const bool whole = ALIGNED && a.in.head_dim_v % CHUNK_ELEMENTS == 0;
#pragma unroll 1
    for (int chunk = lane % GROUP; chunk < CHUNKS; chunk += GROUP) {
        const int count = min(max(a.in.head_dim_v - chunk * CHUNK_ELEMENTS, 0), CHUNK_ELEMENTS);
        const char *x = out + chunk * 16, *y = dout + chunk * 16;
        if (whole)
            add_chunks(sums, x, a.in.out.row * ELEMENT_BYTES, y, a.dout.row * ELEMENT_BYTES, at.first + lane / GROUP,
                       count ? at.seqlen_q : 0);
        else
#pragma unroll 1
            for (int n = 0; n < ROUNDS; n++) {
                const int row = at.first + n * ROWS_AT_ONCE + lane / GROUP;
                const float sum = row < at.seqlen_q ? add_elements(x + (int64_t)row * a.in.out.row * ELEMENT_BYTES,
                                                                   y + (int64_t)row * a.dout.row * ELEMENT_BYTES, count)
                                                    : 0;
#pragma unroll
                for (int to = 0; to < ROUNDS; to++)
                    sums[to] += to == n ? sum : 0;
            }
    }
    float mine = 0;
#pragma unroll
    for (int n = 0; n < ROUNDS; n++) {
#pragma unroll
        for (int step = GROUP / 2; step > 0; step /= 2)
            sums[n] += __shfl_xor_sync(0xffffffff, sums[n], step);
        const float of_row = __shfl_sync(0xffffffff, sums[n], lane % ROWS_AT_ONCE * GROUP);
        mine = lane / ROWS_AT_ONCE == n ? of_row : mine;
    }
    return mine;
}

/* Sets the sums of dQ, and the semaphore of 16 rows, to 0. */
__device__ __forceinline__ void clear_dq(const struct gpu_backward_params &a, const struct rows &at) {
    const int lane = threadIdx.x % 32;
    float4 *dq = (float4 *)(a.dq_sums + (at.begin + at.first) * HEAD_DIM);
#pragma unroll 8
    for (int n = lane; n < 16 * HEAD_DIM / 4 && !NO_ZEROS; n += 32)
        dq[n] = make_float4(0, 0, 0, 0);
    if (a.semaphores && lane == 0)
        a.semaphores[(at.begin + at.first) / 16] = 0;
}

/* A row whose lse is the logarithm of its sinks alone, whose out is 0 and whose q or dO is not finite. It sees no key,
 * or all its weights are below 2^-20. */
__device__ __forceinline__ bool is_sink_alone(const struct gpu_backward_params &a, const struct rows &at, int64_t row,
                                              float lse, float sink) {
    if (!(fabsf(lse - sink) <= 0x1p-21f * fmaxf(1.0f, fabsf(sink))))
        return false;
    const auto any = [&](const struct gpu_matrix &m, int columns, const auto &is_odd) {
        const int64_t first = GRID_BATCH * m.batch + (at.packed + row) * m.row + GRID_HEAD * m.head;
        bool odd = false;
#pragma unroll 1
        for (int c = 0; c < columns; c++)
            odd |= is_odd(number(((const element *)m.data)[first + c]));
        return odd;
    };
    const auto is_not_0 = [](float x) { return x != 0.0f; };
    const auto is_not_finite = [](float x) { return !(fabsf(x) < __int_as_float(0x7f800000)); };
    return !any(a.in.out, a.in.head_dim_v, is_not_0) &&
           (any(a.in.q, a.in.head_dim, is_not_finite) || any(a.dout, a.in.head_dim_v, is_not_finite));
}

/* The same by a call, which costs fewer registers; before 9.0 it spills. */
__device__ __noinline__ bool call_sink_alone(const struct gpu_backward_params &a, const struct rows &at, int64_t row,
                                             float lse, float sink) {
    return is_sink_alone(a, at, row, lse, sink);
}

/* Of a row with sinks whose delta is the sum of dO * O. lse and low become those of the sum with the sinks, dlse what
 * is to be subtracted from delta. share: what the row adds to the gradient of the sinks' logarithm. An lse without
 * sinks is raised by `growth`; beside dlse that is held so low that its exponential is finite. Weights are far below
 * the digits of float32 then. */
__device__ __forceinline__ void join_sink(const struct gpu_backward_params &a, const struct rows &at, int64_t row,
                                          float sink, float &lse, float &low, float delta, float &dlse, float &share) {
    const float infinite = __int_as_float(0x7f800000), far = 60.0f;
    if (sink != MINUS_INF && lse != infinite && !a.in.lse_without_sink) {
        const float weight = expf(sink - lse - low);
        const bool alone =
            __CUDA_ARCH__ >= 900 ? call_sink_alone(a, at, row, lse, sink) : is_sink_alone(a, at, row, lse, sink);
        share = weight * (alone ? dlse : dlse - delta);
        lse = alone ? infinite : lse;
    } else if (sink != MINUS_INF && lse != infinite) {
        const float apart = sink - lse - low, more = log1pf(expf(-fabsf(apart)));
        const float growth = apart > 0 ? apart + more : more;
        const bool held = a.dlse.data && growth > far, high = apart > 0 && !held;
        const float base = high ? sink : lse, rest = held ? far + low : high ? more : more + low;
        share = sink == infinite ? 0.0f : -expf(apart > 0 ? -more : apart - more) * delta;
        lse = base + rest;
        low = lse < infinite ? (base - lse) + rest : 0.0f;
        if (a.dlse.data)
            dlse *= expf(held ? far : growth);
    }
}

/* Left to itself the assembler takes 48 registers from 10.0 on, and spills; on 8.0 and 9.0 it takes 96 for packed rows
 * of 192 and 224 columns beside a bias. Sinks need more before 9.0. */
#if (HEAD_SINKS && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1000 || \
    ((__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900) && VARLEN && BIAS && HEAD_DIM_V > 128 && HEAD_DIM_V < 256)
#    define PREPARE_BOUNDS __launch_bounds__(THREADS, 1)
#else
#    define PREPARE_BOUNDS __launch_bounds__(THREADS)
#endif

extern "C" __global__ void PREPARE_BOUNDS backward_prepare(const __grid_constant__ struct gpu_backward_params a) {
    griddepcontrol_launch_dependents(); /* kernels that begin early wait for this one's end by themselves */
    clear_sums(a);
    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0)
        *a.ticket = 0;
    if ((VARLEN || SEQUSED) && GRID_X == 0)
        clear_rest(a);
    if (a.in.batch == 0)
        return;
    const struct rows at = find_rows(a, GRID_X);
    if (BIAS && a.zero_dbias)
        clear_dbias(a, at.first);
    const int lane = threadIdx.x % 32, h = GRID_HEAD, b = GRID_BATCH;
    if (at.first >= (at.seqlen_q + ROW_STEP - 1) / ROW_STEP * ROW_STEP)
        return;
    if (NEEDS_DQ) /* stores wait for nothing: they go first */
        clear_dq(a, at);
    const uint32_t sink = HEAD_SINKS ? read_sink(a.in.sink, h) : 0;
    float mine = sum_of_row(a, at);
    if (lane >= 16)
        return;
    const int64_t row = at.first + lane, i = at.packed + row;
    float lse = __int_as_float(0x7f800000), low = 0, share = 0;
    if (row < at.seqlen_q) {
        lse = a.in.lse.data[b * a.in.lse.batch + h * a.in.lse.head + i * a.in.lse.row];
        if (BIAS && a.in.lse_low.data)
            low = a.in.lse_low.data[b * a.in.lse_low.batch + h * a.in.lse_low.head + i * a.in.lse_low.row];
        float dlse = 0;
        if (a.dlse.data)
            dlse = a.dlse.data[b * a.dlse.batch + h * a.dlse.head + i * a.dlse.row];
        if (HEAD_SINKS)
            join_sink(a, at, row, sink_logit(a.in.sink, sink), lse, low, mine, dlse, share);
        mine -= dlse;
        lse *= a.lse_factor;
    }
    if (lse == __int_as_float(0x7f800000))
        mine = 0; /* also where dO or dlse is not finite */

#if __CUDA_ARCH__ >= 900 /* the lane that reads it; registers are short before 9.0 */
    const bool empty = __any_sync(0xffff, row < at.seqlen_q && lse == __int_as_float(0x7f800000));
    if (a.empty && lane == 0)
        a.empty[(at.begin + at.first) / 16] = empty;
#endif
    a.lse_rows[at.begin + row] = lse;
    a.delta_rows[at.begin + row] = mine;
    if (BIAS)
        a.low_rows[at.begin + row] = low * -LOG2_E;
    if (HEAD_SINKS && a.sink_shares)
        a.sink_shares[at.begin + row] = share;
}

#if NEEDS_DQ
extern "C" __global__ void __launch_bounds__(THREADS)
    backward_finish(const __grid_constant__ struct gpu_backward_params a) {
    __shared__ __align__(128) char shared[WARPS * 16 * HEAD_DIM * 2];
    griddepcontrol_wait();
    /* The first block of a head makes the gradient of its sinks, and those of other batches nothing. */
    const bool has_dsink = HEAD_SINKS && a.dsink.data;
    if (has_dsink && GRID_X == 0) {
        if (GRID_BATCH == 0)
            store_dsink<THREADS>(a, GRID_HEAD, (float *)shared);
        return;
    }
    if (HEAD_SINKS && a.in.batch == 0)
        return;
    const struct rows at = find_rows(a, GRID_X - has_dsink);
    const int lane = threadIdx.x % 32;
    if (at.first >= at.seqlen_q)
        return;
    const uint32_t tile = shared_address(shared) + threadIdx.x / 32 * 16 * HEAD_DIM * 2;
    const float *sums = a.dq_sums + (at.begin + at.first) * HEAD_DIM;
    constexpr int together = HEAD_DIM % 128 == 0 ? 16 : HEAD_DIM % 64 == 0 ? 8 : 4; /* loads in flight */
#    pragma unroll 1
    for (int first = 0; first < HEAD_DIM / 8; first += together) {
        float4 x[together];
#    pragma unroll
        for (int n = 0; n < together; n++) {
            const float *from = sums + (first + n) * 128;
            x[n] = __CUDA_ARCH__ >= 900 ? *(const float4 *)(from + lane * 4)
                                        : make_float4(from[lane], from[32 + lane], from[64 + lane], from[96 + lane]);
        }
#    pragma unroll
        for (int n = 0; n < together; n++) {
            st_shared_4(tile + chunk_offset<HEAD_DIM / 8>(lane / 4, first + n) + lane % 4 * 4,
                        pack(x[n].x * a.in.scale, x[n].y * a.in.scale));
            st_shared_4(tile + chunk_offset<HEAD_DIM / 8>(lane / 4 + 8, first + n) + lane % 4 * 4,
                        pack(x[n].z * a.in.scale, x[n].w * a.in.scale));
        }
    }
    __syncwarp();
    store_tile<HEAD_DIM / 8>(
        a.dq.data + (GRID_BATCH * a.dq.batch + (at.packed + at.first) * a.dq.row + GRID_HEAD * a.dq.head) * 2,
        a.dq.row * 2, tile, min(16, at.seqlen_q - at.first), a.in.head_dim, lane, 32);
}
#endif

#if DTYPE != GPU_FLOAT32
/* Columns of a row of float32. */
[[maybe_unused]] __device__ __forceinline__ void store_wide(float *to, const float (&sum)[8], float factor, int count) {
#    pragma unroll
    for (int e = 0; e < 8; e++)
        if (e < count)
            to[e] = sum[e] * factor + (WIDE_DKV == 2 ? to[e] : 0.0f);
}

/* dK and dV of a KV head whose sums are in the workspace: those of a group's parts are added in order. A thread has 8
 * columns of one key of one of them. Grid: x keys times columns, y KV heads. */
extern "C" __global__ void __launch_bounds__(THREADS)
    backward_combine(const __grid_constant__ struct gpu_backward_params a) {
    griddepcontrol_wait();
    constexpr int chunks_k = HEAD_DIM / 8, chunks_v = HEAD_DIM_V / 8, chunks = chunks_k + chunks_v;
    const int64_t n = (int64_t)GRID_X * THREADS + threadIdx.x, row = n / chunks;
    const bool of_k = n % chunks < chunks_k;
    const int chunk = (int)(n % chunks) - (of_k ? 0 : chunks_k);
    const struct gpu_matrix &to = of_k ? a.dk : a.dv;
    const int count = min((of_k ? a.in.head_dim : a.in.head_dim_v) - chunk * 8, 8);
    if (row >= a.key_rows || !to.data || count <= 0)
        return;
    const int64_t batch = VARLEN ? 0 : row / a.in.seqlen_k, key = VARLEN ? row : row % a.in.seqlen_k;
    if (VARLEN && is_unused(a.in.cu_seqlens_k, a.in.batch, (int)row, a.in.total_k, a.in.seqlen_k, a.in.seqused_k))
        return; /* no part has written it */
    if (!VARLEN && SEQUSED && key >= used_of(a.in.seqused_k, (int)batch, a.in.seqlen_k))
        return;
    const int columns = of_k ? HEAD_DIM : HEAD_DIM_V;
    const int64_t step = a.key_rows * columns;
    const float *from = (of_k ? a.dk_parts : a.dv_parts) + GRID_HEAD * a.group_parts * step + row * columns + chunk * 8;
    float sum[8] = {};
#    pragma unroll 4
    for (int part = 0; part < a.group_parts; part++, from += step) {
        const float4 x = *(const float4 *)from, y = *(const float4 *)(from + 4);
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
        sum[4] += y.x, sum[5] += y.y, sum[6] += y.z, sum[7] += y.w;
    }
    const float factor = of_k ? a.in.scale : 1.0f;
    const int64_t at = batch * to.batch + key * to.row + GRID_HEAD * to.head + chunk * 8;
    if (WIDE_DKV) {
        store_wide((float *)to.data + at, sum, factor, count);
        return;
    }
    uint32_t word[4];
#    pragma unroll
    for (int e = 0; e < 4; e++)
        word[e] = pack(sum[2 * e] * factor, sum[2 * e + 1] * factor);
    store_words(to.data + at * 2, word, count);
}
#endif
