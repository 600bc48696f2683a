/* copy_rows.c: copies of matrices on the host: the kernel and its launch. */
#include "gpu/copy_rows.h"
#include "gpu/gpu_family.h"

void copy_rows_request(struct cuda_kernel_request *request) {
    *request =
        (struct cuda_kernel_request){.file = "gpu/copy_rows.cu", .entry = "copy_rows", .threads = COPY_ROWS_THREADS};
}

/* At multiples of how many bytes its rows begin and end. */
static int32_t alignment(const struct gpu_matrix *m, int32_t columns) {
    const uintptr_t all = (uintptr_t)m->data | (uintptr_t)(2 * m->batch) | (uintptr_t)(2 * m->row) |
                          (uintptr_t)(2 * m->head) | (uintptr_t)(2 * columns);
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

void copy_rows_add(struct gpu_launches *l, int32_t kernel, const struct copy_rows_matrix *matrices, int32_t count) {
    struct copy_rows_params params = {0};
    int64_t blocks = 0;
    for (int32_t n = 0; n < count; n++) {
        struct copy_rows_matrix *m = &params.matrices[n];
        *m = matrices[n];
        m->from_bytes = alignment(&m->from, m->columns);
        m->to_bytes = alignment(&m->to, m->to_columns);
        m->row_blocks = (m->rows + COPY_ROWS_ROWS - 1) / COPY_ROWS_ROWS;
        m->first_block = blocks;
        blocks += (int64_t)m->row_blocks * m->heads * m->batches;
        m->past_block = blocks;
    }
    gpu_add_launch_of(l, kernel,
                      (struct gpu_launch){.grid = {blocks}, .params = &params, .params_bytes = sizeof params});
}
