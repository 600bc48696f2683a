/* lse.cuh: what a forward kernel leaves of a row's softmax: the logarithm of its sum and, beside a bias, what that
 * number has rounded away. The end of every forward kernel calls it, so that all leave the same. */
#ifndef FDM_LSE_CUH
#define FDM_LSE_CUH

#include "gpu/forward_params.h"

/* Of row `row` (packed sequences: of the packed tensor). The logarithm is most() + rest(), both natural: the score that
 * P is relative to, and the logarithm of the sum of P. empty: the row sees no key. Where a bias is -1e6 or below, lse
 * has few digits left for rest, or none; most - lse is exact there. beside_bias is known when compiled, so that kernels
 * without a bias have no code for it. most and rest are functions, so that they are not computed for empty rows. Only
 * where a.lse.data is given. */
template <bool beside_bias, class score, class logarithm>
__device__ __forceinline__ void store_lse(const struct gpu_forward_params &a, int batch, int head, int64_t row,
                                          bool empty, const score &most, const logarithm &rest) {
    const float infinite = __int_as_float(0x7f800000);
    if constexpr (!beside_bias) {
        a.lse.data[batch * a.lse.batch + head * a.lse.head + row * a.lse.row] = empty ? infinite : most() + rest();
    } else {
        const float lse = empty ? infinite : most() + rest();
        a.lse.data[batch * a.lse.batch + head * a.lse.head + row * a.lse.row] = lse;
        if (a.lse_low.data)
            a.lse_low.data[batch * a.lse_low.batch + head * a.lse_low.head + row * a.lse_low.row] =
                lse == infinite ? 0.0f : (most() - lse) + rest();
    }
}

#endif
