/* ranks_local.c: shapes and dtypes of a rank's tensors. */
#include "parallel/ranks_local.h"

#include <stddef.h>
#include <string.h>

#include "base/error.h"
#include "problem/tensor.h"

enum place { Q, K, V, MASK, BIAS, SINK, OUT, LSE, LSE_LOW, DOUT, DLSE, DQ, DK, DV, DBIAS };

static const struct {
    const char *name;
    size_t offset; /* in fdm_tensors */
} places[] = {
    [Q] = {"q", offsetof(fdm_tensors, q)},
    [K] = {"k", offsetof(fdm_tensors, k)},
    [V] = {"v", offsetof(fdm_tensors, v)},
    [MASK] = {"mask", offsetof(fdm_tensors, mask)},
    [BIAS] = {"bias", offsetof(fdm_tensors, bias)},
    [SINK] = {"sink", offsetof(fdm_tensors, sink)},
    [OUT] = {"out", offsetof(fdm_tensors, out)},
    [LSE] = {"lse", offsetof(fdm_tensors, lse)},
    [LSE_LOW] = {"lse_low", offsetof(fdm_tensors, lse_low)},
    [DOUT] = {"dout", offsetof(fdm_tensors, dout)},
    [DLSE] = {"dlse", offsetof(fdm_tensors, dlse)},
    [DQ] = {"dq", offsetof(fdm_tensors, dq)},
    [DK] = {"dk", offsetof(fdm_tensors, dk)},
    [DV] = {"dv", offsetof(fdm_tensors, dv)},
    [DBIAS] = {"dbias", offsetof(fdm_tensors, dbias)},
};
enum { NUM_PLACES = sizeof places / sizeof places[0] };

struct maker {
    const fdm_ranks_plan *plan;
    struct local_tensors *local;
    int unaligned;
};

static void put(const struct maker *m, enum place at, fdm_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c,
                int64_t d) {
    fdm_tensor *t = &m->local->list[at];
    const int64_t shape[] = {a, b, c, d};
    const uintptr_t address = (uintptr_t)(at + 1) << 40;
    memcpy(m->local->shapes[at], shape, sizeof shape);
    *t = (fdm_tensor){(void *)(address + (uintptr_t)(m->unaligned ? fdm_dtype_bytes(dtype) : 0)),
                      m->plan->device.id,
                      ndim,
                      fdm_data_type_of(dtype),
                      m->local->shapes[at],
                      NULL,
                      0};
    memcpy((char *)&m->local->tensors + places[at].offset, &t, sizeof t);
}

static void put_scores(const struct maker *m, enum place at, fdm_dtype dtype, enum scores_kind kind,
                       const int64_t *shape) {
    const int64_t rows = kind == SCORES_OF_ROWS ? m->plan->rows : 1;
    const int64_t keys = kind == SCORES_OF_KEYS ? m->plan->keys : shape[3];
    put(m, at, dtype, 4, shape[0], shape[1], rows, keys);
}

void local_describe(const fdm_ranks_plan *plan, int unaligned, struct local_tensors *local) {
    const fdm_problem *p = &plan->problem;
    const struct maker m = {plan, local, unaligned};
    const int64_t batch = p->batch, rows = plan->rows, keys = plan->keys;
    const fdm_dtype lse = p->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    const int backward = p->pass == FDM_BACKWARD;
    local->tensors = (fdm_tensors){.struct_bytes = sizeof local->tensors};
    put(&m, Q, p->dtype, 4, batch, rows, p->heads, p->head_dim);
    put(&m, K, p->dtype, 4, batch, keys, p->heads_kv, p->head_dim);
    put(&m, V, p->dtype, 4, batch, keys, p->heads_kv, p->head_dim_v);
    put(&m, OUT, p->dtype, 4, batch, rows, p->heads, p->head_dim_v);
    if (plan->mask_kind)
        put_scores(&m, MASK, FDM_BOOL, plan->mask_kind, p->mask_shape);
    if (plan->bias_kind)
        put_scores(&m, BIAS, p->bias_dtype, plan->bias_kind, p->bias_shape);
    if (p->has_sink)
        put(&m, SINK, p->sink_dtype, 2, p->num_sinks, p->heads, 0, 0);
    if (backward || p->needs_lse)
        put(&m, LSE, lse, 3, batch, p->heads, rows, 0);
    if (p->has_lse_low)
        put(&m, LSE_LOW, lse, 3, batch, p->heads, rows, 0);
    if (!backward)
        return;
    put(&m, DOUT, p->dtype, 4, batch, rows, p->heads, p->head_dim_v);
    if (p->has_dlse)
        put(&m, DLSE, lse, 3, batch, p->heads, rows, 0);
    if (p->needs_dq)
        put(&m, DQ, p->dtype, 4, batch, rows, p->heads, p->head_dim);
    if (p->needs_dk)
        put(&m, DK, p->dtype, 4, batch, keys, p->heads_kv, p->head_dim);
    if (p->needs_dv)
        put(&m, DV, p->dtype, 4, batch, keys, p->heads_kv, p->head_dim_v);
    if (p->needs_dbias)
        put_scores(&m, DBIAS, p->bias_dtype, plan->bias_kind, p->bias_shape);
}

static const fdm_tensor *tensor_at(const fdm_tensors *tensors, enum place at) {
    const fdm_tensor *tensor;
    memcpy(&tensor, (const char *)tensors + places[at].offset, sizeof tensor);
    return tensor;
}

fdm_status local_check(const fdm_ranks_plan *plan, const fdm_tensors *given) {
    struct local_tensors local;
    fdm_status status = FDM_OK;
    local_describe(plan, 0, &local);
    if (given->cu_seqlens_q || given->cu_seqlens_k || given->seqused_q || given->seqused_k || given->cache)
        return error_set(FDM_ERROR_UNSUPPORTED, "packed sequences, lengths and caches are not computed over ranks");
    if (given->row_start || given->row_end || given->block_mask)
        return error_set(FDM_ERROR_UNSUPPORTED, "row intervals and block masks are not computed over ranks");
    if (given->mask_plan)
        return error_set(FDM_ERROR_UNSUPPORTED, "mask_plan is given; it is of one rank's call");
    if (given->interval_start || given->interval_end)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "interval_start and interval_end are the plan's; give NULL");
    for (int at = 0; !status && at < NUM_PLACES; at++) {
        const fdm_tensor *expected = tensor_at(&local.tensors, (enum place)at);
        const fdm_tensor *tensor = tensor_at(given, (enum place)at);
        if (!expected != !tensor)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is %s, but the plan is for a call %s it", places[at].name,
                             tensor ? "given" : "NULL", expected ? "with" : "without");
        if (!tensor || (at == SINK && tensor->ndim == 1)) /* calls look at its heads themselves */
            continue;
        const enum tensor_role role = at >= DQ || (at >= OUT && at <= LSE_LOW && plan->problem.pass == FDM_FORWARD)
                                          ? TENSOR_OUTPUT
                                          : TENSOR_INPUT;
        status = tensor_check_as(tensor, places[at].name, expected->ndim, role, fdm_dtype_of(expected), expected->shape,
                                 tensor_at(given, Q), "q");
    }
    if (!status && (given->q->device.type != plan->device.id.type || given->q->device.index != plan->device.id.index))
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "q is on DLPack device %d:%d, but the plan is for %d:%d",
                           given->q->device.type, given->q->device.index, plan->device.id.type, plan->device.id.index);
    return status;
}
