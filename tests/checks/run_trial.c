/* run_trial.c: one random problem on one kernel, with unreadable pages around its tensors and its workspace. */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checks.h"
#include "launches.h"
#include "structure.h"

int checks_quiet, checks_far;
static char crash_line[256];

/* Not installed where the address sanitizer reports crashes itself. */
__attribute__((unused)) static void on_crash(int number) {
    (void)number;
    if (!checks_quiet && write(STDOUT_FILENO, crash_line, strlen(crash_line)) < 0)
        _exit(3);
    _exit(1);
}

void trial_catch_crashes(void) {
#if !defined(__SANITIZE_ADDRESS__)
    signal(SIGSEGV, on_crash);
#    ifdef SIGBUS
    signal(SIGBUS, on_crash);
#    endif
    signal(SIGILL, on_crash);
#endif
}

/* Whether a family's tensors live on a CUDA device; NULL: the family of a choice code, which only those have here. */
int is_on_device(const char *family) {
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    for (int32_t i = 0; family && fdm_kernel_list(i, &info) == FDM_OK; i++)
        if (strcmp(info.family, family) == 0)
            return info.device_type == FDM_CUDA;
    return family == NULL;
}

/* Far tensors would take the memory of a real device from other programs. */
int trial_has_room(const struct trial *t) { return !t->far || t->named || checks_far || is_emulated(); }

fdm_status trial_plan(struct trial *t, fdm_pass pass, const fdm_tensors *tensors, const char *kernel,
                      const char *family, int threads, fdm_plan *plan) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    fdm_options options = t->options;
    options.kernel = kernel;
    options.family = family;
    options.num_threads = threads;
    if (tensors->cache)
        options.max_seqlen_k = trial_serve_bound(t);
    else if (t->varlen && is_on_device(family)) { /* cu_seqlens are out of reach there */
        options.max_seqlen_q = t->seqlen_q;
        options.max_seqlen_k = t->seqlen_k;
    }
    if (t->varlen && tensors->cache && is_on_device(family))
        options.max_seqlen_q = t->seqlen_q;
    fdm_status status = fdm_device_query(is_on_device(family) ? FDM_CUDA : FDM_CPU, 0, &device);
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
    fdm_plan plan = {.struct_bytes = sizeof plan};
    struct guarded workspace;
    const char *name = kernel ? kernel : family;
    snprintf(crash_line, sizeof crash_line, "WRONG %s crashed\n  replay: %s --kernel %s --seed %llu\n", name,
             checks_program(), name, (unsigned long long)t->seed);
    for (int i = 0; i < NUM_ROLES; i++) {
        int is_output = pass == FDM_FORWARD ? i >= OUT && i <= LSE_LOW : i >= DQ;
        is_output ? guarded_poison(&t->g[i]) : guarded_save(&t->g[i]);
    }
    if (pass == FDM_FORWARD)
        trial_serve_erase(t);
    if (before)
        before(t, pass);
    fdm_tensors tensors = trial_call(t, pass);
    fdm_status status;
    if (is_on_device(family)) {
        static struct device_copy copy;
        if (!trial_has_room(t) || !device_layout(t, &copy))
            return t->far ? -1 : 0;
        tensors = device_tensors(&copy, &tensors);
        if (trial_plan(t, pass, &tensors, kernel, family, threads, &plan))
            return -1;
        trial_contradict(t, t->contradicts);
        const int zones = device_execute(t, &copy, &plan, &tensors, &status);
        trial_contradict(t, 0);
        if (zones < 0)
            return 0;
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
        if (trial_plan(t, pass, &tensors, kernel, family, threads, &plan))
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

/* What flows into a row without keys may be anything: on every other trial NaN or inf. Not where rows share elements,
 * nor into its lse where that is the logarithm of its sinks. */
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
        const int empty = t->magnitude[LSE][n] == 0 && !isnan(t->truth[LSE][n]);
        for (int64_t e = 0; e < row_elements && empty && (role == DOUT || t->truth[LSE][n] == INFINITY); e++)
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
    trial_serve_fill(t);
    spoil_empty_rows(t, DLSE, 1);
    spoil_empty_rows(t, DOUT, t->head_dim_v);
}

void *trial_bits(const struct trial *t, fdm_pass pass, size_t *all) {
    size_t bytes = 0;
    for (int i = 0; i < NUM_ROLES; i++)
        bytes += guarded_bytes(&t->g[i]);
    char *copy = calloc(1, bytes + 1), *to = copy;
    *all = bytes;
    for (int i = pass == FDM_FORWARD ? OUT : DQ; i <= (pass == FDM_FORWARD ? (int)LSE_LOW : (int)DSINK); i++)
        if (t->g[i].map) {
            guarded_copy(to, &t->g[i]);
            to += guarded_bytes(&t->g[i]);
        }
    return copy;
}
