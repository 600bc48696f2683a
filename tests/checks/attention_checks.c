/* attention_checks.c: every kernel of every family on random problems, against the float64 reference. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checks.h"
#include "subjects.h"
#include "tally.h"

/* The same bits on one and on three threads; of the emulated device at two orders of what is asynchronous. */
static int deterministic(struct trial *t, struct tally *k) {
    void *bits[2];
    size_t bytes;
    t->options.deterministic = 1;
    for (int run = 0; run < 2; run++) {
        emulated_round(t, run);
        trial_run(t, k->pass, tally_runner(k), tally_family(k), run ? 3 : 1, NULL, NULL);
        bits[run] = trial_bits(t, k->pass, &bytes);
    }
    int same = memcmp(bits[0], bits[1], bytes) == 0;
    if (!same)
        printf("WRONG %s differs between two runs (on the CPU with 1 and 3 threads)\n  %s\n  replay: %s "
               "--kernel %s --seed %llu\n",
               tally_runner(k), t->text, checks_program(), tally_runner(k), (unsigned long long)t->seed);
    free(bits[0]);
    free(bits[1]);
    return same;
}

/* Whether the kernel takes the problem, and by which way; known before anything of it is computed. */
static int accepts(struct trial *t, struct tally *k, int threads) {
    static struct device_copy copy;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_tensors tensors = trial_call(t, k->pass);
    if (sums_in_float16(k->name) && !t->mild)
        return 0;
    if (is_on_device(tally_family(k))) {
        if (!trial_has_room(t) || !device_layout(t, &copy))
            return 0;
        tensors = device_tensors(&copy, &tensors);
    }
    if (trial_plan(t, k->pass, &tensors, k->name, tally_family(k), threads, &plan))
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
        right = trial_run(t, k->pass, tally_runner(k), tally_family(k), threads, NULL, NULL);
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

static int has_enough(const struct tally *k, const struct options *o) { return (uint64_t)k->accepted >= o->right; }

/* One seed on every kernel that takes it and has not done enough; 0 when all have. */
static int try_seed(const struct options *o, uint64_t seed, struct tally *kernels, int32_t count) {
    const int threads = (int)given_or(o->threads, 1 + seed % 3);
    int taken[KERNELS_MAX] = {0}, any = 0, backward = 0, wanted = count == 0;
    struct trial trial;
    trial_draw(&trial, seed, o->ways);
    if (o->subject->run == serving_checks)
        trial_serve(&trial);
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

/* Where nothing ends the run: one problem of a named seed, else 200; with --right not many more than it should take. */
static uint64_t repeat_of(const struct options *o) {
    if (o->repeat != NOT_GIVEN)
        return o->repeat;
    if (o->right != NOT_GIVEN)
        return 1000 + 500 * o->right;
    return o->seconds != NOT_GIVEN ? UINT64_MAX : o->seed != NOT_GIVEN ? 1 : 200;
}

/* Tries seeds until there were enough, or SIGTERM comes; returns how many. */
static uint64_t try_seeds(const struct options *o, uint64_t first, struct tally *kernels, int32_t count) {
    enum { REPORT_SECONDS = 20 };
    const uint64_t repeat = repeat_of(o);
    const double begin = now();
    double reported = begin;
    uint64_t n = 0;
    signal(SIGTERM, on_stop);
    while (n < repeat && !stopped && now() - begin < (double)o->seconds && try_seed(o, first + n, kernels, count)) {
        n++;
        if (o->until_wrong && tally_any_wrong(kernels, count))
            break;
        if (now() - reported < REPORT_SECONDS)
            continue;
        for (int32_t i = 0; i < count; i++)
            printf("so far: %s %lld, %lld wrong\n", kernels[i].name, (long long)kernels[i].accepted,
                   (long long)kernels[i].wrong);
        fflush(stdout);
        reported = now();
    }
    return n;
}

/* Leaves out the kernel of latent keys, which few ways do not have (trial_draw); returns how many are left. */
static int32_t without_latent(struct tally *kernels, int32_t count) {
    int32_t left = 0;
    for (int32_t i = 0; i < count; i++)
        if (strcmp(kernels[i].name, "hopper.latent"))
            kernels[left++] = kernels[i];
    return left;
}

int attention_checks(const struct options *o) {
    static struct tally kernels[KERNELS_MAX];
    const uint64_t first = given_or(o->seed, 1);
    const int32_t all = tally_kernels(kernels, o->kernel, o->cuda);
    const int32_t count = o->ways.count ? without_latent(kernels, all) : all;
    int64_t accepted = 0;
    checks_far = o->far;
    trial_catch_crashes();
    const uint64_t n = try_seeds(o, first, kernels, count);
    const int64_t wrong = tally_report(kernels, count, n, &accepted);
    if (accepted == 0)
        printf(count ? "WRONG no kernel accepted a problem; %llu were drawn\n"
                     : "WRONG no kernel of this run has such a name; %llu problems were drawn\n",
               (unsigned long long)n);
    if (o->json && !tally_write(o->json, kernels, count, first, n)) {
        printf("WRONG %s cannot be written\n", o->json);
        return 2;
    }
    return wrong > 0 || accepted == 0;
}

int serving_checks(const struct options *o) { return attention_checks(o); }
