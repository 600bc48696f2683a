/* backward_rows.c: what the CPU's backward knows of a query row: lse, delta, and what its head's sinks change. */
#include <math.h>
#include <string.h>

#include "families/cpu/backward_call.h"
#include "problem/sinks.h"

static float row_value(const struct row_view *view, const struct lane_block *block, int32_t lane) {
    int64_t row = block->sequence.q_begin + block->row[lane];
    return ((const float *)(const void *)
                view->data)[block->batch * view->batch + block->head[lane] * view->head + row * view->row];
}

static const void *lane_row(const struct attention *a, const struct matrix_view *view, const struct lane_block *block,
                            int32_t lane) {
    return matrix_row(view, fdm_dtype_bytes(a->problem->dtype), block->batch,
                      block->sequence.q_begin + block->row[lane], block->head[lane]);
}

/* Whether a lane whose lse is the logarithm of its sinks alone, out 0, and q or dO not finite. It sees no key, or all
 * its weights are below 2^-20. */
static int is_sink_alone(const struct attention *a, const struct cpu_kernels *k, const struct lane_block *block,
                         int32_t lane, float lse, float sink) {
    const fdm_problem *p = a->problem;
    const void *out = lane_row(a, &a->out, block, lane), *q = lane_row(a, &a->q, block, lane);
    const void *dout = lane_row(a, &a->dout, block, lane);
    const int32_t d = (int32_t)p->head_dim, dv = (int32_t)p->head_dim_v;
    return fabsf(lse - sink) <= 0x1p-21f * fmaxf(1, fabsf(sink)) && k->dot(out, out, dv, p->dtype) == 0 &&
           !(k->all_finite(&q, 1, d, p->dtype) && k->all_finite(&dout, 1, dv, p->dtype));
}

/* Beside sinks: lse becomes the logarithm of the sum with them where it is without, and +inf in a lane that sees no key
 * and may hold NaN. sink_weight is the share of the sinks in the sum; dlse_factor is what dlse counts in delta: exp(lse
 * with sinks - lse). That logarithm is held so low beside dlse that the factor is finite; weights are far below
 * float32's digits then. */
static void load_sink(const struct attention *a, const struct cpu_kernels *k, struct backward_thread *thread,
                      int32_t lane) {
    enum { FAR = 60 };
    const struct lane_block *block = &thread->block;
    const float sink = (float)sinks_logit(a, block->head[lane]), lse = thread->lse[lane];
    thread->sink_weight[lane] = 0;
    thread->dlse_factor[lane] = 1;
    if (sink == -INFINITY || lse == INFINITY)
        return;
    if (!a->problem->lse_without_sink) {
        thread->sink_weight[lane] = expf(sink - lse - thread->lse_low[lane]);
        if (is_sink_alone(a, k, block, lane, lse, sink))
            thread->lse[lane] = INFINITY;
        return;
    }
    const double whole = (double)lse + (double)thread->lse_low[lane], growth = sinks_growth(whole, sink);
    const int held = a->dlse.data && growth > FAR, high = sink > whole && !held;
    const double base = high ? sink : lse;
    const double rest = held   ? FAR + (double)thread->lse_low[lane]
                        : high ? sinks_growth(sink, whole)
                               : growth + (double)thread->lse_low[lane];
    thread->sink_weight[lane] = sink == INFINITY ? 0 : (float)exp(sink - whole - growth);
    thread->dlse_factor[lane] = (float)exp(held ? FAR : growth);
    thread->lse[lane] = (float)(base + rest);
    thread->lse_low[lane] = thread->lse[lane] < INFINITY ? (float)(base - (double)thread->lse[lane] + rest) : 0;
}

void backward_load_lse(const struct backward_call *call, const struct attention *a, struct backward_thread *thread) {
    const struct lane_block *block = &thread->block;
    for (int32_t lane = 0; lane < block->num_panels * CPU_LANES; lane++) {
        const int has_lse = lane < block->num_lanes;
        thread->lse[lane] = has_lse ? row_value(&a->lse, block, lane) : INFINITY;
        thread->lse_low[lane] = has_lse && a->lse_low.data ? row_value(&a->lse_low, block, lane) : 0;
        thread->delta[lane] = 0;
        thread->dbias_rows[lane] = 0;
        if (has_lse && a->sink.data)
            load_sink(a, call->kernels, thread, lane);
    }
}

/* What a lane adds to the gradient of its head's sinks; delta: rowsum(dO O). */
static void store_share(const struct backward_call *call, const struct backward_thread *thread, int32_t lane,
                        float delta, float dlse) {
    const struct lane_block *block = &thread->block;
    const fdm_problem *p = call->attention->problem;
    const float weight = thread->sink_weight[lane];
    const int64_t first = p->varlen ? block->sequence.q_begin : block->batch * p->seqlen_q;
    call->sink_shares[block->head[lane] * backward_query_rows(p) + first + block->row[lane]] =
        weight == 0 ? 0 : weight * ((p->lse_without_sink ? 0 : dlse) - delta);
}

void backward_load_delta(const struct backward_call *call, const struct attention *a, struct backward_thread *thread) {
    const struct lane_block *block = &thread->block;
    const struct cpu_kernels *k = call->kernels;
    memset(thread->careful, 0, sizeof thread->careful);
    for (int32_t lane = 0; lane < block->num_lanes; lane++) {
        const int counts = backward_counts(thread, lane);
        float *delta = &thread->delta[lane], dlse = a->dlse.data ? row_value(&a->dlse, block, lane) : 0;
        if (counts)
            *delta = k->dot(thread->rows[lane], lane_row(a, &a->out, block, lane), (int32_t)a->problem->head_dim_v,
                            a->problem->dtype);
        if (call->sink_shares && a == call->attention)
            store_share(call, thread, lane, *delta, dlse);
        if (counts && a->dlse.data)
            *delta -= a->sink.data ? dlse * thread->dlse_factor[lane] : dlse;
        thread->careful[lane / CPU_LANES] |= isnan(thread->lse[lane]) || !isfinite(*delta);
    }
}

void backward_store_dsink(const struct backward_call *call) {
    const fdm_problem *p = call->attention->problem;
    const int64_t rows = backward_query_rows(p);
    for (int64_t head = 0; head < p->heads; head++) {
        double sum = 0;
        for (int64_t row = 0; row < rows; row++)
            sum += call->sink_shares[head * rows + row];
        sinks_store_gradient(call->attention, head, sum);
    }
}
