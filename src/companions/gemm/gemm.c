/* gemm.c: the public entries of gemm: tensors are checked once, then plan, parameters, launch. */
#include <math.h>

#include "base/error.h"
#include "base/struct_bytes.h"
#include "companions/gemm/gemm_plan.h"
#include "problem/tensor.h"

_Static_assert(FDM_FLOAT16 == GEMM_FLOAT16 && FDM_BFLOAT16 == GEMM_BFLOAT16, "DTYPE is a number of fdm_dtype");

/* ---- describe ---- */

/* What a call is made of, C's rows contiguous: where its columns are, C^T = B^T A^T is computed. */
struct call {
    fdm_gemm_problem problem;
    struct gemm_params params;
    int32_t device;
    const char *kernel; /* of the options */
    int64_t tune;
    void *stream;
};

static fdm_status check_one(const fdm_tensor *tensor, const char *name, enum tensor_role role, const fdm_tensor *like) {
    fdm_status status;
    if (!tensor)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    if (tensor->ndim != 2 && tensor->ndim != 3)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has %d axes; it needs 2, or 3 with a batch", name,
                         tensor->ndim);
    if ((status = tensor_check(tensor, name, tensor->ndim, role, 0)))
        return status;
    if (fdm_dtype_of(tensor) != fdm_dtype_of(like))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is %s, but a is %s", name,
                         fdm_dtype_name(fdm_dtype_of(tensor)), fdm_dtype_name(fdm_dtype_of(like)));
    return tensor_check_device(tensor, name, like, "a");
}

static int64_t extent_of(const fdm_tensor *t, int32_t axis) { return t->shape[t->ndim - 2 + axis]; }
static int64_t batch_of(const fdm_tensor *t) { return t->ndim == 3 ? t->shape[0] : 1; }

static fdm_status check_shape(const fdm_tensor *t, const char *name, int64_t rows, int64_t columns, int64_t batch,
                              int shared) {
    if (extent_of(t, 0) == rows && extent_of(t, 1) == columns && (batch_of(t) == batch || (shared && batch_of(t) == 1)))
        return FDM_OK;
    char is[96], wanted[96];
    const int64_t shape[3] = {batch, rows, columns};
    return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is %s; it must be %s%s", name,
                     tensor_shape_text(is, sizeof is, t->shape, t->ndim),
                     tensor_shape_text(wanted, sizeof wanted, shape, 3),
                     shared ? ", where the first may be 1 or left out" : ", where a first of 1 may be left out");
}

static fdm_status check_apart(const fdm_gemm_tensors *t, int has_c) {
    enum { C = 2 };
    const struct named_tensor all[] = {
        {"a", t->a, 0, 0}, {"b", t->b, 0, 0}, [C] = {"c", has_c ? t->c : NULL, 0, 0}, {"out", t->out, 1, 1u << C}};
    return tensors_check_apart(all, 4);
}

/* Strides in elements, 0 on axes of extent 1. */
static struct gemm_matrix matrix_of(const fdm_tensor *t, int64_t batch) {
    return (struct gemm_matrix){tensor_data(t), batch > 1 && batch_of(t) > 1 ? tensor_stride(t, 0) : 0,
                                tensor_stride(t, t->ndim - 2), tensor_stride(t, t->ndim - 1)};
}

static void swap_axes(struct gemm_matrix *x) {
    const int64_t row = x->row;
    x->row = x->column;
    x->column = row;
}

/* 1: rows are contiguous, 0: columns are, -1: neither. */
static int rows_contiguous(const struct gemm_matrix *x, int64_t rows, int64_t columns) {
    if (columns <= 1 && rows > 1)
        return x->row == 1 ? 0 : 1;
    return x->column == 1 || columns <= 1 ? 1 : x->row == 1 || rows <= 1 ? 0 : -1;
}

/* A tensor map can say where the matrix lies: the address and the strides of what is not contiguous. */
static int is_mappable(const struct gemm_matrix *x, int contiguous_rows, int64_t rows, int64_t columns) {
    const int64_t outer = contiguous_rows ? rows : columns, stride = contiguous_rows ? x->row : x->column;
    const int64_t limit = (int64_t)1 << 39;
    return (uintptr_t)x->data % 16 == 0 && (outer <= 1 || (stride > 0 && stride % 8 == 0 && stride < limit)) &&
           x->batch % 8 == 0 && x->batch < limit;
}

static fdm_status check_contiguous(const struct gemm_matrix *x, const char *name, int64_t rows, int64_t columns,
                                   int *contiguous_rows) {
    *contiguous_rows = rows_contiguous(x, rows, columns);
    return *contiguous_rows >= 0 ? FDM_OK
                                 : error_set(FDM_ERROR_INVALID_ARGUMENT,
                                             "%s has strides %lld and %lld; rows or columns must be contiguous", name,
                                             (long long)x->row, (long long)x->column);
}

static fdm_status check_layouts(struct call *c) {
    fdm_gemm_problem *p = &c->problem;
    struct gemm_params *a = &c->params;
    int of_a, of_b, of_c = 1, of_out;
    fdm_status status;
    if ((status = check_contiguous(&a->a, "a", p->m, p->k, &of_a)) ||
        (status = check_contiguous(&a->b, "b", p->k, p->n, &of_b)) ||
        (status = check_contiguous(&a->out, "out", p->m, p->n, &of_out)) ||
        (p->has_c && (status = check_contiguous(&a->c, "c", p->m, p->n, &of_c))))
        return status;
    p->a_rows_contiguous = of_a;
    p->b_rows_contiguous = of_b;
    p->mappable = is_mappable(&a->a, of_a, p->m, p->k) && is_mappable(&a->b, of_b, p->k, p->n) &&
                  is_mappable(&a->out, 1, p->m, p->n) && of_out == 1;
    return FDM_OK;
}

static fdm_status check_limits(const fdm_tensor *a, const fdm_gemm_problem *p) {
    const double elements = (double)p->batch * (double)p->m * (double)p->n;
    if (a->device.type != FDM_CUDA)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "a is on the CPU; gemm is for tensors on a CUDA device (torch.matmul takes both)");
    if (p->dtype != FDM_FLOAT16 && p->dtype != FDM_BFLOAT16)
        return error_set(FDM_ERROR_UNSUPPORTED, "a is %s; gemm takes float16 and bfloat16",
                         fdm_dtype_name(fdm_dtype_of(a)));
    if (p->m >= INT32_MAX / 2 || p->n >= INT32_MAX / 2 || p->k >= INT32_MAX / 2 || p->batch >= INT32_MAX ||
        elements >= 0x1p38)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "the product has %lld batches of %lld x %lld x %lld; gemm takes extents below 2^30 and fewer "
                         "than 2^38 results",
                         (long long)p->batch, (long long)p->m, (long long)p->n, (long long)p->k);
    return FDM_OK;
}

static fdm_status describe_whole(const fdm_gemm_tensors *t, const fdm_gemm_options *o, struct call *c) {
    fdm_status status;
    if (!isfinite(o->alpha) || !isfinite(o->beta))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "alpha is %g and beta is %g; they must be finite", o->alpha,
                         o->beta);
    if (!t->a)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "a is NULL");
    const int has_c = o->beta != 0;
    if ((status = check_one(t->a, "a", TENSOR_INPUT, t->a)) || (status = check_one(t->b, "b", TENSOR_INPUT, t->a)) ||
        (status = check_one(t->out, "out", TENSOR_OUTPUT, t->a)) ||
        (has_c && (status = check_one(t->c, "c", TENSOR_INPUT, t->a))))
        return status;
    const int64_t batch = batch_of(t->a) == 1 ? batch_of(t->b) : batch_of(t->a);
    const int64_t m = extent_of(t->a, 0), k = extent_of(t->a, 1), n = extent_of(t->b, 1);
    if ((status = check_shape(t->b, "b", k, n, batch, 1)) || (status = check_shape(t->out, "out", m, n, batch, 0)) ||
        (has_c && (status = check_shape(t->c, "c", m, n, batch, 1))) || (status = check_apart(t, has_c)))
        return status;
    *c = (struct call){.problem = {.dtype = fdm_dtype_of(t->a),
                                   .batch = batch,
                                   .m = m,
                                   .n = n,
                                   .k = k,
                                   .has_c = has_c,
                                   .accumulate_float16 = o->accumulate_float16 != 0},
                       .params = {.a = matrix_of(t->a, batch),
                                  .b = matrix_of(t->b, batch),
                                  .c = has_c ? matrix_of(t->c, batch) : (struct gemm_matrix){0},
                                  .out = matrix_of(t->out, batch),
                                  .alpha = (float)o->alpha,
                                  .beta = (float)o->beta},
                       .device = t->a->device.index,
                       .kernel = o->kernel,
                       .tune = o->tune,
                       .stream = o->stream};
    if ((status = check_limits(t->a, &c->problem)))
        return status;
    if (rows_contiguous(&c->params.out, m, n) == 0) {
        const struct gemm_matrix a = c->params.a;
        c->params.a = c->params.b;
        c->params.b = a;
        c->problem.m = n, c->problem.n = m;
        swap_axes(&c->params.a), swap_axes(&c->params.b), swap_axes(&c->params.c), swap_axes(&c->params.out);
    }
    c->params.m = (int32_t)c->problem.m, c->params.n = (int32_t)c->problem.n;
    c->params.k = (int32_t)k, c->params.batch = (int32_t)batch;
    return check_layouts(c);
}

/* options may be NULL. */
static fdm_status describe(const fdm_gemm_tensors *tensors, const fdm_gemm_options *options, struct call *c) {
    const fdm_gemm_options standard = fdm_gemm_options_default();
    fdm_gemm_tensors tensors_room;
    fdm_gemm_options options_room;
    const fdm_gemm_tensors *t = STRUCT_READ(fdm_gemm_tensors, tensors, &tensors_room);
    const fdm_gemm_options *o = options ? STRUCT_READ(fdm_gemm_options, options, &options_room) : &standard;
    return t && o ? describe_whole(t, o, c) : FDM_ERROR_INVALID_ARGUMENT;
}

fdm_status fdm_describe_gemm(const fdm_gemm_tensors *tensors, const fdm_gemm_options *options,
                             fdm_gemm_problem *problem) {
    struct call call;
    if (!problem)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "problem is NULL");
    const fdm_status status = describe(tensors, options, &call);
    if (!status)
        *problem = call.problem;
    return status;
}

/* ---- plan ---- */

static fdm_status validate(const fdm_gemm_problem *p) {
    const fdm_status status = companion_check_reserved(p->reserved, NULL);
    if (status)
        return status;
    if (p->dtype != FDM_FLOAT16 && p->dtype != FDM_BFLOAT16)
        return error_set(FDM_ERROR_UNSUPPORTED, "dtype is %s; gemm takes float16 and bfloat16",
                         fdm_dtype_name(p->dtype));
    if (p->m < 0 || p->n < 0 || p->k < 0 || p->batch < 0 || p->m >= INT32_MAX / 2 || p->n >= INT32_MAX / 2 ||
        p->k >= INT32_MAX / 2 || (double)p->batch * (double)p->m * (double)p->n >= 0x1p38)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "batch, m, n and k are %lld, %lld, %lld and %lld; they must be 0 to 2^30, of fewer than 2^38 "
                         "results",
                         (long long)p->batch, (long long)p->m, (long long)p->n, (long long)p->k);
    return FDM_OK;
}

static fdm_status plan_on(const fdm_device *device, const fdm_gemm_problem *problem, const char *kernel, int64_t tune,
                          fdm_gemm_plan *plan, int *measures) {
    const fdm_status status = validate(problem);
    *plan = (fdm_gemm_plan){.struct_bytes = sizeof *plan, .problem = *problem};
    return status ? status : companion_plan(&gemm_operation, device, problem, kernel, tune, &plan->choice, measures);
}

fdm_status fdm_plan_gemm(const fdm_device *device, const fdm_gemm_problem *problem, const char *kernel,
                         fdm_gemm_plan *plan) {
    fdm_device room;
    if (!(device = STRUCT_READ(fdm_device, device, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    if (!problem)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "problem is NULL");
    fdm_gemm_plan made;
    int measures;
    const fdm_status status = plan_on(device, problem, kernel, FDM_TUNE_DEFAULT, &made, &measures);
    return status ? status : STRUCT_WRITE(fdm_gemm_plan, plan, &made);
}

/* A caller's plan, whole. NULL with a sentence. */
static const fdm_gemm_plan *plan_read(const fdm_gemm_plan *plan, fdm_gemm_plan *room) {
    plan = STRUCT_READ(fdm_gemm_plan, plan, room);
    return plan && !companion_check_reserved(plan->problem.reserved, &plan->choice) ? plan : NULL;
}

fdm_status fdm_plan_gemm_variant(const fdm_device *device, const fdm_gemm_problem *problem, const char *kernel,
                                 int32_t variant, fdm_gemm_plan *plan) {
    fdm_device room;
    if (!(device = STRUCT_READ(fdm_device, device, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    if (!problem || !kernel)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", problem ? "kernel" : "problem");
    fdm_gemm_plan made = {.struct_bytes = sizeof made, .problem = *problem};
    fdm_status status = validate(problem);
    if (!status)
        status = companion_variant(&gemm_operation, device, problem, kernel, variant, &made.choice);
    return status ? status : STRUCT_WRITE(fdm_gemm_plan, plan, &made);
}

fdm_status fdm_prepare_gemm(const fdm_gemm_plan *plan) {
    struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
    fdm_gemm_plan room;
    if (!(plan = plan_read(plan, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    return companion_prepare(&plan->choice, requests, gemm_requests(plan, requests), "tile or workspace");
}

fdm_status fdm_gemm_kernel(int32_t index, const char **name, const char **description) {
    return companion_kernel_at(&gemm_operation, index, name, description);
}

/* ---- execute ---- */

static fdm_status execute(const void *planned, const void *called, void *workspace, size_t bytes, void *stream) {
    const fdm_gemm_plan *plan = planned;
    struct gemm_params params = ((const struct call *)called)->params;
    if (plan->problem.batch == 0 || plan->problem.m == 0 || plan->problem.n == 0)
        return FDM_OK;
    const fdm_status status = companion_check_workspace(&plan->choice, workspace, bytes);
    return status ? status : gemm_launch(plan, &params, workspace, stream);
}

static int is_same_problem(const fdm_gemm_problem *planned, const fdm_gemm_problem *now) {
    return planned->dtype == now->dtype && planned->batch == now->batch && planned->m == now->m &&
           planned->n == now->n && planned->k == now->k && planned->a_rows_contiguous == now->a_rows_contiguous &&
           planned->b_rows_contiguous == now->b_rows_contiguous && planned->has_c == now->has_c &&
           planned->accumulate_float16 == now->accumulate_float16 && planned->mappable <= now->mappable;
}

fdm_status fdm_execute_gemm(const fdm_gemm_plan *plan, const fdm_gemm_tensors *tensors, const fdm_gemm_options *options,
                            void *workspace, size_t workspace_bytes, void *stream) {
    struct call call;
    fdm_gemm_plan room;
    if (!(plan = plan_read(plan, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    const fdm_status status = describe(tensors, options, &call);
    if (status)
        return status;
    if (call.device != plan->choice.device.index || !is_same_problem(&plan->problem, &call.problem))
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the tensors and options are another problem, or on another device, than the plan's");
    return execute(plan, &call, workspace, workspace_bytes, stream);
}

fdm_status fdm_gemm(const fdm_gemm_tensors *tensors, const fdm_gemm_options *options, const fdm_allocator *allocator) {
    struct call call;
    fdm_gemm_plan plan;
    fdm_device device;
    int measures;
    fdm_status status = describe(tensors, options, &call);
    if (status || (status = cuda_device_facts(call.device, &device)) ||
        (status = plan_on(&device, &call.problem, call.kernel, call.tune, &plan, &measures)))
        return status;
    device.struct_bytes = sizeof device;
    if (measures && companion_measure_first(&gemm_operation, &device, &call.problem, call.stream) &&
        (status = plan_on(&device, &call.problem, call.kernel, call.tune, &plan, &measures)))
        return status;
    return companion_once(&plan.choice, allocator, execute, &plan, &call, call.stream);
}
