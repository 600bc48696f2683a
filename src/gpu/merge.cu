/* merge.cu: merges two partial results over disjoint keys (Milakov and Gimelshein 2018).
 *
 * Idea: each part's share of the sum of exponentials weighs its rows; a part whose lse is infinite has no keys and no
 * share, whatever its row holds. Bound by memory: each number is read once and written once.
 *
 * A row (b, i, h) is cut into chunks of 16 bytes (VECTOR: rows are contiguous and aligned) or of one element, a thread
 * each; a block takes as many whole rows as it has threads for, or one row in several rounds. The result may take the
 * place of either part: a chunk is written by the thread that read it, and an lse only when all of its row's threads
 * have read it. */
#include "cuda/ptx/math.cuh"
#include "gpu/merge.h"
#include "gpu/numbers.h"

MERGE_CONSTANTS(GPU_CONSTANT_GIVEN)

/* The shares of both parts in the sum of exponentials, and the sum's logarithm in two floats. */
struct shares {
    float one, two, lse, lse_low;
    bool empty1, empty2; /* an infinite lse: no keys, and no share */
};

/* A NaN in a part with keys makes both shares NaN, and the sum. */
__device__ __forceinline__ struct shares shares_of(float lse1, float low1, float lse2, float low2) {
    struct shares s = {0.0f, 0.0f, __uint_as_float(0x7f800000u), 0.0f, (bool)isinf(lse1), (bool)isinf(lse2)};
    if (s.empty1 && s.empty2)
        return s;
    const bool alone = s.empty1 || s.empty2;
    /* Numbers of one size first: what cancels there is exact, and the low ones are not lost beside them. */
    const float difference = alone ? 0.0f : (lse1 - lse2) + (low1 - low2);
    const float less = alone ? 0.0f : ex2_approx(-fabsf(difference) * LOG2_E), sum = 1.0f + less;
    const bool first = !s.empty1 && (s.empty2 || difference > 0.0f || (!(difference < 0.0f) && lse1 >= lse2));
    const float high = first ? lse1 : lse2, low = first ? low1 : low2, is_nan = 0.0f * (high + low);
    s.one = (first ? 1.0f : less) / sum + is_nan;
    s.two = (first ? less : 1.0f) / sum + is_nan;
    const float rest = low + lg2_approx(sum) * LN_2 + is_nan;
    s.lse = high + rest;
    const float of_rest = s.lse - high; /* Knuth 1969, 4.2.2, theorem B */
    s.lse_low = isinf(s.lse) ? 0.0f : (high - (s.lse - of_rest)) + (rest - of_rest);
    return s;
}

/* ---- elements ---- */

/* The row of a part without keys has no effect, even if it is NaN; that of a part with keys has, however small its
 * share. */
__device__ __forceinline__ float weighed(const struct shares &s, float x1, float x2) {
    return (s.empty1 ? 0.0f : s.one * x1) + (s.empty2 ? 0.0f : s.two * x2);
}

__device__ __forceinline__ float widened(uint16_t x) { return DTYPE == GPU_FLOAT16 ? cvt_f32_f16(x) : cvt_f32_bf16(x); }

/* Two elements of 16 bits in a word. */
__device__ __forceinline__ uint32_t merge_pair(const struct shares &s, uint32_t x1, uint32_t x2) {
    const float low = weighed(s, widened((uint16_t)x1), widened((uint16_t)x2));
    const float high = weighed(s, widened((uint16_t)(x1 >> 16)), widened((uint16_t)(x2 >> 16)));
    return DTYPE == GPU_FLOAT16 ? cvt_f16x2(low, high) : cvt_bf16x2(low, high);
}

__device__ __forceinline__ uint32_t merge_word(const struct shares &s, uint32_t x1, uint32_t x2) {
    if (DTYPE == GPU_FLOAT32)
        return __float_as_uint(weighed(s, __uint_as_float(x1), __uint_as_float(x2)));
    return merge_pair(s, x1, x2);
}

__device__ __forceinline__ void merge_chunk(const struct shares &s, const char *from1, const char *from2, char *to) {
    if (VECTOR) {
        const uint4 x = *(const uint4 *)from1, y = *(const uint4 *)from2;
        *(uint4 *)to = make_uint4(merge_word(s, x.x, y.x), merge_word(s, x.y, y.y), merge_word(s, x.z, y.z),
                                  merge_word(s, x.w, y.w));
    } else if (DTYPE == GPU_FLOAT32) {
        *(uint32_t *)to = merge_word(s, *(const uint32_t *)from1, *(const uint32_t *)from2);
    } else {
        *(uint16_t *)to = (uint16_t)merge_pair(s, *(const uint16_t *)from1, *(const uint16_t *)from2);
    }
}

/* ---- rows ---- */

__device__ __forceinline__ char *chunk_of(const struct merge_out &t, int64_t b, int64_t i, int64_t h, int64_t chunk) {
    const int bytes = DTYPE == GPU_FLOAT32 ? 4 : 2;
    const int64_t row = b * t.batch + i * t.row + h * t.head;
    return t.data + (VECTOR ? row * bytes + chunk * 16 : (row + chunk * t.element) * bytes);
}

__device__ __forceinline__ float *lse_of(const struct gpu_rows &t, int64_t b, int64_t i, int64_t h) {
    return t.data + b * t.batch + h * t.head + i * t.row;
}

/* The row's lse_low; 0 where there is no such tensor. */
__device__ __forceinline__ float low_of(const struct gpu_rows &t, int64_t b, int64_t i, int64_t h) {
    return t.data ? *lse_of(t, b, i, h) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge(const __grid_constant__ struct merge_params a) {
    const uint32_t local = threadIdx.x / a.chunks, first = threadIdx.x % a.chunks; /* one row: local 0 */
    const uint32_t row = blockIdx.x * a.rows_per_block + local;
    const bool active = local < a.rows_per_block && row < a.num_rows;
    const uint32_t h = row % a.heads, i = row / a.heads % a.seqlen, b = row / a.heads / a.seqlen;
    struct shares s = {};
    if (active)
        s = shares_of(*lse_of(a.lse1, b, i, h), low_of(a.lse_low1, b, i, h), *lse_of(a.lse2, b, i, h),
                      low_of(a.lse_low2, b, i, h));
    __syncthreads();
    if (!active)
        return;
    if (first == 0)
        *lse_of(a.lse, b, i, h) = s.lse;
    if (first == 0 && a.lse_low.data)
        *lse_of(a.lse_low, b, i, h) = s.lse_low;
    for (uint32_t chunk = first; chunk < a.pieces; chunk += MERGE_THREADS)
        merge_chunk(s, chunk_of(a.out1, b, i, h, chunk), chunk_of(a.out2, b, i, h, chunk),
                    chunk_of(a.out, b, i, h, chunk));
}
