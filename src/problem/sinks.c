/* sinks.c: learnable sinks: their tensors, and on the CPU their logarithms and gradients. */
#include "problem/sinks.h"

#include "base/elements.h"
#include "base/error.h"
#include "problem/tensor.h"

fdm_status sinks_validate(const fdm_problem *p) {
    const int of_float64 = p->dtype == FDM_FLOAT64 && p->sink_dtype == FDM_FLOAT64;
    if (p->needs_dsink && !p->has_sink)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "dsink is wanted, but there is no sink");
    if (!p->has_sink)
        return FDM_OK;
    if ((p->sink_dtype < FDM_FLOAT32 || p->sink_dtype > FDM_BFLOAT16) && !of_float64)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "sink is %s; it must be float32, float16 or bfloat16%s",
                         fdm_dtype_name(p->sink_dtype), p->dtype == FDM_FLOAT64 ? ", or float64 as q is" : "");
    if (p->num_sinks < 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "a head has %d sinks; it must have one at least", p->num_sinks);
    return FDM_OK;
}

static struct sink_view view_of(const fdm_tensor *tensor) {
    const int32_t last = tensor->ndim - 1;
    return (struct sink_view){tensor_data(tensor), last ? tensor_stride(tensor, 0) : 0, tensor_stride(tensor, last)};
}

fdm_status sinks_resolve(const fdm_tensors *t, fdm_problem *p, struct attention *a) {
    const int wants_dsink = p->pass == FDM_BACKWARD && t->dsink;
    if (!t->sink)
        return wants_dsink ? error_set(FDM_ERROR_INVALID_ARGUMENT, "dsink is given, but sink is not") : FDM_OK;
    const int32_t ndim = t->sink->ndim;
    if (ndim != 1 && ndim != 2)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "sink has %d axes; its shape is [heads of q] or [n, heads of q]",
                         ndim);
    if (!t->sink->shape)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "sink has no shape");
    const int64_t parts = ndim > 1 ? t->sink->shape[0] : 1, shape[2] = {parts, p->heads};
    const fdm_dtype dtype = fdm_dtype_of(t->sink);
    fdm_status status = tensor_check_as(t->sink, "sink", ndim, TENSOR_INPUT, dtype, shape + 2 - ndim, t->q, "q");
    if (status)
        return status;
    p->has_sink = 1;
    p->sink_dtype = dtype;
    if (parts > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "a head has %lld sinks; it may have 2^31 - 1 at most",
                         (long long)parts);
    p->num_sinks = (int32_t)parts;
    if ((status = sinks_validate(p)))
        return status;
    a->sink = view_of(t->sink);
    if (!wants_dsink)
        return FDM_OK;
    status = tensor_check_as(t->dsink, "dsink", ndim, TENSOR_OUTPUT, dtype, shape + 2 - ndim, t->q, "q");
    if (status)
        return status;
    p->needs_dsink = 1;
    a->dsink = view_of(t->dsink);
    return FDM_OK;
}

static double sink_at(const struct attention *a, int64_t n, int64_t head) {
    return element_load(a->sink.data, n * a->sink.part + head * a->sink.head, a->problem->sink_dtype);
}

double sinks_logit(const struct attention *a, int64_t head) {
    double largest = -INFINITY, sum = 0;
    const int64_t count = a->sink.data ? a->problem->num_sinks : 0;
    for (int64_t n = 0; n < count; n++)
        largest = fmax(largest, sink_at(a, n, head));
    for (int64_t n = 0; n < count; n++) { /* equal infinities are no NaN */
        const double sink = sink_at(a, n, head);
        sum += sink == largest ? 1 : exp(sink - largest);
    }
    return sum > 0 || isnan(sum) ? largest + log(sum) : largest;
}

void sinks_store_gradient(const struct attention *a, int64_t head, double gradient) {
    const double logit = sinks_logit(a, head);
    for (int64_t n = 0; a->dsink.data && n < a->problem->num_sinks; n++) {
        const double x = gradient == 0 ? 0 : gradient * exp(sink_at(a, n, head) - logit);
        element_store(a->dsink.data, n * a->dsink.part + head * a->dsink.head, a->problem->sink_dtype, x);
    }
}
