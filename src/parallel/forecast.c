/* forecast.c: which algorithm is fastest over several ranks, and why. */
#include "parallel/forecast.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/struct_bytes.h"

const char *fdm_rank_algorithm_name(fdm_rank_algorithm algorithm) {
    static const char *const names[] = {"auto", "gather", "ulysses", "both", "ring"};
    return (unsigned)algorithm < sizeof names / sizeof names[0] ? names[algorithm] : "unknown";
}

/* What an algorithm takes, or why it cannot be. */
struct outcome {
    double seconds; /* 0: it cannot */
    int32_t head_ranks, num_sets;
    int64_t memory_bytes; /* of the rank with most */
    char why_not[120];
};

static void refuse(struct outcome *o, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void refuse(struct outcome *o, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(o->why_not, sizeof o->why_not, format, arguments);
    va_end(arguments);
    o->seconds = 0;
}

static void note_memory(struct outcome *o, int32_t ranks, const fdm_rank_forecast *rows) {
    for (int32_t r = 0; r < ranks; r++)
        o->memory_bytes = rows[r].memory_bytes > o->memory_bytes ? rows[r].memory_bytes : o->memory_bytes;
}

static int64_t greatest_common(int64_t a, int64_t b) { return b ? greatest_common(b, a % b) : a; }

/* ---- gather ---- */

static void try_gather(const struct scene *scene, const struct loads *l, struct outcome *o, fdm_rank_forecast *rows) {
    struct head_sets sets;
    o->head_ranks = 1;
    o->seconds = gather_forecast(scene, l, &sets, rows);
    o->num_sets = sets.count;
    note_memory(o, l->rows->ranks, rows);
}

/* ---- heads for rows ---- */

/* Bytes that a rank with `rows` of its group's rows gets when heads are exchanged and when results come back. */
struct swapped {
    double in, back;
};
static struct swapped swapped_bytes(const fdm_problem *p, double group_rows, double rows, int64_t ranks) {
    const double unit = (double)fdm_dtype_bytes(p->dtype), batch = p->varlen ? 1 : (double)p->batch;
    const double out = (double)p->heads * (double)p->head_dim_v;
    const double inputs =
        (double)p->heads * (double)p->head_dim + (double)p->heads_kv * (double)(p->head_dim + p->head_dim_v);
    const double share = 1 / (double)ranks, sent = 1 - share;
    if (p->pass == FDM_BACKWARD) /* q, k and v are there since the forward: dout, then three gradients */
        return (struct swapped){batch * unit * (group_rows - rows) * out * share, batch * unit * rows * inputs * sent};
    return (struct swapped){batch * unit * (group_rows - rows) * inputs * share, batch * unit * rows * out * sent};
}

/* Adds what the exchange of heads costs a rank; near: so much of it stays in the node. */
static void add_swap(const struct scene *scene, struct swapped bytes, double near, fdm_rank_forecast *f) {
    const double seconds = exchange_seconds(scene, (struct exchange_bytes){near * bytes.in, (1 - near) * bytes.in}) +
                           exchange_seconds(scene, (struct exchange_bytes){near * bytes.back, (1 - near) * bytes.back});
    f->node_bytes += (int64_t)(near * (bytes.in + bytes.back));
    f->net_bytes += (int64_t)((1 - near) * (bytes.in + bytes.back));
    f->bytes_sent += (int64_t)(bytes.in + bytes.back);
    f->exchange_seconds += seconds;
    f->exposed_seconds += seconds;
    f->seconds += seconds;
}

static void try_ulysses(const struct scene *scene, const struct loads *l, struct outcome *o, fdm_rank_forecast *rows) {
    const fdm_problem *p = scene->problem;
    const int32_t ranks = l->rows->ranks;
    const double per_node = scene->links.ranks_per_node, others = ranks - 1;
    const double near = ranks > 1 ? fmin(per_node - 1, others) / others : 1;
    int64_t pairs = 0;
    if (p->heads_kv % ranks)
        return refuse(o, "%lld KV heads are no multiple of %d ranks", (long long)p->heads_kv, ranks);
    for (int32_t r = 0; r < ranks; r++)
        pairs += l->pairs[r];
    const double work = work_of_heads(scene, ranks, pairs);
    o->head_ranks = ranks;
    o->num_sets = 1;
    for (int32_t r = 0; r < ranks; r++) {
        fdm_rank_forecast *f = &rows[r];
        const double own = (double)layout_rows(l->rows, r);
        *f = (fdm_rank_forecast){.struct_bytes = sizeof *f, .rank = r, .rows = (int64_t)own, .pairs = pairs / ranks};
        f->work_seconds = f->seconds = work;
        const struct swapped bytes = swapped_bytes(p, (double)l->rows->total, own, ranks);
        add_swap(scene, bytes, near, f);
        f->seconds = with_host(scene, f->seconds, ranks > 1 ? 2 : 0);
        f->exposed_seconds = f->seconds - f->work_seconds;
        f->memory_bytes = (int64_t)(bytes.in + bytes.back);
        o->seconds = fmax(o->seconds, f->seconds);
    }
    note_memory(o, ranks, rows);
}

/* Neighbours become one rank of a layout that has their rows. */
static fdm_status joined_layout(const fdm_layout *layout, int64_t neighbours, fdm_layout **joined) {
    const int32_t ranks = (int32_t)(layout->ranks / neighbours);
    fdm_range *ranges = memory_allocate((size_t)layout->num_ranges * sizeof *ranges);
    int64_t *counts = memory_allocate((size_t)ranks * sizeof *counts), count = 0;
    fdm_status status = ranges && counts ? FDM_OK : error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a layout");
    for (int32_t r = 0; !status && r < ranks; r++) {
        const int64_t before = count;
        for (int64_t i = 0; i < layout->num_ranges; i++) /* by position */
            if (layout->sorted[i].owner / neighbours == r)
                ranges[count++] = (fdm_range){layout->sorted[i].first, layout->sorted[i].end};
        counts[r] = count - before;
    }
    const fdm_layout_wish wish = {.struct_bytes = sizeof wish,
                                  .kind = FDM_LAYOUT_RANGES,
                                  .ranks = ranks,
                                  .total = layout->total,
                                  .block = layout->block,
                                  .ranges = ranges,
                                  .range_counts = counts};
    if (!status)
        status = fdm_layout_create(&wish, joined);
    memory_release(ranges);
    memory_release(counts);
    return status;
}

static fdm_status spread_over_neighbours(const struct scene *scene, const struct loads *l, const struct loads *joined,
                                         struct outcome *o, fdm_rank_forecast *rows) {
    const int32_t heads = o->head_ranks, groups = joined->rows->ranks;
    struct scene inner = *scene;
    const fdm_problem part = problem_of_heads(scene->problem, heads);
    struct head_sets sets;
    fdm_rank_forecast *of_groups = memory_allocate((size_t)groups * sizeof *of_groups);
    if (!of_groups)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %d groups", groups);
    inner.problem = &part;
    inner.pair_seconds /= heads;
    inner.ranks_a_place = heads;
    inner.more_exchanges = 2;
    gather_forecast(&inner, joined, &sets, of_groups);
    o->num_sets = sets.count;
    for (int32_t r = 0; r < l->rows->ranks; r++) {
        const fdm_rank_forecast *group = &of_groups[r / heads];
        const double own = (double)layout_rows(l->rows, r);
        rows[r] = *group;
        rows[r].rank = r;
        rows[r].rows = (int64_t)own;
        rows[r].pairs = group->pairs / heads;
        add_swap(scene, swapped_bytes(scene->problem, (double)group->rows, own, heads), 1, &rows[r]);
        o->seconds = fmax(o->seconds, rows[r].seconds);
    }
    note_memory(o, l->rows->ranks, rows);
    memory_release(of_groups);
    return FDM_OK;
}

static fdm_status try_both(const struct scene *scene, const struct loads *l, struct outcome *o,
                           fdm_rank_forecast *rows) {
    const int32_t ranks = l->rows->ranks, node = scene->links.ranks_per_node;
    struct loads joined = {0};
    fdm_layout *joined_rows = NULL, *joined_keys = NULL;
    const int64_t most = greatest_common(greatest_common(node, ranks), scene->problem->heads_kv);
    if (ranks <= node) {
        refuse(o, "the ranks are on one node");
        return FDM_OK;
    }
    if (most < 2) {
        refuse(o, "%d ranks of a node share no divisor with %lld KV heads", node, (long long)scene->problem->heads_kv);
        return FDM_OK;
    }
    o->head_ranks = (int32_t)most;
    struct scene of_groups = *scene;
    of_groups.ranks_a_place = most;
    fdm_status status = joined_layout(l->rows, most, &joined_rows);
    if (!status && l->keys != l->rows)
        status = joined_layout(l->keys, most, &joined_keys);
    if (!status)
        status = loads_make(&of_groups, joined_rows, joined_keys ? joined_keys : joined_rows, &joined);
    if (!status)
        status = spread_over_neighbours(scene, l, &joined, o, rows);
    if (joined.rows)
        loads_release(&joined);
    fdm_layout_release(joined_rows);
    fdm_layout_release(joined_keys);
    return status;
}

/* ---- ring ---- */

static void try_ring(const struct scene *scene, const struct loads *l, struct outcome *o, fdm_rank_forecast *rows) {
    const fdm_problem *p = scene->problem;
    const int32_t ranks = l->rows->ranks;
    const double unit = (double)fdm_dtype_bytes(p->dtype), batch = p->varlen ? 1 : (double)p->batch;
    const double a_row = batch * (double)p->heads_kv * (double)(p->head_dim + p->head_dim_v);
    const double a_key = a_row * (unit + (p->pass == FDM_BACKWARD ? 4 : 0));
    const double bandwidth = scene->device->bandwidth > 0 ? (double)scene->device->bandwidth : 1e12;
    int64_t most_keys = 0;
    for (int32_t r = 0; r < ranks; r++)
        most_keys = layout_rows(l->keys, r) > most_keys ? layout_rows(l->keys, r) : most_keys;
    const double shard = a_key * (double)most_keys;
    const int is_near = ranks <= scene->links.ranks_per_node;
    const double step = exchange_seconds(scene, (struct exchange_bytes){is_near ? shard : 0, is_near ? 0 : shard});
    for (int32_t r = 0; r < ranks; r++) {
        fdm_rank_forecast *f = &rows[r];
        *f = (fdm_rank_forecast){
            .struct_bytes = sizeof *f, .rank = r, .rows = layout_rows(l->rows, r), .pairs = l->pairs[r]};
        /* Each step reads and writes float32 results of all rows. */
        const double merged = 3 * 4 * batch * (double)f->rows * (double)p->heads * (double)p->head_dim_v / bandwidth;
        f->work_seconds = work_of_rank(scene, l, r, p->heads_kv) + (ranks - 1) * merged;
        f->keys_fetched = (ranks - 1) * most_keys;
        f->node_bytes = is_near ? (int64_t)(shard * (ranks - 1)) : 0;
        f->net_bytes = is_near ? 0 : (int64_t)(shard * (ranks - 1));
        f->bytes_sent = (int64_t)(shard * (ranks - 1));
        f->exchange_seconds = step * (ranks - 1);
        f->seconds =
            ranks > 1 ? (ranks - 1) * fmax(f->work_seconds / ranks, step) + f->work_seconds / ranks : f->work_seconds;
        f->seconds = with_host(scene, f->seconds, (ranks - 1) * (p->pass == FDM_BACKWARD ? 2 : 1));
        f->exposed_seconds = f->seconds - f->work_seconds;
        f->memory_bytes = (int64_t)(2 * shard);
        o->seconds = fmax(o->seconds, f->seconds);
    }
    o->head_ranks = o->num_sets = 1;
    note_memory(o, ranks, rows);
}

/* ---- choice ---- */

static fdm_status try_one(const struct scene *scene, const struct loads *l, fdm_rank_algorithm algorithm,
                          struct outcome *o, fdm_rank_forecast *rows) {
    *o = (struct outcome){.head_ranks = 1, .num_sets = 1};
    switch (algorithm) {
    case FDM_RANKS_GATHER: try_gather(scene, l, o, rows); return FDM_OK;
    case FDM_RANKS_ULYSSES: try_ulysses(scene, l, o, rows); return FDM_OK;
    case FDM_RANKS_BOTH: return try_both(scene, l, o, rows);
    default: try_ring(scene, l, o, rows); return FDM_OK;
    }
}

static void append(fdm_ranks_forecast *f, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(fdm_ranks_forecast *f, const char *format, ...) {
    const size_t used = strlen(f->reason);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->reason + used, sizeof f->reason - used, format, arguments);
    va_end(arguments);
}

static int fits(const struct scene *scene, const struct outcome *o) {
    return scene->links.memory_bytes <= 0 || o->memory_bytes <= scene->links.memory_bytes;
}

static void explain(const struct scene *scene, fdm_rank_algorithm algorithm, const struct outcome *o,
                    fdm_ranks_forecast *f) {
    append(f, "%s%s", *f->reason ? "; " : "", fdm_rank_algorithm_name(algorithm));
    if (!(o->seconds > 0)) {
        append(f, ": %s", o->why_not);
        return;
    }
    append(f, " %.4g ms", o->seconds * 1e3);
    if (algorithm == FDM_RANKS_BOTH)
        append(f, " with %d ranks that exchange heads", o->head_ranks);
    if (!fits(scene, o))
        append(f, ", which needs %.3g GB beside the shard", (double)o->memory_bytes * 1e-9);
}

/* Of those that can be and have the memory the fastest; the ring only where no other has it. */
static fdm_status choose(const struct scene *scene, const struct loads *l, fdm_rank_algorithm wished,
                         fdm_ranks_forecast *f, fdm_rank_forecast *rows, fdm_rank_forecast *tried) {
    struct outcome best = {0};
    for (int a = FDM_RANKS_GATHER; a <= FDM_RANKS_RING; a++) {
        const fdm_rank_algorithm algorithm = (fdm_rank_algorithm)a;
        struct outcome o;
        if ((wished && wished != algorithm) || (!wished && algorithm == FDM_RANKS_RING && best.seconds > 0))
            continue;
        const fdm_status status = try_one(scene, l, algorithm, &o, tried);
        if (status)
            return status;
        explain(scene, algorithm, &o, f);
        if (!(o.seconds > 0) || (!wished && !fits(scene, &o)) || (best.seconds > 0 && best.seconds <= o.seconds))
            continue;
        best = o;
        f->algorithm = algorithm;
        memcpy(rows, tried, (size_t)l->rows->ranks * sizeof *rows);
    }
    if (!(best.seconds > 0))
        return error_set(FDM_ERROR_UNSUPPORTED, "no algorithm for %d ranks: %s", l->rows->ranks, f->reason);
    f->seconds = best.seconds;
    f->head_ranks = best.head_ranks;
    f->num_sets = best.num_sets;
    return FDM_OK;
}

/* ---- public ---- */

static void fill_links(fdm_links *links, const fdm_links *given, int launches) {
    static const double rates[] = {348e9, 15e-6, 45e9, 30e-6};
    *links = given ? *given : (fdm_links){0};
    double *of[] = {&links->node_bandwidth, &links->node_latency, &links->net_bandwidth, &links->net_latency};
    for (int i = 0; i < 4; i++)
        *of[i] = *of[i] > 0 ? *of[i] : rates[i];
    links->ranks_per_node = links->ranks_per_node > 0 ? links->ranks_per_node : 8;
    links->copy_sms = links->copy_sms > 0 ? links->copy_sms : 16;
    /* bench/fit_ranks.py on bench/results/nvidia-h200/2026-11-28-ranks.json and 2026-11-28-ranks-graphs.json */
    static const double fitted[] = {500e-6, 600e-6, 200e9};
    double *more[] = {&links->host_start, &links->host_exchange, &links->sums_bandwidth};
    for (int i = 0; i < 3; i++) /* of a device that launches */
        *more[i] = *more[i] < 0 || !launches ? 0 : *more[i] > 0 ? *more[i] : fitted[i];
}

static fdm_status check_problem(const fdm_problem *p, const fdm_layout *layout, const fdm_layout *keys) {
    const int64_t rows = p->varlen ? p->total_q : p->seqlen_q, k = p->varlen ? p->total_k : p->seqlen_k;
    if (rows != layout->total || k != keys->total)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the problem has %lld rows and %lld keys, but the layouts have %lld and %lld", (long long)rows,
                         (long long)k, (long long)layout->total, (long long)keys->total);
    if (p->has_cache)
        return error_set(FDM_ERROR_UNSUPPORTED, "a problem with a KV cache is not computed over several ranks");
    if (p->has_row_intervals || p->block_mask_size || p->has_tree)
        return error_set(FDM_ERROR_UNSUPPORTED, "row intervals, block masks and trees are not computed over ranks");
    return FDM_OK;
}

static fdm_status forecast_scene(struct scene *scene, const fdm_layout *layout, const fdm_layout *keys,
                                 fdm_rank_algorithm algorithm, fdm_ranks_forecast *made, fdm_rank_forecast *rows) {
    struct loads l;
    int64_t pairs = 0, most = 0;
    fdm_status status = loads_make(scene, layout, keys, &l);
    for (int32_t r = 0; !status && r < layout->ranks; r++)
        pairs += l.pairs[r];
    if (!status) {
        made->ranks = layout->ranks;
        made->one_rank_seconds = work_of_one(scene, pairs, &status);
        made->from_model = scene->from_model;
    }
    if (!status)
        status = choose(scene, &l, algorithm, made, rows, rows + layout->ranks);
    for (int32_t r = 0; !status && r < layout->ranks; r++)
        most = rows[r].pairs > most ? rows[r].pairs : most;
    made->imbalance = pairs > 0 ? fmax((double)most * layout->ranks / (double)pairs - 1, 0) : 0;
    loads_release(&l);
    return status;
}

fdm_status fdm_forecast_ranks(const fdm_device *device, const fdm_problem *problem, const fdm_layout *layout,
                              const fdm_layout *layout_keys, const fdm_rank_mask *mask, const fdm_links *links,
                              fdm_rank_algorithm algorithm, fdm_ranks_forecast *forecast, fdm_rank_forecast *ranks) {
    fdm_device device_room;
    fdm_links links_room;
    fdm_rank_mask whole;
    fdm_ranks_forecast made = {.struct_bytes = sizeof made};
    if (!(device = STRUCT_READ(fdm_device, device, &device_room)) ||
        (links && !(links = STRUCT_READ(fdm_links, links, &links_room))))
        return FDM_ERROR_INVALID_ARGUMENT;
    if (!layout || (unsigned)algorithm > FDM_RANKS_RING)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s",
                         layout ? "algorithm is none of this library" : "layout is NULL");
    const fdm_layout *keys = layout_keys ? layout_keys : layout;
    fdm_status status = STRUCT_CHECK(fdm_ranks_forecast, forecast);
    if (status || (ranks && (status = STRUCT_CHECK(fdm_rank_forecast, ranks))) ||
        (status = fdm_problem_validate(problem)) || (status = check_problem(problem, layout, keys)) ||
        (status = rank_mask_read(mask, layout->total, keys->total, &whole)))
        return status;
    if (keys->ranks != layout->ranks)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "layout has %d ranks, but layout_keys has %d", layout->ranks,
                         keys->ranks);
    struct scene scene = {.device = device, .problem = problem, .mask = &whole, .ranks_a_place = 1};
    fill_links(&scene.links, links, device->id.type == FDM_CUDA);
    fdm_rank_forecast *rows = memory_allocate(2 * (size_t)layout->ranks * sizeof *rows);
    if (!rows)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a forecast of %d ranks", layout->ranks);
    status = forecast_scene(&scene, layout, keys, algorithm, &made, rows);
    if (!status)
        status = STRUCT_WRITE(fdm_ranks_forecast, forecast, &made);
    const size_t step = ranks ? ranks->struct_bytes : 0;
    for (int32_t r = 0; ranks && !status && r < layout->ranks; r++) {
        void *const one = (char *)ranks + (size_t)r * step;
        *(uint32_t *)one = (uint32_t)step;
        status = struct_write(one, &rows[r], sizeof rows[r], "ranks", "fdm_rank_forecast");
    }
    memory_release(rows);
    return status;
}
