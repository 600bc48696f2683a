/* model.c: features of a plan, and the constants that turn them into seconds. */
#include "tuning/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- tiles of a problem ---- */

struct work {
    double items;  /* blocks of all heads and sequences */
    double tiles;  /* steps of all of them */
    double masked; /* of those, steps with hidden pairs */
    double most;   /* steps of the longest block */
};

/* Steps of the keys [first, last) and those of them that lie in [whole_first, whole_last) entirely. */
static void add_block(struct work *w, double first, double last, double whole_first, double whole_last, int64_t step,
                      double times) {
    const double s = (double)step, tiles = last > first ? ceil(last / s) - floor(first / s) : 0;
    const double whole = floor(whole_last / s) - ceil(fmax(whole_first, 0) / s);
    w->items += times;
    w->tiles += times * tiles;
    w->masked += times * (tiles - fmin(fmax(whole, 0), tiles));
    w->most = fmax(w->most, tiles);
}

/* Of a sequence: blocks of `rows` query rows that walk over keys, or of `rows` keys that walk over query rows, in
 * steps. left, right: how far from the diagonal a pair may be, seen from a block's own axis. */
struct walk {
    double own, other, offset, left, right; /* offset: other - own, where both axes end together */
    int64_t block, step;
};
static void add_sequence(struct work *w, const struct walk *k, double times) {
    enum { SAMPLES = 128 };
    const double blocks = ceil(k->own / (double)k->block);
    const int64_t taken = blocks > SAMPLES ? SAMPLES : (int64_t)blocks;
    for (int64_t n = 0; n < taken; n++) {
        const double begin = floor(((double)n + 0.5) * blocks / (double)taken) * (double)k->block;
        const double end = fmin(begin + (double)k->block, k->own);
        const double first = fmax(begin + k->offset - k->left, 0), last = fmin(end + k->offset + k->right, k->other);
        const int ragged = end - begin < (double)k->block;
        add_block(w, first, last, end - 1 + k->offset - k->left,
                  ragged ? 0 : fmin(begin + k->offset + k->right + 1, k->other), k->step,
                  times * blocks / (double)taken);
    }
}

/* Blocks of keys of a causal top-W whose biases are random, in the order of the last rows that see them: W keys live to
 * the last row, W / t of those at row t die there, and no others were ever seen. A block's keys begin at any row. */
static void add_topk(struct work *w, const struct model_way *way, double times) {
    enum { SAMPLES = 128 };
    const fdm_plan *plan = way->plan;
    const double rows = (double)plan->problem.seqlen_q, keys = (double)way->window;
    const double step = plan->block_m > 0 ? plan->block_m : 64, own = plan->block_n > 0 ? plan->block_n : 64;
    const double seen = keys * (1 + log(rows / keys));
    for (int n = 0; n < SAMPLES; n++) {
        const double number = (n + 0.5) / SAMPLES * seen; /* in the order of death */
        const double end = number < seen - keys ? keys * exp(number / keys) : rows;
        const double tiles = ceil(end / step), some = times * seen / own / SAMPLES;
        w->items += some;
        w->tiles += some * tiles;
        w->masked += some * tiles;
        w->most = fmax(w->most, tiles);
    }
}

static double bound_of(int64_t side) { return side < 0 ? HUGE_VAL : (double)side; }

/* The length of sequence b where they fall evenly from the longest on: all that a packed problem says of them. */
static double length_of(int64_t b, int64_t batch, int64_t longest, int64_t total) {
    const double mean = (double)total / (double)batch, spread = fmin((double)longest - mean, mean);
    return fmax(1, mean + spread * (batch > 1 ? 1 - 2 * (double)b / (double)(batch - 1) : 0));
}

static struct walk walk_of(const struct model_way *way, double rows, double keys) {
    const fdm_plan *plan = way->plan;
    const fdm_problem *p = &plan->problem;
    const int backward = p->pass == FDM_BACKWARD;
    const double left = bound_of(p->window_left), right = p->causal ? 0 : bound_of(p->window_right);
    const int64_t packed = way->packed > 1 ? way->packed : 1, block = plan->block_m > 0 ? plan->block_m : 64;
    const int64_t step = plan->block_n > 0 ? plan->block_n : 64;
    struct walk k = {rows, keys, keys - rows, left, right, block / packed > 0 ? block / packed : 1, step};
    if (backward)
        k = (struct walk){keys, rows, rows - keys, right, left, step, block};
    if (p->has_intervals && way->kernels_own && !backward) /* a list of keys that ends with the block's rows */
        k.left = (double)way->window;
    return k;
}

static struct work work_of(const struct model_way *way) {
    const fdm_problem *p = &way->plan->problem;
    struct work w = {0};
    const int backward = p->pass == FDM_BACKWARD;
    const int64_t packed = way->packed > 1 ? way->packed : 1;
    const double heads = backward ? (double)p->heads_kv : (double)p->heads / (double)packed;
    const int topk = backward && p->has_intervals && !p->varlen && way->window < p->seqlen_q;
    if (topk)
        add_topk(&w, way, heads * (double)p->batch);
    for (int64_t b = topk ? p->batch : 0; b < (p->varlen ? p->batch : 1); b++) {
        const double rows = p->varlen ? length_of(b, p->batch, p->seqlen_q, p->total_q) : (double)p->seqlen_q;
        const double keys = p->varlen ? length_of(b, p->batch, p->seqlen_k, p->total_k) : (double)p->seqlen_k;
        const struct walk k = walk_of(way, rows, keys);
        add_sequence(&w, &k, heads * (p->varlen ? 1 : (double)p->batch));
    }
    const double splits = way->splits > 1 ? way->splits : 1;
    const double heads_a_block = backward ? (double)p->heads / (double)(p->heads_kv ? p->heads_kv : 1) : 1;
    w.items *= splits;
    w.tiles *= heads_a_block;
    w.masked *= heads_a_block;
    w.most *= heads_a_block / splits;
    return w;
}

/* ---- features ---- */

static double num_sms(const fdm_device *device) { return device->num_sms > 0 ? device->num_sms : 1; }

/* Blocks that are resident at once, as far as shared memory and what the way says bound them. */
static double slots_of(const fdm_device *device, const struct model_way *way) {
    enum { RESERVED = 1024, MOST = 4 };
    const int64_t bytes = way->plan->shared_bytes;
    const double room = (double)device->shared_bytes + RESERVED, block = (double)bytes + RESERVED;
    const double resident = bytes >= 0 ? floor(room / block) : 1;
    return fmin(fmax(resident, 1), way->resident > 0 ? way->resident : MOST) * num_sms(device);
}

/* Steps of the multiprocessor that ends last: its share of all, or the longest block. A static order gives out blocks,
 * or pairs of unequal ones, evenly; where a block is asked for when another begins, the longest has a second. */
static double busiest(const fdm_device *device, const struct model_way *way, const struct work *w) {
    const double sms = num_sms(device), mean = w->items > 0 ? w->tiles / w->items : 0;
    const double together = way->order == MODEL_PAIRS ? 2 : 1;
    if (way->order == MODEL_STATIC || way->order == MODEL_PAIRS)
        return fmax(ceil(w->items / together / sms) * together * mean, w->most);
    if (way->order == MODEL_ASKS_EARLY && w->items > sms)
        return fmax(w->tiles / sms, w->most * (2 - sms / w->items));
    return fmax(w->tiles / sms, w->most);
}

static double bytes_of(const fdm_problem *p) {
    const double unit = (double)fdm_dtype_bytes(p->dtype), dims = (double)(p->head_dim + p->head_dim_v);
    const double rows = p->varlen ? (double)p->total_q : (double)p->batch * (double)p->seqlen_q;
    const double keys = p->varlen ? (double)p->total_k : (double)p->batch * (double)p->seqlen_k;
    const double q = rows * (double)p->heads * dims * unit, k = keys * (double)p->heads_kv * dims * unit;
    double bytes = p->pass == FDM_BACKWARD ? 3 * q + 2 * k : q + k;
    if (p->has_mask)
        bytes += (double)(p->mask_shape[0] * p->mask_shape[1]) * (double)p->mask_shape[2] * (double)p->mask_shape[3];
    return bytes;
}

void model_features(const fdm_device *device, const struct model_way *way, double f[MODEL_FEATURES]) {
    const struct work w = work_of(way);
    const double slots = slots_of(device, way), sms = num_sms(device);
    const double bandwidth = device->bandwidth > 0 ? (double)device->bandwidth : 1e12;
    const double mean = w.items > 0 ? w.tiles / w.items : 0;
    f[0] = 1e-6;
    f[1] = 1e-6 * ceil(w.items / slots);
    f[2] = 1e-6 * busiest(device, way, &w);
    f[3] = 1e-6 * ceil(w.items / sms) * mean;
    f[4] = 1e-6 * w.most;
    f[5] = bytes_of(&way->plan->problem) / bandwidth;
    f[6] = 1e-6 * w.masked / sms;
    f[7] = (double)way->plan->workspace_bytes / bandwidth;
}

/* ---- the table ---- */

static const char *kind_of(const fdm_problem *p) {
    return p->has_mask        ? "mask"
           : p->has_intervals ? "intervals"
           : p->has_bias      ? "bias"
           : p->seqlen_q <= 8 ? "few"
           : p->varlen        ? "packed"
                              : "plain";
}

static int64_t dim_of(const fdm_problem *p) {
    const int64_t dim = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
    return (dim + 31) / 32 * 32;
}

/* Codes say everything of a way but how many parts there are, which the features know. */
void model_name(const struct model_way *way, char name[MODEL_NAME_BYTES]) {
    const char *parts = strstr(way->plan->choice, "_Parts");
    const int length = parts ? (int)(parts - way->plan->choice) : (int)strlen(way->plan->choice);
    snprintf(name, MODEL_NAME_BYTES, "%s %.*s %lld %s", way->plan->kernel, length, way->plan->choice,
             (long long)dim_of(&way->plan->problem), kind_of(&way->plan->problem));
}

void model_tile_name(const struct model_way *way, char name[MODEL_NAME_BYTES]) {
    static const char *const ends[] = {"_Parts", "_Static", "_Longest", "_Dynamic", "_Exp"};
    size_t length = strlen(way->plan->choice);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        const char *end = strstr(way->plan->choice, ends[i]);
        if (end && (size_t)(end - way->plan->choice) < length)
            length = (size_t)(end - way->plan->choice);
    }
    snprintf(name, MODEL_NAME_BYTES, "%s %.*s %lld *", way->plan->kernel, (int)length, way->plan->choice,
             (long long)dim_of(&way->plan->problem));
}

static int compare_names(const void *name, const void *row) {
    return strcmp(name, ((const struct model_row *)row)->name);
}

const struct model_row *model_find(const fdm_device *device, const struct model_way *way) {
    char name[MODEL_NAME_BYTES], tile[MODEL_NAME_BYTES];
    const struct model_row *row = NULL;
    model_name(way, name);
    model_tile_name(way, tile);
    for (int32_t i = 0; i < num_model_tables && !row; i++) {
        const struct model_table *t = &model_tables[i];
        if (t->compute_major != device->compute_major || t->compute_minor != device->compute_minor)
            continue;
        row = bsearch(name, t->rows, (size_t)t->num_rows, sizeof *row, compare_names);
        if (!row)
            row = bsearch(tile, t->rows, (size_t)t->num_rows, sizeof *row, compare_names);
    }
    return row;
}

double model_seconds(const struct model_row *row, const double f[MODEL_FEATURES]) {
    double seconds = 0;
    for (int i = 0; i < MODEL_FEATURES; i++)
        seconds += (double)row->constants[i] * f[i];
    return seconds;
}
