/* command_gemm.c: fdm bench gemm, fdm plan --op gemm. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "companion_run.h"

static const char help[] =
    "usage: fdm bench gemm [OPTION ...]\n"
    "       fdm plan --op gemm [OPTION ...]\n"
    "\n"
    "C = alpha A B + beta C, A m x k, B k x n. bench times every kernel by name; plan says which kernel a product\n"
    "gets, by which tile, and why.\n"
    "\n"
    "  --M N --N N --K N --batch N   (4096, as M, as M, 1)\n"
    "  --layout XY        N or T for A and for B: T when columns are contiguous (NN)\n"
    "  --dtype NAME       fp16 or bf16                       (bf16)\n"
    "  --alpha X --beta X                                    (1, 0)\n"
    "  --float16-sums     sums in float16\n"
    "  --device DEVICE    bench: cuda, cuda:N                (cuda)\n"
    "                     plan: sm_90, ...                   (sm_90)\n"
    "  --kernel NAME      one kernel\n"
    "  --iters N  --check                                    (10) bench; compare elements with float64\n"
    "  --explain          plan: each step of the choice on its own line\n"
    "  --json\n";

struct request {
    int64_t m, n, k, batch, iters;
    int float16_sums, check, explain, json;
    double alpha, beta;
    fdm_dtype dtype;
    const char *layout, *device, *kernel;
};

enum {
    OPT_M = 256,
    OPT_N,
    OPT_K,
    OPT_BATCH,
    OPT_ITERS,
    OPT_FLOAT16_SUMS,
    OPT_CHECK,
    OPT_EXPLAIN,
    OPT_JSON,
    OPT_ALPHA,
    OPT_BETA,
    OPT_DTYPE,
    OPT_LAYOUT,
    OPT_DEVICE,
    OPT_KERNEL,
    OPT_HELP
};

static const struct option options[] = {{"M", required_argument, 0, OPT_M},
                                        {"N", required_argument, 0, OPT_N},
                                        {"K", required_argument, 0, OPT_K},
                                        {"batch", required_argument, 0, OPT_BATCH},
                                        {"iters", required_argument, 0, OPT_ITERS},
                                        {"float16-sums", no_argument, 0, OPT_FLOAT16_SUMS},
                                        {"check", no_argument, 0, OPT_CHECK},
                                        {"explain", no_argument, 0, OPT_EXPLAIN},
                                        {"json", no_argument, 0, OPT_JSON},
                                        {"alpha", required_argument, 0, OPT_ALPHA},
                                        {"beta", required_argument, 0, OPT_BETA},
                                        {"dtype", required_argument, 0, OPT_DTYPE},
                                        {"layout", required_argument, 0, OPT_LAYOUT},
                                        {"device", required_argument, 0, OPT_DEVICE},
                                        {"kernel", required_argument, 0, OPT_KERNEL},
                                        {"help", no_argument, 0, OPT_HELP},
                                        {0}};

/* 1, or 0 after a complaint. */
static int set_option(void *request, int option, const char *text) {
    struct request *r = request;
    int64_t *const numbers[] = {&r->m, &r->n, &r->k, &r->batch, &r->iters};
    int *const flags[] = {&r->float16_sums, &r->check, &r->explain, &r->json};
    if (option <= OPT_ITERS)
        return parse_integer(options[option - OPT_M].name, text, 1, 1 << 20, numbers[option - OPT_M]);
    if (option <= OPT_JSON)
        return *flags[option - OPT_FLOAT16_SUMS] = 1;
    switch (option) {
    case OPT_ALPHA: return parse_real("alpha", text, &r->alpha);
    case OPT_BETA: return parse_real("beta", text, &r->beta);
    case OPT_DTYPE:
        r->dtype = fdm_dtype_from_name(text);
        return r->dtype == FDM_FLOAT16 || r->dtype == FDM_BFLOAT16 ||
               complain(0, "--dtype is '%s'; it must be fp16 or bf16", text);
    case OPT_LAYOUT:
        r->layout = text;
        return (strlen(text) == 2 && strspn(text, "NT") == 2) ||
               complain(0, "--layout is '%s'; it must be NN, NT, TN or TT", text);
    case OPT_DEVICE: r->device = text; return 1;
    default: r->kernel = text; return 1;
    }
}

/* -1: go on; else the exit code. */
static int read_options(struct request *r, int argc, char **argv) {
    static const struct companion_command command = {"gemm", help, options, OPT_HELP, set_option};
    const int code = companion_read_options(&command, r, argc, argv);
    r->n = r->n ? r->n : r->m;
    r->k = r->k ? r->k : r->m;
    return code;
}

static struct request default_request(const char *device) {
    return (struct request){
        .m = 4096, .batch = 1, .iters = 10, .alpha = 1, .dtype = FDM_BFLOAT16, .layout = "NN", .device = device};
}

/* Of contiguous matrices. */
static fdm_gemm_problem problem_of(const struct request *r) {
    const int rows_a = r->layout[0] == 'N', rows_b = r->layout[1] == 'N';
    return (fdm_gemm_problem){.dtype = r->dtype,
                              .batch = r->batch,
                              .m = r->m,
                              .n = r->n,
                              .k = r->k,
                              .a_rows_contiguous = rows_a,
                              .b_rows_contiguous = rows_b,
                              .has_c = r->beta != 0,
                              .accumulate_float16 = r->float16_sums,
                              .mappable =
                                  (rows_a ? r->k : r->m) % 8 == 0 && (rows_b ? r->n : r->k) % 8 == 0 && r->n % 8 == 0};
}

int tune_words_gemm(int argc, char **argv, fdm_gemm_problem *problem) {
    struct request r = default_request("sm_90");
    const int right = read_options(&r, argc, argv) < 0;
    *problem = problem_of(&r);
    return right;
}

int plan_gemm(int argc, char **argv) {
    struct request r = default_request("sm_90");
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
    const int code = read_options(&r, argc, argv);
    if (code >= 0)
        return code;
    if (!companion_device(r.device, 1, &device))
        return EXIT_USAGE;
    const fdm_gemm_problem problem = problem_of(&r);
    const fdm_status status = fdm_plan_gemm(&device, &problem, r.kernel, &plan);
    if (status)
        return fail(status);
    companion_print_choice(device.name, &plan.choice, r.explain, r.json);
    return EXIT_FINE;
}

/* ---- bench ---- */

enum { ELEMENTS_CHECKED = 1000 };

struct bench {
    struct request r;
    struct companion_buffer a, b, c, out;
    int64_t a_strides[3], b_strides[3];
    fdm_gemm_tensors tensors;
    fdm_gemm_options options;
    fdm_gemm_plan plan;
    void *workspace;
    fdm_device device;
};

static fdm_status call(void *context) {
    struct bench *b = context;
    return fdm_execute_gemm(&b->plan, &b->tensors, &b->options, b->workspace, (size_t)b->plan.choice.workspace_bytes,
                            NULL);
}

/* Largest error of elements spread evenly, over the sum of their products' sizes' root. */
static double worst_error(struct bench *b) {
    const struct request *r = &b->r;
    const fdm_device_id host = {FDM_CPU, 0};
    double worst = 0;
    if (fdm_memory_copy(b->out.host, host, b->out.tensor.data, b->device.id, (size_t)b->out.bytes))
        return INFINITY;
    for (int64_t n = 0; n < ELEMENTS_CHECKED && n < b->out.elements; n++) {
        const int64_t index = n * (b->out.elements - 1) / (ELEMENTS_CHECKED - 1);
        const int64_t j = index % r->n, i = index / r->n % r->m, z = index / r->n / r->m;
        double sum = 0, squares = 0;
        for (int64_t k = 0; k < r->k; k++) {
            const double product =
                companion_get(&b->a, z * b->a_strides[0] + i * b->a_strides[1] + k * b->a_strides[2]) *
                companion_get(&b->b, z * b->b_strides[0] + k * b->b_strides[1] + j * b->b_strides[2]);
            sum += product, squares += product * product;
        }
        const double old = r->beta != 0 ? r->beta * companion_get(&b->c, index) : 0;
        const double want = r->alpha * sum + old, size = fabs(r->alpha) * sqrt(squares) + fabs(old) + 1e-30;
        const double error = fabs(companion_get(&b->out, index) - want) / size;
        worst = error <= worst ? worst : error;
    }
    return worst;
}

static void make_tensors(struct bench *b) {
    const struct request *r = &b->r;
    const int t_a = r->layout[0] == 'T', t_b = r->layout[1] == 'T';
    const int64_t a[3] = {r->batch, r->m, r->k}, bb[3] = {r->batch, r->k, r->n}, c[3] = {r->batch, r->m, r->n};
    companion_make(&b->a, b->device.id, r->dtype, 3, a, 1);
    companion_make(&b->b, b->device.id, r->dtype, 3, bb, 1);
    companion_make(&b->c, b->device.id, r->dtype, 3, c, 1);
    companion_make(&b->out, b->device.id, r->dtype, 3, c, 0);
    const int64_t a_strides[3] = {r->m * r->k, t_a ? 1 : r->k, t_a ? r->m : 1};
    const int64_t b_strides[3] = {r->k * r->n, t_b ? 1 : r->n, t_b ? r->k : 1};
    memcpy(b->a_strides, a_strides, sizeof a_strides);
    memcpy(b->b_strides, b_strides, sizeof b_strides);
    b->a.tensor.strides = b->a_strides;
    b->b.tensor.strides = b->b_strides;
    b->tensors = (fdm_gemm_tensors){sizeof(fdm_gemm_tensors), &b->a.tensor, &b->b.tensor, &b->c.tensor, &b->out.tensor};
    b->options = (fdm_gemm_options){.struct_bytes = sizeof(fdm_gemm_options),
                                    .alpha = r->alpha,
                                    .beta = r->beta,
                                    .accumulate_float16 = r->float16_sums};
}

static fdm_status time_kernel(void *context, const char *name, struct companion_row *row) {
    struct bench *b = context;
    fdm_gemm_problem problem;
    fdm_status status = fdm_describe_gemm(&b->tensors, &b->options, &problem);
    b->plan.struct_bytes = sizeof b->plan;
    if (status || (status = fdm_plan_gemm(&b->device, &problem, name, &b->plan)))
        return status;
    status = companion_time_plan(b->device.id, &b->plan.choice, call, b, &b->workspace, (int32_t)b->r.iters, row);
    row->rate = 2.0 * (double)b->r.batch * (double)b->r.m * (double)b->r.n * (double)b->r.k / row->time.median * 1e-12;
    row->worst_error = !status && b->r.check ? worst_error(b) : 0;
    return status;
}

int bench_gemm(int argc, char **argv) {
    static struct bench b;
    b.r = default_request("cuda");
    const int code = read_options(&b.r, argc, argv);
    if (code >= 0)
        return code;
    if (!companion_device(b.r.device, 0, &b.device))
        return EXIT_USAGE;
    make_tensors(&b);
    const double limit = b.r.float16_sums ? 0.1 : b.r.dtype == FDM_FLOAT16 ? 2e-3 : 1.5e-2;
    const struct companion_bench bench = {.operation = "gemm",
                                          .subject = "product",
                                          .unit = "TFLOPS",
                                          .json_unit = "tflops",
                                          .kernel = fdm_gemm_kernel,
                                          .time = time_kernel,
                                          .context = &b,
                                          .only = b.r.kernel,
                                          .limit = limit,
                                          .check = b.r.check,
                                          .json = b.r.json};
    return companion_bench(&bench);
}
