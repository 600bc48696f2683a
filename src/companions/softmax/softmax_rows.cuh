/* softmax_rows.cuh: what all softmax kernels do alike: where a row lies, runs of it in registers, sums of exponentials.
 *
 * A chunk is as many elements as fill 16 bytes. With VECTOR chunk k of a row is the k-th 16 bytes from the multiple of
 * 16 at or below the row's first element, so that one load takes it unless it sticks out at either end. Without, the
 * elements of a chunk are a row's threads apart, so that neighbouring threads read neighbours.
 *
 * Scores are z = x * scale * log2(e), and exponentials 2^(z - n), where n is the largest z so far; one rounding in the
 * fma, of the difference. A hidden element, be it masked or outside of the row, is held as the infinity that scale
 * makes -inf of. Of the backward, in units of 1: softmax dx = scale out (dout - sum(out dout)), log-softmax dx = scale
 * (dout - exp(out) sum(dout)); out = -inf is hidden there, and gets 0. */
#ifndef FDM_SOFTMAX_ROWS_CUH
#define FDM_SOFTMAX_ROWS_CUH

#include "companions/softmax/softmax.h"
#include "cuda/ptx/math.cuh"

SOFTMAX_CONSTANTS(GPU_CONSTANT_GIVEN)

#define LOG2_E    1.4426950408889634f
#define LN_2      0.6931471805599453f
#define MINUS_INF (-__int_as_float(0x7f800000))

constexpr int ELEMENT_BYTES = DTYPE == SOFTMAX_FLOAT32 ? 4 : 2;
constexpr int PER_CHUNK = 16 / ELEMENT_BYTES;
/* A hidden element: -inf or +inf as scale wants it; of the backward 0, or -inf, which the forward has written. */
constexpr uint32_t INFINITY_BITS = DTYPE == SOFTMAX_FLOAT32   ? 0x7f800000u
                                   : DTYPE == SOFTMAX_FLOAT16 ? 0x7c00u
                                                              : 0x7f80u;
constexpr uint32_t SIGN_BIT = 1u << (8 * ELEMENT_BYTES - 1);
constexpr uint32_t HIDDEN = BACKWARD && !LOG ? 0 : INFINITY_BITS | (FLIP ? 0 : SIGN_BIT);

struct chunk {
    uint32_t word[4];
};

/* ---- elements ---- */

__device__ __forceinline__ float element_of(const struct chunk &c, int j) {
    if (DTYPE == SOFTMAX_FLOAT32)
        return __uint_as_float(c.word[j]);
    const uint16_t half = (uint16_t)(c.word[j / 2] >> 16 * (j % 2));
    return DTYPE == SOFTMAX_FLOAT16 ? cvt_f32_f16(half) : cvt_f32_bf16(half);
}

/* From the floats of a whole chunk. */
__device__ __forceinline__ struct chunk chunk_of(const float (&x)[PER_CHUNK]) {
    struct chunk c;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (DTYPE == SOFTMAX_FLOAT32)
            c.word[i] = __float_as_uint(x[i]);
        else
            c.word[i] = DTYPE == SOFTMAX_FLOAT16 ? cvt_f16x2(x[2 * i % PER_CHUNK], x[(2 * i + 1) % PER_CHUNK])
                                                 : cvt_bf16x2(x[2 * i % PER_CHUNK], x[(2 * i + 1) % PER_CHUNK]);
    return c;
}

/* ---- rows ---- */

struct row {
    const char *in, *dout;
    char *out;
    const uint8_t *mask;
    int32_t shift; /* VECTOR: elements from the multiple of 16 to the first one */
};

__device__ __forceinline__ int64_t offset_of(const struct softmax_rows &t, const uint32_t (&at)[SOFTMAX_ROW_AXES]) {
    return at[0] * t.stride[0] + at[1] * t.stride[1] + at[2] * t.stride[2];
}

__device__ __forceinline__ struct row row_of(const struct softmax_params &a, uint32_t number) {
    uint32_t at[SOFTMAX_ROW_AXES] = {0, 0, number};
    if (!a.flat) {
        const uint32_t upper = number / a.extent[1];
        at[0] = upper / a.extent[0], at[1] = upper % a.extent[0], at[2] = number % a.extent[1];
    }
    struct row r;
    r.in = a.in.data + offset_of(a.in, at) * ELEMENT_BYTES;
    r.dout = BACKWARD ? a.dout.data + offset_of(a.dout, at) * ELEMENT_BYTES : nullptr;
    r.out = a.out.data + offset_of(a.out, at) * ELEMENT_BYTES;
    r.mask = MASK ? (const uint8_t *)a.mask.data + offset_of(a.mask, at) : nullptr;
    r.shift = VECTOR == SOFTMAX_SHIFTED ? (int32_t)((uint64_t)r.in % 16 / ELEMENT_BYTES) : 0;
    return r;
}

/* Where a chunk lies in its row: column of its first element, may be negative, and from each to the next. Chunks are
 * numbered so that those of a row's threads at one time follow each other: tile, a multiple of LANES, plus lane. */
struct place {
    int32_t first;
    static constexpr int32_t step = VECTOR ? 1 : LANES;
};
__device__ __forceinline__ struct place place_of(const struct row &r, uint32_t tile, uint32_t lane) {
    return {VECTOR ? (int32_t)((tile + lane) * PER_CHUNK) - r.shift : (int32_t)(tile * PER_CHUNK + lane)};
}
__device__ __forceinline__ bool begins(const struct place &p, uint32_t columns) { return p.first < (int32_t)columns; }
__device__ __forceinline__ bool is_whole(const struct place &p, uint32_t columns) {
    return VECTOR >= SOFTMAX_WHOLE || VECTOR && p.first >= 0 && p.first + PER_CHUNK <= (int32_t)columns;
}

__device__ __forceinline__ void hide(struct chunk &c, int j) {
    if (DTYPE == SOFTMAX_FLOAT32)
        c.word[j] = HIDDEN;
    else
        c.word[j / 2] = (c.word[j / 2] & (j % 2 ? 0xffffu : 0xffff0000u)) | HIDDEN << 16 * (j % 2);
}

__device__ __forceinline__ struct chunk hidden_chunk() {
    const uint32_t word = DTYPE == SOFTMAX_FLOAT32 ? HIDDEN : HIDDEN << 16 | HIDDEN;
    return {{word, word, word, word}};
}

/* The chunk's elements; those outside of the row are hidden. */
__device__ __forceinline__ struct chunk load_chunk(const char *row, const struct place &p, uint32_t columns) {
    struct chunk c;
    if (is_whole(p, columns)) {
        const uint4 x = *(const uint4 *)(row + (int64_t)p.first * ELEMENT_BYTES);
        c.word[0] = x.x, c.word[1] = x.y, c.word[2] = x.z, c.word[3] = x.w;
        return c;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        c.word[i] = 0;
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++) {
        const uint32_t column = (uint32_t)(p.first + j * place::step);
        uint32_t bits = HIDDEN;
        if (column < columns && DTYPE == SOFTMAX_FLOAT32)
            bits = *(const uint32_t *)(row + (int64_t)column * ELEMENT_BYTES);
        else if (column < columns)
            bits = *(const uint16_t *)(row + (int64_t)column * ELEMENT_BYTES);
        c.word[j * ELEMENT_BYTES / 4] |= bits << (DTYPE == SOFTMAX_FLOAT32 ? 0 : 16 * (j % 2));
    }
    return c;
}

/* Masked elements are hidden. */
__device__ __forceinline__ void apply_mask(struct chunk &c, const struct softmax_params &a, const struct row &r,
                                           const struct place &p) {
    if (!MASK)
        return;
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++) {
        const uint32_t column = (uint32_t)(p.first + j * place::step);
        if (column < a.columns && !r.mask[(int64_t)column * a.mask_column])
            hide(c, j);
    }
}

__device__ __forceinline__ void store_chunk(char *row, const struct place &p, uint32_t columns, const struct chunk &c) {
    if (is_whole(p, columns)) {
        *(uint4 *)(row + (int64_t)p.first * ELEMENT_BYTES) = make_uint4(c.word[0], c.word[1], c.word[2], c.word[3]);
        return;
    }
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++) {
        const uint32_t column = (uint32_t)(p.first + j * place::step);
        if (column < columns && DTYPE == SOFTMAX_FLOAT32)
            *(uint32_t *)(row + (int64_t)column * ELEMENT_BYTES) = c.word[j % 4];
        else if (column < columns)
            *(uint16_t *)(row + (int64_t)column * ELEMENT_BYTES) = (uint16_t)(c.word[j / 2] >> 16 * (j % 2));
    }
}

/* ---- sums ---- */

/* Of a set of elements. Forward: n, the largest z, and the sum of 2^(z - n). Backward: the sum alone. */
struct sums {
    float n, sum;
};
__device__ __forceinline__ struct sums no_sums() { return {MINUS_INF, 0.0f}; }

/* What is subtracted from z: n, but 0 where nothing has been seen, as -inf - -inf is no number. */
__device__ __forceinline__ float finite(float n) { return n == MINUS_INF ? 0.0f : n; }

/* The same sum relative to a larger n. Where nothing has been seen it is 0, or no number, and stays so. */
__device__ __forceinline__ float rescaled(const struct sums &s, float n) {
    return s.n == MINUS_INF ? s.sum : s.sum * ex2_approx(s.n - n);
}

/* The largest z of a chunk; of those so far, `n`. */
__device__ __forceinline__ float chunk_largest(const struct chunk &c, float scale2, float n) {
    float x = element_of(c, 0);
#pragma unroll
    for (int j = 1; j < PER_CHUNK; j++)
        x = FLIP ? fminf(x, element_of(c, j)) : fmaxf(x, element_of(c, j));
    return fmaxf(n, x * scale2);
}
/* The sum of a chunk's 2^(z - n); of the backward what is summed there. */
__device__ __forceinline__ float chunk_sum(const struct chunk &c, float scale2, float n) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++)
        sum += ex2_approx(fmaf(element_of(c, j), scale2, -finite(n)));
    return sum;
}
__device__ __forceinline__ float chunk_product(const struct chunk &out, const struct chunk &dout) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++) {
        const float y = element_of(out, j), d = element_of(dout, j);
        sum += LOG ? (y == MINUS_INF ? 0.0f : d) : y * d;
    }
    return sum;
}

/* Adds one more chunk as it comes: the online softmax (Milakov and Gimelshein, 2018). */
__device__ __forceinline__ void add_chunk(struct sums &s, const struct chunk &in, const struct chunk &dout,
                                          float scale2) {
    if (BACKWARD) {
        s.sum += chunk_product(in, dout);
        return;
    }
    const float n = chunk_largest(in, scale2, s.n);
    s.sum = rescaled(s, n) + chunk_sum(in, scale2, n);
    s.n = n;
}

/* Of `lanes` neighbouring threads, the same bits in each: largest first, then sums relative to it. */
template <int lanes> __device__ __forceinline__ void sums_over_lanes(struct sums &s) {
    float n = s.n;
#pragma unroll
    for (int step = lanes / 2; step && !BACKWARD; step /= 2)
        n = fmaxf(n, __shfl_xor_sync(0xffffffff, n, step));
    if (!BACKWARD)
        s.sum = rescaled(s, n);
    s.n = n;
#pragma unroll
    for (int step = lanes / 2; step; step /= 2)
        s.sum += __shfl_xor_sync(0xffffffff, s.sum, step);
}

/* Of a block of whole warps; `scratch` has two floats for each warp and is used once. */
__device__ __forceinline__ void sums_over_block(struct sums &s, float *scratch) {
    const uint32_t lane = threadIdx.x % 32;
    sums_over_lanes<32>(s);
    if (lane == 0) {
        scratch[threadIdx.x / 32 * 2] = s.n;
        scratch[threadIdx.x / 32 * 2 + 1] = s.sum;
    }
    __syncthreads();
    s = no_sums();
    if (lane < THREADS / 32)
        s = {scratch[lane * 2], scratch[lane * 2 + 1]};
    sums_over_lanes<32>(s);
}

/* ---- results ---- */

/* Of a row: what each element's result is made with. */
struct totals {
    float n;      /* forward: largest z */
    float factor; /* softmax: 1 / sum; log-softmax: ln sum; backward: the sum */
};
__device__ __forceinline__ struct totals totals_of(const struct sums &s) {
    if (BACKWARD)
        return {0.0f, s.sum};
    if (LOG)
        return {finite(s.n), s.sum == 0.0f ? 0.0f : lg2_approx(s.sum) * LN_2};
    return {finite(s.n), s.sum == 0.0f ? 0.0f : 1.0f / s.sum};
}

__device__ __forceinline__ float result_of(float x, float d, const struct totals &t, float scale, float scale2) {
    if (BACKWARD && LOG)
        return x == MINUS_INF ? 0.0f : scale * (d - ex2_approx(x * LOG2_E) * t.factor);
    if (BACKWARD)
        return scale * x * (d - t.factor);
    const float z = fmaf(x, scale2, -t.n);
    return LOG ? z * LN_2 - t.factor : ex2_approx(z) * t.factor;
}

__device__ __forceinline__ struct chunk results_of(const struct chunk &in, const struct chunk &dout,
                                                   const struct totals &t, float scale, float scale2) {
    float x[PER_CHUNK];
#pragma unroll
    for (int j = 0; j < PER_CHUNK; j++)
        x[j] = result_of(element_of(in, j), BACKWARD ? element_of(dout, j) : 0.0f, t, scale, scale2);
    return chunk_of(x);
}

#endif
