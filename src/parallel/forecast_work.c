/* forecast_work.c: the time of a rank's kernels, by the device's model. */
#include <math.h>

#include "base/error.h"
#include "parallel/forecast.h"

enum { MOST_CALLS = 8 }; /* ranges of a rank that get a call each */

/* What a call costs besides its pairs, where the model is asked for none. */
static const double launch_seconds = 5e-6;

/* 0: the model has no constants. */
static double predicted(const struct scene *scene, const fdm_problem *problem) {
    const fdm_device *device = scene->device;
    fdm_options options = fdm_options_default();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_prediction prediction = {.struct_bytes = sizeof prediction};
    options.deterministic = problem->deterministic;
    options.tune = FDM_TUNE_RULES;
    if (fdm_plan_attention(device, problem, &options, &plan) ||
        fdm_plan_predict(device, &plan, scene->window, &prediction))
        return 0;
    return prediction.seconds;
}

static double flops_of(const fdm_problem *p, double pairs) {
    const double batch = p->varlen ? 1 : (double)p->batch;
    const double a_pair = 2 * (double)(p->head_dim + p->head_dim_v) * (p->pass == FDM_BACKWARD ? 2.5 : 1);
    return pairs * a_pair * batch * (double)p->heads;
}

/* What the model wants to know of key intervals: how many keys a row sees. */
static int64_t problem_window(const struct scene *scene, double pairs) {
    const double rows = (double)scene->mask->seqlen_q;
    return scene->problem->has_intervals && rows > 0 ? (int64_t)(pairs / rows) + 1 : 0;
}

double work_of_one(struct scene *scene, int64_t pairs, fdm_status *status) {
    const fdm_problem *p = scene->problem;
    const double of_a_list = (double)pairs / (double)(scene->mask->num_lists > 1 ? scene->mask->num_lists : 1);
    scene->window = problem_window(scene, of_a_list);
    double seconds = scene->device->id.type == FDM_CUDA ? predicted(scene, p) : 0;
    scene->from_model = seconds > 0;
    if (!(seconds > 0) && scene->links.flops > 0)
        seconds = flops_of(p, of_a_list) / scene->links.flops + launch_seconds;
    if (!(seconds > 0)) {
        *status = error_set(FDM_ERROR_UNSUPPORTED,
                            "the model of times has no constants for this problem on %s; say how many operations a "
                            "second attention does there",
                            scene->device->name);
        return 0;
    }
    scene->pair_seconds = pairs > 0 ? seconds / (double)pairs : 0;
    return seconds;
}

/* A call of heads_kv KV heads on `rows` and the keys that causal mask and window leave them; 0: ask for pairs. */
static double work_of_range(const struct scene *scene, fdm_range rows, int64_t heads_kv) {
    fdm_problem p = *scene->problem;
    const fdm_range keys = rank_mask_span(scene->mask, rows);
    const int64_t shift = scene->mask->seqlen_k - scene->mask->seqlen_q, beyond = keys.end - rows.end - shift;
    if (keys.first >= keys.end || p.has_mask || p.has_bias)
        return 0;
    p.heads = heads_kv * (p.heads / p.heads_kv);
    p.heads_kv = heads_kv;
    p.seqlen_q = rows.end - rows.first;
    p.seqlen_k = keys.end;
    p.window_left = p.window_left >= 0 ? p.window_left + beyond : -1;
    p.window_right = p.window_right > beyond ? p.window_right - beyond : p.window_right >= 0 ? 0 : -1;
    return predicted(scene, &p);
}

double work_of_rank(const struct scene *scene, const struct loads *l, int32_t rank, int64_t heads_kv) {
    const fdm_layout *rows = l->rows;
    const int64_t first = rows->begin[rank], count = rows->begin[rank + 1] - first;
    const double share = (double)heads_kv / (double)scene->problem->heads_kv;
    const double by_pairs = (double)l->pairs[rank] * scene->pair_seconds * share;
    double seconds = 0;
    if (!l->pairs[rank])
        return 0;
    if (!scene->from_model || scene->mask->num_lists || scene->problem->varlen || count > MOST_CALLS)
        return by_pairs + launch_seconds;
    for (int64_t i = 0; i < count; i++) {
        const double of_range = work_of_range(scene, rows->ranges[first + i], heads_kv);
        if (!(of_range > 0))
            return by_pairs + launch_seconds * (double)count;
        seconds += of_range;
    }
    return seconds;
}

fdm_problem problem_of_heads(const fdm_problem *problem, int64_t ranks) {
    fdm_problem p = *problem;
    int64_t *shared[] = {&p.mask_shape[1], &p.bias_shape[1], &p.interval_heads}; /* an extent of 1 is of all heads */
    p.heads /= ranks;
    p.heads_kv /= ranks;
    for (int i = 0; i < 3; i++)
        *shared[i] = *shared[i] > 1 ? *shared[i] / ranks : *shared[i];
    return p;
}

double work_of_heads(const struct scene *scene, int64_t ranks, int64_t pairs) {
    const fdm_problem p = problem_of_heads(scene->problem, ranks);
    const double seconds = scene->from_model ? predicted(scene, &p) : 0;
    return seconds > 0 ? seconds : (double)pairs * scene->pair_seconds / (double)ranks + launch_seconds;
}
