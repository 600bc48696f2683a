/* run.c: one attention call of the tool: its tensors, on the host and on its device, and its timed runs. */
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/elements.h"

const char *const run_tensor_names[RUN_TENSORS] = {
    "q",       "k",          "v",    "mask", "bias", "interval_start", "interval_end", "sink", "row_start",
    "row_end", "block_mask", "tree", "out",  "lse",  "dout",           "dlse",         "dq",   "dk",
    "dv",      "dbias",      "dsink"};

static const fdm_device_id host = {FDM_CPU, 0};

static fdm_tensors view_on(struct run *run, fdm_pass pass, fdm_device_id device) {
    fdm_tensor *view[RUN_TENSORS];
    for (int i = 0; i < RUN_TENSORS; i++) {
        struct file_tensor *t = &run->tensors[i];
        void *data = device.type == FDM_CUDA && run->on_device[i] ? run->on_device[i] : t->data;
        run->views[i] = (fdm_tensor){data, device, t->ndim, fdm_data_type_of(t->dtype), t->shape, NULL, 0};
        view[i] = t->data ? &run->views[i] : NULL;
    }
    fdm_tensors t = {.struct_bytes = sizeof t,
                     .q = view[RUN_Q],
                     .k = view[RUN_K],
                     .v = view[RUN_V],
                     .mask = view[RUN_MASK],
                     .bias = view[RUN_BIAS],
                     .interval_start = view[RUN_START],
                     .interval_end = view[RUN_END],
                     .sink = view[RUN_SINK],
                     .row_start = view[RUN_ROW_START],
                     .row_end = view[RUN_ROW_END],
                     .block_mask = view[RUN_BLOCKS],
                     .tree = view[RUN_TREE],
                     .out = view[RUN_OUT],
                     .lse = view[RUN_LSE]};
    if (pass == FDM_BACKWARD) {
        t.dout = view[RUN_DOUT];
        t.dlse = view[RUN_DLSE];
        t.dq = view[RUN_DQ];
        t.dk = view[RUN_DK];
        t.dv = view[RUN_DV];
        t.dbias = view[RUN_DBIAS];
        t.dsink = view[RUN_DSINK];
    }
    return t;
}

fdm_tensors run_view(struct run *run, fdm_pass pass) { return view_on(run, pass, host); }
fdm_tensors run_device_view(struct run *run, fdm_pass pass) { return view_on(run, pass, run->device.id); }

void run_make_tensor(struct file_tensor *tensor, const char *name, fdm_dtype dtype, int32_t ndim,
                     const int64_t *shape) {
    *tensor = (struct file_tensor){.dtype = dtype, .ndim = ndim};
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    memcpy(tensor->shape, shape, (size_t)ndim * sizeof *shape);
    tensor->bytes = (size_t)(file_tensor_elements(tensor) * fdm_dtype_bytes(dtype));
    tensor->data = allocate_or_exit(tensor->bytes);
    memset(tensor->data, 0xff, tensor->bytes);
}

static void make_like(struct run *run, enum run_tensor which, enum run_tensor like) {
    const struct file_tensor *t = &run->tensors[like];
    if (t->data)
        run_make_tensor(&run->tensors[which], run_tensor_names[which], t->dtype, t->ndim, t->shape);
}

void run_allocate_outputs(struct run *run, int backward) {
    const struct file_tensor *q = &run->tensors[RUN_Q], *v = &run->tensors[RUN_V];
    const int64_t out[4] = {q->shape[0], q->shape[1], q->shape[2], v->shape[3]};
    const int64_t lse[3] = {q->shape[0], q->shape[2], q->shape[1]};
    run_make_tensor(&run->tensors[RUN_OUT], "out", q->dtype, 4, out);
    run_make_tensor(&run->tensors[RUN_LSE], "lse", q->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32, 3, lse);
    if (!backward)
        return;
    if (!run->tensors[RUN_DOUT].data)
        run_make_normal(&run->tensors[RUN_DOUT], "dout", q->dtype, 4, out, 4);
    make_like(run, RUN_DQ, RUN_Q);
    make_like(run, RUN_DK, RUN_K);
    make_like(run, RUN_DV, RUN_V);
    make_like(run, RUN_DBIAS, RUN_BIAS);
    make_like(run, RUN_DSINK, RUN_SINK);
}

/* Sum of four uniform numbers of splitmix64: mean 0, variance 1, near enough to normal for timing and checking. */
void run_make_normal(struct file_tensor *tensor, const char *name, fdm_dtype dtype, int32_t ndim, const int64_t *shape,
                     uint64_t seed) {
    run_make_tensor(tensor, name, dtype, ndim, shape);
    int64_t elements = file_tensor_elements(tensor);
    for (int64_t i = 0; i < elements; i++) {
        uint64_t z = (seed << 40) + (uint64_t)i * 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        double sum = (double)(z & 0xffff) + (double)(z >> 16 & 0xffff) + (double)(z >> 32 & 0xffff) + (double)(z >> 48);
        element_store(tensor->data, i, dtype, (sum / 65535 - 2) * 1.7320508075688772);
    }
}

fdm_status run_make_topk(struct run *run, int64_t window) {
    struct file_tensor *bias = &run->tensors[RUN_BIAS];
    const int64_t shape[3] = {bias->shape[0], bias->shape[1], bias->shape[bias->ndim - 1]};
    run_make_tensor(&run->tensors[RUN_START], "interval_start", FDM_INT32, 3, shape);
    run_make_tensor(&run->tensors[RUN_END], "interval_end", FDM_INT32, 3, shape);
    run_view(run, FDM_FORWARD);
    run->topk = window;
    return fdm_topk_intervals(&run->views[RUN_BIAS], NULL, window, run->tensors[RUN_Q].shape[1], &run->views[RUN_START],
                              &run->views[RUN_END], NULL, 0, NULL);
}

/* ---- the device ---- */

static int on_cuda(const struct run *run) { return run->device.id.type == FDM_CUDA; }

/* Over the copies of the host's intervals: what the device's kernels see is what the device has made. */
static fdm_status make_topk_there(struct run *run) {
    const fdm_tensors t = run_device_view(run, FDM_FORWARD);
    const size_t bytes = fdm_topk_intervals_workspace(t.bias, NULL);
    void *workspace = NULL;
    fdm_status status = fdm_memory_fill(run->device.id, run->on_device[RUN_END], 0xff, run->tensors[RUN_END].bytes);
    if (!status)
        status = fdm_memory_allocate(run->device.id, bytes, &workspace);
    if (!status)
        status = fdm_topk_intervals(t.bias, NULL, run->topk, run->tensors[RUN_Q].shape[1], &run->views[RUN_START],
                                    &run->views[RUN_END], workspace, bytes, NULL);
    if (!status)
        status = fdm_synchronize(run->device.id);
    fdm_memory_release(run->device.id, workspace);
    return status;
}

fdm_status run_upload(struct run *run) {
    fdm_status status = FDM_OK;
    for (int i = 0; i < RUN_TENSORS && on_cuda(run) && !status; i++) {
        const struct file_tensor *t = &run->tensors[i];
        if (t->data && !(status = fdm_memory_allocate(run->device.id, t->bytes, &run->on_device[i])))
            status = fdm_memory_copy(run->on_device[i], run->device.id, t->data, host, t->bytes);
    }
    return !status && on_cuda(run) && run->topk ? make_topk_there(run) : status;
}

void run_release(struct run *run) {
    for (int i = 0; i < RUN_TENSORS; i++) {
        fdm_memory_release(run->device.id, run->on_device[i]);
        run->on_device[i] = NULL;
    }
}

static int written_by(fdm_pass pass, int role) {
    return pass == FDM_FORWARD ? role == RUN_OUT || role == RUN_LSE : role >= RUN_DQ;
}

static fdm_status poison_outputs(struct run *run, fdm_pass pass) {
    fdm_status status = FDM_OK;
    for (int i = 0; i < RUN_TENSORS && !status; i++)
        if (written_by(pass, i) && run->tensors[i].data) {
            memset(run->tensors[i].data, 0xff, run->tensors[i].bytes);
            if (on_cuda(run))
                status = fdm_memory_fill(run->device.id, run->on_device[i], 0xff, run->tensors[i].bytes);
        }
    return status;
}

static fdm_status download_outputs(struct run *run, fdm_pass pass) {
    fdm_status status = FDM_OK;
    for (int i = 0; i < RUN_TENSORS && on_cuda(run) && !status; i++)
        if (written_by(pass, i) && run->tensors[i].data)
            status =
                fdm_memory_copy(run->tensors[i].data, host, run->on_device[i], run->device.id, run->tensors[i].bytes);
    return status;
}

/* ---- plan and runs ---- */

fdm_status run_plan(struct run *run, fdm_pass pass, fdm_plan *plan) {
    fdm_problem problem;
    const fdm_tensors tensors = run_device_view(run, pass);
    fdm_status status = fdm_describe(pass, &tensors, &run->options, &problem);
    plan->struct_bytes = sizeof *plan;
    if (!status)
        status = fdm_plan_attention(&run->device, &problem, &run->options, plan);
    if (status)
        return status;
    progress("making the kernels of %s", plan->kernel);
    status = fdm_prepare(plan);
    progress(NULL);
    return status;
}

struct stopwatch {
    const fdm_plan *plan;
    fdm_tensors tensors;
    void *workspace;
    fdm_launch launch;
    fdm_timer *timer;
};

/* Mean time of `calls` calls one after the other. */
static fdm_status sample(const struct stopwatch *s, int32_t calls, double *seconds) {
    fdm_status status = fdm_timer_start(s->timer, s->launch.stream);
    for (int32_t i = 0; i < calls && !status; i++)
        status = fdm_execute(s->plan, &s->tensors, s->workspace, (size_t)s->plan->workspace_bytes, &s->launch);
    if (!status)
        status = fdm_timer_stop(s->timer, s->launch.stream, seconds);
    *seconds /= calls;
    return status;
}

/* One call; on a CUDA device, as many as bring its clocks up. *calls is what a sample is to have. */
static fdm_status warm_up(const struct stopwatch *s, int cuda, int32_t *calls) {
    static const double sample_seconds = 1e-3, warm_seconds = 2e-2;
    enum { CALLS_MAX = 200 };
    double seconds = 0;
    fdm_status status = sample(s, 1, &seconds);
    *calls = 1;
    if (status || !cuda || (status = sample(s, 1, &seconds)))
        return status;
    while (*calls < CALLS_MAX && *calls * seconds < sample_seconds)
        ++*calls;
    for (double warm = seconds; warm < warm_seconds && !status; warm += *calls * seconds + 1e-4)
        status = sample(s, *calls, &seconds);
    return status;
}

static fdm_status time_samples(const struct stopwatch *s, int cuda, int32_t iters, double *seconds) {
    int32_t calls;
    fdm_status status = warm_up(s, cuda, &calls);
    for (int32_t i = 0; i < iters && !status; i++) {
        progress("%s, %d of %d", s->plan->kernel, i + 1, iters);
        status = sample(s, calls, &seconds[i]);
    }
    return status;
}

fdm_status run_timed(struct run *run, const fdm_plan *plan, int32_t iters, double *seconds) {
    const fdm_pass pass = plan->problem.pass;
    struct stopwatch s = {.plan = plan,
                          .tensors = run_device_view(run, pass),
                          .launch = {.struct_bytes = sizeof s.launch, .stream = run->options.stream}};
    progress("%s", plan->kernel);
    fdm_status status = poison_outputs(run, pass);
    if (!status)
        status = fdm_memory_allocate(run->device.id, (size_t)plan->workspace_bytes, &s.workspace);
    if (!status)
        status = fdm_timer_create(run->device.id, &s.timer);
    if (!status)
        status = time_samples(&s, on_cuda(run), iters, seconds);
    if (!status)
        status = download_outputs(run, pass);
    if (!status) { /* else the process ends, and fdm_last_error() stays what it is */
        fdm_timer_release(s.timer);
        fdm_memory_release(run->device.id, s.workspace);
    }
    progress(NULL);
    return status;
}
