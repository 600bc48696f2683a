/* forecast_gather.c: what ranks fetch, and when: the next heads travel while these are computed. */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "parallel/forecast.h"

/* ---- loads ---- */

static int64_t node_of(const struct scene *scene, int32_t rank) {
    return rank * scene->ranks_a_place / scene->links.ranks_per_node;
}

static void count_keys(const struct scene *scene, struct loads *l, int32_t rank) {
    for (int64_t i = 0; i < l->needed[rank].count; i++) {
        const fdm_range needed = l->needed[rank].data[i];
        for (int64_t k = layout_range_at(l->keys, needed.first);
             k < l->keys->num_ranges && l->keys->sorted[k].first < needed.end; k++) {
            const struct owned_range *own = &l->keys->sorted[k];
            const int64_t first = own->first > needed.first ? own->first : needed.first;
            const int64_t keys = (own->end < needed.end ? own->end : needed.end) - first;
            const int is_near = node_of(scene, own->owner) == node_of(scene, rank);
            if (own->owner == rank)
                continue;
            *(is_near ? &l->node_in[rank] : &l->net_in[rank]) += keys;
            *(is_near ? &l->node_out[own->owner] : &l->net_out[own->owner]) += keys;
        }
    }
}

fdm_status loads_make(const struct scene *scene, const fdm_layout *rows, const fdm_layout *keys, struct loads *l) {
    const size_t ranks = (size_t)rows->ranks;
    *l = (struct loads){.rows = rows, .keys = keys};
    int64_t *counts = memory_allocate(5 * ranks * sizeof *counts);
    l->needed = memory_allocate(ranks * sizeof *l->needed);
    l->pairs = counts;
    if (!counts || !l->needed)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the loads of %d ranks", rows->ranks);
    memset(counts, 0, 5 * ranks * sizeof *counts);
    memset(l->needed, 0, ranks * sizeof *l->needed);
    l->node_in = counts + ranks, l->net_in = counts + 2 * ranks;
    l->node_out = counts + 3 * ranks, l->net_out = counts + 4 * ranks;
    fdm_status status = fdm_layout_work(rows, keys, scene->mask, l->pairs, NULL);
    if (!status)
        status = rank_mask_needed(scene->mask, rows, l->needed);
    for (int32_t r = 0; !status && r < rows->ranks; r++)
        count_keys(scene, l, r);
    return status;
}

void loads_release(struct loads *l) {
    for (int32_t r = 0; l->needed && l->pairs && r < l->rows->ranks; r++)
        range_list_release(&l->needed[r]);
    memory_release(l->needed);
    memory_release(l->pairs);
}

/* ---- times ---- */

double exchange_seconds(const struct scene *scene, struct exchange_bytes bytes) {
    const fdm_links *links = &scene->links;
    const double node = bytes.node > 0 ? links->node_latency + bytes.node / links->node_bandwidth : 0;
    const double net = bytes.net > 0 ? links->net_latency + bytes.net / links->net_bandwidth : 0;
    return fmax(node, net);
}

double with_host(const struct scene *scene, double seconds, int32_t exchanges) {
    const fdm_links *links = &scene->links;
    return exchanges > 0 ? links->host_start + fmax(seconds, exchanges * links->host_exchange) : seconds;
}

/* Bytes of a key and KV head that are fetched, and that come back as parts of gradients. */
static double fetched_bytes(const fdm_problem *p) {
    const double batch = p->varlen ? 1 : (double)p->batch;
    return batch * (double)(p->head_dim + p->head_dim_v) * (double)fdm_dtype_bytes(p->dtype);
}

static double returned_bytes(const fdm_problem *p) {
    const double unit = p->dtype == FDM_FLOAT64 ? 8 : 4, batch = p->varlen ? 1 : (double)p->batch;
    return p->pass == FDM_BACKWARD ? batch * (double)(p->head_dim + p->head_dim_v) * unit : 0;
}

static struct exchange_bytes keys_of(const struct loads *l, int32_t r, double bytes) {
    return (struct exchange_bytes){bytes * (double)(l->node_in[r] > l->node_out[r] ? l->node_in[r] : l->node_out[r]),
                                   bytes * (double)(l->net_in[r] > l->net_out[r] ? l->net_in[r] : l->net_out[r])};
}

/* Fetches set 0; then computes each set while the next one is fetched and the gradients before are returned. */
static void time_rank(const struct scene *scene, const struct loads *l, const struct head_sets *sets,
                      fdm_rank_forecast *f) {
    const fdm_problem *p = scene->problem;
    const double a_key = fetched_bytes(p), back = returned_bytes(p);
    const double parts = back * (double)(layout_rows(l->keys, f->rank) + f->keys_fetched); /* of a KV head */
    const int32_t exchanges = l->rows->ranks < 2 ? 0 : sets->count * (back > 0 ? 2 : 1) + scene->more_exchanges;
    const double slower =
        1 + (double)scene->links.copy_sms / (double)(scene->device->num_sms ? scene->device->num_sms : 1);
    double most_heads = 0;
    f->seconds = f->exchange_seconds = exchange_seconds(scene, keys_of(l, f->rank, a_key * (double)sets->heads[0]));
    for (int32_t n = 0; n < sets->count; n++) {
        const double sums = exchanges && scene->links.sums_bandwidth > 0 ? parts / scene->links.sums_bandwidth : 0;
        const double work = work_of_rank(scene, l, f->rank, sets->heads[n]) + (double)sets->heads[n] * sums;
        const double next = n + 1 < sets->count ? (double)sets->heads[n + 1] * a_key : 0;
        const double before = n > 0 ? (double)sets->heads[n - 1] * back : 0;
        const double copy = exchange_seconds(scene, keys_of(l, f->rank, next + before));
        f->work_seconds += work;
        f->exchange_seconds += copy;
        /* A copy takes multiprocessors for as long as it lasts. */
        f->seconds += copy > 0 ? fmax(work + fmin(copy, work) * (slower - 1), copy) : work;
        most_heads = fmax(most_heads, (double)sets->heads[n]);
    }
    const double last = exchange_seconds(scene, keys_of(l, f->rank, back * (double)sets->heads[sets->count - 1]));
    f->exchange_seconds += last;
    f->seconds = with_host(scene, f->seconds + last, exchanges);
    f->exposed_seconds = f->seconds - f->work_seconds;
    f->memory_bytes = (int64_t)((double)f->keys_fetched * most_heads * (a_key + back) * (sets->count > 1 ? 2 : 1));
}

static void count_rank(const struct scene *scene, const struct loads *l, int32_t r, fdm_rank_forecast *f) {
    const double in = fetched_bytes(scene->problem) * (double)scene->problem->heads_kv;
    const double back = returned_bytes(scene->problem) * (double)scene->problem->heads_kv;
    *f = (fdm_rank_forecast){
        .struct_bytes = sizeof *f, .rank = r, .rows = layout_rows(l->rows, r), .pairs = l->pairs[r]};
    f->keys_fetched = l->node_in[r] + l->net_in[r];
    f->node_bytes = (int64_t)(in * (double)l->node_in[r] + back * (double)l->node_out[r]);
    f->net_bytes = (int64_t)(in * (double)l->net_in[r] + back * (double)l->net_out[r]);
    f->bytes_sent = (int64_t)(in * (double)(l->node_out[r] + l->net_out[r]) + back * (double)f->keys_fetched);
}

double gather_forecast(const struct scene *scene, const struct loads *l, struct head_sets *sets,
                       fdm_rank_forecast *out) {
    const int64_t heads_kv = scene->problem->heads_kv;
    int32_t heaviest = 0;
    double best = HUGE_VAL, slowest = 0;
    for (int32_t r = 0; r < l->rows->ranks; r++) {
        count_rank(scene, l, r, &out[r]);
        heaviest = l->pairs[r] > l->pairs[heaviest] ? r : heaviest;
    }
    for (int64_t fewest = 1; fewest <= heads_kv; fewest *= 2) /* the sets by which the heaviest rank is fastest */
        for (int32_t most = 1; most <= HEAD_SETS_MAX; most++) {
            const struct head_sets tried = head_sets_of(heads_kv, fewest, most);
            fdm_rank_forecast f = out[heaviest];
            if (tried.count < most || (most == 1 && fewest > 1))
                continue;
            time_rank(scene, l, &tried, &f);
            if (f.seconds < best) {
                best = f.seconds;
                *sets = tried;
            }
        }
    for (int32_t r = 0; r < l->rows->ranks; r++) {
        time_rank(scene, l, sets, &out[r]);
        slowest = fmax(slowest, out[r].seconds);
    }
    return slowest;
}
