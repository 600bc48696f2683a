/* rotary.cuh: pairs of elements turned by rotary embeddings, in float32: the same bits in every kernel and on the
 * CPU. */
#ifndef FDM_GPU_ROTARY_CUH
#define FDM_GPU_ROTARY_CUH

#include "gpu/cache.cuh"
#include "gpu/convert.cuh"

/* An element of the tables. */
__device__ __forceinline__ float table_value(const struct gpu_rotary &r, const char *table, int64_t element) {
    return DTYPE == GPU_FLOAT32 || r.is_wide ? ((const float *)table)[element]
                                             : unpack(((const uint16_t *)table)[element]);
}

/* The t-th pair of a row. Products are rounded before they are added. */
__device__ __forceinline__ void turn_pair(const struct gpu_rotary &r, int64_t position, int t, float &x, float &y) {
    position = min(max(position, (int64_t)0), r.num_rows - 1);
    const float c = table_value(r, r.cosines, position * r.cosine_row + t);
    const float s = table_value(r, r.sines, position * r.sine_row + t), was = x;
    x = __fsub_rn(__fmul_rn(was, c), __fmul_rn(y, s));
    y = __fadd_rn(__fmul_rn(was, s), __fmul_rn(y, c));
}

/* That of a sequence's first new key, which it has `cached` keys before. */
__device__ __forceinline__ int64_t first_position(const struct gpu_rotary &r, int batch, int cached) {
    return r.start.data ? index_of(r.start, batch) : cached;
}

#endif
