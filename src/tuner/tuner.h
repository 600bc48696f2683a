/* tuner.h: what the files of the tuner share. */
#ifndef FDM_TUNER_H
#define FDM_TUNER_H

#include "flash_dmattn.h"
#include "tuner/tune_data.h"

/* A way to run the problem, and what is known of it. */
struct tune_candidate {
    fdm_plan plan;
    fdm_tune_row row;
    double predicted; /* seconds, for the order of candidates */
    int32_t calls;    /* of a sample */
    int alive;        /* 1: it goes on to the next round */
};

/* The rules' choice, then others, each once; where there are more than `most`, those of the least predicted time.
 * Returns them for memory_release(), NULL with a sentence where the problem has none or memory is short. most:
 * besides the rules' choice; below 0: all. */
struct tune_candidate *tune_candidates(const fdm_device *device, const fdm_problem *problem, int32_t most,
                                       int64_t window, int32_t *count);
/* Makes their kernels ready in parallel; those that fail are out of it. */
void tune_compile(struct tune_candidate *candidates, int32_t count, const fdm_tune_options *options);

struct tuner {
    const fdm_tune_options *options;
    struct tune_candidate *candidates;
    int32_t count;
    struct tune_data data;
    void *workspace;
    fdm_timer *timer;
    int64_t num_calls;
    double device_seconds;
};
/* Checks and times the candidates; candidate 0 is what the others are compared with. */
fdm_status tune_measure(struct tuner *tuner);
/* The row of the best; 0 where none is better than the rules' choice. */
int32_t tune_best(const struct tuner *tuner);
/* Keeps what was measured for the problem's class: 1 in a file and memory, 2 in memory alone, 0 not at all. */
int32_t tune_keep(const struct tuner *tuner, const fdm_device *device, int32_t best);

#endif
