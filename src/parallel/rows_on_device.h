/* rows_on_device.h: moves of rows on a CUDA device. */
#ifndef FDM_PARALLEL_ROWS_ON_DEVICE_H
#define FDM_PARALLEL_ROWS_ON_DEVICE_H

#include "cuda/cuda.h"

/* Element (i, b, h) begins at data + i * row + b * batch + h * head bytes. */
struct rows_place {
    char *data;
    int64_t row, batch, head;
};
enum move_action {
    MOVE_COPY,
    MOVE_ADD,   /* dtype: float32 or float64 */
    MOVE_ROUND, /* float32 to dtype, of 16 bits */
    MOVE_WIDEN  /* dtype, of 16 bits, to float32 */
};
struct move {
    enum move_action action;
    fdm_dtype dtype; /* MOVE_COPY: not looked at */
    struct rows_place from, to;
    int64_t rows, batches, heads, width; /* width: bytes of an element of `from` */
};

/* Bytes of an element of `to`. */
static inline int64_t move_to_width(const struct move *move) {
    return move->action == MOVE_ROUND ? move->width / 2 : move->action == MOVE_WIDEN ? move->width * 2 : move->width;
}

void rank_rows_request(int32_t action, int32_t unit, struct cuda_kernel_request *request);
/* Enqueues; no float64. */
fdm_status rows_on_device(int32_t device, const struct move *move, void *stream);

#endif
