/* run_cases.c: the named cases, each as the kernel that it names, in the way that it asks: none may be refused, unless
 * the case says so. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/kernel_name.h"
#include "checks.h"
#include "launches.h"
#include "subjects.h"

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
    size_t bytes;
    void *now = trial_bits(t, pass, &bytes);
    const int same = !*bits || memcmp(*bits, now, bytes) == 0;
    free(*bits);
    *bits = now;
    return same;
}

/* In every round, by the choice code of the case's way. */
static int check_variant(struct trial *t, const struct named_case *c, const char *code) {
    int right = 1;
    void *bits = NULL;
    for (int round = 0; right == 1 && emulated_round(t, round); round++) {
        right = trial_run(t, c->pass, code, NULL, 1, NULL, NULL);
        if (right == 1 && c->deterministic && !same_bits(t, c->pass, &bits)) {
            printf("WRONG %s: other bits than in the round before\n  %s\n", code, t->text);
            right = 0;
        }
    }
    free(bits);
    if (right < 0)
        printf("WRONG %s is refused by its choice code\n", code);
    return right == 1 && (!t->varlen || keeps_sequences_apart(t, c->pass, code));
}

/* The plan of the case's way, or of the first from there on whose choice code holds the words that the case names. */
static int plan_of(const struct named_case *c, const fdm_device *device, const fdm_problem *problem, fdm_plan *plan) {
    for (int32_t variant = c->variant; !fdm_plan_variant(device, problem, c->kernel, variant, plan); variant++)
        if (!c->choice || strstr(plan->choice, c->choice))
            return 1;
    return 0;
}

/* -1: the device has no room for tensors so far apart. */
static int check_on_device(struct trial *t, const struct named_case *c) {
    struct device_copy copy;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    if (!device_layout(t, &copy))
        return t->far ? -1 : 0;
    fdm_tensors tensors = trial_tensors(t, c->pass);
    tensors = device_tensors(&copy, &tensors);
    const int taken = !fdm_device_query(FDM_CUDA, 0, &device) &&
                      !fdm_describe(c->pass, &tensors, &t->options, &problem) && plan_of(c, &device, &problem, &plan);
    if (taken && !c->refused)
        return check_variant(t, c, plan.choice);
    const int right = !taken && c->refused && strstr(fdm_last_error(), "2^31 bytes");
    if (!right)
        printf("WRONG %s %s case %llu, %s: %s\n  %s\n", c->kernel, taken ? "took" : "refused",
               (unsigned long long)t->seed, c->group, taken ? plan.choice : fdm_last_error(), t->text);
    return right;
}

/* By each kernel of this machine whose name begins as the case's does; one of them has to take it. */
static int check_on_cpu(struct trial *t, const struct named_case *c) {
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    int right = -1;
    for (int32_t i = 0; right && fdm_kernel_list(i, &info) == FDM_OK; i++)
        if (info.available && info.pass == c->pass && strncmp(info.name, c->kernel, strlen(c->kernel)) == 0) {
            const int one = trial_run(t, c->pass, info.name, info.family, 2, NULL, NULL);
            right = one < 0 ? right : one;
        }
    if (right < 0)
        printf("WRONG no kernel %s takes case %llu, %s\n  %s\n", c->kernel, (unsigned long long)t->seed, c->group,
               t->text);
    return right > 0;
}

static int is_on_cpu(const struct named_case *c) { return strncmp(c->kernel, "cpu.", 4) == 0; }

/* Whether this run has the device of a case's kernel. */
static int is_of_this_run(const struct named_case *c, int cuda_alone) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    for (int32_t i = 0; fdm_kernel_list(i, &info) == FDM_OK; i++)
        if (strncmp(info.name, c->kernel, strlen(c->kernel)) == 0)
            return is_on_cpu(c) ? !cuda_alone : info.available && !fdm_device_query(FDM_CUDA, 0, &device);
    return 0;
}

/* A seed alone: that case, whatever its kernel, for reports name a choice code. */
static int is_alone(const struct options *o) { return o->seed != NOT_GIVEN && given_or(o->repeat, 1) == 1; }

/* Apart from the share, which counts these cases alone: of a few cases a share of their numbers may have none. */
static int is_asked_for(const struct named_case *c, const struct options *o) {
    return is_of_this_run(c, o->cuda || is_emulated()) &&
           (is_alone(o) ||
            (kernel_is_chosen(o->kernel, c->kernel) && (o->group ? strstr(c->group, o->group) != NULL : !c->many)));
}

int cases_checks(const struct options *o) {
    const uint64_t first = given_or(o->seed, 0), repeat = is_alone(o) ? 1 : o->repeat;
    const struct named_case *c;
    const char *expected = "";
    int64_t counts[3] = {0}; /* wrong, right, without room */
    uint64_t asked_for = 0;
    trial_catch_crashes();
    for (uint64_t n = first; n - first < repeat && (c = named_case((int64_t)n)); n++) {
        struct trial trial;
        if (!is_asked_for(c, o) || (asked_for++ % o->share.parts != o->share.part && !is_alone(o)))
            continue;
        if (strcmp(expected, c->kernel) != 0)
            launches_expect(c->kernel, c->pass);
        expected = c->kernel;
        trial_of_case(&trial, c, n);
        trial_truth(&trial, c->pass == FDM_BACKWARD);
        if (c->pass == FDM_BACKWARD)
            trial_set_forward_results(&trial);
        const int result = is_on_cpu(c) ? check_on_cpu(&trial, c) : check_on_device(&trial, c);
        counts[result < 0 ? 2 : result]++;
        trial_free(&trial);
        if (o->until_wrong && result == 0)
            break;
    }
    if (!is_alone(o))
        launches_report();
    if (counts[2])
        printf("not covered: %lld cases whose tensors lie further apart than this device has memory\n",
               (long long)counts[2]);
    printf("%lld passed, %lld failed\n", (long long)counts[1], (long long)counts[0]);
    if (counts[0] + counts[1] == 0)
        printf("WRONG no case was run: none is of this machine, of the kernel, group and share that were asked for\n");
    return counts[0] > 0 || counts[1] == 0;
}
