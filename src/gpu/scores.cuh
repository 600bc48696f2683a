/* scores.cuh: from the product of a query and a key to a score, and the end of a row's softmax: lse and what O is to be
 * multiplied by. A score is softmax_scale times the product, capped, plus the bias. The functions take one element, so
 * every layout of accumulators can use them. */
#ifndef FDM_SCORES_CUH
#define FDM_SCORES_CUH

#include "cuda/ptx/math.cuh"
#include "gpu/convert.cuh"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"
#include "gpu/sinks.cuh"

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

/* Of row `row` (packed sequences: of the packed tensor). The logarithm is most() + log_of(sum), both natural: the score
 * that P is relative to, and the logarithm of the sum of P. Where a bias is -1e6 or below, lse has few digits left for
 * the latter, or none; most() - lse is exact there. Only where a.lse.data is given. */
template <class score, class logarithm>
__device__ __forceinline__ void store_lse(const struct gpu_forward_params &a, int batch, int head, int64_t row,
                                          bool empty, const score &most, const logarithm &log_of, float sum) {
    const float infinite = __int_as_float(0x7f800000), lse = empty ? infinite : most() + log_of(sum);
    a.lse.data[batch * a.lse.batch + head * a.lse.head + row * a.lse.row] = lse;
    if constexpr (BIAS != GPU_BIAS_NONE)
        if (a.lse_low.data)
            a.lse_low.data[batch * a.lse_low.batch + head * a.lse_low.head + row * a.lse_low.row] =
                lse == infinite ? 0.0f : (most() - lse) + log_of(sum);
}

/* Ends the softmax of a row and returns the factor of O. `sum` is the row's sum of P relative to most(), which is a
 * natural logarithm. With `writes` the row's lse is stored, if the call wants it. A row that sees no key has the sum
 * 0; a row whose scores are all NaN has the sum NaN. most and log_of are functions, so that they are computed only
 * where they are needed. */
template <class score, class logarithm>
__device__ __forceinline__ float end_plain_softmax(const struct gpu_forward_params &a, bool writes, int batch, int head,
                                                   int64_t row, float sum, const score &most, const logarithm &log_of) {
    const bool empty = sum == 0.0f;
    const float inverse = empty ? 0.0f : 1.0f / sum;
    if (a.lse.data && writes)
        store_lse(a, batch, head, row, empty, most, log_of, sum);
    return inverse;
}
/* The same for a row whose head may have sinks; sink_read is what read_sink() returns for the head. */
template <class score, class logarithm>
__device__ __forceinline__ float end_softmax(const struct gpu_forward_params &a, bool writes, int batch, int head,
                                             int64_t row, float sum, const score &most, const logarithm &log_of,
                                             uint32_t sink_read) {
    if (!SINK)
        return end_plain_softmax(a, writes, batch, head, row, sum, most, log_of);
    const bool empty = sum == 0.0f, stores = a.lse.data && writes;
    /* The sinks join the sum, relative to the keys' maximum. Where they are far above it, the keys' sum is lost beside
     * them. A row that sees no key has the lowest finite number as its maximum. */
    constexpr float lowest = -3.4028234663852886e38f, far = 115.0f; /* far: in units of exp2 */
    const float sink = sink_logit(a.sink, sink_read), of_keys = empty ? lowest : most();
    const float apart = (sink - of_keys) * LOG2_E, total = sum + ex2_approx(apart > far ? far : apart);
    const bool alone = apart > far, none = total == 0.0f;
    if (stores && a.lse_without_sink)
        store_lse(
            a, batch, head, row, empty, [&] { return of_keys; }, log_of, sum);
    else if (stores)
        store_lse(
            a, batch, head, row, none, [&] { return alone ? sink + 0.0f * sum : of_keys; },
            [&](float x) { return alone ? 0.0f : log_of(x); }, total);
    return empty ? 0.0f : alone ? ex2_approx(-apart) : 1.0f / total;
}
template <class score, class logarithm>
__device__ __forceinline__ float end_softmax(const struct gpu_forward_params &a, bool writes, int batch, int head,
                                             int64_t row, float sum, const score &most, const logarithm &log_of) {
    return end_softmax(a, writes, batch, head, row, sum, most, log_of, SINK ? read_sink(a.sink, head) : 0);
}

#endif
