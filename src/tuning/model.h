/* model.h: the time that a way to run a problem takes, from facts alone: docs/tuning.md has the formula. */
#ifndef FDM_TUNING_MODEL_H
#define FDM_TUNING_MODEL_H

#include "flash_dmattn.h"

enum { MODEL_FEATURES = 8, MODEL_NAME_BYTES = 128 };

/* Who takes which block: the next that is free; a fixed share; a fixed share of pairs; the next, asked for where a
 * block begins. */
enum model_order { MODEL_FREE, MODEL_STATIC, MODEL_PAIRS, MODEL_ASKS_EARLY };

/* What a plan's numbers do not say by themselves. */
struct model_way {
    const fdm_plan *plan;
    int64_t window;      /* W of key intervals, of which the problem knows that they are there alone */
    int32_t splits;      /* of the keys of a forward, or of the query heads of a backward's block */
    int32_t packed;      /* query heads that share a block of rows */
    int32_t kernels_own; /* 1: the keys that a block reads are its own list */
    int32_t resident;    /* blocks of a multiprocessor at most, by registers; 0: not known */
    enum model_order order;
};

/* A row of the table: constants that multiply the features, in seconds, and the fit's own error. */
struct model_row {
    const char *name; /* kernel, choice, head dim, kind: model_name() */
    float constants[MODEL_FEATURES];
    float residual;      /* root mean square of predicted / measured - 1 over the problems of the fit */
    int32_t num_samples; /* problems that it was fitted to */
};
struct model_table {
    int32_t compute_major, compute_minor;
    const struct model_row *rows; /* by name, rising */
    int32_t num_rows;
};
extern const struct model_table model_tables[];
extern const int32_t num_model_tables;

/* The name of the row that a way looks for, and of that of its tile in any order and on any problem, which stands in
 * for it. */
void model_name(const struct model_way *way, char name[MODEL_NAME_BYTES]);
void model_tile_name(const struct model_way *way, char name[MODEL_NAME_BYTES]);
/* A launch; waves of blocks; steps of the busiest multiprocessor, which are its share or the longest block's; steps of
 * whole rounds of blocks; steps of the longest block; bytes over bandwidth; steps with hidden pairs a multiprocessor;
 * bytes of the workspace over bandwidth. All in microseconds for a constant of 1, but the bytes. */
void model_features(const fdm_device *device, const struct model_way *way, double features[MODEL_FEATURES]);
/* NULL where no table knows the way. The table is the device's architecture's. */
const struct model_row *model_find(const fdm_device *device, const struct model_way *way);
double model_seconds(const struct model_row *row, const double features[MODEL_FEATURES]);

#endif
