/* command_bench.c: fdm bench attention: every kernel by name on one problem. */
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/elements.h"
#include "base/kernel_name.h"
#include "companion_run.h"
#include "json_writer.h"
#include "kernel_names.h"
#include "run.h"

static const char help[] =
    "usage: fdm bench [attention] [OPTION ...]\n"
    "       fdm bench gemm|softmax [OPTION ...]    fdm bench gemm --help explains it\n"
    "\n"
    "Times every kernel that takes the problem: first three output elements, median time, TFLOPS, gain over the best "
    "row\n"
    "so far; then a table sorted by speed, with the TFLOPS of visible pairs as \"useful\".\n"
    "\n"
    "  --B N --H N --Hkv N --N N --Nk N --D N --Dv N       (1, 8, as H, 1024, as N, 64, as D)\n"
    "  --dtype NAME  --causal  --topk W                    fp32, on CUDA fp16; top-W over a random per-key bias\n"
    "  --pass PASS        forward or backward              (forward)\n"
    "  --device DEVICE    cpu, cuda, cuda:N, or auto: CUDA where it has such kernels, else the CPU (auto)\n"
    "  --threads N  --iters N                              (all, 10)\n"
    "  --kernel TEXT      the kernel of this name; else all whose names, or on CUDA choice codes, hold TEXT, or are\n"
    "                     TEXT where * stands for anything\n"
    "  --reference        the float64 reference too, on the CPU\n"
    "  --show-all         rows that do not improve, too; on CUDA every variant of a kernel; and why kernels were left "
    "out\n"
    "  --check            compare with float64; exit code 1 when one is wrong. Of a long forward, rows evenly spread\n"
    "  --json  --csv\n"
    "\n"
    "examples: fdm bench attention --B 1 --H 8 --N 2048 --D 64 --causal --show-all --check\n"
    "          fdm bench --device cuda --dtype bf16 --N 8192 --D 128 --kernel 'mma.split-q*'\n";

enum { ROWS_MAX = 512, VARIANTS_MAX = 64, LEFT_OUT_MAX = 64 };

struct row {
    const char *kernel;
    char label[KERNEL_LABEL_MAX];
    fdm_plan plan;
    double seconds, quartile_low, quartile_high, tflops, worst_error;
    float first[3];
};

/* A kernel that does not take the problem. */
struct left_out {
    const char *kernel;
    char label[KERNEL_LABEL_MAX], reason[256];
};

struct bench {
    int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, topk, iters, threads;
    fdm_dtype dtype;
    fdm_pass pass;
    int has_dtype, causal, reference, show_all, check, json, csv;
    const char *only;
    struct device_choice device;
    struct run run;
    struct run_truth truth;
    int32_t num_rows, num_left_out;
    struct row rows[ROWS_MAX];
    struct left_out left_out[LEFT_OUT_MAX];
    double best;                /* TFLOPS of the best row so far */
    double flops, useful_flops; /* by shape, halved when causal; of visible pairs only */
    int wrong;
};

enum {
    OPT_B = 256,
    OPT_H,
    OPT_HKV,
    OPT_N,
    OPT_NK,
    OPT_D,
    OPT_DV,
    OPT_TOPK,
    OPT_ITERS,
    OPT_THREADS,
    OPT_DTYPE,
    OPT_PASS,
    OPT_DEVICE,
    OPT_KERNEL,
    OPT_CAUSAL,
    OPT_REFERENCE,
    OPT_SHOW_ALL,
    OPT_CHECK,
    OPT_JSON,
    OPT_CSV,
    OPT_HELP
};

static const struct option options[] = {
    {"B", required_argument, 0, OPT_B},           {"H", required_argument, 0, OPT_H},
    {"Hkv", required_argument, 0, OPT_HKV},       {"N", required_argument, 0, OPT_N},
    {"Nk", required_argument, 0, OPT_NK},         {"D", required_argument, 0, OPT_D},
    {"Dv", required_argument, 0, OPT_DV},         {"topk", required_argument, 0, OPT_TOPK},
    {"iters", required_argument, 0, OPT_ITERS},   {"threads", required_argument, 0, OPT_THREADS},
    {"dtype", required_argument, 0, OPT_DTYPE},   {"pass", required_argument, 0, OPT_PASS},
    {"device", required_argument, 0, OPT_DEVICE}, {"kernel", required_argument, 0, OPT_KERNEL},
    {"causal", no_argument, 0, OPT_CAUSAL},       {"reference", no_argument, 0, OPT_REFERENCE},
    {"show-all", no_argument, 0, OPT_SHOW_ALL},   {"check", no_argument, 0, OPT_CHECK},
    {"json", no_argument, 0, OPT_JSON},           {"csv", no_argument, 0, OPT_CSV},
    {"help", no_argument, 0, OPT_HELP},           {0}};

static int set_option(struct bench *b, int option, const char *text) {
    int64_t *const numbers[] = {&b->batch,    &b->heads,      &b->heads_kv, &b->seqlen_q, &b->seqlen_k,
                                &b->head_dim, &b->head_dim_v, &b->topk,     &b->iters,    &b->threads};
    int *const flags[] = {&b->causal, &b->reference, &b->show_all, &b->check, &b->json, &b->csv};
    if (option <= OPT_THREADS)
        return parse_integer(options[option - OPT_B].name, text, 1, INT32_MAX, numbers[option - OPT_B]);
    if (option >= OPT_CAUSAL)
        return *flags[option - OPT_CAUSAL] = 1;
    if (option == OPT_KERNEL) {
        b->only = text;
        return 1;
    }
    if (option == OPT_DEVICE)
        return parse_device(text, &b->device);
    if (option == OPT_DTYPE) {
        b->has_dtype = 1;
        b->dtype = fdm_dtype_from_name(text);
        return (b->dtype >= FDM_FLOAT32 && b->dtype <= FDM_FLOAT64) ||
               complain(0, "--dtype is '%s'; it must be fp32, bf16, fp16 or fp64", text);
    }
    b->pass = strcmp(text, "backward") == 0 ? FDM_BACKWARD : FDM_FORWARD;
    return b->pass == FDM_BACKWARD || strcmp(text, "forward") == 0 ||
           complain(0, "--pass is '%s'; it must be forward or backward", text);
}

/* ---- the device ---- */

/* What make_tensors() will make, as a problem. */
static fdm_problem problem_of(const struct bench *b, fdm_dtype dtype) {
    fdm_problem p = fdm_problem_default();
    p.pass = b->pass;
    p.dtype = dtype;
    p.batch = b->batch;
    p.heads = b->heads;
    p.heads_kv = b->heads_kv;
    p.seqlen_q = b->seqlen_q;
    p.seqlen_k = b->seqlen_k;
    p.head_dim = b->head_dim;
    p.head_dim_v = b->head_dim_v;
    p.causal = b->run.options.causal;
    p.softmax_scale = 1 / sqrt((double)b->head_dim);
    p.needs_lse = b->pass == FDM_FORWARD;
    if (b->topk) {
        p.has_bias = p.has_intervals = 1;
        p.interval_heads = p.bias_shape[1] = b->heads_kv;
        p.bias_shape[3] = b->seqlen_k;
        p.needs_dbias = b->pass == FDM_BACKWARD;
    }
    return p;
}

static int is_named(const struct bench *b, const fdm_kernel_info *kernel) {
    return kernel_is_chosen(b->only, kernel->name);
}

/* Codes of the rows that a kernel has here: of each variant where that is wanted, else one. */
static int32_t rows_of(const struct bench *b, const fdm_problem *problem, const fdm_kernel_info *kernel, int every,
                       char (*codes)[KERNEL_CODE_MAX]) {
    const int named = is_named(b, kernel), by_code = !named && !strpbrk(b->only, ".+-"); /* which no code has */
    const int all = kernel->device_type == FDM_CUDA && (by_code || (every && named));
    int32_t kept = 0, count = kernel_variants(&b->run.device, problem, kernel, all ? VARIANTS_MAX : 1, codes);
    for (int32_t i = 0; i < count; i++)
        if (named || kernel_text_fits(b->only, codes[i]))
            memmove(codes[kept++], codes[i], KERNEL_CODE_MAX);
    return kept;
}

/* Whether a kernel that can run on the chosen CUDA device takes the problem. */
static int cuda_has_rows(const struct bench *b, fdm_dtype dtype) {
    static char codes[VARIANTS_MAX][KERNEL_CODE_MAX];
    const fdm_problem problem = problem_of(b, dtype);
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    for (int32_t i = 0; fdm_kernel_list(i, &kernel) == FDM_OK; i++)
        if (kernel.device_type == FDM_CUDA && kernel.pass == b->pass && kernel.available &&
            rows_of(b, &problem, &kernel, 0, codes) > 0)
            return 1;
    return 0;
}

static fdm_status choose_device(struct bench *b) {
    const fdm_dtype cuda_dtype = b->has_dtype ? b->dtype : FDM_FLOAT16;
    fdm_device_id id = b->device.id;
    b->run.device.struct_bytes = sizeof b->run.device;
    if (b->device.automatic && !b->reference && !fdm_device_query(FDM_CUDA, 0, &b->run.device) &&
        cuda_has_rows(b, cuda_dtype))
        id.type = FDM_CUDA;
    if (id.type == FDM_CUDA)
        b->dtype = cuda_dtype;
    return fdm_device_query(id.type, id.index, &b->run.device);
}

/* What stands against every kernel, a setting as a rule, is no reason to leave one out after the other. */
static fdm_status check_problem(const struct bench *b) {
    const fdm_problem problem = problem_of(b, b->dtype);
    fdm_plan plan = {.struct_bytes = sizeof plan};
    const fdm_status status = fdm_plan_attention(&b->run.device, &problem, NULL, &plan);
    return status == FDM_ERROR_INVALID_ARGUMENT ? status : FDM_OK;
}

/* ---- the problem ---- */

static fdm_status make_tensors(struct bench *b) {
    const int64_t q[4] = {b->batch, b->seqlen_q, b->heads, b->head_dim},
                  k[4] = {b->batch, b->seqlen_k, b->heads_kv, b->head_dim};
    const int64_t v[4] = {b->batch, b->seqlen_k, b->heads_kv, b->head_dim_v},
                  bias[4] = {1, b->heads_kv, 1, b->seqlen_k};
    struct file_tensor *t = b->run.tensors;
    run_make_normal(&t[RUN_Q], "q", b->dtype, 4, q, 1);
    run_make_normal(&t[RUN_K], "k", b->dtype, 4, k, 2);
    run_make_normal(&t[RUN_V], "v", b->dtype, 4, v, 3);
    if (b->topk) {
        run_make_normal(&t[RUN_BIAS], "bias", FDM_FLOAT32, 4, bias, 5);
        fdm_status status = run_make_topk(&b->run, b->topk);
        if (status)
            return status;
    }
    run_allocate_outputs(&b->run, b->pass == FDM_BACKWARD);
    return FDM_OK;
}

static fdm_status count_useful_flops(struct bench *b) {
    fdm_tensors tensors = run_view(&b->run, FDM_FORWARD);
    fdm_problem problem;
    int64_t pairs;
    fdm_status status = fdm_describe(FDM_FORWARD, &tensors, &b->run.options, &problem);
    if (status || (status = fdm_count_visible(&problem, &tensors, &pairs)))
        return status;
    b->useful_flops = 2.0 * (double)pairs * (double)(b->head_dim + b->head_dim_v) * (b->pass == FDM_BACKWARD ? 2.5 : 1);
    return FDM_OK;
}

/* out and lse for the backward, from the chosen forward. */
static fdm_status run_forward(struct bench *b) {
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_status status = run_plan(&b->run, FDM_FORWARD, &plan);
    return status ? status : run_timed(&b->run, &plan, 0, NULL);
}

static fdm_status prepare(struct bench *b) {
    fdm_status status = choose_device(b);
    if (!status)
        status = check_problem(b);
    if (!status)
        status = make_tensors(b);
    if (!status)
        status = count_useful_flops(b);
    if (!status)
        status = run_upload(&b->run);
    return status || b->pass == FDM_FORWARD ? status : run_forward(b);
}

/* ---- rows ---- */

static float first_element(const struct bench *b, int i) {
    const struct file_tensor *t = &b->run.tensors[b->pass == FDM_BACKWARD ? RUN_DQ : RUN_OUT];
    if (i >= file_tensor_elements(t))
        return 0;
    return (float)element_load(t->data, i, t->dtype);
}

static void check_row(struct bench *b, struct row *row) {
    struct run_error errors[RUN_TENSORS];
    int32_t count = run_compare(&b->run, &b->truth, run_tolerance(&row->plan), errors);
    for (int32_t i = 0; i < count; i++) {
        row->worst_error = fmax(errors[i].worst_row, row->worst_error);
        b->wrong |= errors[i].failed;
    }
}

static void print_row(const struct bench *b, const struct row *row) {
    const double gain = b->best > 0 ? 100 * (row->tflops / b->best - 1) : 0;
    if (b->json || b->csv || (!b->show_all && b->best > 0 && gain <= 0))
        return;
    printf("%s: [%.8f, %.8f, %.8f], time:%.6fms, TFLOPS:%.2f (%+.2f%%)\n", row->label, (double)row->first[0],
           (double)row->first[1], (double)row->first[2], row->seconds * 1e3, row->tflops, gain);
    fflush(stdout);
}

static void leave_out(struct bench *b, const fdm_kernel_info *kernel, const char *code) {
    struct left_out *left = &b->left_out[b->num_left_out];
    if (b->num_left_out == LEFT_OUT_MAX)
        return;
    b->num_left_out++;
    left->kernel = kernel->name;
    kernel_label(kernel, code, left->label);
    snprintf(left->reason, sizeof left->reason, "%s", kernel_refusal(&b->run.device, kernel));
}

/* Runs what the options name. A kernel that the library refuses is left out; what fails while it runs ends the bench.
 */
static fdm_status time_row(struct bench *b, const fdm_kernel_info *kernel, const char *code) {
    struct row *row = &b->rows[b->num_rows];
    *row = (struct row){.kernel = kernel->name};
    fdm_status status = run_plan(&b->run, b->pass, &row->plan);
    if (status == FDM_ERROR_UNSUPPORTED || status == FDM_ERROR_INVALID_ARGUMENT) {
        leave_out(b, kernel, code);
        return FDM_OK;
    }
    double *seconds = allocate_or_exit((size_t)b->iters * sizeof *seconds);
    if (!status)
        status = run_timed(&b->run, &row->plan, (int32_t)b->iters, seconds);
    if (!status) {
        row->seconds = median_of(seconds, (int32_t)b->iters);
        row->quartile_low = seconds[b->iters / 4];
        row->quartile_high = seconds[b->iters - 1 - b->iters / 4];
        row->tflops = b->flops / row->seconds * 1e-12;
        for (int i = 0; i < 3; i++)
            row->first[i] = first_element(b, i);
        kernel_label(kernel, row->plan.choice, row->label);
        if (b->check)
            check_row(b, row);
        b->num_rows++;
        print_row(b, row);
        b->best = fmax(b->best, row->tflops);
    }
    release(seconds);
    return status;
}

static fdm_status time_kernel(struct bench *b, const fdm_kernel_info *kernel) {
    static char codes[VARIANTS_MAX][KERNEL_CODE_MAX];
    fdm_problem problem;
    const fdm_tensors tensors = run_device_view(&b->run, b->pass);
    b->run.options.kernel = NULL;
    b->run.options.family = kernel->family;
    const int named = is_named(b, kernel); /* before: what it calls sets fdm_last_error() */
    fdm_status status = fdm_describe(b->pass, &tensors, &b->run.options, &problem);
    const int32_t count = status ? 0 : rows_of(b, &problem, kernel, b->show_all, codes);
    if (!status && count == 0 && named)
        leave_out(b, kernel, "");
    for (int32_t i = 0; i < count && !status && b->num_rows < ROWS_MAX; i++) {
        const int by_name = count == 1 && named;
        b->run.options.kernel = by_name ? kernel->name : codes[i];
        status = time_row(b, kernel, codes[i]);
    }
    return status;
}

static fdm_status time_kernels(struct bench *b) {
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    fdm_status status = FDM_OK;
    for (int32_t i = 0; !status && fdm_kernel_list(i, &kernel) == FDM_OK; i++) {
        const int asked = strcmp(kernel.family, "reference") != 0 || b->reference || b->only;
        /* What is for other GPUs is not spoken of unless it is named. */
        if (kernel.device_type == FDM_CUDA && !kernel.available && !b->only)
            continue;
        if (kernel.pass == b->pass && kernel.device_type == b->run.device.id.type && asked)
            status = time_kernel(b, &kernel);
    }
    return status;
}

/* ---- results ---- */

static int compare_rows(const void *a, const void *b) {
    double x = ((const struct row *)a)->seconds, y = ((const struct row *)b)->seconds;
    return (x > y) - (x < y);
}

static void print_json(const struct bench *b) {
    struct json_writer w = {.stream = stdout};
    json_open(&w, NULL, '[');
    for (int32_t i = 0; i < b->num_rows; i++) {
        const struct row *row = &b->rows[i];
        json_open(&w, NULL, '{');
        json_put_text(&w, "row", row->label);
        json_put_text(&w, "kernel", row->kernel);
        json_put_text(&w, "choice", row->plan.choice);
        json_put_text(&w, "device", b->run.device.name);
        json_put_integer(&w, "threads", row->plan.num_threads);
        json_put_real(&w, "seconds", row->seconds);
        json_put_real(&w, "seconds_quartile_low", row->quartile_low);
        json_put_real(&w, "seconds_quartile_high", row->quartile_high);
        json_put_real(&w, "tflops", row->tflops);
        json_put_real(&w, "useful_tflops", b->useful_flops / row->seconds * 1e-12);
        if (b->check)
            json_put_real(&w, "worst_row_error", row->worst_error);
        json_close(&w, '}');
    }
    for (int32_t i = 0; b->show_all && i < b->num_left_out; i++) {
        json_open(&w, NULL, '{');
        json_put_text(&w, "row", b->left_out[i].label);
        json_put_text(&w, "kernel", b->left_out[i].kernel);
        json_put_text(&w, "left_out", b->left_out[i].reason);
        json_close(&w, '}');
    }
    json_close(&w, ']');
    puts("");
}

static void print_csv(const struct bench *b) {
    puts("kernel,choice,threads,seconds,seconds_quartile_low,seconds_quartile_high,tflops,useful_tflops,worst_row_"
         "error");
    for (int32_t i = 0; i < b->num_rows; i++) {
        const struct row *r = &b->rows[i];
        printf("%s,%s,%d,%.9g,%.9g,%.9g,%.6g,%.6g,%.3g\n", r->kernel, r->plan.choice, r->plan.num_threads, r->seconds,
               r->quartile_low, r->quartile_high, r->tflops, b->useful_flops / r->seconds * 1e-12, r->worst_error);
    }
}

static void print_table(const struct bench *b) {
    int kernel_width = 30, choice_width = 28;
    for (int32_t i = 0; i < b->num_rows; i++) {
        const int kernel = (int)strlen(b->rows[i].kernel), choice = (int)strlen(b->rows[i].plan.choice);
        kernel_width = kernel > kernel_width ? kernel : kernel_width;
        choice_width = choice > choice_width ? choice : choice_width;
    }
    printf("\n%-*s %-*s %12s %21s %10s %10s%s\n", kernel_width, "kernel", choice_width, "choice", "median ms",
           "quartiles", "TFLOPS", "useful", b->check ? "  worst row" : "");
    for (int32_t i = 0; i < b->num_rows; i++) {
        const struct row *r = &b->rows[i];
        printf("%-*s %-*s %12.3f %10.3f %10.3f %10.4f %10.4f", kernel_width, r->kernel, choice_width, r->plan.choice,
               r->seconds * 1e3, r->quartile_low * 1e3, r->quartile_high * 1e3, r->tflops,
               b->useful_flops / r->seconds * 1e-12);
        b->check ? printf("  %.2e\n", r->worst_error) : printf("\n");
    }
    if (!b->show_all || b->num_left_out == 0)
        return;
    printf("\nleft out\n");
    for (int32_t i = 0; i < b->num_left_out; i++)
        printf("  %s: %s\n", b->left_out[i].label, b->left_out[i].reason);
}

static int report(struct bench *b) {
    if (b->num_rows == 0 && b->num_left_out == 0)
        return complain(EXIT_WRONG, "no kernel that takes the problem has '%s' in its name%s", b->only ? b->only : "",
                        b->run.device.id.type == FDM_CUDA ? " or choice code" : "");
    if (b->num_rows == 0)
        return complain(EXIT_WRONG, "no kernel took the problem; the first one, %s: %s", b->left_out[0].kernel,
                        b->left_out[0].reason);
    qsort(b->rows, (size_t)b->num_rows, sizeof b->rows[0], compare_rows);
    b->json ? print_json(b) : b->csv ? print_csv(b) : print_table(b);
    return b->wrong ? complain(EXIT_WRONG, "a kernel differs from float64") : EXIT_FINE;
}

static int run_bench(struct bench *b) {
    enum { PRODUCTS_MAX = 1 << 30 }; /* some 5 s of the reference */
    fdm_status status = prepare(b);
    if (status)
        return fail(status);
    if (b->check && !run_make_truth(&b->run, b->pass == FDM_BACKWARD, PRODUCTS_MAX, &b->truth))
        return EXIT_WRONG;
    status = time_kernels(b);
    if (status)
        return fail(status);
    run_release_truth(&b->run, &b->truth);
    run_release(&b->run);
    return report(b);
}

int command_bench(int argc, char **argv) {
    static struct bench b = {.batch = 1,
                             .heads = 8,
                             .seqlen_q = 1024,
                             .head_dim = 64,
                             .iters = 10,
                             .pass = FDM_FORWARD,
                             .device = {1, {FDM_CPU, 0}}};
    int option;
    if (argc > 1 && strcmp(argv[1], "gemm") == 0)
        return bench_gemm(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "softmax") == 0)
        return bench_softmax(argc - 1, argv + 1);
    b.run.options = fdm_options_default();
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == OPT_HELP) {
            fputs(help, stdout);
            return EXIT_FINE;
        }
        if (option == '?' || !set_option(&b, option, optarg))
            return EXIT_USAGE;
    }
    if (argc > optind + 1 || (optind < argc && strcmp(argv[optind], "attention") != 0))
        return complain(EXIT_USAGE, "bench takes one benchmark: attention, gemm or softmax");
    b.heads_kv = b.heads_kv ? b.heads_kv : b.heads;
    b.seqlen_k = b.seqlen_k ? b.seqlen_k : b.seqlen_q;
    b.head_dim_v = b.head_dim_v ? b.head_dim_v : b.head_dim;
    b.run.options.causal = b.causal || b.topk;
    b.run.options.num_threads = (int32_t)b.threads;
    b.flops = 2.0 * (double)b.batch * (double)b.heads * (double)b.seqlen_q * (double)b.seqlen_k *
              (double)(b.head_dim + b.head_dim_v) * (b.run.options.causal ? 0.5 : 1) *
              (b.pass == FDM_BACKWARD ? 2.5 : 1);
    if (b.reference && b.device.id.type == FDM_CUDA)
        return complain(EXIT_USAGE, "--reference runs on the CPU; with it, --device is cpu or auto");
    return run_bench(&b);
}
