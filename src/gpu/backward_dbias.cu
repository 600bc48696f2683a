/* backward_dbias.cu: the gradient of a bias from the fp32 sums that the backward of a family left: what several heads,
 * batches or keys share is added here, in a fixed order, and rounded. Where the keys of a row share it, it is the
 * gradient of lse.
 *
 * One thread an element; one warp where keys are added. Bound by memory. */
#include "cuda/ptx/launch.cuh"
#include "gpu/backward_params.h"
#include "gpu/convert.cuh"
#include "gpu/packed.cuh"
#include "gpu/scores.cuh"

BACKWARD_ROWS_CONSTANTS(GPU_CONSTANT_GIVEN)

#define THREADS (32 * BACKWARD_DBIAS_WARPS)

__device__ __forceinline__ float sum_of_keys(const struct gpu_backward_params &a, int64_t b, int64_t h, int first,
                                             int step, int last) {
    const int b_first = a.dbias_batches == 1 ? 0 : (int)b, b_last = a.dbias_batches == 1 ? a.in.batch : (int)b + 1;
    const int group = a.in.heads / a.dbias_heads;
    float sum = 0;
    for (int s = 0; s < a.dbias_shares; s++)
        for (int batch = b_first; batch < b_last; batch++)
            for (int64_t head = h * group; head < (h + 1) * group; head++)
                for (int j = first; j < last; j += step)
                    sum += a.dbias_sums[(((int64_t)s * a.in.batch + batch) * a.in.heads + head) * a.in.seqlen_k + j];
    return sum;
}

/* Of a bias that the keys of row i share: the gradients of lse that flow into rows which see a key. Beside sinks the
 * bias changes their shares of the rows, too. */
__device__ __forceinline__ float sum_of_rows(const struct gpu_backward_params &a, int64_t b, int64_t h, int i) {
    const int b_first = a.dbias_batches == 1 ? 0 : (int)b, b_last = a.dbias_batches == 1 ? a.in.batch : (int)b + 1;
    const int group = a.in.heads / a.dbias_heads;
    float sum = 0;
    if (!a.dlse.data && !HEAD_SINKS)
        return 0;
    for (int batch = b_first; batch < b_last; batch++) {
        int64_t packed = 0, begin = (int64_t)batch * a.in.heads * a.rows;
        if (VARLEN) {
            const struct packed q = find_packed_q(a.in, batch);
            if (i >= q.length)
                continue;
            packed = q.begin;
            begin = backward_begin(packed, batch, ROW_STEP);
        }
        if (SEQUSED && i >= used_of(a.in.seqused_q, batch, a.in.seqlen_q))
            continue;
        for (int64_t head = h * group; head < (h + 1) * group; head++) {
            const int64_t row = begin + head * a.rows + i;
            if (a.lse_rows[row] == __int_as_float(0x7f800000))
                continue;
            if (a.dlse.data)
                sum +=
                    a.dlse.data[(VARLEN ? 0 : batch) * a.dlse.batch + head * a.dlse.head + (packed + i) * a.dlse.row];
            if (HEAD_SINKS)
                sum -= a.sink_shares[row];
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    backward_dbias(const __grid_constant__ struct gpu_backward_params a) {
    griddepcontrol_wait();
    const bool keys = a.dbias_shares > 0, adds_keys = keys && a.dbias_keys == 1;
    const int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int64_t n = adds_keys ? thread / 32 : thread;
    if (n >= (int64_t)a.dbias_batches * a.dbias_heads * a.dbias_rows * a.dbias_keys)
        return;
    const int64_t j = n % a.dbias_keys, i = n / a.dbias_keys % a.dbias_rows;
    const int64_t h = n / a.dbias_keys / a.dbias_rows % a.dbias_heads,
                  b = n / a.dbias_keys / a.dbias_rows / a.dbias_heads;
    float x;
    if (a.dbias_of_rows) {
        x = sum_of_rows(a, b, h, (int)i);
    } else if (!keys) {
        x = a.dbias_sums[n];
    } else if (!adds_keys) {
        x = sum_of_keys(a, b, h, (int)j, 1, (int)j + 1);
    } else {
        x = sum_of_keys(a, b, h, (int)(thread % 32), 32, a.in.seqlen_k);
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            x += __shfl_xor_sync(0xffffffff, x, step);
        if (thread % 32)
            return;
    }
    char *to =
        (char *)a.dbias.data + (b * a.dbias.batch + h * a.dbias.head + i * a.dbias.row + j * a.dbias.key) * BIAS_BYTES;
    if (BIAS_BYTES == 4)
        *(float *)to = x;
    else
        *(uint16_t *)to = (uint16_t)pack(x, 0);
}
