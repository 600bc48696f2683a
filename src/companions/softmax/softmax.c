/* softmax.c: the public entries of softmax: tensors are checked once, then plan, parameters, launch. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/struct_bytes.h"
#include "companions/softmax/softmax_plan.h"
#include "problem/tensor.h"

enum { AXES_MAX = SOFTMAX_ROW_AXES + 1, LIMIT = 1 << 30 };

_Static_assert(FDM_FLOAT32 == SOFTMAX_FLOAT32 && FDM_FLOAT16 == SOFTMAX_FLOAT16 && FDM_BFLOAT16 == SOFTMAX_BFLOAT16,
               "DTYPE is a number of fdm_dtype");

/* ---- describe ---- */

/* `tensor` beside `like`, the first of the call; NULL is an error. */
static fdm_status check_one(const fdm_tensor *tensor, const char *name, enum tensor_role role, const fdm_tensor *like,
                            const char *like_name) {
    fdm_status status;
    if (!tensor)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    if (tensor->ndim < 1 || tensor->ndim > AXES_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has %d axes; it needs 1 to %d", name, tensor->ndim, AXES_MAX);
    const int is_mask = strcmp(name, "mask") == 0;
    if ((status = tensor_check(tensor, name, like->ndim, role, !is_mask)))
        return status;
    if (is_mask ? fdm_dtype_of(tensor) != FDM_BOOL : fdm_dtype_of(tensor) != fdm_dtype_of(like))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is %s; it must be %s", name,
                         fdm_dtype_name(fdm_dtype_of(tensor)), is_mask ? "bool" : fdm_dtype_name(fdm_dtype_of(like)));
    if ((status = tensor_check_device(tensor, name, like, like_name)))
        return status;
    for (int32_t i = 0; i < like->ndim; i++)
        if (tensor->shape[i] != like->shape[i] && !(is_mask && tensor->shape[i] == 1))
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has extent %lld on axis %d; beside %s it must be %lld%s",
                             name, (long long)tensor->shape[i], i, like_name, (long long)like->shape[i],
                             is_mask ? " or 1" : "");
    return FDM_OK;
}

static fdm_status check_limits(const fdm_tensor *t, const char *name, fdm_softmax_problem *p) {
    p->dtype = fdm_dtype_of(t);
    p->columns = t->shape[t->ndim - 1];
    p->rows = 1;
    for (int32_t i = 0; i + 1 < t->ndim; i++)
        p->rows *= t->shape[i];
    if (t->device.type != FDM_CUDA)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "%s is on the CPU; softmax is for tensors on a CUDA device (torch.softmax takes both)", name);
    if (p->dtype != FDM_FLOAT32 && p->dtype != FDM_FLOAT16 && p->dtype != FDM_BFLOAT16)
        return error_set(FDM_ERROR_UNSUPPORTED, "%s is %s; softmax takes float32, float16 and bfloat16", name,
                         fdm_dtype_name(p->dtype));
    if (p->rows >= LIMIT || p->columns >= LIMIT)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "%s has %lld rows of %lld columns; softmax takes fewer than 2^30 of both", name,
                         (long long)p->rows, (long long)p->columns);
    return FDM_OK;
}

/* No place may be taken: threads of softmax.resident that have no row read the first one, whenever its block writes. */
static fdm_status check_apart(fdm_pass pass, const fdm_softmax_tensors *t) {
    const struct named_tensor forward[] = {{"x", t->x, 0, 0}, {"mask", t->mask, 0, 0}, {"out", t->out, 1, 0}};
    const struct named_tensor backward[] = {{"out", t->out, 0, 0}, {"dout", t->dout, 0, 0}, {"dx", t->dx, 1, 0}};
    return tensors_check_apart(pass == FDM_BACKWARD ? backward : forward, 3);
}

/* How far elements lie from multiples of 16 bytes, on each axis of rows and at the first. */
static uint64_t remainder_of(const fdm_tensor *t, int32_t axis) {
    if (axis < 0)
        return (uintptr_t)tensor_data(t) % 16;
    return (uint64_t)tensor_stride(t, axis) * (uint64_t)fdm_dtype_bytes(fdm_dtype_of(t)) % 16;
}
static int32_t alignment_of(const fdm_tensor *const *tensors, int32_t count) {
    int32_t aligned = 2;
    for (int32_t axis = -1; axis + 1 < tensors[0]->ndim; axis++)
        for (int32_t i = 0; i < count; i++) {
            if (remainder_of(tensors[i], axis) != remainder_of(tensors[0], axis))
                return 0;
            if (remainder_of(tensors[i], axis) != 0)
                aligned = 1;
        }
    return aligned;
}

/* Tensors and options of a call, whole, and where they stand when the caller's are not. */
struct call {
    const fdm_softmax_tensors *tensors;
    const fdm_softmax_options *options;
    fdm_softmax_tensors tensors_room;
    fdm_softmax_options options_room;
};

/* options may be NULL. */
static fdm_status read_call(const fdm_softmax_tensors *tensors, const fdm_softmax_options *options, struct call *call) {
    call->options_room = fdm_softmax_options_default();
    call->tensors = STRUCT_READ(fdm_softmax_tensors, tensors, &call->tensors_room);
    if (call->tensors)
        call->options = options ? STRUCT_READ(fdm_softmax_options, options, &call->options_room) : &call->options_room;
    return call->tensors && call->options ? FDM_OK : FDM_ERROR_INVALID_ARGUMENT;
}

static fdm_status describe(fdm_pass pass, const struct call *call, fdm_softmax_problem *problem) {
    const fdm_softmax_tensors *tensors = call->tensors;
    const fdm_softmax_options *o = call->options;
    fdm_status status;
    if (!isfinite(o->scale))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "scale is %g; it must be finite", o->scale);
    const int backward = pass == FDM_BACKWARD;
    const fdm_tensor *first = backward ? tensors->out : tensors->x;
    const char *name = backward ? "out" : "x";
    *problem = (fdm_softmax_problem){.pass = pass,
                                     .log = o->log != 0,
                                     .has_mask = !backward && tensors->mask,
                                     .negative_scale = !backward && o->scale < 0};
    if (!first)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    if ((status = check_one(first, name, TENSOR_INPUT, first, name)) || (status = check_limits(first, name, problem)))
        return status;
    if (!backward) {
        const fdm_tensor *const all[] = {first, tensors->out};
        if ((status = check_one(tensors->out, "out", TENSOR_OUTPUT, first, name)) ||
            (tensors->mask && (status = check_one(tensors->mask, "mask", TENSOR_INPUT, first, name))) ||
            (status = check_apart(pass, tensors)))
            return status;
        problem->aligned = alignment_of(all, 2);
        return FDM_OK;
    }
    const fdm_tensor *const all[] = {first, tensors->dout, tensors->dx};
    if ((status = check_one(tensors->dout, "dout", TENSOR_INPUT, first, name)) ||
        (status = check_one(tensors->dx, "dx", TENSOR_OUTPUT, first, name)) || (status = check_apart(pass, tensors)))
        return status;
    problem->aligned = alignment_of(all, 3);
    return FDM_OK;
}

fdm_status fdm_describe_softmax(fdm_pass pass, const fdm_softmax_tensors *tensors, const fdm_softmax_options *options,
                                fdm_softmax_problem *problem) {
    struct call call;
    if (!problem)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "problem is NULL");
    const fdm_status status = read_call(tensors, options, &call);
    return status ? status : describe(pass, &call, problem);
}

/* ---- plan ---- */

static fdm_status validate(const fdm_softmax_problem *p) {
    const fdm_status status = companion_check_reserved(p->reserved, NULL);
    if (status)
        return status;
    if (p->dtype != FDM_FLOAT32 && p->dtype != FDM_FLOAT16 && p->dtype != FDM_BFLOAT16)
        return error_set(FDM_ERROR_UNSUPPORTED, "dtype is %s; softmax takes float32, float16 and bfloat16",
                         fdm_dtype_name(p->dtype));
    if (p->rows < 0 || p->columns < 0 || p->rows >= LIMIT || p->columns >= LIMIT)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "rows is %lld and columns is %lld; they must be 0 to 2^30 - 1",
                         (long long)p->rows, (long long)p->columns);
    if (p->aligned < 0 || p->aligned > 2)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "aligned is %d; it must be 0, 1 or 2", p->aligned);
    return FDM_OK;
}

static fdm_status plan_on(const fdm_device *device, const fdm_softmax_problem *problem, const char *kernel,
                          int64_t tune, fdm_softmax_plan *plan, int *measures) {
    const fdm_status status = validate(problem);
    *plan = (fdm_softmax_plan){.struct_bytes = sizeof *plan, .problem = *problem};
    return status ? status : companion_plan(&softmax_operation, device, problem, kernel, tune, &plan->choice, measures);
}

fdm_status fdm_plan_softmax(const fdm_device *device, const fdm_softmax_problem *problem, const char *kernel,
                            fdm_softmax_plan *plan) {
    fdm_device room;
    if (!(device = STRUCT_READ(fdm_device, device, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    if (!problem)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "problem is NULL");
    fdm_softmax_plan made;
    int measures;
    const fdm_status status = plan_on(device, problem, kernel, FDM_TUNE_DEFAULT, &made, &measures);
    return status ? status : STRUCT_WRITE(fdm_softmax_plan, plan, &made);
}

/* A caller's plan, whole. NULL with a sentence. */
static const fdm_softmax_plan *plan_read(const fdm_softmax_plan *plan, fdm_softmax_plan *room) {
    plan = STRUCT_READ(fdm_softmax_plan, plan, room);
    return plan && !companion_check_reserved(plan->problem.reserved, &plan->choice) ? plan : NULL;
}

fdm_status fdm_plan_softmax_variant(const fdm_device *device, const fdm_softmax_problem *problem, const char *kernel,
                                    int32_t variant, fdm_softmax_plan *plan) {
    fdm_device room;
    if (!(device = STRUCT_READ(fdm_device, device, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    if (!problem || !kernel)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", problem ? "kernel" : "problem");
    fdm_softmax_plan made = {.struct_bytes = sizeof made, .problem = *problem};
    fdm_status status = validate(problem);
    if (!status)
        status = companion_variant(&softmax_operation, device, problem, kernel, variant, &made.choice);
    return status ? status : STRUCT_WRITE(fdm_softmax_plan, plan, &made);
}

fdm_status fdm_prepare_softmax(const fdm_softmax_plan *plan) {
    struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
    fdm_softmax_plan room;
    if (!(plan = plan_read(plan, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    return companion_prepare(&plan->choice, requests, softmax_requests(plan, requests), "shape or workspace");
}

fdm_status fdm_softmax_kernel(int32_t index, const char **name, const char **description) {
    return companion_kernel_at(&softmax_operation, index, name, description);
}

/* ---- execute ---- */

/* The tensor's axes as three of rows: leading ones have extent 1. */
static struct softmax_rows rows_of(const fdm_tensor *t) {
    struct softmax_rows rows = {.data = t ? tensor_data(t) : NULL};
    for (int32_t i = 0; t && i + 1 < t->ndim; i++)
        rows.stride[i + SOFTMAX_ROW_AXES - (t->ndim - 1)] = tensor_stride(t, i);
    return rows;
}

/* Where every tensor's rows are as far apart along all axes, they are those of one; 1 when so. */
static int join_axes(struct softmax_params *a) {
    struct softmax_rows *const all[] = {&a->in, &a->out, &a->dout, &a->mask};
    const int64_t outer = (int64_t)a->rows / a->extent[0] / a->extent[1];
    for (int32_t i = 0; i < 4; i++) {
        const int64_t *s = all[i]->stride, step = a->extent[1] > 1 ? s[2] : a->extent[0] > 1 ? s[1] : s[0];
        if (!all[i]->data)
            continue;
        if ((a->extent[0] > 1 && s[1] != step * a->extent[1]) ||
            (outer > 1 && s[0] != step * a->extent[1] * a->extent[0]))
            return 0;
    }
    for (int32_t i = 0; i < 4; i++) {
        int64_t *s = all[i]->stride;
        s[2] = a->extent[1] > 1 ? s[2] : a->extent[0] > 1 ? s[1] : s[0];
    }
    return 1;
}

static int is_same_problem(const fdm_softmax_problem *planned, const fdm_softmax_problem *now) {
    return planned->dtype == now->dtype && planned->rows == now->rows && planned->columns == now->columns &&
           planned->log == now->log && planned->has_mask == now->has_mask &&
           planned->negative_scale == now->negative_scale && planned->aligned <= now->aligned;
}

/* `called` has been described. */
static fdm_status execute(const void *planned, const void *called, void *workspace, size_t bytes, void *stream) {
    const fdm_softmax_plan *plan = planned;
    const struct call *call = called;
    const fdm_softmax_tensors *t = call->tensors;
    const int backward = plan->problem.pass == FDM_BACKWARD;
    const fdm_tensor *first = backward ? t->out : t->x, *mask = plan->problem.has_mask ? t->mask : NULL;
    const double scale = call->options->scale;
    if (plan->problem.rows == 0 || plan->problem.columns == 0)
        return FDM_OK;
    struct softmax_params params = {.in = rows_of(first),
                                    .dout = rows_of(backward ? t->dout : NULL),
                                    .out = rows_of(backward ? t->dx : t->out),
                                    .mask = rows_of(mask),
                                    .rows = (uint32_t)plan->problem.rows,
                                    .columns = (uint32_t)plan->problem.columns,
                                    .extent = {1, 1},
                                    .mask_column = mask ? (uint32_t)tensor_stride(mask, mask->ndim - 1) : 0,
                                    .scale = backward || fabs(scale) >= (double)FLT_MIN ? (float)scale
                                             : scale < 0                                ? -FLT_MIN
                                                                                        : FLT_MIN};
    for (int32_t i = 0; i < 2; i++)
        if (first->ndim - 3 + i >= 0)
            params.extent[i] = (uint32_t)first->shape[first->ndim - 3 + i];
    params.flat = first->ndim <= 2 || join_axes(&params);
    const fdm_status status = companion_check_workspace(&plan->choice, workspace, bytes);
    return status ? status : softmax_launch(plan, &params, workspace, stream);
}

fdm_status fdm_execute_softmax(const fdm_softmax_plan *plan, const fdm_softmax_tensors *tensors,
                               const fdm_softmax_options *options, void *workspace, size_t workspace_bytes,
                               void *stream) {
    struct call call;
    fdm_softmax_plan room;
    fdm_softmax_problem now;
    if (!(plan = plan_read(plan, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = read_call(tensors, options, &call);
    if (status || (status = describe(plan->problem.pass, &call, &now)))
        return status;
    const fdm_tensor *first = plan->problem.pass == FDM_BACKWARD ? call.tensors->out : call.tensors->x;
    if (first->device.index != plan->choice.device.index || !is_same_problem(&plan->problem, &now))
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the tensors and options are another problem, or on another device, than the plan's");
    return execute(plan, &call, workspace, workspace_bytes, stream);
}

fdm_status fdm_softmax(fdm_pass pass, const fdm_softmax_tensors *tensors, const fdm_softmax_options *options,
                       const fdm_allocator *allocator) {
    struct call call;
    fdm_softmax_problem problem;
    fdm_softmax_plan plan;
    fdm_device device;
    int measures;
    fdm_status status = read_call(tensors, options, &call);
    if (status || (status = describe(pass, &call, &problem)))
        return status;
    const fdm_tensor *first = pass == FDM_BACKWARD ? call.tensors->out : call.tensors->x;
    if ((status = cuda_device_facts(first->device.index, &device)) ||
        (status = plan_on(&device, &problem, call.options->kernel, call.options->tune, &plan, &measures)))
        return status;
    device.struct_bytes = sizeof device;
    if (measures && companion_measure_first(&softmax_operation, &device, &problem, call.options->stream) &&
        (status = plan_on(&device, &problem, call.options->kernel, call.options->tune, &plan, &measures)))
        return status;
    return companion_once(&plan.choice, allocator, execute, &plan, &call, call.options->stream);
}
