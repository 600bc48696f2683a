/* rank_rows.h: rows between a tensor and what travels. The contract of rank_rows.cu, for C and CUDA C. */
#ifndef FDM_PARALLEL_RANK_ROWS_H
#define FDM_PARALLEL_RANK_ROWS_H

#include "cuda/constants.h"

#define RANK_ROWS_CONSTANTS(X)         \
    X(ACTION) /* one of those below */ \
    X(UNIT)   /* bytes that a thread reads at once: 16, 4, or, of a copy, 2 or 1; widened: 16 or 2 */

#define RANK_ROWS_COPY           0
#define RANK_ROWS_ADD            1 /* float32 to float32 */
#define RANK_ROWS_FLOAT16        2 /* float32 rounded */
#define RANK_ROWS_BFLOAT16       3
#define RANK_ROWS_WIDEN_FLOAT16  4 /* to float32 */
#define RANK_ROWS_WIDEN_BFLOAT16 5

#define RANK_ROWS_THREADS 256

/* Element (i, b, h) begins at data + i * row + b * batch + h * head bytes. */
struct rank_rows_side {
    char *data;
    int64_t row, batch, head;
};
struct rank_rows_params {
    struct rank_rows_side from, to; /* from is only read */
    uint32_t count, batches, heads; /* count = rows * batches * heads */
    uint32_t units;                 /* of an element of `from` */
    uint32_t lanes;                 /* threads of an element: a power of two, at most RANK_ROWS_THREADS */
};

#endif
