/* plan_ranks.h: fdm plan --ranks. */
#ifndef FDM_PLAN_RANKS_H
#define FDM_PLAN_RANKS_H

#include "flash_dmattn.h"

/* Its options, for the help of fdm plan. */
#define PLAN_RANKS_HELP                                                                                         \
    "  --ranks N          what the problem takes on N devices that share its rows, and how many pay: up to\n"   \
    "                     them, twice as many make it 1.25 x as fast\n"                                         \
    "  --nodes N          of equal size                              (8 ranks a node)\n"                        \
    "  --layout NAME      contiguous, zigzag, documents, balanced    (the fastest)\n"                           \
    "  --algorithm NAME   gather, ulysses, both, ring                (the fastest)\n"                           \
    "  --node-bandwidth GB/s  --node-latency US    of a rank in its node, one way  (348, 15: NVLink of H100)\n" \
    "  --net-bandwidth GB/s   --net-latency US     between nodes                   (45, 30: NDR InfiniBand)\n"  \
    "  --host-start US        --host-exchange US   of the host                     (500, 600; -1: none)\n"      \
    "  --sums-bandwidth GB/s  of float32 parts of dk and dv          (200; -1: they take no time)\n"            \
    "  --tflops X         of attention on one device, where no measured model has it\n"                         \
    "  --memory GB        that a rank may use beside its rows        (no limit)\n"

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
