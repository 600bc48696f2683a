/* tuner.h: what the files of the tuner share. */
#ifndef FDM_TUNER_H
#define FDM_TUNER_H

#include "flash_dmattn.h"
#include "tuner/tune_data.h"

union tune_plan {
    fdm_plan attention;
    fdm_gemm_plan gemm;
    fdm_softmax_plan softmax;
};
/* A way to run the problem, and what is known of it. */
struct tune_candidate {
    union tune_plan plan;
    int64_t workspace_bytes;
    double bound; /* of its results' difference from those of the rules' choice */
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

/* What is tuned. */
struct tune_operation {
    fdm_status (*prepare)(const union tune_plan *plan);
    /* Enqueues the number-th call. */
    fdm_status (*run)(const union tune_plan *plan, struct tune_data *data, int64_t number, void *workspace,
                      size_t bytes, void *stream);
    fdm_status (*make_data)(const fdm_device *device, const void *problem, int64_t window, struct tune_data *data);
    fdm_status (*key)(const fdm_device *device, const void *problem, int32_t num_threads, char *key);
};
extern const struct tune_operation tune_attention;

struct tuner {
    const struct tune_operation *operation;
    const void *problem; /* of the operation */
    const fdm_tune_options *options;
    struct tune_candidate *candidates;
    int32_t count;
    struct tune_data data;
    void *workspace;
    fdm_timer *timer;
    int64_t num_calls;
    double device_seconds;
};
/* fdm_tune() of the operation, once problem and options are right and the candidates are there: compiles, measures,
 * keeps, and fills rows and result. */
fdm_status tune_run(struct tuner *tuner, const fdm_device *device, fdm_tune_row *rows, int32_t size,
                    fdm_tune_result *result);
/* Device and options of a call, whole: FDM_OK and t->options, or what is wrong with them or with rows and result. */
fdm_status tune_read(struct tuner *t, const fdm_device *device, const fdm_tune_options *options, fdm_tune_options *room,
                     fdm_tune_row *rows, int32_t size, fdm_tune_result *result);
/* Ways besides the rules' that the options let be timed; below 0: all. */
int32_t tune_most(const fdm_tune_options *options);
/* Makes the candidates' kernels ready in parallel; those that fail are out of it. */
void tune_compile(struct tuner *tuner);
/* Checks and times the candidates; candidate 0 is what the others are compared with. */
fdm_status tune_measure(struct tuner *tuner);
/* The row of the best; 0 where none is better than the rules' choice. */
int32_t tune_best(const struct tuner *tuner);
/* Keeps what was measured for the problem's class: 1 in a file and memory, 2 in memory alone, 0 not at all. */
int32_t tune_keep(const struct tuner *tuner, const fdm_device *device, int32_t best);

#endif
