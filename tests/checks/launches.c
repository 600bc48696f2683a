/* launches.c: the kernels that the plans of a run launch, counted by the values of their constants. */
#include "launches.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda.h"
#include "plan/plan.h"

/* A kernel in the device's text, or one value of one of its constants. */
struct counted {
    char family[16], entry[40];
    const char *constant; /* NULL: the kernel */
    int64_t value, launches;
};
/* Of constants with more values, such as head dims, none is counted: those are the problems'. */
enum { COUNTED_MAX = 4096, VALUES_MAX = 8, PROBLEMS = 400, MULTIPROCESSORS = 132 };
static struct counted counted[COUNTED_MAX];
static int num_counted;

static int same_constant(const struct counted *c, const char *family, const char *entry, const char *constant) {
    return strcmp(c->entry, entry) == 0 && strcmp(c->family, family) == 0 &&
           (c->constant && constant ? strcmp(c->constant, constant) == 0 : c->constant == constant);
}

static struct counted *counter_of(const char *family, const char *entry, const char *constant, int64_t value) {
    for (int i = 0; i < num_counted; i++)
        if (counted[i].value == value && same_constant(&counted[i], family, entry, constant))
            return &counted[i];
    if (num_counted == COUNTED_MAX) {
        printf("WRONG launches.c has no room for more constants than %d\n", num_counted);
        exit(2);
    }
    struct counted *made = &counted[num_counted++];
    *made = (struct counted){.constant = constant, .value = value};
    snprintf(made->family, sizeof made->family, "%s", family);
    snprintf(made->entry, sizeof made->entry, "%s", entry);
    return made;
}

static void add(const fdm_plan *plan, int64_t launches) {
    const struct family *family = plan_family(plan);
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    const int32_t count = family->launches ? family->launches(family, plan, requests) : 0;
    for (int32_t i = 0; i < count; i++) {
        counter_of(family->name, requests[i].entry, NULL, 0)->launches += launches;
        for (int32_t n = 0; n < requests[i].num_constants; n++) {
            const struct cuda_constant *c = &requests[i].constants[n];
            counter_of(family->name, requests[i].entry, c->name, c->value)->launches += launches;
        }
    }
}

void launches_count(const fdm_plan *plan) { add(plan, 1); }

/* ---- problems of all kinds, to be planned only ---- */

static uint64_t state;
static int64_t below(int64_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (int64_t)((state >> 33) % (uint64_t)n);
}
static int64_t one_of(const int64_t *values, int64_t count) { return values[below(count)]; }
#define ONE_OF(...) one_of((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

static void draw_scores(const fdm_problem *p, int32_t *has, int64_t shape[4]) {
    *has = below(3) == 0;
    shape[0] = *has ? ONE_OF(1, p->batch) : 1;
    shape[1] = *has ? ONE_OF(1, p->heads_kv, p->heads) : 1;
    shape[2] = *has ? ONE_OF(1, p->seqlen_q) : 1;
    shape[3] = *has && below(6) ? p->seqlen_k : 1;
}

static fdm_problem draw_problem(fdm_pass pass) {
    fdm_problem p = fdm_problem_default();
    p.pass = pass;
    p.dtype = (fdm_dtype)below(3);
    p.batch = ONE_OF(1, 1, 2, 40);
    p.heads_kv = ONE_OF(1, 2, 8);
    p.heads = p.heads_kv * ONE_OF(1, 1, 2, 4, 8);
    p.seqlen_q = ONE_OF(1, 1, 4, 40, 300, 1000, 9000);
    p.seqlen_k = ONE_OF(40, 300, 2000, 9000, 40000);
    p.head_dim = ONE_OF(16, 32, 40, 64, 64, 72, 96, 128, 128, 192, 256, 320, 512, 1024);
    p.head_dim_v = below(3) ? p.head_dim : ONE_OF(16, 64, 128, 256);
    p.causal = (int32_t)below(2);
    p.window_left = ONE_OF(-1, -1, -1, 100);
    p.softcap = below(4) ? 0 : 10;
    p.softmax_scale = below(6) ? 0.1 : -0.1;
    p.varlen = below(4) == 0;
    p.total_q = p.varlen ? p.batch * p.seqlen_q : 0;
    p.total_k = p.varlen ? p.batch * p.seqlen_k : 0;
    p.deterministic = (int32_t)below(2);
    p.has_intervals = below(4) == 0;
    draw_scores(&p, &p.has_mask, p.mask_shape);
    draw_scores(&p, &p.has_bias, p.bias_shape);
    p.bias_dtype = below(2) ? p.dtype : FDM_FLOAT32;
    p.has_lse_low = p.has_bias && below(2);
    p.needs_dbias = pass == FDM_BACKWARD && p.has_bias && below(2);
    p.has_dlse = pass == FDM_BACKWARD && below(3) == 0;
    p.needs_dq = p.needs_dk = p.needs_dv = pass == FDM_FORWARD || below(8) != 0;
    p.aligned = p.scores_aligned = p.scores_mappable = p.q_mappable = p.keys_mappable = below(4) != 0;
    return p;
}

void launches_expect(const char *kernel, fdm_pass pass) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    if (fdm_device_query(FDM_CUDA, 0, &device))
        return;
    if (device.num_sms < MULTIPROCESSORS) /* an emulated device that has few shall not hide what needs many */
        device.num_sms = MULTIPROCESSORS;
    state = 1;
    for (int n = 0; n < PROBLEMS; n++) {
        const fdm_problem p = draw_problem(pass);
        for (int32_t way = 0; fdm_plan_variant(&device, &p, kernel, way, &plan) == FDM_OK; way++)
            add(&plan, 0);
    }
}

/* ---- what is said ---- */

static int num_values(const struct counted *c) {
    int count = 0;
    for (int i = 0; i < num_counted; i++)
        count += same_constant(&counted[i], c->family, c->entry, c->constant);
    return count;
}

/* Head dims and what follows from them are the problems', as is what has many values. */
static int is_of_problems(const struct counted *c) {
    return strstr(c->constant, "HEAD_DIM") || strstr(c->constant, "SLICE") || num_values(c) > VALUES_MAX;
}

/* " (SCHEDULER=2, SPLITS=1)": the values with which a kernel that was launched was not. */
static int report_values(const struct counted *kernel, const char *between) {
    int missing = 0;
    for (int i = 0; i < num_counted; i++) {
        const struct counted *c = &counted[i];
        if (!c->constant || c->launches || strcmp(c->entry, kernel->entry) != 0 ||
            strcmp(c->family, kernel->family) != 0 || is_of_problems(c))
            continue;
        if (missing++ == 0)
            printf("%s%s (", between, kernel->entry);
        printf("%s%s=%lld", missing == 1 ? "" : ", ", c->constant, (long long)c->value);
    }
    if (missing)
        printf(")");
    return missing;
}

static void report_family(const char *family) {
    int launched = 0, missing = 0;
    printf("launched of %s: ", family);
    for (int i = 0; i < num_counted; i++)
        if (!counted[i].constant && counted[i].launches && strcmp(counted[i].family, family) == 0)
            printf("%s%s %lld", launched++ ? ", " : "", counted[i].entry, (long long)counted[i].launches);
    printf(launched ? "; not launched: " : "nothing; not launched: ");
    for (int i = 0; i < num_counted; i++) {
        if (counted[i].constant || strcmp(counted[i].family, family) != 0)
            continue;
        if (counted[i].launches)
            missing += report_values(&counted[i], missing ? ", " : "");
        else
            printf("%s%s", missing++ ? ", " : "", counted[i].entry);
    }
    printf(missing ? "\n" : "nothing\n");
}

void launches_report(void) {
    for (int i = 0; i < num_counted; i++) {
        int first = 0;
        while (strcmp(counted[first].family, counted[i].family) != 0)
            first++;
        if (first == i)
            report_family(counted[i].family);
    }
}

/* Whether "ENTRY" or "ENTRY.CONSTANT=VALUE" was launched. */
static int was_launched(const char *wanted) {
    char name[128];
    for (int i = 0; i < num_counted; i++) {
        const struct counted *c = &counted[i];
        snprintf(name, sizeof name, c->constant ? "%s.%s=%lld" : "%s", c->entry, c->constant, (long long)c->value);
        if (c->launches && strcmp(name, wanted) == 0)
            return 1;
    }
    return 0;
}

int launches_include(const char *list) {
    char wanted[128];
    int all = 1;
    for (const char *at = list; *at;) {
        const size_t length = strcspn(at, ",");
        snprintf(wanted, sizeof wanted, "%.*s", (int)length, at);
        if (!was_launched(wanted)) {
            printf("WRONG %s was not launched\n", wanted);
            all = 0;
        }
        at += length + (at[length] == ',');
    }
    return all;
}
