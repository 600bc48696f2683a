/* command_tune.c: fdm tune: times the ways to run problems on this machine. */
#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "json_writer.h"
#include "system/system.h"
#include "tune_problems.h"

static const char help[] =
    "usage: fdm tune [OPTION ...] [OPTIONS OF fdm plan]\n"
    "       fdm tune [OPTION ...] --op gemm|softmax [OPTIONS OF fdm plan --op gemm|softmax]\n"
    "       fdm tune [OPTION ...] --from FILE\n"
    "       fdm tune --list|--forget [--json]      fdm tune --export|--import FILE\n"
    "\n"
    "Times the ways in which this machine can run a problem, each checked against the rules' choice first, and keeps\n"
    "the best for later calls of the problem's class (FLASH_DMATTN_TUNE=0 ignores it). Tensors are random, caches "
    "too:\n"
    "lengths and pages fall from what there is room for to half of it.\n"
    "\n"
    "  --from FILE        a problem on each line, in the words of `fdm plan` or as an object of JSON (\"op\" first):\n"
    "                     {\"pass\": \"backward\", \"seqlen-q\": 8192, \"dtype\": \"bf16\", \"causal\": true}\n"
    "  --device DEVICE    cpu, cuda, cuda:N, or auto: a CUDA device where there is one  (auto)\n"
    "  --seconds X        device time of a problem at most                              (2)\n"
    "  --variants-max N   ways that are timed besides the rules' choice                 (12)\n"
    "  --no-keep          time alone\n"
    "  --exhaustive       time every way, with all samples, and keep nothing\n"
    "  --rounds N         samples of each way there                                     (5)\n"
    "  --compile-only     make the kernels ready and time nothing\n"
    "  --list  --forget   what is kept on this machine; removes it\n"
    "  --export FILE  --import FILE   for other machines of the same kind\n"
    "  --json             a line for each problem\n"
    "\n"
    "examples: fdm tune --pass backward --batch 2 --heads 16 --seqlen-q 8192 --head-dim 128 --dtype bf16 --causal\n"
    "          fdm tune --batch 64 --heads 32 --heads-kv 8 --seqlen-q 1 --page-size 16 --max-pages 512 --append\n"
    "          fdm tune --from problems.jsonl --json\n";

enum { ROWS_MAX = 256, BATCH = 64, WORKERS_MAX = 64 };

struct tune {
    const char *from;
    struct device_choice choice;
    fdm_device device;
    fdm_tune_options options;
    int json, no_keep, action; /* action: an option that stands alone, 0 = none */
    const char *file;          /* of that option */
    struct tune_problems problems;
    char words[TUNE_TEXT_BYTES]; /* of the problem that the command line says */
    int wrong, failed;
};

enum {
    OPT_FROM = 256,
    OPT_DEVICE,
    OPT_SECONDS,
    OPT_VARIANTS,
    OPT_EXHAUSTIVE,
    OPT_ROUNDS,
    OPT_COMPILE,
    OPT_JSON,
    OPT_NO_KEEP,
    OPT_LIST,
    OPT_FORGET,
    OPT_EXPORT,
    OPT_IMPORT
};
static const struct option options[] = {
    {"from", required_argument, 0, OPT_FROM},       {"device", required_argument, 0, OPT_DEVICE},
    {"seconds", required_argument, 0, OPT_SECONDS}, {"variants-max", required_argument, 0, OPT_VARIANTS},
    {"exhaustive", no_argument, 0, OPT_EXHAUSTIVE}, {"rounds", required_argument, 0, OPT_ROUNDS},
    {"compile-only", no_argument, 0, OPT_COMPILE},  {"json", no_argument, 0, OPT_JSON},
    {"no-keep", no_argument, 0, OPT_NO_KEEP},       {"list", no_argument, 0, OPT_LIST},
    {"forget", no_argument, 0, OPT_FORGET},         {"export", required_argument, 0, OPT_EXPORT},
    {"import", required_argument, 0, OPT_IMPORT}};
enum { NUM_OPTIONS = sizeof options / sizeof options[0] };

static int set_option(struct tune *t, int option, const char *text) {
    int64_t number;
    switch (option) {
    case OPT_FROM: t->from = text; return 1;
    case OPT_DEVICE: return parse_device(text, &t->choice);
    case OPT_SECONDS:
        return parse_real("seconds", text, &t->options.seconds) &&
               (t->options.seconds > 0 || complain(0, "--seconds is '%s'; it must be above 0", text));
    case OPT_VARIANTS:
        if (!parse_integer("variants-max", text, 1, ROWS_MAX, &number))
            return 0;
        t->options.max_variants = (int32_t)number;
        return 1;
    case OPT_ROUNDS:
        if (!parse_integer("rounds", text, 1, FDM_TUNE_SAMPLES, &number))
            return 0;
        t->options.rounds = (int32_t)number;
        return 1;
    case OPT_EXHAUSTIVE: return t->options.exhaustive = 1;
    case OPT_COMPILE: return t->options.compile_only = 1;
    case OPT_JSON: return t->json = 1;
    case OPT_NO_KEEP: return t->no_keep = 1;
    default: t->file = text; return t->action = option;
    }
}

static int append_word(struct tune *t, const char *word) {
    const size_t used = strlen(t->words);
    return snprintf(t->words + used, sizeof t->words - used, "%s%s", used ? " " : "", word) <
               (int)(sizeof t->words - used) ||
           complain(0, "the problem has more than %d bytes", TUNE_TEXT_BYTES - 1);
}

/* The command's own options, and the others as words of the problem. */
static int read_options(struct tune *t, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int which = 0;
        while (which < NUM_OPTIONS && (strncmp(argv[i], "--", 2) != 0 || strcmp(argv[i] + 2, options[which].name) != 0))
            which++;
        if (which == NUM_OPTIONS) {
            if (!append_word(t, argv[i]))
                return 0;
            continue;
        }
        if (options[which].has_arg && i + 1 == argc)
            return complain(0, "%s needs a value", argv[i]);
        if (!set_option(t, options[which].val, options[which].has_arg ? argv[++i] : NULL))
            return 0;
    }
    if (t->action && (t->from || *t->words))
        return complain(0, "--list, --forget, --export and --import time nothing; a problem or --from stands alone");
    if (t->action)
        return 1;
    if (t->from && *t->words)
        return complain(0, "'%s' and --from say two problems; give one", t->words);
    return t->from ? tune_read_file(&t->problems, t->from) : tune_add_words(&t->problems, t->words, "tune");
}

static fdm_status choose_device(struct tune *t) {
    t->device.struct_bytes = sizeof t->device;
    if (t->choice.automatic && !fdm_device_query(FDM_CUDA, 0, &t->device))
        return FDM_OK;
    return fdm_device_query(t->choice.id.type, t->choice.id.index, &t->device);
}

static fdm_status run_tuner(const fdm_device *device, const struct tune_problem *problem, const fdm_tune_options *own,
                            fdm_tune_row *rows, int32_t size, fdm_tune_result *result) {
    switch (problem->operation) {
    case TUNE_GEMM: return fdm_tune_gemm(device, &problem->gemm, own, rows, size, result);
    case TUNE_SOFTMAX: return fdm_tune_softmax(device, &problem->softmax, own, rows, size, result);
    default: return fdm_tune(device, &problem->problem, own, rows, size, result);
    }
}

/* ---- kernels of many problems, in parallel ---- */

static struct {
    pthread_mutex_t lock;
    struct tune *tune;
    int32_t next, end;
} job = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *compile(void *unused) {
    for (;;) {
        pthread_mutex_lock(&job.lock);
        const int32_t n = job.next < job.end ? job.next++ : -1;
        if (n >= 0)
            progress("compiling the kernels of problem %d of %d", n + 1, job.tune->problems.count);
        pthread_mutex_unlock(&job.lock);
        if (n < 0)
            return unused;
        fdm_tune_options only = job.tune->options;
        fdm_tune_result result = {.struct_bytes = sizeof result};
        only.compile_only = 1;
        only.progress = NULL;
        (void)run_tuner(&job.tune->device, &job.tune->problems.list[n], &only, NULL, 0, &result);
    }
}

/* What fails here fails again, and is told, where its problem is timed. */
static void compile_batch(struct tune *t, int32_t begin, int32_t end) {
    pthread_t workers[WORKERS_MAX];
    const int32_t cpus = system_usable_cpus();
    const int wanted = cpus > WORKERS_MAX ? WORKERS_MAX : cpus;
    int started = 0;
    job.tune = t;
    job.next = begin;
    job.end = end;
    while (started < wanted - 1 && pthread_create(&workers[started], NULL, compile, NULL) == 0)
        started++;
    compile(NULL);
    while (started > 0)
        pthread_join(workers[--started], NULL);
    progress(NULL);
}

/* ---- reports ---- */

static const char *const states[] = {"timed", "not timed", "wrong", "failed"};

static void put_row(struct json_writer *w, const fdm_tune_row *row) {
    json_open(w, NULL, '{');
    json_put_text(w, "kernel", row->kernel);
    json_put_text(w, "choice", row->choice);
    json_put_text(w, "state", states[row->state]);
    json_put_integer(w, "threads", row->num_threads);
    if (row->is_rule)
        json_put_raw(w, "rule", "true");
    if (row->num_samples) {
        json_put_real(w, "seconds", row->seconds);
        json_put_real(w, "seconds_quartile_low", row->quartile_low);
        json_put_real(w, "seconds_quartile_high", row->quartile_high);
        json_open(w, "samples", '[');
        for (int32_t i = 0; i < row->num_samples; i++)
            json_put_real(w, NULL, row->samples[i]);
        json_close(w, ']');
    }
    json_put_real(w, "difference", row->difference);
    if (*row->why)
        json_put_text(w, "why", row->why);
    json_close(w, '}');
}

static void put_problem(const struct tune *t, int32_t n, fdm_status status, const fdm_tune_row *rows,
                        const fdm_tune_result *result) {
    struct json_writer w = {.stream = stdout};
    json_open(&w, NULL, '{');
    json_put_integer(&w, "number", n);
    json_put_text(&w, "problem", t->problems.list[n].text);
    json_put_text(&w, "device", t->device.name);
    if (status) {
        json_put_text(&w, "error", fdm_last_error());
    } else {
        json_put_real(&w, "compile_seconds", result->compile_seconds);
        json_put_real(&w, "device_seconds", result->device_seconds);
        json_put_integer(&w, "places", result->num_places);
        json_put_text(&w, "best", rows[result->best].choice);
        json_put_raw(&w, "kept", result->kept == 1 ? "true" : "false");
        json_open(&w, "rows", '[');
        for (int32_t i = 0; i < result->num_rows; i++)
            put_row(&w, &rows[i]);
        json_close(&w, ']');
    }
    json_close(&w, '}');
    puts("");
}

static int compare_rows(const void *a, const void *b) {
    const fdm_tune_row *x = *(const fdm_tune_row *const *)a, *y = *(const fdm_tune_row *const *)b;
    const double p = x->num_samples ? x->seconds : HUGE_VAL, q = y->num_samples ? y->seconds : HUGE_VAL;
    return (p > q) - (p < q);
}

static void print_problem(const struct tune *t, int32_t n, const fdm_tune_row *rows, const fdm_tune_result *result) {
    const fdm_tune_row *sorted[ROWS_MAX], *best = &rows[result->best];
    for (int32_t i = 0; i < result->num_rows; i++)
        sorted[i] = &rows[i];
    qsort(sorted, (size_t)result->num_rows, sizeof sorted[0], compare_rows);
    printf("%s on %s: %d ways, compiled in %.1f s, timed in %.2f s\n", t->problems.list[n].text, t->device.name,
           result->num_rows, result->compile_seconds, result->device_seconds);
    for (int32_t i = 0; i < result->num_rows; i++) {
        const fdm_tune_row *row = sorted[i];
        printf("  %-24s %-44s ", row->kernel, row->choice);
        if (t->device.id.type == FDM_CPU)
            printf("%2d threads ", row->num_threads);
        if (row->num_samples)
            printf("%10.4f ms  %9.4f %9.4f  of %d%s\n", row->seconds * 1e3, row->quartile_low * 1e3,
                   row->quartile_high * 1e3, row->num_samples, row->is_rule ? "  rule" : "");
        else
            printf("%s%s%s\n", states[row->state], *row->why ? ": " : "", row->why);
    }
    if (result->best)
        printf("  best: %s, %.1f %% less time than the rules' choice\n", best->choice,
               100 * (1 - best->seconds / rows[0].seconds));
    else
        printf("  best: the rules' choice, %s\n", best->choice);
    if (result->kept == 2)
        printf("  the cache folder cannot be written: nothing is kept\n");
}

static void report_progress(void *context, const char *step, int32_t done, int32_t count) {
    (void)context;
    progress("%s %d of %d ways", step, done, count);
}

/* A kernel's fault ends the process' use of the device, so that the problems after it are not tried. */
static fdm_status tune_one(struct tune *t, int32_t n) {
    static fdm_tune_row rows[ROWS_MAX];
    fdm_tune_result result = {.struct_bytes = sizeof result};
    fdm_tune_options own = t->options;
    own.progress = report_progress;
    own.window = t->problems.list[n].window;
    own.keep = !t->no_keep && !own.exhaustive && !own.compile_only;
    rows[0].struct_bytes = sizeof rows[0];
    const fdm_status status = run_tuner(&t->device, &t->problems.list[n], &own, rows, ROWS_MAX, &result);
    progress(NULL);
    t->failed += status != FDM_OK;
    for (int32_t i = 0; !status && i < result.num_rows; i++)
        t->wrong += rows[i].state == FDM_TUNE_WRONG;
    if (t->json)
        put_problem(t, n, status, rows, &result);
    else if (status)
        fail(status);
    else if (!t->options.compile_only)
        print_problem(t, n, rows, &result);
    fflush(stdout);
    return status;
}

static int tune_all(struct tune *t) {
    fdm_status status = FDM_OK;
    for (int32_t n = 0; n < t->problems.count && status != FDM_ERROR_SYSTEM; n++) {
        if (n % BATCH == 0 && t->problems.count > 1)
            compile_batch(t, n, n + BATCH < t->problems.count ? n + BATCH : t->problems.count);
        status = tune_one(t, n);
    }
    if (t->wrong)
        return complain(EXIT_WRONG, "%d ways gave wrong results", t->wrong);
    return t->failed ? EXIT_WRONG : EXIT_FINE;
}

/* ---- what is kept ---- */

static void put_kept(struct json_writer *w, const fdm_kept_choice *c) {
    json_open(w, NULL, '{');
    json_put_text(w, "file", c->file);
    if (*c->key) {
        json_put_text(w, "key", c->key);
        json_put_text(w, "maker", c->maker);
        json_put_integer(w, "date", c->date);
        json_put_text(w, "kernel", c->kernel);
        json_put_text(w, "choice", c->choice);
        json_put_integer(w, "threads", c->num_threads);
        json_put_real(w, "seconds", c->seconds);
        json_put_text(w, "rule", c->rule_choice);
        json_put_real(w, "rule_seconds", c->rule_seconds);
    }
    json_put_text(w, "ignored", *c->ignored ? c->ignored : NULL);
    json_close(w, '}');
}

static void print_kept(const fdm_kept_choice *c) {
    if (*c->key)
        printf("%s\n  %s %s: %.4f ms, %.1f %% less than %s\n", c->key, c->kernel, c->choice, c->seconds * 1e3,
               100 * (1 - c->seconds / c->rule_seconds), c->rule_choice);
    if (*c->ignored)
        printf("%s%s is not used: it %s\n", *c->key ? "  " : "", c->file, c->ignored);
}

static int list_kept(int json) {
    fdm_kept_choice kept = {.struct_bytes = sizeof kept};
    struct json_writer w = {.stream = stdout};
    char folder[512];
    fdm_status status = fdm_cache_folder(folder, sizeof folder);
    if (status)
        return fail(status);
    if (json)
        json_open(&w, NULL, '[');
    int32_t n = 0;
    for (; !fdm_tune_kept(n, &kept); n++)
        json ? put_kept(&w, &kept) : print_kept(&kept);
    if (json)
        json_close(&w, ']');
    else
        printf("%d kept choices in %s/tuned", n, folder);
    puts("");
    return EXIT_FINE;
}

static int act_on_kept(const struct tune *t) {
    int64_t count = 0;
    if (t->action == OPT_LIST)
        return list_kept(t->json);
    const fdm_status status = t->action == OPT_FORGET   ? fdm_tune_forget(&count)
                              : t->action == OPT_EXPORT ? fdm_tune_export(t->file, &count)
                                                        : fdm_tune_import(t->file, &count);
    if (status)
        return fail(status);
    const char *done = t->action == OPT_FORGET ? "removed" : t->action == OPT_EXPORT ? "written" : "taken in";
    if (t->json)
        printf("{\"choices\": %lld}\n", (long long)count);
    else
        printf("%lld kept choices %s\n", (long long)count, done);
    return EXIT_FINE;
}

int command_tune(int argc, char **argv) {
    static struct tune t = {.choice = {1, {FDM_CPU, 0}}, .options = {.struct_bytes = sizeof t.options}};
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0) {
            fputs(help, stdout);
            return EXIT_FINE;
        }
    if (!read_options(&t, argc, argv))
        return EXIT_USAGE;
    if (t.action)
        return act_on_kept(&t);
    const fdm_status status = choose_device(&t);
    if (status)
        return fail(status);
    const int code = tune_all(&t);
    free(t.problems.list);
    return code;
}
