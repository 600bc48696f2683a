/* mma_rules.h: which tile the mma family's backward gets: the table as data, and the one function that reads it. */
#ifndef FDM_MMA_RULES_H
#define FDM_MMA_RULES_H

#include <stddef.h>

#include "families/mma/backward/mma_backward.h"
#include "flash_dmattn.h"

/* Columns of the table. 8.0 serves every other architecture from 8.0 on: 8.7, 10.0, 12.0, ... by their own limits. */
enum mma_column { MMA_SM90, MMA_SM89, MMA_SM86, MMA_SM80, MMA_COLUMN_COUNT };

/* Length classes by query rows (varlen: the longest sequence); a row names a set of them. */
enum { MMA_STANDARD = 1, MMA_MEDIUM = 2, MMA_LONG = 4, MMA_ANY_LENGTH = 7 };
enum { MMA_MEDIUM_ROWS = 4096, MMA_LONG_ROWS = 8192, MMA_SMALL_BATCH = 4 };

enum mma_variant {
    MMA_SINGLE_BUFFERED, /* one buffer of Q, V in shared memory */
    MMA_DOUBLE_BUFFERED,
    MMA_V_IN_REGISTERS,   /* one buffer of Q */
    MMA_DOUBLE_IF_IT_FITS /* else single, else V in registers */
};

/* A cell of the table, or one of its cases. The first row in order that matches is taken. */
struct mma_backward_row {
    struct {
        enum mma_column column;
        int32_t head_dim_max; /* of the wider of D and Dv */
        int32_t lengths;
        int32_t limit_min; /* bytes of shared memory that the device must offer, whatever the tile needs; 0 = any */
    } takes;
    struct {
        int32_t block_m, block_n;
        enum mma_variant variant;
    } shape;
    const char *reason;
    const char *small_batch; /* why small batches keep block_m; NULL: they halve it */
};

/* A choice code stands for one tile, with V in registers or not. */
struct mma_backward_code {
    const char *code;
    enum mma_column column;
    int32_t block_m, block_n, v_in_registers;
};

extern const struct mma_backward_row mma_backward_rows[];
extern const int32_t mma_backward_row_count;
extern const struct mma_backward_code mma_backward_codes[];
extern const int32_t mma_backward_code_count;

struct mma_backward_choice {
    const char *code; /* static */
    int32_t row;      /* of mma_backward_rows; -1 when the code was forced */
    int32_t block_m, block_n, stages, v_in_registers;
    int32_t staged_rows; /* MS of mma_backward.h */
    int32_t overlay;     /* 1: dS lies over consumed rows of dO */
    int32_t shared_bytes;
};

const char *mma_column_name(enum mma_column column);    /* "SM90" */
const char *mma_variant_name(enum mma_variant variant); /* "single-buffered" */

/* Chooses, or checks the choice code `forced` (NULL = free). 1: choice is filled and explanation walks the steps. 0: no
 * tile, and explanation is one clause that says why. Pure. */
int mma_backward_choose(const fdm_device *device, const fdm_problem *problem, const char *forced,
                        struct mma_backward_choice *choice, char *explanation, size_t size);

/* The choice code of the number-th way (from 0, the free choice) to run a problem that mma_backward_choose() takes;
 * NULL past the last. Each tile that exists and fits comes once, by the code of the device's column where that has one.
 */
const char *mma_backward_variant(const fdm_device *device, const fdm_problem *problem, int32_t number);

#endif
