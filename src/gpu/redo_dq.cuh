/* redo_dq.cuh: a row of dQ done again by a warp, as redo.cuh does a row of the output; for kernels that own rows, and
 * define HEAD_DIM besides. */
#ifndef FDM_REDO_DQ_CUH
#define FDM_REDO_DQ_CUH

#include "gpu/backward_params.h"
#include "gpu/redo.cuh"

/* place: of the row in the workspace's arrays of rows. */
__device__ __forceinline__ void redo_dq(const struct gpu_backward_params &a, const struct sequence &s, int head,
                                        int head_kv, int row, int64_t place) {
    const struct gpu_forward_params &in = a.in;
    const int lane = threadIdx.x % 32;
    const int64_t i = (int64_t)s.q_begin + row, batch = s.batch; /* packed: strides of 0 */
    const float lse = a.lse_rows[place] / a.lse_factor, low = BIAS ? a.low_rows[place] : 0, delta = a.delta_rows[place];
    const int64_t dout = batch * a.dout.batch + i * a.dout.row + head * a.dout.head;
    struct redone_row<HEAD_DIM> r = {};
    redo_keys(in, s, head, head_kv, row, 0, s.seqlen_k, [&](int key, float x, float slope) {
        const int64_t j = (int64_t)s.k_begin + key;
        const int64_t k = batch * in.k.batch + j * in.k.row + head_kv * in.k.head;
        const int64_t v = batch * in.v.batch + j * in.v.row + head_kv * in.v.head;
        float dp = 0;
#pragma unroll 1
        for (int c = lane; c < in.head_dim_v; c += 32)
            dp += redo_number(a.dout.data, dout + c) * redo_number(in.v.data, v + c);
        float ds = 0;
        if (lse != __int_as_float(0x7f800000))
            ds = ex2_approx((x - lse) * LOG2_E + low) * (redo_sum(dp) - delta) * slope;
#pragma unroll
        for (int n = 0; n < r.count; n++)
            r.o[n] += lane + 32 * n < in.head_dim ? ds * redo_number(in.k.data, k + lane + 32 * n) : 0.0f;
    });
    store_redone(a.dq.data, batch * a.dq.batch + i * a.dq.row + head * a.dq.head, r, in.scale, 0, in.head_dim);
}

#endif
