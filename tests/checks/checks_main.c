/* checks_main.c: every kernel of every family on random problems, against the float64 reference. */
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "checks.h"
#include "launches.h"
#include "rotation.h"
#include "structure.h"

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

static int cuda_alone;    /* --cuda: no kernel of the CPU */
static int far_on_device; /* --far */

/* Far tensors would take the memory of a real device from other programs. */
static int has_room_for(const struct trial *t) { return !t->far || t->named || far_on_device || is_emulated(); }

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

/* Masks are drawn around the tiles of every kernel; below 16 rows there is one of all rows. */
static int knows_tiles(const struct trial *t, const fdm_plan *plan) {
    const int known = (plan->block_m < 16 || structure_knows_tile(plan->block_m)) &&
                      (!plan->block_n || structure_knows_tile(plan->block_n));
    if (!known)
        printf("WRONG structure.c does not know the tiles of %s, %d rows and %d keys\n  replay: %s --kernel %s "
               "--seed %llu\n",
               plan->kernel, (int)plan->block_m, (int)plan->block_n, checks_program(), plan->kernel,
               (unsigned long long)t->seed);
    return known;
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
    const char *name = kernel ? kernel : family;
    snprintf(crash_line, sizeof crash_line, "WRONG %s crashed\n  replay: %s --kernel %s --seed %llu\n", name,
             checks_program(), name, (unsigned long long)t->seed);
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
        if (!has_room_for(t) || !device_layout(t, &copy))
            return t->far ? -1 : 0;
        tensors = device_tensors(&copy, &tensors);
        if (plan_trial(t, pass, &tensors, kernel, family, threads, &plan))
            return -1;
        trial_contradict(t, t->contradicts);
        const int zones = device_execute(t, &copy, &plan, &tensors, &status);
        trial_contradict(t, 0);
        if (!zones) {
            printf("WRONG %s wrote between the tensors %s\n  replay: %s --kernel %s --seed %llu\n", name, t->text,
                   checks_program(), name, (unsigned long long)t->seed);
            return 0;
        }
        if (!status)
            launches_count(&plan);
    } else {
        if (t->contradicts && !refuses_contradiction(t, pass, &tensors, name))
            return 0;
        if (plan_trial(t, pass, &tensors, kernel, family, threads, &plan))
            return -1;
        make_workspace(&workspace, t, plan.workspace_bytes);
        status = fdm_execute(&plan, &tensors, workspace.data, (size_t)plan.workspace_bytes, NULL);
        guarded_free(&workspace);
    }
    if (status) {
        printf("WRONG %s refused its own plan: %s\n  %s\n  replay: %s --kernel %s --seed %llu\n", name,
               fdm_last_error(), t->text, checks_program(), name, (unsigned long long)t->seed);
        return 0;
    }
    if (after)
        after(t, pass);
    return knows_tiles(t, &plan) && outputs_right(t, pass, name);
}

/* ---- the loop ---- */

struct tally {
    char name[64];
    char family[16]; /* "" with a choice code */
    char code[64];   /* this problem's way to run it; "": the rules' */
    fdm_pass pass;
    int64_t accepted, refused, wrong, by_code;
};
enum { KERNELS_MAX = 64 };

/* What this problem is run by. */
static const char *runner_of(const struct tally *k) { return *k->code ? k->code : k->name; }
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

void trial_truth(struct trial *t, int backward) {
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

void *trial_bits(const struct trial *t, fdm_pass pass, size_t *all) {
    size_t bytes = 0;
    for (int i = 0; i < NUM_ROLES; i++)
        bytes += guarded_bytes(&t->g[i]);
    char *copy = calloc(1, bytes + 1), *to = copy;
    *all = bytes;
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
    size_t bytes;
    t->options.deterministic = 1;
    for (int run = 0; run < 2; run++) {
        emulated_round(t, run);
        trial_run(t, k->pass, runner_of(k), family_of(k), run ? 3 : 1, NULL, NULL);
        bits[run] = trial_bits(t, k->pass, &bytes);
    }
    int same = memcmp(bits[0], bits[1], bytes) == 0;
    if (!same)
        printf("WRONG %s differs between two runs (on the CPU with 1 and 3 threads)\n  %s\n  replay: %s "
               "--kernel %s --seed %llu\n",
               runner_of(k), t->text, checks_program(), runner_of(k), (unsigned long long)t->seed);
    free(bits[0]);
    free(bits[1]);
    return same;
}

/* Whether the kernel takes the problem, and by which way; known before anything of it is computed. */
static int accepts(struct trial *t, struct tally *k, int threads) {
    static struct device_copy copy;
    fdm_plan plan;
    fdm_tensors tensors = trial_tensors(t, k->pass);
    if (sums_in_float16(k->name) && !t->mild)
        return 0;
    if (on_device(family_of(k))) {
        if (!has_room_for(t) || !device_layout(t, &copy))
            return 0;
        tensors = device_tensors(&copy, &tensors);
    }
    if (plan_trial(t, k->pass, &tensors, k->name, family_of(k), threads, &plan))
        return 0;
    *k->code = 0;
    if (*k->family)
        trial_variant(t, &plan, k->code, sizeof k->code);
    return 1;
}

static void check_kernel(struct trial *t, struct tally *k, int threads) {
    if (k->pass == FDM_BACKWARD)
        trial_set_forward_results(t);
    int right = 1;
    for (int round = 0; right > 0 && emulated_round(t, round); round++)
        right = trial_run(t, k->pass, runner_of(k), family_of(k), threads, NULL, NULL);
    if (right < 0) {
        k->refused++;
        return;
    }
    k->accepted++;
    k->by_code += *k->code != 0;
    if (right && t->seed % 20 == 0 && !t->nan_row && !t->nan_key)
        right = deterministic(t, k);
    k->wrong += !right;
}

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
        if (on_device(info.family))
            launches_expect(info.name, info.pass);
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

/* Which problems are tried. They end with `repeat` seeds, when each kernel has done `right` of them, after `seconds`,
 * or by SIGTERM. */
struct order {
    uint64_t seed, repeat;
    struct ways ways;
    int64_t right; /* 0: any number */
    double seconds;
    int threads, until_wrong;
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
        trial_truth(&trial, backward);
    for (int32_t i = 0; i < count; i++)
        if (taken[i])
            check_kernel(&trial, &kernels[i], threads);
    trial_free(&trial);
    return wanted;
}

static int is_any_wrong(const struct tally *kernels, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        if (kernels[i].wrong)
            return 1;
    return 0;
}

/* A line for each kernel; how many problems were wrong. A kernel that took none of more than a few fails. */
static int64_t report(struct tally *kernels, int32_t count, uint64_t problems, int64_t *accepted) {
    enum { FEW_PROBLEMS = 50 };
    int64_t wrong = 0;
    for (int32_t i = 0; i < count; i++) {
        struct tally *k = &kernels[i];
        if (!*k->family && k->accepted == 0 && kernels[count - 1 - i].accepted > 0)
            continue; /* the choice code is of the other pass */
        printf("%-28s %8lld right, %lld wrong, %lld refused", k->name, (long long)(k->accepted - k->wrong),
               (long long)k->wrong, (long long)k->refused);
        printf(k->by_code ? ", %lld by choice code\n" : "\n", (long long)k->by_code);
        if (k->accepted == 0 && problems > FEW_PROBLEMS) {
            printf("WRONG %s accepted no problem\n", k->name);
            k->wrong = 1;
        }
        *accepted += k->accepted;
        wrong += k->wrong;
    }
    if (problems > 1)
        launches_report();
    printf("%lld passed, %lld failed\n", (long long)(*accepted - wrong), (long long)wrong);
    return wrong;
}

static int run_checks(const char *only, const struct order *o, const char *json) {
    enum { REPORT_SECONDS = 20 };
    static struct tally kernels[KERNELS_MAX];
    int32_t count = list_kernels(kernels, only);
    int64_t accepted = 0;
    const double begin = now();
    double reported = begin;
    uint64_t n = 0;
    signal(SIGTERM, on_stop);
    while (n < o->repeat && !stopped && (o->seconds <= 0 || now() - begin < o->seconds) &&
           try_seed(o, o->seed + n, kernels, count)) {
        n++;
        if (o->until_wrong && is_any_wrong(kernels, count))
            break;
        if (now() - reported < REPORT_SECONDS)
            continue;
        for (int32_t i = 0; i < count; i++)
            printf("so far: %s %lld, %lld wrong\n", kernels[i].name, (long long)kernels[i].accepted,
                   (long long)kernels[i].wrong);
        fflush(stdout);
        reported = now();
    }
    const int64_t wrong = report(kernels, count, n, &accepted);
    if (accepted == 0)
        printf(count ? "WRONG no kernel accepted a problem; %llu were drawn\n"
                     : "WRONG no kernel of this run has such a name; %llu problems were drawn\n",
               (unsigned long long)n);
    if (json && !write_json(json, kernels, count, o->seed, n)) {
        printf("WRONG %s cannot be written\n", json);
        return 2;
    }
    return wrong > 0 || accepted == 0;
}

static uint64_t default_repeat(const struct order *o, int seeded) {
    if (o->right)
        return 1000 + 500 * (uint64_t)o->right;
    return o->seconds > 0 ? UINT64_MAX : seeded ? 1 : 200;
}

/* What the command line asks for. */
struct request {
    struct order order;
    struct case_choice cases;
    const char *device, *json, *demand;
    int broken, named, seeded, rotates;
};

static int usage(int code) {
    printf("usage: fdm-checks [--kernel TEXT] [--emulate sm_90 | --cuda] [--seed N] [--repeat N] [--right N] "
           "[--seconds N]\n"
           "                  [--ways N[+M]] [--threads N] [--far] [--rotate] [--until-wrong] [--launches LIST] "
           "[--json FILE]\n"
           "       fdm-checks --cases [--kernel TEXT] [--group TEXT] [--share K/N] [--seed N] [--rotate] ...\n"
           "       fdm-checks --broken [--repeat N]\n"
           "--right: until each kernel has done N problems; --ways: of N kinds, from number M on, so that few "
           "specialisations run many;\n"
           "--far: on a device that is not emulated, tensors that lie 2^31 bytes apart too, where its memory has "
           "room;\n"
           "--rotate: the seeds, ways and share that FDM_CHECK_SEED names; --launches: fails unless what the list "
           "names was "
           "launched:\n"
           "kernels of the device, or constants of theirs: combine_splits,hopper_forward.SPLITS=1\n");
    return code;
}

/* 0: it cannot be read. */
static int read_option(struct request *r, int option) {
    char *end;
    switch (option) {
    case 'k': r->cases.kernel = optarg; break;
    case 's': r->order.seed = strtoull(optarg, NULL, 10), r->seeded = 1; break;
    case 'r': r->order.repeat = strtoull(optarg, NULL, 10); break;
    case 't': r->order.threads = atoi(optarg); break;
    case 'g': r->order.right = atoll(optarg); break;
    case 'w':
        r->order.ways.count = strtoull(optarg, &end, 10);
        r->order.ways.first = *end == '+' ? strtoull(end + 1, NULL, 10) : 0;
        break;
    case 'x': r->order.seconds = atof(optarg); break;
    case 'b': r->broken = 1; break;
    case 'e': r->device = optarg; break;
    case 'j': r->json = optarg; break;
    case 'c': cuda_alone = 1; break;
    case 'n': r->named = 1; break;
    case 'u': r->cases.group = optarg; break;
    case 'o': r->rotates = 1; break;
    case 'f': far_on_device = 1; break;
    case 'i': r->order.until_wrong = 1; break;
    case 'l': r->demand = optarg; break;
    case 'p':
        return sscanf(optarg, "%" SCNu64 "/%" SCNu64, &r->cases.part, &r->cases.parts) == 2 &&
               r->cases.part < r->cases.parts;
    default: return 0;
    }
    return 1;
}

/* What FDM_CHECK_SEED names; said, so that a run can be repeated without it. */
static void rotate(struct request *r) {
    r->order.seed = rotated_seed(r->order.seed);
    r->order.ways.first += r->order.ways.count * (rotation() % 1000);
    r->cases.part = (r->cases.part + rotation()) % r->cases.parts;
    printf("the same again, without FDM_CHECK_SEED and --rotate: ");
    if (r->named)
        printf("--share %llu/%llu\n", (unsigned long long)r->cases.part, (unsigned long long)r->cases.parts);
    else if (r->order.ways.count)
        printf("--seed %llu --ways %llu+%llu\n", (unsigned long long)r->order.seed,
               (unsigned long long)r->order.ways.count, (unsigned long long)r->order.ways.first);
    else
        printf("--seed %llu\n", (unsigned long long)r->order.seed);
}

static int run_request(struct request *r) {
    struct order *o = &r->order;
    if (r->broken)
        return r->device ? broken_texts_main(r->cases.kernel) : broken_main(o->repeat ? o->repeat : 60);
    if (r->rotates)
        rotate(r);
    if (r->named) {
        checks_named();
        r->cases.first = r->seeded ? o->seed : 0;
        r->cases.repeat = o->repeat ? o->repeat : r->seeded ? 1 : UINT64_MAX;
        r->cases.until_wrong = o->until_wrong;
        r->cases.cuda_alone = cuda_alone || is_emulated();
        r->cases.alone = r->seeded && r->cases.repeat == 1;
        return cases_main(&r->cases);
    }
    if (o->ways.count)
        checks_of_ways(o->ways);
    if (!o->repeat)
        o->repeat = default_repeat(o, r->seeded);
    return run_checks(r->cases.kernel, o, r->json);
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"kernel", required_argument, 0, 'k'},   {"seed", required_argument, 0, 's'},
        {"repeat", required_argument, 0, 'r'},   {"threads", required_argument, 0, 't'},
        {"broken", no_argument, 0, 'b'},         {"emulate", required_argument, 0, 'e'},
        {"cases", no_argument, 0, 'n'},          {"share", required_argument, 0, 'p'},
        {"json", required_argument, 0, 'j'},     {"cuda", no_argument, 0, 'c'},
        {"group", required_argument, 0, 'u'},    {"right", required_argument, 0, 'g'},
        {"ways", required_argument, 0, 'w'},     {"seconds", required_argument, 0, 'x'},
        {"rotate", no_argument, 0, 'o'},         {"until-wrong", no_argument, 0, 'i'},
        {"launches", required_argument, 0, 'l'}, {"far", no_argument, 0, 'f'},
        {"help", no_argument, 0, 'h'},           {0}};
    struct request request = {.order.seed = 1, .cases.parts = 1};
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1)
        if (option == 'h' || !read_option(&request, option))
            return usage(option == 'h' ? 0 : 2);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (request.device && !emulate_device(request.device))
        return 2;
#if !defined(__SANITIZE_ADDRESS__)
    signal(SIGSEGV, on_crash);
    signal(SIGBUS, on_crash);
    signal(SIGILL, on_crash);
#endif
    const int result = run_request(&request);
    return request.demand && !launches_include(request.demand) ? 1 : result;
}
