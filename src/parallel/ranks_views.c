/* ranks_views.c: the tensors of a rank's calls, as views, and the calls. */
#include <string.h>

#include "base/error.h"
#include "parallel/ranks_call.h"
#include "problem/problem.h"
#include "problem/tensor.h"

static fdm_tensor *view_of(struct view *v, const fdm_tensor *tensor) {
    *v = (struct view){.tensor = *tensor};
    for (int32_t axis = 0; axis < tensor->ndim; axis++) {
        v->shape[axis] = tensor->shape[axis];
        v->strides[axis] = tensor_stride(tensor, axis);
    }
    v->tensor.shape = v->shape;
    v->tensor.strides = v->strides;
    return &v->tensor;
}

static void narrow(struct view *v, int32_t axis, fdm_range range) {
    v->tensor.byte_offset += (uint64_t)(range.first * v->strides[axis] * fdm_dtype_bytes(fdm_dtype_of(&v->tensor)));
    v->shape[axis] = range.end - range.first;
}

/* A part of axes 1 and 2; NULL of none. */
static fdm_tensor *view_part(struct view *v, const fdm_tensor *tensor, fdm_range first, fdm_range second) {
    if (!tensor)
        return NULL;
    view_of(v, tensor);
    narrow(v, 1, first);
    narrow(v, 2, second);
    return &v->tensor;
}

fdm_tensor *view_matrix(struct view *v, const fdm_tensor *tensor, fdm_range rows, fdm_range heads) {
    return view_part(v, tensor, rows, heads);
}

fdm_tensor *view_rows(struct view *v, const fdm_tensor *tensor, fdm_range rows, fdm_range heads) {
    return view_part(v, tensor, heads, rows);
}

fdm_tensor *view_scores(struct view *v, const fdm_tensor *tensor, fdm_range heads, fdm_range rows, fdm_range keys) {
    const fdm_range ranges[] = {heads, rows, keys};
    view_of(v, tensor);
    for (int32_t axis = 1; axis < 4; axis++)
        if (v->shape[axis] > 1)
            narrow(v, axis, ranges[axis - 1]);
    return &v->tensor;
}

static fdm_tensor *buffer_tensor(struct view *v, char *data, fdm_dtype dtype, const struct ranks_call *call,
                                 int32_t ndim) {
    v->tensor = (fdm_tensor){data, call->plan->device.id, ndim, fdm_data_type_of(dtype), v->shape, v->strides, 0};
    return &v->tensor;
}

fdm_tensor *view_buffer(struct view *v, char *buffer, fdm_dtype dtype, const struct ranks_call *call, int64_t batches,
                        fdm_range rows, int64_t heads, int64_t width) {
    const int64_t row = batches * heads * width;
    *v = (struct view){.shape = {batches, rows.end - rows.first, heads, width},
                       .strides = {heads * width, row, width, 1}};
    return buffer_tensor(v, buffer + rows.first * row * fdm_dtype_bytes(dtype), dtype, call, 4);
}

fdm_tensor *view_buffer_rows(struct view *v, char *buffer, fdm_dtype dtype, const struct ranks_call *call,
                             int64_t batches, fdm_range rows, int64_t heads) {
    const int64_t row = batches * heads;
    *v = (struct view){.shape = {batches, heads, rows.end - rows.first}, .strides = {heads, 1, row}};
    return buffer_tensor(v, buffer + rows.first * row * fdm_dtype_bytes(dtype), dtype, call, 3);
}

fdm_tensor *view_buffer_keys(struct view *v, char *buffer, fdm_dtype dtype, const struct ranks_call *call,
                             int64_t batches, fdm_range rows, int64_t heads) {
    const int64_t row = batches * heads;
    *v = (struct view){.shape = {batches, heads, 1, rows.end - rows.first}, .strides = {heads, 1, row, row}};
    return buffer_tensor(v, buffer + rows.first * row * fdm_dtype_bytes(dtype), dtype, call, 4);
}

void view_intervals(struct view views[2], const struct ranks_call *call, const struct piece *piece, fdm_range heads_kv,
                    fdm_tensors *tensors) {
    const fdm_ranks_plan *plan = call->plan;
    const int64_t keys = piece->keys.end - piece->keys.first, heads = plan->interval_heads;
    const fdm_range own = heads_of(heads, heads_kv, plan->problem.heads_kv);
    int32_t *const lists[] = {piece->start, piece->end};
    for (int i = 0; piece->start && i < 2; i++) {
        views[i] = (struct view){.shape = {plan->interval_batch, own.end - own.first, keys},
                                 .strides = {heads * keys, keys, 1}};
        buffer_tensor(&views[i], (char *)(lists[i] + own.first * keys), FDM_INT32, call, 3);
    }
    tensors->interval_start = piece->start ? &views[0].tensor : NULL;
    tensors->interval_end = piece->start ? &views[1].tensor : NULL;
}

fdm_tensor *view_sink(struct view *v, const fdm_tensor *tensor, fdm_range heads) {
    if (!tensor)
        return NULL;
    view_of(v, tensor);
    narrow(v, tensor->ndim - 1, heads);
    return &v->tensor;
}

static fdm_status plan_call(const fdm_ranks_plan *plan, fdm_options *options, const fdm_problem *problem,
                            fdm_plan *made) {
    *made = (fdm_plan){.struct_bytes = sizeof *made};
    const fdm_status status = fdm_plan_attention(&plan->device, problem, options, made);
    if (status != FDM_ERROR_UNSUPPORTED || !options->kernel)
        return status;
    options->kernel = NULL; /* the call is too small for it, say */
    return fdm_plan_attention(&plan->device, problem, options, made);
}

/* What is kept of the plan's n-th call, if it is of such a problem, which has no padding. */
static const fdm_plan *kept_plan(const fdm_ranks_plan *plan, int32_t n, const fdm_problem *problem) {
    const fdm_plan *kept = plan->call_plans ? &plan->call_plans[n] : NULL;
    return kept && memcmp(&kept->problem, problem, sizeof *problem) == 0 ? kept : NULL;
}

fdm_status call_attention(struct ranks_call *call, const fdm_tensors *tensors, const struct piece *piece,
                          int32_t add_dkv) {
    const fdm_ranks_plan *plan = call->plan;
    const int32_t n = call->num_calls++;
    fdm_options options = problem_options(&plan->problem);
    fdm_problem problem;
    fdm_plan made;
    options.causal = piece->causal;
    options.window_left = piece->left;
    options.window_right = piece->right;
    options.num_threads = plan->num_threads;
    options.sm_margin = plan->sm_margin;
    options.executor = call->launch ? call->launch->executor : NULL;
    options.add_dkv = add_dkv;
    options.lse_without_sink = options.lse_without_sink && !piece->sinks_alone;
    options.kernel = *plan->choice ? plan->choice : NULL;
    fdm_status status = fdm_describe(plan->problem.pass, tensors, &options, &problem);
    if (status)
        return status;
    const fdm_plan *kept = call->counting ? NULL : kept_plan(plan, n, &problem);
    if (!kept && (status = plan_call(plan, &options, &problem, &made)))
        return status;
    if (call->counting) {
        call->call_bytes =
            (size_t)made.workspace_bytes > call->call_bytes ? (size_t)made.workspace_bytes : call->call_bytes;
        if (plan->call_plans)
            plan->call_plans[n] = made;
        return FDM_OK;
    }
    return fdm_execute(kept ? kept : &made, tensors, call->call_memory, plan->call_bytes, call->launch);
}
