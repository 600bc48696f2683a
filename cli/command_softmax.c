/* command_softmax.c: fdm bench softmax, fdm plan --op softmax. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "companion_run.h"

static const char help[] =
    "usage: fdm bench softmax [OPTION ...]\n"
    "       fdm plan --op softmax [OPTION ...]\n"
    "\n"
    "bench times every kernel by name, each with the bytes it must move a second (x read, out written; of the\n"
    "backward out and dout read, dx written); plan says which kernel a problem gets, and why.\n"
    "\n"
    "  --rows N --columns N   (4096, 4096)\n"
    "  --dtype NAME       fp32, fp16, bf16                   (bf16)\n"
    "  --pass PASS        forward or backward                (forward)\n"
    "  --log  --mask  --scale X                              (softmax, none, 1)\n"
    "  --device DEVICE    bench: cuda, cuda:N                (cuda)\n"
    "                     plan: sm_90, ...                   (sm_90)\n"
    "  --kernel NAME      one kernel\n"
    "  --iters N  --check                                    (10) bench; compare with float64\n"
    "  --explain          plan: each step of the choice on its own line\n"
    "  --json\n";

struct request {
    int64_t rows, columns, iters;
    fdm_dtype dtype;
    fdm_pass pass;
    int log, mask, check, explain, json;
    double scale;
    const char *device, *kernel;
};

enum {
    OPT_ROWS = 256,
    OPT_COLUMNS,
    OPT_ITERS,
    OPT_LOG,
    OPT_MASK,
    OPT_CHECK,
    OPT_EXPLAIN,
    OPT_JSON,
    OPT_DTYPE,
    OPT_PASS,
    OPT_SCALE,
    OPT_DEVICE,
    OPT_KERNEL,
    OPT_HELP
};

static const struct option options[] = {{"rows", required_argument, 0, OPT_ROWS},
                                        {"columns", required_argument, 0, OPT_COLUMNS},
                                        {"iters", required_argument, 0, OPT_ITERS},
                                        {"log", no_argument, 0, OPT_LOG},
                                        {"mask", no_argument, 0, OPT_MASK},
                                        {"check", no_argument, 0, OPT_CHECK},
                                        {"explain", no_argument, 0, OPT_EXPLAIN},
                                        {"json", no_argument, 0, OPT_JSON},
                                        {"dtype", required_argument, 0, OPT_DTYPE},
                                        {"pass", required_argument, 0, OPT_PASS},
                                        {"scale", required_argument, 0, OPT_SCALE},
                                        {"device", required_argument, 0, OPT_DEVICE},
                                        {"kernel", required_argument, 0, OPT_KERNEL},
                                        {"help", no_argument, 0, OPT_HELP},
                                        {0}};

/* 1, or 0 after a complaint. */
static int set_option(void *request, int option, const char *text) {
    struct request *r = request;
    int64_t *const numbers[] = {&r->rows, &r->columns, &r->iters};
    int *const flags[] = {&r->log, &r->mask, &r->check, &r->explain, &r->json};
    if (option <= OPT_ITERS)
        return parse_integer(options[option - OPT_ROWS].name, text, 1, 1 << 30, numbers[option - OPT_ROWS]);
    if (option <= OPT_JSON)
        return *flags[option - OPT_LOG] = 1;
    switch (option) {
    case OPT_DTYPE:
        r->dtype = fdm_dtype_from_name(text);
        return (r->dtype >= FDM_FLOAT32 && r->dtype <= FDM_BFLOAT16) ||
               complain(0, "--dtype is '%s'; it must be fp32, fp16 or bf16", text);
    case OPT_PASS:
        r->pass = strcmp(text, "backward") == 0 ? FDM_BACKWARD : FDM_FORWARD;
        return r->pass == FDM_BACKWARD || strcmp(text, "forward") == 0 ||
               complain(0, "--pass is '%s'; it must be forward or backward", text);
    case OPT_SCALE: return parse_real("scale", text, &r->scale);
    case OPT_DEVICE: r->device = text; return 1;
    default: r->kernel = text; return 1;
    }
}

/* -1: go on; else the exit code. */
static int read_options(struct request *r, int argc, char **argv) {
    static const struct companion_command command = {"softmax", help, options, OPT_HELP, set_option};
    return companion_read_options(&command, r, argc, argv);
}

static struct request default_request(const char *device) {
    return (struct request){
        .rows = 4096, .columns = 4096, .iters = 10, .dtype = FDM_BFLOAT16, .scale = 1, .device = device};
}

static fdm_softmax_problem problem_of(const struct request *r) {
    return (fdm_softmax_problem){.pass = r->pass,
                                 .dtype = r->dtype,
                                 .rows = r->rows,
                                 .columns = r->columns,
                                 .log = r->log,
                                 .has_mask = r->mask && r->pass == FDM_FORWARD,
                                 .negative_scale = r->scale < 0 && r->pass == FDM_FORWARD,
                                 .aligned = r->columns * fdm_dtype_bytes(r->dtype) % 16 ? 1 : 2};
}

int tune_words_softmax(int argc, char **argv, fdm_softmax_problem *problem) {
    struct request r = default_request("sm_90");
    const int right = read_options(&r, argc, argv) < 0;
    *problem = problem_of(&r);
    return right;
}

int plan_softmax(int argc, char **argv) {
    struct request r = default_request("sm_90");
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_softmax_plan plan = {.struct_bytes = sizeof plan};
    const int code = read_options(&r, argc, argv);
    if (code >= 0)
        return code;
    if (!companion_device(r.device, 1, &device))
        return EXIT_USAGE;
    const fdm_softmax_problem problem = problem_of(&r);
    const fdm_status status = fdm_plan_softmax(&device, &problem, r.kernel, &plan);
    if (status)
        return fail(status);
    companion_print_choice(device.name, &plan.choice, r.explain, r.json);
    return EXIT_FINE;
}

/* ---- bench ---- */

enum { ROWS_CHECKED = 8 };

struct bench {
    struct request r;
    struct companion_buffer x, mask, out, dout, dx;
    fdm_softmax_tensors tensors;
    fdm_softmax_options options;
    fdm_softmax_plan plan;
    void *workspace;
    fdm_device device;
};

static fdm_status call(void *context) {
    struct bench *b = context;
    return fdm_execute_softmax(&b->plan, &b->tensors, &b->options, b->workspace, (size_t)b->plan.choice.workspace_bytes,
                               NULL);
}

/* The largest error of a row over the row's largest element, of rows spread evenly. */
static double worst_error(struct bench *b) {
    const int backward = b->r.pass == FDM_BACKWARD;
    struct companion_buffer *result = backward ? &b->dx : &b->out;
    const fdm_device_id host = {FDM_CPU, 0};
    double worst = 0, *want = allocate_or_exit((size_t)b->r.columns * sizeof *want);
    if (fdm_memory_copy(result->host, host, result->tensor.data, b->device.id, (size_t)result->bytes))
        return INFINITY;
    const uint8_t *mask = b->mask.host;
    for (int64_t n = 0; n < ROWS_CHECKED && n < b->r.rows; n++) {
        const int64_t row = n * (b->r.rows - 1) / (ROWS_CHECKED - 1), first = row * b->r.columns;
        double largest = -INFINITY, sum = 0, size = 0, error = 0;
        for (int64_t j = 0; j < b->r.columns; j++) {
            const double y = companion_get(&b->out, first + j), d = backward ? companion_get(&b->dout, first + j) : 0;
            const double z = b->r.mask && !mask[first + j] ? -INFINITY : companion_get(&b->x, first + j) * b->r.scale;
            want[j] = z;
            largest = fmax(largest, z);
            sum += !backward ? 0 : b->r.log ? d : y * d;
        }
        for (int64_t j = 0; !backward && j < b->r.columns; j++)
            sum += exp(want[j] - largest);
        for (int64_t j = 0; j < b->r.columns; j++) {
            const double y = companion_get(&b->out, first + j), d = backward ? companion_get(&b->dout, first + j) : 0;
            if (backward)
                want[j] = b->r.scale * (b->r.log ? d - exp(y) * sum : y * (d - sum));
            else
                want[j] = b->r.log ? want[j] - largest - log(sum) : exp(want[j] - largest) / sum;
            if (isinf(want[j]))
                continue;
            size = fmax(size, fabs(want[j]));
            error = fmax(error, fabs(companion_get(result, first + j) - want[j]));
            error = companion_get(result, first + j) == companion_get(result, first + j) ? error : INFINITY;
        }
        worst = fmax(worst, size > 0 ? error / size : error);
    }
    release(want);
    return worst;
}

static void make_tensors(struct bench *b) {
    const int64_t shape[2] = {b->r.rows, b->r.columns};
    const int backward = b->r.pass == FDM_BACKWARD;
    companion_make(&b->x, b->device.id, b->r.dtype, 2, shape, 2);
    companion_make(&b->out, b->device.id, b->r.dtype, 2, shape, backward ? 1.0 / (double)b->r.columns : 0);
    companion_make(&b->dout, b->device.id, b->r.dtype, 2, shape, 1);
    companion_make(&b->dx, b->device.id, b->r.dtype, 2, shape, 0);
    companion_make(&b->mask, b->device.id, FDM_BOOL, 2, shape, 0); /* all bytes 0xff: everything counts */
    b->tensors = (fdm_softmax_tensors){.struct_bytes = sizeof(fdm_softmax_tensors),
                                       .x = &b->x.tensor,
                                       .mask = b->r.mask ? &b->mask.tensor : NULL,
                                       .out = &b->out.tensor,
                                       .dout = &b->dout.tensor,
                                       .dx = &b->dx.tensor};
    b->options =
        (fdm_softmax_options){.struct_bytes = sizeof(fdm_softmax_options), .scale = b->r.scale, .log = b->r.log};
}

static fdm_status time_kernel(void *context, const char *name, struct companion_row *row) {
    struct bench *b = context;
    fdm_softmax_problem problem;
    fdm_status status = fdm_describe_softmax(b->r.pass, &b->tensors, &b->options, &problem);
    b->plan.struct_bytes = sizeof b->plan;
    if (status || (status = fdm_plan_softmax(&b->device, &problem, name, &b->plan)))
        return status;
    status = companion_time_plan(b->device.id, &b->plan.choice, call, b, &b->workspace, (int32_t)b->r.iters, row);
    row->rate = (double)b->x.bytes * (b->r.pass == FDM_BACKWARD ? 3 : 2) / row->time.median * 1e-9;
    row->worst_error = !status && b->r.check ? worst_error(b) : 0;
    return status;
}

static double tolerance(fdm_dtype dtype) { return dtype == FDM_FLOAT32 ? 1e-5 : dtype == FDM_FLOAT16 ? 2e-3 : 1e-2; }

int bench_softmax(int argc, char **argv) {
    static struct bench b;
    b.r = default_request("cuda");
    const int code = read_options(&b.r, argc, argv);
    if (code >= 0)
        return code;
    if (!companion_device(b.r.device, 0, &b.device))
        return EXIT_USAGE;
    make_tensors(&b);
    const struct companion_bench bench = {.operation = "softmax",
                                          .subject = "problem",
                                          .unit = "GB/s",
                                          .json_unit = "gb_per_second",
                                          .kernel = fdm_softmax_kernel,
                                          .time = time_kernel,
                                          .context = &b,
                                          .only = b.r.kernel,
                                          .limit = tolerance(b.r.dtype),
                                          .check = b.r.check,
                                          .json = b.r.json};
    return companion_bench(&bench);
}
