/* plan_ranks.c: fdm plan --ranks: what a problem takes on 2 to many ranks, and how many pay. */
#include "plan_ranks.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "json_writer.h"

enum {
    COUNTS_MAX = 24,        /* 2, 4, 8, .. ranks and the wished number */
    BALANCED_BLOCKS = 1024, /* of a balanced layout that is tried unasked, at most */
    ROWS_PRINTED = 16
};
/* Doubling the ranks pays while it makes the call this many times as fast. */
static const double pays = 1.25;

/* The mask of the problem, and where its documents begin. */
struct ranks_mask {
    fdm_rank_mask mask;
    int32_t *intervals;
    int64_t *cu_seqlens;
    int64_t num_documents;
};

struct attempt {
    fdm_ranks_forecast forecast;
    fdm_rank_forecast *rows; /* NULL: not wanted */
    const char *layout;
    char others[160]; /* the best of every layout that was tried */
};

static const char *const layout_names[] = {"contiguous", "zigzag", "documents", "balanced"};
static const fdm_layout_kind layout_kinds[] = {FDM_LAYOUT_CONTIGUOUS, FDM_LAYOUT_ZIGZAG, FDM_LAYOUT_DOCUMENTS,
                                               FDM_LAYOUT_BALANCED};
enum { NUM_LAYOUTS = 4 };

/* ---- the mask ---- */

/* Lengths fall evenly from the longest on, as the model of times takes them. */
static void make_documents(const fdm_problem *p, struct ranks_mask *m) {
    const double mean = (double)p->total_q / (double)p->batch, spread = fmin((double)p->seqlen_q - mean, mean);
    double sum = 0;
    m->num_documents = p->batch;
    m->cu_seqlens = allocate_or_exit((size_t)(p->batch + 1) * sizeof *m->cu_seqlens);
    m->cu_seqlens[0] = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        sum += mean + spread * (p->batch > 1 ? 1 - 2 * (double)b / (double)(p->batch - 1) : 0);
        m->cu_seqlens[b + 1] = b + 1 < p->batch ? (int64_t)(sum + 0.5) : p->total_q;
    }
}

static void document_intervals(const fdm_problem *p, struct ranks_mask *m) {
    const int64_t keys = p->total_k;
    m->intervals = allocate_or_exit((size_t)(2 * keys + 1) * sizeof *m->intervals);
    for (int64_t d = 0; d < m->num_documents; d++)
        for (int64_t j = m->cu_seqlens[d]; j < m->cu_seqlens[d + 1]; j++) {
            m->intervals[j] = (int32_t)m->cu_seqlens[d];
            m->intervals[keys + j] = (int32_t)m->cu_seqlens[d + 1];
        }
}

/* Of one list of random biases. */
static fdm_status topk_intervals(const fdm_problem *p, int64_t topk, struct ranks_mask *m) {
    const int64_t keys = p->seqlen_k;
    float *bias = allocate_or_exit((size_t)(keys + 1) * sizeof *bias);
    uint64_t state = 1;
    m->intervals = allocate_or_exit((size_t)(2 * keys + 1) * sizeof *m->intervals);
    for (int64_t j = 0; j < keys; j++) {
        state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth, MMIX */
        bias[j] = (float)(state >> 40);
    }
    int64_t shape[] = {1, 1, keys};
    const fdm_data_type integers = fdm_data_type_of(FDM_INT32);
    const fdm_tensor biases = {bias, {FDM_CPU, 0}, 3, fdm_data_type_of(FDM_FLOAT32), shape, NULL, 0};
    fdm_tensor start = {m->intervals, {FDM_CPU, 0}, 3, integers, shape, NULL, 0};
    fdm_tensor end = {m->intervals + keys, {FDM_CPU, 0}, 3, integers, shape, NULL, 0};
    const fdm_status status = fdm_topk_intervals(&biases, NULL, topk, p->seqlen_q, &start, &end, NULL, 0, NULL);
    release(bias);
    return status;
}

static fdm_status make_mask(const fdm_problem *p, int64_t topk, struct ranks_mask *m) {
    const int64_t rows = p->varlen ? p->total_q : p->seqlen_q, keys = p->varlen ? p->total_k : p->seqlen_k;
    fdm_status status = FDM_OK;
    *m = (struct ranks_mask){.mask = fdm_rank_mask_default()};
    m->mask.seqlen_q = rows;
    m->mask.seqlen_k = keys;
    m->mask.causal = p->causal;
    m->mask.window_left = p->window_left;
    m->mask.window_right = p->window_right;
    if (p->varlen && p->batch > 0) {
        make_documents(p, m);
        document_intervals(p, m);
    } else if (topk) {
        status = topk_intervals(p, topk, m);
    }
    if (m->intervals) {
        m->mask.num_lists = 1;
        m->mask.interval_start = m->intervals;
        m->mask.interval_end = m->intervals + keys;
    }
    return status;
}

/* ---- one number of ranks ---- */

static fdm_links links_of(const struct ranks_request *r, int64_t ranks) {
    fdm_links links = {.struct_bytes = sizeof links,
                       .node_bandwidth = r->node_bandwidth * 1e9,
                       .node_latency = r->node_latency * 1e-6,
                       .net_bandwidth = r->net_bandwidth * 1e9,
                       .net_latency = r->net_latency * 1e-6,
                       .flops = r->tflops * 1e12,
                       .host_start = r->host_start * 1e-6,
                       .host_exchange = r->host_exchange * 1e-6,
                       .sums_bandwidth = r->sums_bandwidth * 1e9,
                       .memory_bytes = (int64_t)(r->memory * 1e9)};
    /* Fewer ranks are on fewer nodes of the same size. */
    links.ranks_per_node = (int32_t)(r->nodes ? (r->ranks + r->nodes - 1) / r->nodes : ranks < 8 ? ranks : 8);
    return links;
}

static fdm_rank_algorithm algorithm_of(const char *name) {
    for (int a = FDM_RANKS_AUTO; name && a <= FDM_RANKS_RING; a++)
        if (strcmp(name, fdm_rank_algorithm_name((fdm_rank_algorithm)a)) == 0)
            return (fdm_rank_algorithm)a;
    return FDM_RANKS_AUTO;
}

static fdm_status try_layout(const struct ranks_request *r, const fdm_device *device, const fdm_problem *p,
                             const struct ranks_mask *m, int64_t ranks, int kind, struct attempt *a) {
    const fdm_links links = links_of(r, ranks);
    fdm_layout_wish wish = {.struct_bytes = sizeof wish,
                            .kind = layout_kinds[kind],
                            .ranks = (int32_t)ranks,
                            .num_masks = 1,
                            .total = m->mask.seqlen_q,
                            .cu_seqlens = m->cu_seqlens,
                            .num_documents = m->num_documents,
                            .masks = &m->mask};
    fdm_layout *layout;
    if (wish.kind == FDM_LAYOUT_BALANCED) /* blocks enough for every rank to have some */
        for (wish.block = 256; wish.total / wish.block > BALANCED_BLOCKS && wish.total / wish.block > 8 * ranks;)
            wish.block *= 2;
    a->forecast.struct_bytes = sizeof a->forecast;
    a->layout = layout_names[kind];
    for (int64_t n = 0; a->rows && n < ranks; n++)
        a->rows[n].struct_bytes = sizeof a->rows[n];
    fdm_status status = fdm_layout_create(&wish, &layout);
    if (status)
        return status;
    status = fdm_forecast_ranks(device, p, layout, NULL, &m->mask, &links, algorithm_of(r->algorithm), &a->forecast,
                                a->rows);
    fdm_layout_release(layout);
    return status;
}

/* Whether a layout may be the best: balanced ones are for masks of intervals. */
static int is_tried(const struct ranks_mask *m, int64_t ranks, int kind) {
    if (layout_kinds[kind] == FDM_LAYOUT_DOCUMENTS)
        return m->num_documents > 0;
    return layout_kinds[kind] != FDM_LAYOUT_BALANCED || (m->mask.num_lists && ranks <= 64);
}

/* The fastest of the layouts; `room` is a second list of rows. */
static fdm_status forecast(const struct ranks_request *r, const fdm_device *device, const fdm_problem *p,
                           const struct ranks_mask *m, int64_t ranks, struct attempt *best, fdm_rank_forecast *room) {
    fdm_status status = FDM_OK;
    int found = 0;
    for (int kind = 0; kind < NUM_LAYOUTS; kind++) {
        struct attempt a = {.rows = found ? room : best->rows};
        if (r->layout ? strcmp(r->layout, layout_names[kind]) != 0 : !is_tried(m, ranks, kind))
            continue;
        if ((status = try_layout(r, device, p, m, ranks, kind, &a)))
            return status;
        if (!found || a.forecast.seconds < best->forecast.seconds) {
            room = found ? best->rows : room;
            memcpy(a.others, best->others, sizeof a.others);
            *best = a;
            found = 1;
        }
        const size_t used = strlen(best->others);
        snprintf(best->others + used, sizeof best->others - used, "%s%s %.4g ms", used ? "; " : "", layout_names[kind],
                 a.forecast.seconds * 1e3);
    }
    return status;
}

/* ---- printing ---- */

static double speed_up(const fdm_ranks_forecast *f) { return f->seconds > 0 ? f->one_rank_seconds / f->seconds : 1; }

static void put_rank(struct json_writer *w, const fdm_rank_forecast *f) {
    json_open(w, NULL, '{');
    json_put_integer(w, "rank", f->rank);
    json_put_integer(w, "rows", f->rows);
    json_put_integer(w, "pairs", f->pairs);
    json_put_integer(w, "keys_fetched", f->keys_fetched);
    json_put_integer(w, "node_bytes", f->node_bytes);
    json_put_integer(w, "net_bytes", f->net_bytes);
    json_put_integer(w, "bytes_sent", f->bytes_sent);
    json_put_integer(w, "memory_bytes", f->memory_bytes);
    json_put_real(w, "work_seconds", f->work_seconds);
    json_put_real(w, "exchange_seconds", f->exchange_seconds);
    json_put_real(w, "exposed_seconds", f->exposed_seconds);
    json_put_real(w, "seconds", f->seconds);
    json_close(w, '}');
}

static void put_attempt(struct json_writer *w, const struct attempt *a) {
    const fdm_ranks_forecast *f = &a->forecast;
    json_put_integer(w, "ranks", f->ranks);
    json_put_text(w, "algorithm", fdm_rank_algorithm_name(f->algorithm));
    json_put_text(w, "layout", a->layout);
    json_put_integer(w, "head_ranks", f->head_ranks);
    json_put_integer(w, "head_sets", f->num_sets);
    json_put_real(w, "seconds", f->seconds);
    json_put_real(w, "speed_up", speed_up(f));
    json_put_real(w, "imbalance", f->imbalance);
}

/* The number of ranks beyond which doubling does not pay; the last count where all pay. */
static int last_that_pays(const struct attempt *all, int count) {
    int n = 0;
    double before = count ? all[0].forecast.one_rank_seconds : 0;
    int32_t ranks = 1;
    while (n < count) {
        const fdm_ranks_forecast *f = &all[n].forecast;
        const double needed = pow(pays, log2((double)f->ranks / ranks));
        if (before / f->seconds < needed)
            break;
        before = f->seconds;
        ranks = f->ranks;
        n++;
    }
    return n - 1; /* -1: one rank */
}

static void print_json(const struct attempt *all, int count) {
    struct json_writer w = {.stream = stdout};
    const struct attempt *a = &all[count - 1];
    const int last = last_that_pays(all, count);
    json_open(&w, NULL, '{');
    put_attempt(&w, a);
    json_put_real(&w, "one_rank_seconds", a->forecast.one_rank_seconds);
    json_put_raw(&w, "from_model", a->forecast.from_model ? "true" : "false");
    json_put_text(&w, "reason", a->forecast.reason);
    json_put_text(&w, "layouts", a->others);
    json_put_integer(&w, "ranks_that_pay", last < 0 ? 1 : all[last].forecast.ranks);
    json_open(&w, "per_rank", '[');
    for (int32_t r = 0; r < a->forecast.ranks; r++)
        put_rank(&w, &a->rows[r]);
    json_close(&w, ']');
    json_open(&w, "counts", '[');
    for (int n = 0; n < count; n++) {
        json_open(&w, NULL, '{');
        put_attempt(&w, &all[n]);
        json_close(&w, '}');
    }
    json_close(&w, ']');
    json_close(&w, '}');
    puts("");
}

static void print_ranks(const struct attempt *a) {
    const int32_t ranks = a->forecast.ranks;
    printf("  %5s %10s %14s %10s %10s %9s %9s %9s\n", "rank", "rows", "pairs", "work ms", "waits ms", "in MB", "out MB",
           "room MB");
    for (int32_t r = 0; r < ranks; r++) {
        const fdm_rank_forecast *f = &a->rows[r];
        if (r == ROWS_PRINTED / 2 && ranks > ROWS_PRINTED) {
            printf("  %5s\n", "..");
            r = ranks - ROWS_PRINTED / 2 - 1;
            continue;
        }
        printf("  %5d %10lld %14lld %10.4f %10.4f %9.1f %9.1f %9.1f\n", f->rank, (long long)f->rows,
               (long long)f->pairs, f->work_seconds * 1e3, f->exposed_seconds * 1e3,
               (double)(f->node_bytes + f->net_bytes) * 1e-6, (double)f->bytes_sent * 1e-6,
               (double)f->memory_bytes * 1e-6);
    }
}

static void print_text(const struct attempt *all, int count, const char *device) {
    const struct attempt *a = &all[count - 1];
    const fdm_ranks_forecast *f = &a->forecast;
    const int last = last_that_pays(all, count);
    printf("%d ranks of %s: %s on a %s layout, %.4g ms, %.2f x one rank\n", f->ranks, device,
           fdm_rank_algorithm_name(f->algorithm), a->layout, f->seconds * 1e3, speed_up(f));
    printf("  imbalance  %.1f %%\n", 100 * f->imbalance);
    printf("  times      of kernels by %s\n", f->from_model ? "the model of this device" : "--tflops");
    printf("  because    %s\n", f->reason);
    printf("  layouts    %s\n", a->others);
    print_ranks(a);
    printf("  %5s %10s %10s %8s  %s\n", "ranks", "ms", "speed-up", "share", "how");
    printf("  %5d %10.4g %10.2f %6.0f %%\n", 1, f->one_rank_seconds * 1e3, 1.0, 100.0);
    for (int n = 0; n < count; n++) {
        const fdm_ranks_forecast *c = &all[n].forecast;
        printf("  %5d %10.4g %10.2f %6.0f %%  %s, %s\n", c->ranks, c->seconds * 1e3, speed_up(c),
               100 * speed_up(c) / c->ranks, fdm_rank_algorithm_name(c->algorithm), all[n].layout);
    }
    if (last + 1 < count) {
        const double before = last < 0 ? f->one_rank_seconds : all[last].forecast.seconds;
        printf("More than %d rank%s do not pay: %d are %.2f x as fast.\n", last < 0 ? 1 : all[last].forecast.ranks,
               last < 0 ? "" : "s", all[last + 1].forecast.ranks, before / all[last + 1].forecast.seconds);
    }
}

/* ---- the command ---- */

static int check_request(const struct ranks_request *r) {
    int known = !r->layout;
    for (int i = 0; i < NUM_LAYOUTS; i++)
        known |= r->layout && strcmp(r->layout, layout_names[i]) == 0;
    if (!known)
        return complain(0, "--layout is '%s'; it must be contiguous, zigzag, documents or balanced", r->layout);
    if (r->algorithm && !algorithm_of(r->algorithm))
        return complain(0, "--algorithm is '%s'; it must be gather, ulysses, both or ring", r->algorithm);
    if (!r->ranks)
        return complain(0, "--nodes, --layout, --algorithm, bandwidths and latencies need --ranks");
    if (r->nodes > r->ranks)
        return complain(0, "--nodes is %lld; there are only %lld ranks", (long long)r->nodes, (long long)r->ranks);
    return 1;
}

/* A smaller number of ranks may not have the wished algorithm: it is left out of the table then. */
int plan_ranks(const struct ranks_request *r, const fdm_device *device, const fdm_problem *problem, int64_t topk,
               int json) {
    struct ranks_mask m;
    struct attempt all[COUNTS_MAX];
    int count = 0;
    if (!check_request(r))
        return EXIT_USAGE;
    fdm_rank_forecast *rows = allocate_or_exit(2 * (size_t)r->ranks * sizeof *rows);
    fdm_status status = make_mask(problem, topk, &m);
    for (int64_t ranks = 2; !status && ranks < r->ranks; ranks *= 2) {
        all[count] = (struct attempt){.rows = NULL};
        count += forecast(r, device, problem, &m, ranks, &all[count], NULL) == FDM_OK;
    }
    all[count] = (struct attempt){.rows = rows};
    if (!status)
        status = forecast(r, device, problem, &m, r->ranks, &all[count++], rows + r->ranks);
    if (!status && json)
        print_json(all, count);
    else if (!status)
        print_text(all, count, device->name);
    release(m.intervals);
    release(m.cu_seqlens);
    release(rows);
    return status ? fail(status) : EXIT_FINE;
}
