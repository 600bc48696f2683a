/* scores.cuh: from the product of a query and a key to a score, and the end of a row's softmax: lse and what O is to be
 * multiplied by. A score is softmax_scale times the product, capped, plus the bias. The functions take one element, so
 * every layout of accumulators can use them. */
#ifndef FDM_SCORES_CUH
#define FDM_SCORES_CUH

#include "cuda/ptx/math.cuh"
#include "gpu/convert.cuh"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

/* A score is the product times the scale, which an exponent can take in. */
#define SCORES_BARE (!BIAS && !SOFTCAP)
/* And the largest score of a row is that of its largest product. */
#define MAXIMA_BARE (SCORES_BARE && POSITIVE_SCALE)
#define BIAS_BYTES  (BIAS == GPU_BIAS_FLOAT32 || DTYPE == GPU_FLOAT32 ? 4 : 2)

__device__ __forceinline__ float bias_value(const char *at) {
    return BIAS_BYTES == 4 ? *(const float *)at : unpack(*(const uint16_t *)at);
}

/* A scaled product, capped. */
__device__ __forceinline__ float cap_score(const struct gpu_forward_params &a, float x) {
    return SOFTCAP ? a.softcap * tanh_accurate(x * a.softcap_inverse) : x;
}
/* The same, and the slope of the cap there. */
__device__ __forceinline__ float cap_score(const struct gpu_forward_params &a, float x, float &slope) {
    const float t = SOFTCAP ? tanh_accurate(x * a.softcap_inverse) : 0.0f;
    slope = 1.0f - t * t;
    return SOFTCAP ? a.softcap * t : x;
}

/* Of row `row` (packed sequences: of the packed tensor). The logarithm is most() + rest(), both natural: the score that
 * P is relative to, and the logarithm of the sum of P. Where a bias is -1e6 or below, lse has few digits left for rest,
 * or none; most - lse is exact there. most and rest are functions, so that they are not computed for rows that see no
 * key. Only where a.lse.data is given. */
template <class score, class logarithm>
__device__ __forceinline__ void store_lse(const struct gpu_forward_params &a, int batch, int head, int64_t row,
                                          bool empty, const score &most, const logarithm &rest) {
    const float infinite = __int_as_float(0x7f800000), lse = empty ? infinite : most() + rest();
    a.lse.data[batch * a.lse.batch + head * a.lse.head + row * a.lse.row] = lse;
    if constexpr (BIAS != GPU_BIAS_NONE)
        if (a.lse_low.data)
            a.lse_low.data[batch * a.lse_low.batch + head * a.lse_low.head + row * a.lse_low.row] =
                lse == infinite ? 0.0f : (most() - lse) + rest();
}

/* The end of a row whose P have this sum: what O is to be multiplied by. writes: lse of the row is stored, if it is
 * wanted. A row that sees no key has the sum 0; one whose scores are all NaN has NaN. */
template <class score, class logarithm>
__device__ __forceinline__ float end_softmax(const struct gpu_forward_params &a, bool writes, int batch, int head,
                                             int64_t row, float sum, const score &most, const logarithm &rest) {
    const bool empty = sum == 0.0f;
    const float inverse = empty ? 0.0f : 1.0f / sum;
    if (a.lse.data && writes)
        store_lse(a, batch, head, row, empty, most, rest);
    return inverse;
}

#endif
