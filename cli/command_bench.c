/* command_bench.c: fdm bench attention: every kernel by name on one problem. */
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "half.h"
#include "json_writer.h"
#include "run.h"

static const char help[] =
    "usage: fdm bench attention [OPTION ...]\n"
    "\n"
    "Times every kernel that takes the problem: first three output elements, median time, TFLOPS, gain over the best "
    "row\n"
    "so far; then a table sorted by speed, with the TFLOPS of visible pairs as \"useful\".\n"
    "\n"
    "  --B N --H N --Hkv N --N N --Nk N --D N --Dv N       (1, 8, as H, 1024, as N, 64, as D)\n"
    "  --dtype NAME  --causal  --topk W                    fp32; top-W over a random per-key bias\n"
    "  --pass PASS        forward or backward              (forward)\n"
    "  --threads N  --iters N                              (all, 10)\n"
    "  --kernel TEXT      only kernels whose name holds TEXT\n"
    "  --reference        the float64 reference too\n"
    "  --show-all         rows that do not improve, too\n"
    "  --check            compare with float64; exit code 1 when one is wrong\n"
    "  --json  --csv\n"
    "\n"
    "example: fdm bench attention --B 1 --H 8 --N 2048 --D 64 --causal --show-all --check\n";

enum { KERNELS_MAX = 64 };

struct row {
    const char *kernel;
    fdm_plan plan;
    double seconds, quartile_low, quartile_high, tflops, worst_error;
    float first[3];
};

struct bench {
    int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, topk, iters, threads;
    fdm_dtype dtype;
    fdm_pass pass;
    int causal, reference, show_all, check, json, csv;
    const char *only;
    struct run run;
    int32_t num_rows;
    struct row rows[KERNELS_MAX];
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
    OPT_KERNEL,
    OPT_CAUSAL,
    OPT_REFERENCE,
    OPT_SHOW_ALL,
    OPT_CHECK,
    OPT_JSON,
    OPT_CSV,
    OPT_HELP
};

static const struct option options[] = {{"B", required_argument, 0, OPT_B},
                                        {"H", required_argument, 0, OPT_H},
                                        {"Hkv", required_argument, 0, OPT_HKV},
                                        {"N", required_argument, 0, OPT_N},
                                        {"Nk", required_argument, 0, OPT_NK},
                                        {"D", required_argument, 0, OPT_D},
                                        {"Dv", required_argument, 0, OPT_DV},
                                        {"topk", required_argument, 0, OPT_TOPK},
                                        {"iters", required_argument, 0, OPT_ITERS},
                                        {"threads", required_argument, 0, OPT_THREADS},
                                        {"dtype", required_argument, 0, OPT_DTYPE},
                                        {"pass", required_argument, 0, OPT_PASS},
                                        {"kernel", required_argument, 0, OPT_KERNEL},
                                        {"causal", no_argument, 0, OPT_CAUSAL},
                                        {"reference", no_argument, 0, OPT_REFERENCE},
                                        {"show-all", no_argument, 0, OPT_SHOW_ALL},
                                        {"check", no_argument, 0, OPT_CHECK},
                                        {"json", no_argument, 0, OPT_JSON},
                                        {"csv", no_argument, 0, OPT_CSV},
                                        {"help", no_argument, 0, OPT_HELP},
                                        {0}};

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
    if (option == OPT_DTYPE) {
        b->dtype = fdm_dtype_from_name(text);
        return (b->dtype >= FDM_FLOAT32 && b->dtype <= FDM_FLOAT64) ||
               complain(0, "--dtype is '%s'; it must be fp32, bf16, fp16 or fp64", text);
    }
    b->pass = strcmp(text, "backward") == 0 ? FDM_BACKWARD : FDM_FORWARD;
    return b->pass == FDM_BACKWARD || strcmp(text, "forward") == 0 ||
           complain(0, "--pass is '%s'; it must be forward or backward", text);
}

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
static fdm_status prepare(struct bench *b) {
    fdm_status status = make_tensors(b);
    if (!status)
        status = count_useful_flops(b);
    if (status || b->pass == FDM_FORWARD)
        return status;
    fdm_tensors tensors = run_view(&b->run, FDM_FORWARD);
    return fdm_attention_forward(&tensors, &b->run.options, NULL);
}

static float first_element(const struct bench *b, int i) {
    const struct file_tensor *t = &b->run.tensors[b->pass == FDM_BACKWARD ? RUN_DQ : RUN_OUT];
    if (i >= file_tensor_elements(t))
        return 0;
    switch (t->dtype) {
    case FDM_FLOAT64: return (float)((const double *)t->data)[i];
    case FDM_FLOAT16: return float16_to_float(((const uint16_t *)t->data)[i]);
    case FDM_BFLOAT16: return bfloat16_to_float(((const uint16_t *)t->data)[i]);
    default: return ((const float *)t->data)[i];
    }
}

static void check_row(struct bench *b, struct row *row) {
    struct run_error errors[RUN_TENSORS];
    int32_t count = run_check(&b->run, b->pass == FDM_BACKWARD, errors);
    for (int32_t i = 0; i < count; i++) {
        row->worst_error = fmax(errors[i].worst_row, row->worst_error);
        b->wrong |= errors[i].failed;
    }
    b->wrong |= count < 0;
}

static void print_row(const struct bench *b, const struct row *row, double best) {
    double gain = best > 0 ? 100 * (row->tflops / best - 1) : 0;
    if (b->json || b->csv || (!b->show_all && best > 0 && gain <= 0))
        return;
    printf("%s: [%.8f, %.8f, %.8f], time:%.6fms, TFLOPS:%.2f", row->kernel, (double)row->first[0],
           (double)row->first[1], (double)row->first[2], row->seconds * 1e3, row->tflops);
    if (best > 0)
        printf(" (%+.2f%%)", gain);
    printf("\n");
    fflush(stdout);
}

/* 1 when the kernel ran. */
static int time_kernel(struct bench *b, const fdm_kernel_info *kernel, double best) {
    struct row *row = &b->rows[b->num_rows];
    double *seconds = allocate_or_exit((size_t)b->iters * sizeof *seconds);
    *row = (struct row){.kernel = kernel->name};
    b->run.options.kernel = kernel->name;
    b->run.options.family = kernel->family;
    fdm_status status = run_timed(&b->run, b->pass, (int32_t)b->iters, &row->plan, seconds);
    if (!status) {
        row->seconds = median_of(seconds, (int32_t)b->iters);
        row->quartile_low = seconds[b->iters / 4];
        row->quartile_high = seconds[b->iters - 1 - b->iters / 4];
        row->tflops = b->flops / row->seconds * 1e-12;
        for (int i = 0; i < 3; i++)
            row->first[i] = first_element(b, i);
        if (b->check)
            check_row(b, row);
        b->num_rows++;
        print_row(b, row, best);
    }
    free(seconds);
    return !status;
}

static int compare_rows(const void *a, const void *b) {
    double x = ((const struct row *)a)->seconds, y = ((const struct row *)b)->seconds;
    return (x > y) - (x < y);
}

static void print_json(const struct bench *b) {
    struct json_writer w = {stdout, 0};
    json_open(&w, NULL, '[');
    for (int32_t i = 0; i < b->num_rows; i++) {
        const struct row *row = &b->rows[i];
        json_open(&w, NULL, '{');
        json_put_text(&w, "kernel", row->kernel);
        json_put_text(&w, "choice", row->plan.choice);
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
    json_close(&w, ']');
    puts("");
}

static void print_table(const struct bench *b) {
    if (b->csv)
        printf("kernel,choice,threads,seconds,seconds_quartile_low,seconds_quartile_high,tflops,useful_tflops,worst_"
               "row_error\n");
    else
        printf("\n%-30s %-28s %12s %21s %10s %10s%s\n", "kernel", "choice", "median ms", "quartiles", "TFLOPS",
               "useful", b->check ? "  worst row" : "");
    for (int32_t i = 0; i < b->num_rows; i++) {
        const struct row *r = &b->rows[i];
        if (b->csv)
            printf("%s,%s,%d,%.9g,%.9g,%.9g,%.6g,%.6g,%.3g\n", r->kernel, r->plan.choice, r->plan.num_threads,
                   r->seconds, r->quartile_low, r->quartile_high, r->tflops, b->useful_flops / r->seconds * 1e-12,
                   r->worst_error);
        else
            printf("%-30s %-28s %12.3f %10.3f %10.3f %10.4f %10.4f", r->kernel, r->plan.choice, r->seconds * 1e3,
                   r->quartile_low * 1e3, r->quartile_high * 1e3, r->tflops, b->useful_flops / r->seconds * 1e-12);
        if (!b->csv)
            b->check ? printf("  %.2e\n", r->worst_error) : printf("\n");
    }
}

static int run_bench(struct bench *b) {
    fdm_kernel_info kernel;
    double best = 0;
    if (prepare(b))
        return complain(EXIT_USAGE, "%s", fdm_last_error());
    int show_progress = isatty(STDERR_FILENO);
    for (int32_t i = 0; fdm_kernel_list(i, &kernel) == FDM_OK; i++) {
        int named = b->only && strstr(kernel.name, b->only);
        if (kernel.pass != b->pass || !kernel.available || b->num_rows == KERNELS_MAX || (b->only && !named) ||
            (strcmp(kernel.family, "reference") == 0 && !b->reference && !named))
            continue;
        if (show_progress)
            fprintf(stderr, "\r%s ... \033[K", kernel.name);
        if (time_kernel(b, &kernel, best) && b->rows[b->num_rows - 1].tflops > best)
            best = b->rows[b->num_rows - 1].tflops;
    }
    if (show_progress)
        fprintf(stderr, "\r\033[K");
    if (b->num_rows == 0)
        return complain(EXIT_WRONG, "no kernel took the problem; the last one said: %s", fdm_last_error());
    qsort(b->rows, (size_t)b->num_rows, sizeof b->rows[0], compare_rows);
    b->json ? print_json(b) : print_table(b);
    return b->wrong ? complain(EXIT_WRONG, "a kernel differs from float64") : EXIT_FINE;
}

int command_bench(int argc, char **argv) {
    static struct bench b = {
        .batch = 1, .heads = 8, .seqlen_q = 1024, .head_dim = 64, .iters = 10, .pass = FDM_FORWARD};
    int option;
    b.run.options = fdm_options_default();
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == OPT_HELP) {
            fputs(help, stdout);
            return EXIT_FINE;
        }
        if (option == '?' || !set_option(&b, option, optarg))
            return EXIT_USAGE;
    }
    if (optind + 1 != argc || strcmp(argv[optind], "attention") != 0)
        return complain(EXIT_USAGE, "bench takes one benchmark: attention");
    b.heads_kv = b.heads_kv ? b.heads_kv : b.heads;
    b.seqlen_k = b.seqlen_k ? b.seqlen_k : b.seqlen_q;
    b.head_dim_v = b.head_dim_v ? b.head_dim_v : b.head_dim;
    b.run.options.causal = b.causal || b.topk;
    b.run.options.num_threads = (int32_t)b.threads;
    b.flops = 2.0 * (double)b.batch * (double)b.heads * (double)b.seqlen_q * (double)b.seqlen_k *
              (double)(b.head_dim + b.head_dim_v) * (b.run.options.causal ? 0.5 : 1) *
              (b.pass == FDM_BACKWARD ? 2.5 : 1);
    return run_bench(&b);
}
