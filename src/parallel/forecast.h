/* forecast.h: the time of an attention over several ranks, algorithm by algorithm. */
#ifndef FDM_PARALLEL_FORECAST_H
#define FDM_PARALLEL_FORECAST_H

#include "parallel/head_sets.h"
#include "parallel/layout.h"

/* What a forecast is made of. */
struct scene {
    const fdm_device *device;
    const fdm_problem *problem; /* of one rank, whole; where heads were exchanged, of a rank's heads */
    const fdm_rank_mask *mask;
    fdm_links links;     /* without zeros but flops, memory_bytes, and what is said to take no time */
    double pair_seconds; /* of a pair of one list; of the whole problem divided by them */
    int32_t from_model;
    int64_t window;         /* keys that a row sees by intervals */
    int64_t ranks_a_place;  /* ranks that one rank of the layout stands for */
    int32_t more_exchanges; /* beside those of keys */
};

/* Rows, keys and messages of each rank. */
struct loads {
    const fdm_layout *rows, *keys;
    int64_t *pairs;
    struct range_list *needed;
    int64_t *node_in, *net_in, *node_out, *net_out; /* keys */
};
fdm_status loads_make(const struct scene *scene, const fdm_layout *rows, const fdm_layout *keys, struct loads *loads);
void loads_release(struct loads *loads);

/* ---- forecast_work.c ---- */

/* Sets scene->pair_seconds and returns the seconds of the whole problem on one device, 0 with *status. */
double work_of_one(struct scene *scene, int64_t pairs, fdm_status *status);
/* Of a rank's rows and heads_kv KV heads. */
double work_of_rank(const struct scene *scene, const struct loads *loads, int32_t rank, int64_t heads_kv);
/* The problem of one of `ranks` ranks that exchange heads. */
fdm_problem problem_of_heads(const fdm_problem *problem, int64_t ranks);
/* Of all rows and the heads of such a rank. */
double work_of_heads(const struct scene *scene, int64_t ranks, int64_t pairs);

/* ---- forecast_gather.c ---- */

struct exchange_bytes {
    double node, net; /* the more of what a rank receives and sends */
};
double exchange_seconds(const struct scene *scene, struct exchange_bytes bytes);
/* A rank's seconds on the device, and those of the host, which goes ahead of it. */
double with_host(const struct scene *scene, double seconds, int32_t exchanges);
/* Fills one row of `out` for each rank of the layout; returns the slowest one's seconds. */
double gather_forecast(const struct scene *scene, const struct loads *loads, struct head_sets *sets,
                       fdm_rank_forecast *out);

#endif
