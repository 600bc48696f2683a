/* command_attend.c: fdm attend. */
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "json_writer.h"
#include "output_file.h"
#include "run.h"

static const char help[] =
    "usage: fdm attend FILE.safetensors [OPTION ...]\n"
    "       fdm attend --q Q.npy --k K.npy --v V.npy [OPTION ...]\n"
    "\n"
    "Runs attention on tensors q, k, v [B, S, H, D] and, where the file holds them, mask, bias, interval_start,\n"
    "interval_end, row_start, row_end, block_mask, tree, sink, dout (else made up) and dlse.\n"
    "\n"
    "  --q --k --v --mask --bias --interval-start --interval-end --sink --dout --dlse FILE.npy, or a pipe\n"
    "  --row-start --row-end --block-mask FILE.npy, or a pipe: int32 [B|1, h, n, Sq], bool blocks of 64 or 128\n"
    "  --tree FILE.npy, or a pipe: int32 [B, Sq, words], of a forward pass without --causal\n"
    "  --causal  --window L,R  --softcap X  --scale X  --lse-without-sink\n"
    "  --topk W           each row keeps the W largest biases of its visible prefix (bias [B|1, h, 1, Sk])\n"
    "  --forward          the forward pass only (default)\n"
    "  --backward         the backward pass too\n"
    "  --check            compare every output with float64, row by row; exit code 1 when one is wrong\n"
    "  --device DEVICE    cpu, cuda, cuda:N, or auto: CUDA where its kernels take the problem, else the CPU (auto);\n"
    "                     emulated:sm_90: CUDA kernels on this machine's processor, checked as they run (slow)\n"
    "  --threads N  --family NAME  --kernel CODE  --iters N\n"
    "  --out FILE         write the results, as .safetensors; exit code 3 when they cannot be written\n"
    "  --json\n"
    "\n"
    "example: fdm attend examples/minilm/qkv.safetensors --causal --topk 64 --backward --check\n";

struct attend {
    struct run run;
    struct tensor_file file;
    int64_t topk, iters;
    int backward, check, json;
    const char *out;
    struct device_choice device;
    char passed_over[512]; /* why no CUDA device was chosen */
    fdm_plan plans[2];
    double seconds[2]; /* medians, by pass */
    int64_t visible;
    struct run_error errors[RUN_TENSORS];
    int32_t num_errors;
};

enum {
    OPT_CAUSAL = 256,
    OPT_WINDOW,
    OPT_SOFTCAP,
    OPT_SCALE,
    OPT_LSE_WITHOUT_SINK,
    OPT_TOPK,
    OPT_FORWARD,
    OPT_BACKWARD,
    OPT_CHECK,
    OPT_DEVICE,
    OPT_THREADS,
    OPT_FAMILY,
    OPT_KERNEL,
    OPT_ITERS,
    OPT_OUT,
    OPT_JSON,
    OPT_HELP,
    OPT_FILE
};

static const struct option options[] = {{"causal", no_argument, 0, OPT_CAUSAL},
                                        {"window", required_argument, 0, OPT_WINDOW},
                                        {"softcap", required_argument, 0, OPT_SOFTCAP},
                                        {"scale", required_argument, 0, OPT_SCALE},
                                        {"lse-without-sink", no_argument, 0, OPT_LSE_WITHOUT_SINK},
                                        {"topk", required_argument, 0, OPT_TOPK},
                                        {"forward", no_argument, 0, OPT_FORWARD},
                                        {"backward", no_argument, 0, OPT_BACKWARD},
                                        {"check", no_argument, 0, OPT_CHECK},
                                        {"device", required_argument, 0, OPT_DEVICE},
                                        {"threads", required_argument, 0, OPT_THREADS},
                                        {"family", required_argument, 0, OPT_FAMILY},
                                        {"kernel", required_argument, 0, OPT_KERNEL},
                                        {"iters", required_argument, 0, OPT_ITERS},
                                        {"out", required_argument, 0, OPT_OUT},
                                        {"json", no_argument, 0, OPT_JSON},
                                        {"help", no_argument, 0, OPT_HELP},
                                        {"q", required_argument, 0, OPT_FILE + RUN_Q},
                                        {"k", required_argument, 0, OPT_FILE + RUN_K},
                                        {"v", required_argument, 0, OPT_FILE + RUN_V},
                                        {"mask", required_argument, 0, OPT_FILE + RUN_MASK},
                                        {"bias", required_argument, 0, OPT_FILE + RUN_BIAS},
                                        {"interval-start", required_argument, 0, OPT_FILE + RUN_START},
                                        {"interval-end", required_argument, 0, OPT_FILE + RUN_END},
                                        {"sink", required_argument, 0, OPT_FILE + RUN_SINK},
                                        {"row-start", required_argument, 0, OPT_FILE + RUN_ROW_START},
                                        {"row-end", required_argument, 0, OPT_FILE + RUN_ROW_END},
                                        {"block-mask", required_argument, 0, OPT_FILE + RUN_BLOCKS},
                                        {"tree", required_argument, 0, OPT_FILE + RUN_TREE},
                                        {"dout", required_argument, 0, OPT_FILE + RUN_DOUT},
                                        {"dlse", required_argument, 0, OPT_FILE + RUN_DLSE},
                                        {0}};

static int set_option(struct attend *a, int option, const char *text) {
    fdm_options *o = &a->run.options;
    int64_t value;
    if (option >= OPT_FILE)
        return tensor_file_read(text, run_tensor_names[option - OPT_FILE], &a->file);
    switch (option) {
    case OPT_CAUSAL: return o->causal = 1;
    case OPT_WINDOW: return parse_window(text, &o->window_left, &o->window_right);
    case OPT_SOFTCAP: return parse_real("--softcap", text, &o->softcap);
    case OPT_SCALE: return o->has_softmax_scale = parse_real("--scale", text, &o->softmax_scale);
    case OPT_LSE_WITHOUT_SINK: return o->lse_without_sink = 1;
    case OPT_TOPK: return parse_integer("--topk", text, 1, INT32_MAX, &a->topk);
    case OPT_FORWARD: a->backward = 0; return 1;
    case OPT_BACKWARD: return a->backward = 1;
    case OPT_CHECK: return a->check = 1;
    case OPT_DEVICE: return parse_device(text, &a->device);
    case OPT_THREADS:
        if (!parse_integer("--threads", text, 1, 4096, &value))
            return 0;
        o->num_threads = (int32_t)value;
        return 1;
    case OPT_FAMILY: o->family = text; return 1;
    case OPT_KERNEL: o->kernel = text; return 1;
    case OPT_ITERS: return parse_integer("--iters", text, 1, 10000, &a->iters);
    case OPT_OUT: return safetensors_may_be(a->out = text);
    default: return a->json = 1;
    }
}

/* Roles by name; what the file holds besides is left alone. */
static int take_tensors(struct attend *a) {
    struct run *run = &a->run;
    for (int i = 0; i < RUN_TENSORS; i++) {
        struct file_tensor *tensor = tensor_file_find(&a->file, run_tensor_names[i]);
        int input = i < RUN_OUT || i == RUN_DOUT || i == RUN_DLSE;
        if (tensor && input)
            run->tensors[i] = *tensor;
    }
    for (int i = RUN_Q; i <= RUN_V; i++)
        if (!run->tensors[i].data || run->tensors[i].ndim != 4)
            return complain(0, "%s is %s; q, k and v are needed, [B, S, H, D]", run_tensor_names[i],
                            run->tensors[i].data ? "not 4-dimensional" : "missing");
    if (a->topk && !run->tensors[RUN_BIAS].data)
        return complain(0, "--topk needs a bias");
    if (a->topk && run->tensors[RUN_BIAS].ndim != 3 && run->tensors[RUN_BIAS].ndim != 4)
        return complain(0, "--topk needs a bias [B|1, h, Sk] or [B|1, h, 1, Sk], not one of %d axes",
                        run->tensors[RUN_BIAS].ndim);
    if (a->topk && run->tensors[RUN_START].data)
        return complain(0, "--topk builds key intervals, but the files hold some already");
    return 1;
}

static double all_pairs(const fdm_problem *p) {
    return (double)p->batch * (double)p->heads * (double)p->seqlen_q * (double)p->seqlen_k;
}

static double visible_fraction(const struct attend *a) {
    double pairs = all_pairs(&a->plans[FDM_FORWARD].problem);
    return pairs > 0 ? (double)a->visible / pairs : 0;
}

static double flops(const fdm_problem *p, double pairs) {
    return 2 * pairs * (double)(p->head_dim + p->head_dim_v) * (p->pass == FDM_BACKWARD ? 2.5 : 1);
}

static fdm_status plan_passes(struct attend *a) {
    fdm_status status = run_plan(&a->run, FDM_FORWARD, &a->plans[FDM_FORWARD]);
    return status || !a->backward ? status : run_plan(&a->run, FDM_BACKWARD, &a->plans[FDM_BACKWARD]);
}

static fdm_status choose_device(struct attend *a) {
    const fdm_device_id id = a->device.id;
    a->run.device.struct_bytes = sizeof a->run.device;
    if (a->device.automatic && !fdm_device_query(FDM_CUDA, 0, &a->run.device)) {
        const fdm_status on_cuda = plan_passes(a);
        if (!on_cuda || on_cuda == FDM_ERROR_INVALID_ARGUMENT) /* which would be one on the CPU too, or a setting's */
            return on_cuda;
        snprintf(a->passed_over, sizeof a->passed_over, "%s", fdm_last_error());
    }
    fdm_status status = fdm_device_query(id.type, id.index, &a->run.device);
    return status ? status : plan_passes(a);
}

static fdm_status run_passes(struct attend *a) {
    double *seconds = allocate_or_exit((size_t)a->iters * sizeof *seconds);
    fdm_status status = run_upload(&a->run);
    for (int pass = FDM_FORWARD; pass <= (a->backward ? FDM_BACKWARD : FDM_FORWARD) && !status; pass++) {
        status = run_timed(&a->run, &a->plans[pass], (int32_t)a->iters, seconds);
        a->seconds[pass] = status ? 0 : median_of(seconds, (int32_t)a->iters);
    }
    release(seconds);
    if (status)
        return status;
    run_release(&a->run);
    const fdm_tensors tensors = run_view(&a->run, FDM_FORWARD);
    return fdm_count_visible(&a->plans[FDM_FORWARD].problem, &tensors, &a->visible);
}

/* 0 after a complaint. */
static int check_results(struct attend *a) {
    struct run_truth truth;
    int fine = run_make_truth(&a->run, a->backward, INFINITY, &truth);
    if (fine)
        a->num_errors = run_compare(&a->run, &truth, run_tolerance(&a->plans[0]), a->errors);
    run_release_truth(&a->run, &truth);
    return fine;
}

static void print_json(const struct attend *a) {
    static char plan[4096];
    struct json_writer w = {.stream = stdout};
    json_open(&w, NULL, '{');
    json_put_text(&w, "device", a->run.device.name);
    if (emulated_device())
        json_put_raw(&w, "emulated", "true");
    json_put_real(&w, "visible_fraction", visible_fraction(a));
    for (int pass = 0; pass <= a->backward; pass++) {
        const fdm_problem *p = &a->plans[pass].problem;
        json_open(&w, pass ? "backward" : "forward", '{');
        fdm_plan_to_json(&a->plans[pass], plan, sizeof plan, NULL);
        json_put_raw(&w, "plan", plan);
        json_put_real(&w, "seconds", a->seconds[pass]);
        json_put_real(&w, "gflops", flops(p, all_pairs(p)) / (p->causal ? 2 : 1) / a->seconds[pass] * 1e-9);
        json_put_real(&w, "useful_gflops", flops(p, (double)a->visible) / a->seconds[pass] * 1e-9);
        json_close(&w, '}');
    }
    json_open(&w, "errors", '{');
    for (int32_t i = 0; i < a->num_errors; i++) {
        json_open(&w, a->errors[i].name, '{');
        json_put_real(&w, "max_abs", a->errors[i].max_abs);
        json_put_real(&w, "rms", a->errors[i].rms);
        json_put_real(&w, "worst_row", a->errors[i].worst_row);
        json_put_raw(&w, "failed", a->errors[i].failed ? "true" : "false");
        json_close(&w, '}');
    }
    json_close(&w, '}');
    json_close(&w, '}');
    puts("");
}

static void print_pass(const struct attend *a, fdm_pass pass) {
    const fdm_plan *plan = &a->plans[pass];
    const double dense = flops(&plan->problem, all_pairs(&plan->problem)) / (plan->problem.causal ? 2 : 1),
                 useful = flops(&plan->problem, (double)a->visible), seconds = a->seconds[pass];
    printf("%-9s %s, choice %s", pass ? "backward" : "forward", plan->kernel, plan->choice);
    if (plan->device.type == FDM_CPU)
        printf(", %d threads", plan->num_threads);
    printf("\n          because %s\n          %.3f ms, %.1f GFLOP/s, of visible pairs %.1f GFLOP/s\n", plan->reason,
           seconds * 1e3, dense / seconds * 1e-9, useful / seconds * 1e-9);
}

/* Nothing where the CPU was asked for, or is all there is. */
static void print_device(const struct attend *a) {
    const fdm_device *device = &a->run.device;
    if (emulated_device())
        printf("device    emulated %s: CUDA kernels on this processor; times are the emulator's\n", emulated_device());
    else if (device->id.type == FDM_CUDA)
        printf("device    cuda:%d, %s\n", device->id.index, device->name);
    else if (a->passed_over[0])
        printf("device    cpu, since on cuda:0 %s\n", a->passed_over);
}

static void print_text(const struct attend *a) {
    const fdm_problem *p = &a->plans[0].problem;
    print_device(a);
    printf("problem   %s, B %lld, H %lld / %lld, Sq %lld, Sk %lld, D %lld / %lld%s\n", fdm_dtype_name(p->dtype),
           (long long)p->batch, (long long)p->heads, (long long)p->heads_kv, (long long)p->seqlen_q,
           (long long)p->seqlen_k, (long long)p->head_dim, (long long)p->head_dim_v, p->causal ? ", causal" : "");
    printf("visible   %.2f %% of all pairs\n", 100 * visible_fraction(a));
    for (int pass = 0; pass <= a->backward; pass++)
        print_pass(a, (fdm_pass)pass);
    if (a->num_errors)
        printf("error against float64 (limit %.0e of a row's size)\n", run_tolerance(&a->plans[0]));
    for (int32_t i = 0; i < a->num_errors; i++)
        printf("  %-6s max %.3e, rms %.3e, worst row %.3e  %s\n", a->errors[i].name, a->errors[i].max_abs,
               a->errors[i].rms, a->errors[i].worst_row, a->errors[i].failed ? "WRONG" : "ok");
}

static int write_results(const struct attend *a) {
    static struct tensor_file results;
    for (int i = RUN_OUT; i < RUN_TENSORS; i++)
        if (a->run.tensors[i].data && i != RUN_DOUT && i != RUN_DLSE)
            results.tensors[results.count++] = a->run.tensors[i];
    return safetensors_write(a->out, &results);
}

int command_attend(int argc, char **argv) {
    static struct attend a;
    a.run.options = fdm_options_default();
    a.iters = 5;
    a.device.automatic = 1;
    a.device.id.type = FDM_CPU;
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == OPT_HELP) {
            fputs(help, stdout);
            return EXIT_FINE;
        }
        if (option == '?' || !set_option(&a, option, optarg))
            return EXIT_USAGE;
    }
    if (a.out && !output_check(a.out))
        return EXIT_WRITE;
    for (; optind < argc; optind++)
        if (!tensor_file_read(argv[optind], "", &a.file))
            return EXIT_USAGE;
    if (!take_tensors(&a))
        return EXIT_USAGE;
    fdm_status status = a.topk ? run_make_topk(&a.run, a.topk) : FDM_OK;
    run_allocate_outputs(&a.run, a.backward);
    if (!status)
        status = choose_device(&a);
    if (!status)
        status = run_passes(&a);
    if (status)
        return fail(status);
    if (a.check && !check_results(&a))
        return EXIT_WRONG;
    if (a.out && !write_results(&a))
        return EXIT_WRITE;
    a.json ? print_json(&a) : print_text(&a);
    for (int32_t i = 0; i < a.num_errors; i++)
        if (a.errors[i].failed)
            return complain(EXIT_WRONG, "%s differs from float64 by %.3e of its row", a.errors[i].name,
                            a.errors[i].worst_row);
    return EXIT_FINE;
}
