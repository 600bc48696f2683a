/* plan_ranks.h: fdm plan --ranks. */
#ifndef FDM_PLAN_RANKS_H
#define FDM_PLAN_RANKS_H

#include "flash_dmattn.h"

struct ranks_request {
    int64_t ranks, nodes; /* 0 = not said */
    const char *layout, *algorithm;
    double node_bandwidth, net_bandwidth; /* GB/s */
    double node_latency, net_latency;     /* microseconds */
    double host_start, host_exchange;     /* microseconds; below 0: none */
    double sums_bandwidth;                /* GB/s; below 0: no time */
    double tflops, memory;                /* memory: GB */
};

/* topk: W of key intervals, 0 = none. Returns the command's exit code. */
int plan_ranks(const struct ranks_request *request, const fdm_device *device, const fdm_problem *problem, int64_t topk,
               int json);

#endif
