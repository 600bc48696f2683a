/* copy_rows.h: the contract of copy_rows.cu. */
#ifndef FDM_COPY_ROWS_H
#define FDM_COPY_ROWS_H

#include "gpu/forward_params.h"

#define COPY_ROWS_THREADS  256
#define COPY_ROWS_ROWS     64 /* of a block */
#define COPY_ROWS_MATRICES 3  /* of a launch */

/* Matrices of 16-bit elements [batches, rows, heads, columns]; strides in elements. */
struct copy_rows_matrix {
    struct gpu_matrix from, to; /* `from` is only read */
    int32_t rows, heads, batches, columns;
    int32_t to_columns;              /* that are written: zeros from `columns` on */
    int32_t from_bytes, to_bytes;    /* rows begin and end at multiples of it: 16, 4 or 2 */
    int32_t row_blocks;              /* of a head */
    int64_t first_block, past_block; /* of the grid */
};
struct copy_rows_params {
    struct copy_rows_matrix matrices[COPY_ROWS_MATRICES]; /* unused ones have no blocks */
};

#endif
