/* checks_main.c: every kernel of every family on random problems, against the float64 reference. */
#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "checks.h"

int checks_quiet;
static char crash_line[256];

/* Not installed where the address sanitizer reports crashes itself. */
__attribute__((unused)) static void on_crash(int number) {
    (void)number;
    if (!checks_quiet && write(STDOUT_FILENO, crash_line, strlen(crash_line)) < 0)
        _exit(3);
    _exit(1);
}

/* Whether a family's tensors live on a CUDA device; NULL: the family of a choice code, which only those have here. */
static int on_device(const char *family) {
    fdm_kernel_info info;
    for (int32_t i = 0; family && fdm_kernel_list(i, &info) == FDM_OK; i++)
        if (strcmp(info.family, family) == 0)
            return info.device_type == FDM_CUDA;
    return family == NULL;
}

static fdm_status plan_trial(struct trial *t, fdm_pass pass, const fdm_tensors *tensors, const char *kernel,
                             const char *family, int threads, fdm_plan *plan) {
    fdm_device device;
    fdm_problem problem;
    fdm_options options = t->options;
    options.kernel = kernel;
    options.family = family;
    options.num_threads = threads;
    if (t->varlen && on_device(family)) { /* cu_seqlens are out of reach there */
        options.max_seqlen_q = t->seqlen_q;
        options.max_seqlen_k = t->seqlen_k;
    }
    fdm_status status = fdm_device_query(on_device(family) ? FDM_CUDA : FDM_CPU, 0, &device);
    if (!status)
        status = fdm_describe(pass, tensors, &options, &problem);
    return status ? status : fdm_plan_attention(&device, &problem, &options, plan);
}

/* A workspace between unreadable pages, poisoned, flush with its end as far as its alignment allows. */
static void make_workspace(struct guarded *g, struct trial *t, int64_t bytes) {
    int64_t shape[1] = {(bytes + 63) / 64 * 16};
    guarded_make(g, t, FDM_FLOAT32, 1, shape, 0);
    size_t slack = (uintptr_t)g->data % 64;
    g->data -= slack;
}

static int outputs_right(const struct trial *t, fdm_pass pass, const char *kernel) {
    for (int i = 0; i < NUM_ROLES; i++) {
        int is_output = pass == FDM_FORWARD ? i >= OUT && i <= LSE_LOW : i >= DQ;
        if (guarded_intact(&t->g[i], is_output))
            continue;
        if (!checks_quiet)
            printf("WRONG %s wrote %s %s\n  %s\n  replay: %s --kernel %s --seed %llu\n", kernel,
                   is_output ? "between the elements of" : "to the input", role_names[i], t->text, checks_program(),
                   kernel, (unsigned long long)t->seed);
        return 0;
    }
    return trial_compare(t, pass, kernel);
}

/* On the CPU cu_seqlens that leave the tensors are an error. */
static int refuses_contradiction(struct trial *t, fdm_pass pass, const fdm_tensors *tensors, const char *kernel) {
    fdm_problem problem;
    trial_contradict(t, 1);
    const fdm_status status = fdm_describe(pass, tensors, &t->options, &problem);
    trial_contradict(t, 0);
    if (status != FDM_ERROR_INVALID_ARGUMENT)
        printf("WRONG cu_seqlens that contradict the tensors are not refused\n  %s\n  replay: %s --kernel %s "
               "--seed %llu\n",
               t->text, checks_program(), kernel, (unsigned long long)t->seed);
    return status == FDM_ERROR_INVALID_ARGUMENT;
}

int trial_run(struct trial *t, fdm_pass pass, const char *kernel, const char *family, int threads,
              tamper_function *before, tamper_function *after) {
    fdm_plan plan;
    struct guarded workspace;
    snprintf(crash_line, sizeof crash_line, "WRONG %s crashed\n  replay: %s --kernel %s --seed %llu\n", kernel,
             checks_program(), kernel, (unsigned long long)t->seed);
    for (int i = 0; i < NUM_ROLES; i++) {
        int is_output = pass == FDM_FORWARD ? i >= OUT && i <= LSE_LOW : i >= DQ;
        is_output ? guarded_poison(&t->g[i]) : guarded_save(&t->g[i]);
    }
    if (before)
        before(t, pass);
    fdm_tensors tensors = trial_tensors(t, pass);
    fdm_status status;
    if (on_device(family)) {
        static struct device_copy copy;
        if (t->far)
            return -1;
        if (!device_layout(t, &copy))
            return 0;
        tensors = device_tensors(&copy, &tensors);
        if (plan_trial(t, pass, &tensors, kernel, family, threads, &plan))
            return -1;
        trial_contradict(t, t->contradicts);
        const int zones = device_execute(t, &copy, &plan, &tensors, &status);
        trial_contradict(t, 0);
        if (!zones) {
            printf("WRONG %s wrote between the tensors %s\n  replay: %s --kernel %s --seed %llu\n", kernel, t->text,
                   checks_program(), kernel, (unsigned long long)t->seed);
            return 0;
        }
    } else {
        if (t->contradicts && !refuses_contradiction(t, pass, &tensors, kernel))
            return 0;
        if (plan_trial(t, pass, &tensors, kernel, family, threads, &plan))
            return -1;
        make_workspace(&workspace, t, plan.workspace_bytes);
        status = fdm_execute(&plan, &tensors, workspace.data, (size_t)plan.workspace_bytes, NULL);
        guarded_free(&workspace);
    }
    if (status) {
        printf("WRONG %s refused its own plan: %s\n  %s\n  replay: %s --kernel %s --seed %llu\n", kernel,
               fdm_last_error(), t->text, checks_program(), kernel, (unsigned long long)t->seed);
        return 0;
    }
    if (after)
        after(t, pass);
    return outputs_right(t, pass, kernel);
}

/* ---- the loop ---- */

struct tally {
    char name[64];
    char family[16]; /* "" with a choice code */
    fdm_pass pass;
    int64_t accepted, refused, wrong;
};
enum { KERNELS_MAX = 64 };

static const char *family_of(const struct tally *k) { return *k->family ? k->family : NULL; }

/* What flows into a row without keys may be anything: on every other trial NaN or inf. Not where rows share elements.
 */
static void spoil_empty_rows(struct trial *t, enum role role, int64_t row_elements) {
    if (!t->g[role].map || (t->seed % 2 && !t->named))
        return;
    for (int32_t i = 0; i < t->g[role].tensor.ndim; i++)
        if (t->g[role].strides[i] == 0)
            return;
    const int64_t *shape = t->g[LSE].shape, elements = guarded_elements(&t->g[LSE]);
    const int64_t rows = shape[t->g[LSE].tensor.ndim - 1], heads = t->heads;
    for (int64_t n = 0; n < elements; n++) { /* lse is [B, H, Sq], dout [B, Sq, H, Dv] */
        const int64_t at = role == DLSE ? n : (n / rows / heads * rows + n % rows) * heads + n / rows % heads;
        for (int64_t e = 0; e < row_elements && t->truth[LSE][n] == INFINITY; e++)
            guarded_set(&t->g[role], at * row_elements + e, t->seed % 4 ? NAN : INFINITY);
    }
}

static void compute_truth(struct trial *t, int backward) {
    trial_reference(t, backward);
    trial_baseline(t, backward);
    if (trial_spoil_seen(t)) { /* rows that become NaN tell nothing of what rounding does in their head */
        trial_keep_facts(t);
        trial_free_truth(t);
        trial_reference(t, backward);
        trial_baseline(t, backward);
    }
    trial_spoil_hidden(t);
    spoil_empty_rows(t, DLSE, 1);
    spoil_empty_rows(t, DOUT, t->head_dim_v);
}

static void *snapshot(const struct trial *t, fdm_pass pass) {
    size_t bytes = 0;
    for (int i = 0; i < NUM_ROLES; i++)
        bytes += guarded_bytes(&t->g[i]);
    char *copy = calloc(1, bytes + 1), *to = copy;
    for (int i = pass == FDM_FORWARD ? OUT : DQ; i <= (pass == FDM_FORWARD ? (int)LSE_LOW : (int)DBIAS); i++)
        if (t->g[i].map) {
            guarded_copy(to, &t->g[i]);
            to += guarded_bytes(&t->g[i]);
        }
    return copy;
}

/* The same bits on one and on three threads; of the emulated device at two orders of what is asynchronous. */
static int deterministic(struct trial *t, struct tally *k) {
    void *bits[2];
    size_t bytes = 1;
    for (int i = 0; i < NUM_ROLES; i++)
        bytes += guarded_bytes(&t->g[i]);
    t->options.deterministic = 1;
    for (int run = 0; run < 2; run++) {
        emulated_round(t, run);
        trial_run(t, k->pass, k->name, family_of(k), run ? 3 : 1, NULL, NULL);
        bits[run] = snapshot(t, k->pass);
    }
    int same = memcmp(bits[0], bits[1], bytes) == 0;
    if (!same)
        printf("WRONG %s differs between two runs (on the CPU with 1 and 3 threads)\n  %s\n  replay: %s "
               "--kernel %s --seed %llu\n",
               k->name, t->text, checks_program(), k->name, (unsigned long long)t->seed);
    free(bits[0]);
    free(bits[1]);
    return same;
}

/* Whether the kernel takes the problem; known before anything of it is computed. */
static int accepts(struct trial *t, const struct tally *k, int threads) {
    static struct device_copy copy;
    fdm_plan plan;
    fdm_tensors tensors = trial_tensors(t, k->pass);
    if (sums_in_float16(k->name) && !t->mild)
        return 0;
    if (on_device(family_of(k))) {
        if (t->far || !device_layout(t, &copy))
            return 0;
        tensors = device_tensors(&copy, &tensors);
    }
    return plan_trial(t, k->pass, &tensors, k->name, family_of(k), threads, &plan) == FDM_OK;
}

static void check_kernel(struct trial *t, struct tally *k, int threads) {
    if (k->pass == FDM_BACKWARD)
        trial_set_forward_results(t);
    int right = 1;
    for (int round = 0; right > 0 && emulated_round(t, round); round++)
        right = trial_run(t, k->pass, k->name, family_of(k), threads, NULL, NULL);
    if (right < 0) {
        k->refused++;
        return;
    }
    k->accepted++;
    if (right && t->seed % 20 == 0 && !t->nan_row && !t->nan_key)
        right = deterministic(t, k);
    k->wrong += !right;
}

static int cuda_alone; /* --cuda: no kernel of the CPU */

static int32_t list_kernels(struct tally *kernels, const char *only) {
    fdm_kernel_info info;
    int32_t count = 0, missing = 0;
    for (int32_t i = 0; fdm_kernel_list(i, &info) == FDM_OK; i++) {
        if (strcmp(info.family, "reference") == 0 || (only && !strstr(info.name, only)) ||
            ((is_emulated() || cuda_alone) && !on_device(info.family)))
            continue;
        if (!info.available) {
            printf("%s%s", missing++ ? ", " : "not covered on this machine: ", info.name);
            continue;
        }
        struct tally *k = &kernels[count++];
        *k = (struct tally){.pass = info.pass};
        snprintf(k->name, sizeof k->name, "%s", info.name);
        snprintf(k->family, sizeof k->family, "%s", info.family);
    }
    printf(missing ? "\n" : "");
    fdm_device device;
    if (count == 0 && only && !fdm_device_query(FDM_CUDA, 0, &device)) /* a choice code: one variant of a kernel */
        for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++) {
            kernels[count] = (struct tally){.pass = (fdm_pass)pass};
            snprintf(kernels[count++].name, sizeof kernels->name, "%s", only);
        }
    return count;
}

/* Appends a line of JSON for each kernel: device, first seed, and how many problems it did right, wrong and refused. */
static int write_json(const char *path, const struct tally *kernels, int32_t count, uint64_t seed, uint64_t seeds) {
    FILE *file = fopen(path, "a");
    for (int32_t i = 0; file && i < count; i++) {
        const struct tally *k = &kernels[i];
        fdm_device device;
        if (fdm_device_query(on_device(family_of(k)) ? FDM_CUDA : FDM_CPU, 0, &device))
            continue;
        fprintf(
            file,
            "{\"kernel\": \"%s\", \"device\": \"%s\", \"emulated\": %s, \"seed\": %llu, \"seeds\": %llu, \"right\": "
            "%lld, \"wrong\": %lld, \"refused\": %lld}\n",
            k->name, device.name, is_emulated() ? "true" : "false", (unsigned long long)seed, (unsigned long long)seeds,
            (long long)(k->accepted - k->wrong), (long long)k->wrong, (long long)k->refused);
    }
    return file && fclose(file) == 0;
}

static int is_of_keys(enum role role) { return role == K || role == V || role == DK || role == DV; }

/* Elements first .. last - 1 of a packed matrix are of sequence b. */
struct range {
    int64_t first, last;
};
static struct range elements_of(const struct trial *t, enum role role, int64_t b) {
    const struct guarded *cu = &t->g[is_of_keys(role) ? CU_K : CU_Q];
    const int64_t of_row = t->g[role].shape[1] * t->g[role].shape[2];
    return (struct range){(int64_t)guarded_get(cu, b) * of_row, (int64_t)guarded_get(cu, b + 1) * of_row};
}

/* With NaN in all of a packed sequence the others' outputs are as they were, bit by bit; on 9.0, where rows of a warp
 * decide together when maxima are raised, up to a rounding. */
static int keeps_sequences_apart(struct trial *t, fdm_pass pass, const char *kernel) {
    static const enum role inputs[] = {Q, K, V, DOUT}, outputs[2][3] = {{OUT, OUT, OUT}, {DQ, DK, DV}};
    const double rounding = strncmp(kernel, "SM90", 4) == 0 ? 0x1p-6 : 0;
    const int64_t b = 1 + (int64_t)(t->seed % (uint64_t)(t->batch - 1));
    double *before[3];
    int same = 1;
    for (int i = 0; i < 3; i++) {
        const struct guarded *g = &t->g[outputs[pass][i]];
        before[i] = malloc((size_t)guarded_elements(g) * sizeof(double));
        for (int64_t n = 0; n < guarded_elements(g); n++)
            before[i][n] = guarded_get(g, n);
    }
    for (int i = 0; i < 4; i++) {
        const struct range r = elements_of(t, inputs[i], b);
        for (int64_t n = r.first; n < r.last; n++)
            guarded_set(&t->g[inputs[i]], n, NAN);
    }
    checks_quiet = 1;
    trial_run(t, pass, kernel, NULL, 1, NULL, NULL);
    checks_quiet = 0;
    for (int i = 0; i < 3; i++) {
        const struct guarded *g = &t->g[outputs[pass][i]];
        const struct range r = elements_of(t, outputs[pass][i], b);
        for (int64_t n = 0; n < guarded_elements(g) && same; n++)
            same = (n >= r.first && n < r.last) ||
                   fabs(guarded_get(g, n) - before[i][n]) <= rounding * (fabs(before[i][n]) + 0.1);
        if (!same)
            printf("WRONG %s: NaN in sequence %lld reach another's %s\n  %s\n  replay: %s --seed %llu\n", kernel,
                   (long long)b, role_names[outputs[pass][i]], t->text, checks_program(), (unsigned long long)t->seed);
        free(before[i]);
    }
    return same;
}

/* Where the same bits are asked for: whether they are those of the round before, which `bits` holds. */
static int same_bits(const struct trial *t, fdm_pass pass, void **bits) {
    size_t bytes = 1;
    for (int i = 0; i < NUM_ROLES; i++)
        bytes += guarded_bytes(&t->g[i]);
    void *now = snapshot(t, pass);
    const int same = !*bits || memcmp(*bits, now, bytes) == 0;
    free(*bits);
    *bits = now;
    return same;
}

/* A named case, as the kernel that has its name or the way that the case asks: none may be refused. */
static int check_case(struct trial *t, const struct named_case *c) {
    struct device_copy copy;
    fdm_device device;
    fdm_problem problem;
    fdm_plan plan;
    if (c->pass == FDM_BACKWARD)
        trial_set_forward_results(t);
    fdm_tensors tensors = trial_tensors(t, c->pass);
    if (!device_layout(t, &copy))
        return 0;
    tensors = device_tensors(&copy, &tensors);
    if (fdm_device_query(FDM_CUDA, 0, &device) || fdm_describe(c->pass, &tensors, &t->options, &problem) ||
        fdm_plan_variant(&device, &problem, c->kernel, c->variant, &plan)) {
        printf("WRONG %s refused case %llu, %s: %s\n  %s\n", c->kernel, (unsigned long long)t->seed, c->group,
               fdm_last_error(), t->text);
        return 0;
    }
    int right = 1;
    void *bits = NULL;
    for (int round = 0; right == 1 && emulated_round(t, round); round++) {
        right = trial_run(t, c->pass, plan.choice, NULL, 1, NULL, NULL);
        if (right == 1 && c->deterministic && !same_bits(t, c->pass, &bits)) {
            printf("WRONG %s: other bits than in the round before\n  %s\n", plan.choice, t->text);
            right = 0;
        }
    }
    free(bits);
    if (right < 0)
        printf("WRONG %s is refused by its choice code\n", plan.choice);
    return right == 1 && (!t->varlen || keeps_sequences_apart(t, c->pass, plan.choice));
}

/* The named cases of kernels whose names have `only` in them, from number `first` on; of them the part-th of `parts`.
 */
static int run_cases(const char *only, uint64_t first, uint64_t repeat, uint64_t part, uint64_t parts) {
    const struct named_case *c;
    int64_t right = 0, wrong = 0;
    for (uint64_t n = first; n - first < repeat && (c = named_case((int64_t)n)); n++) {
        struct trial trial;
        if ((only && !strstr(c->kernel, only)) || n % parts != part)
            continue;
        trial_of_case(&trial, c, n);
        compute_truth(&trial, c->pass == FDM_BACKWARD);
        check_case(&trial, c) ? right++ : wrong++;
        trial_free(&trial);
    }
    printf("%lld passed, %lld failed\n", (long long)right, (long long)wrong);
    return wrong > 0 || right == 0;
}

/* Which problems are tried. They end with `repeat` seeds, when each kernel has done `right` of them, after `seconds`,
 * or by SIGTERM. */
struct order {
    uint64_t seed, repeat, ways;
    int64_t right; /* 0: any number */
    double seconds;
    int threads;
};

static volatile sig_atomic_t stopped;
static void on_stop(int number) {
    (void)number;
    stopped = 1;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int has_enough(const struct tally *k, const struct order *o) { return o->right && k->accepted >= o->right; }

/* One seed on every kernel that takes it and has not done enough; 0 when all have. */
static int try_seed(const struct order *o, uint64_t seed, struct tally *kernels, int32_t count) {
    const int threads = o->threads ? o->threads : 1 + (int)(seed % 3);
    int taken[KERNELS_MAX] = {0}, any = 0, backward = 0, wanted = count == 0;
    struct trial trial;
    trial_draw(&trial, seed, o->ways);
    for (int32_t i = 0; i < count; i++) {
        if (has_enough(&kernels[i], o))
            continue;
        wanted = 1;
        taken[i] = accepts(&trial, &kernels[i], threads);
        kernels[i].refused += !taken[i];
        any |= taken[i];
        backward |= taken[i] && kernels[i].pass == FDM_BACKWARD;
    }
    if (any)
        compute_truth(&trial, backward);
    for (int32_t i = 0; i < count; i++)
        if (taken[i])
            check_kernel(&trial, &kernels[i], threads);
    trial_free(&trial);
    return wanted;
}

static int run_checks(const char *only, const struct order *o, const char *json) {
    enum { REPORT_SECONDS = 20 };
    static struct tally kernels[KERNELS_MAX];
    int32_t count = list_kernels(kernels, only);
    int64_t accepted = 0, wrong = 0;
    const double begin = now();
    double reported = begin;
    uint64_t n = 0;
    signal(SIGTERM, on_stop);
    while (n < o->repeat && !stopped && (o->seconds <= 0 || now() - begin < o->seconds) &&
           try_seed(o, o->seed + n, kernels, count)) {
        n++;
        if (now() - reported < REPORT_SECONDS)
            continue;
        for (int32_t i = 0; i < count; i++)
            printf("so far: %s %lld, %lld wrong\n", kernels[i].name, (long long)kernels[i].accepted,
                   (long long)kernels[i].wrong);
        fflush(stdout);
        reported = now();
    }
    for (int32_t i = 0; i < count; i++) {
        struct tally *k = &kernels[i];
        if (!*k->family && k->accepted == 0 && kernels[count - 1 - i].accepted > 0)
            continue; /* the choice code is of the other pass */
        printf("%-28s %8lld right, %lld wrong, %lld refused\n", k->name, (long long)(k->accepted - k->wrong),
               (long long)k->wrong, (long long)k->refused);
        if (k->accepted == 0 && n > 50) {
            printf("WRONG %s accepted no problem\n", k->name);
            k->wrong = 1;
        }
        accepted += k->accepted;
        wrong += k->wrong;
    }
    printf("%lld passed, %lld failed\n", (long long)(accepted - wrong), (long long)wrong);
    if (json && !write_json(json, kernels, count, o->seed, n)) {
        printf("WRONG %s cannot be written\n", json);
        return 2;
    }
    return wrong > 0 || count == 0;
}

static uint64_t default_repeat(const struct order *o, int seeded) {
    if (o->right)
        return 1000 + 500 * (uint64_t)o->right;
    return o->seconds > 0 ? UINT64_MAX : seeded ? 1 : 200;
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"kernel", required_argument, 0, 'k'},
                                            {"seed", required_argument, 0, 's'},
                                            {"repeat", required_argument, 0, 'r'},
                                            {"threads", required_argument, 0, 't'},
                                            {"broken", no_argument, 0, 'b'},
                                            {"emulate", required_argument, 0, 'e'},
                                            {"cases", no_argument, 0, 'n'},
                                            {"share", required_argument, 0, 'p'},
                                            {"json", required_argument, 0, 'j'},
                                            {"cuda", no_argument, 0, 'c'},
                                            {"right", required_argument, 0, 'g'},
                                            {"ways", required_argument, 0, 'w'},
                                            {"seconds", required_argument, 0, 'x'},
                                            {"help", no_argument, 0, 'h'},
                                            {0}};
    const char *kernel = NULL, *device = NULL, *json = NULL;
    struct order order = {.seed = 1};
    unsigned long long part = 0, parts = 1;
    int option, broken = 0, seeded = 0, cases = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 'k': kernel = optarg; break;
        case 's': order.seed = strtoull(optarg, NULL, 10), seeded = 1; break;
        case 'r': order.repeat = strtoull(optarg, NULL, 10); break;
        case 't': order.threads = atoi(optarg); break;
        case 'g': order.right = atoll(optarg); break;
        case 'w': order.ways = strtoull(optarg, NULL, 10); break;
        case 'x': order.seconds = atof(optarg); break;
        case 'b': broken = 1; break;
        case 'e': device = optarg; break;
        case 'j': json = optarg; break;
        case 'c': cuda_alone = 1; break;
        case 'n': cases = 1; break;
        case 'p':
            if (sscanf(optarg, "%llu/%llu", &part, &parts) == 2 && part < parts)
                break; /* fall through */
        default:
            printf("usage: fdm-checks [--kernel TEXT] [--cuda] [--seed N] [--repeat N] [--threads N] [--broken] "
                   "[--emulate sm_90] [--cases [--share K/N]] [--json FILE]\n"
                   "                  [--right N] [--seconds N] [--ways N]\n"
                   "--right: until each kernel has done N problems; --ways: of N kinds, so that few specialisations "
                   "run many\n");
            return option == 'h' ? 0 : 2;
        }
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (device && !emulate_device(device))
        return 2;
#if !defined(__SANITIZE_ADDRESS__)
    signal(SIGSEGV, on_crash);
    signal(SIGBUS, on_crash);
    signal(SIGILL, on_crash);
#endif
    if (broken)
        return broken_main(order.repeat ? order.repeat : 60);
    if (cases) {
        checks_named();
        return run_cases(kernel, seeded ? order.seed : 0,
                         order.repeat ? order.repeat
                         : seeded     ? 1
                                      : UINT64_MAX,
                         part, parts);
    }
    if (order.ways)
        checks_of_ways(order.ways);
    if (!order.repeat)
        order.repeat = default_repeat(&order, seeded);
    return run_checks(kernel, &order, json);
}
