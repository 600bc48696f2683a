/* plan_predicted.c: fdm plan --predict: every way to run a problem by predicted time. */
#include "plan_predicted.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "json_writer.h"

enum { VARIANTS_MAX = 256 };

struct predicted {
    fdm_plan plan;
    fdm_prediction prediction;
    int is_rule;
};

static int compare_predicted(const void *a, const void *b) {
    const fdm_prediction *x = &((const struct predicted *)a)->prediction,
                         *y = &((const struct predicted *)b)->prediction;
    const double p = x->seconds > 0 ? x->seconds : HUGE_VAL, q = y->seconds > 0 ? y->seconds : HUGE_VAL;
    return (p > q) - (p < q);
}

static int32_t list_predicted(const fdm_device *device, const fdm_problem *problem, const fdm_options *of, int64_t topk,
                              struct predicted *all) {
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    fdm_plan rule = {.struct_bytes = sizeof rule};
    const fdm_status status = fdm_plan_attention(device, problem, of, &rule);
    int32_t count = 0;
    for (int32_t i = 0; !fdm_kernel_list(i, &kernel); i++)
        for (int32_t n = 0; count < VARIANTS_MAX; n++) {
            struct predicted *p = &all[count];
            *p = (struct predicted){.plan.struct_bytes = sizeof p->plan,
                                    .prediction.struct_bytes = sizeof p->prediction};
            if (fdm_plan_variant(device, problem, kernel.name, n, &p->plan))
                break;
            if (fdm_plan_predict(device, &p->plan, topk, &p->prediction))
                continue;
            p->is_rule =
                !status && strcmp(p->plan.kernel, rule.kernel) == 0 && strcmp(p->plan.choice, rule.choice) == 0;
            count++;
        }
    qsort(all, (size_t)count, sizeof *all, compare_predicted);
    return count;
}

static void put_predicted(struct json_writer *w, const struct predicted *p) {
    json_open(w, NULL, '{');
    json_put_text(w, "kernel", p->plan.kernel);
    json_put_text(w, "choice", p->plan.choice);
    json_put_raw(w, "rule", p->is_rule ? "true" : "false");
    json_put_text(w, "name", p->prediction.name);
    json_put_real(w, "seconds", p->prediction.seconds > 0 ? p->prediction.seconds : (double)INFINITY);
    json_put_real(w, "residual", p->prediction.residual);
    json_open(w, "features", '[');
    for (int i = 0; i < FDM_PREDICTION_FEATURES; i++)
        json_put_real(w, NULL, p->prediction.features[i]);
    json_close(w, ']');
    json_put_text(w, "reason", p->plan.reason);
    json_close(w, '}');
}

int plan_predicted(const fdm_device *device, const fdm_problem *problem, const fdm_options *of, int64_t topk,
                   int json) {
    struct predicted *all = allocate_or_exit(VARIANTS_MAX * sizeof *all);
    const int32_t count = list_predicted(device, problem, of, topk, all);
    struct json_writer w = {.stream = stdout};
    if (json)
        json_open(&w, NULL, '[');
    for (int32_t i = 0; i < count; i++) {
        const struct predicted *p = &all[i];
        if (json)
            put_predicted(&w, p);
        else if (p->prediction.seconds > 0)
            printf("%10.4f ms +- %2.0f %%  %s %s%s: %s\n", p->prediction.seconds * 1e3, 100 * p->prediction.residual,
                   p->plan.kernel, p->plan.choice, p->is_rule ? " (rule)" : "", p->plan.reason);
        else
            printf("%22s %s %s%s: %s\n", "not predicted", p->plan.kernel, p->plan.choice, p->is_rule ? " (rule)" : "",
                   p->plan.reason);
    }
    if (json) {
        json_close(&w, ']');
        puts("");
    }
    release(all);
    return count ? EXIT_FINE
                 : complain(EXIT_WRONG, "no kernel whose time is predicted takes this problem on %s", device->name);
}
