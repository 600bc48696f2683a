/* merge_on_device.c: which of merge.cu's two ways the tensors allow, its parameters and its launch. */
#include "gpu/merge_on_device.h"

#include "base/error.h"
#include "gpu/gpu_family.h"
#include "problem/tensor.h"

enum { VECTOR_BYTES = 16 };

void merge_request(fdm_dtype dtype, int vector, struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){.file = "gpu/merge.cu", .entry = "merge", .threads = MERGE_THREADS};
    GPU_SET_CONSTANTS(request, MERGE_CONSTANTS, .DTYPE = gpu_dtype(dtype), .VECTOR = vector != 0);
}

static struct merge_out out_of(const fdm_tensor *t) {
    return (struct merge_out){tensor_data(t), tensor_stride(t, 0), tensor_stride(t, 1), tensor_stride(t, 2),
                              tensor_stride(t, 3)};
}

static struct gpu_rows rows_of(const fdm_tensor *t) {
    if (!t)
        return (struct gpu_rows){0};
    return (struct gpu_rows){(float *)(void *)tensor_data(t), tensor_stride(t, 0), tensor_stride(t, 1),
                             tensor_stride(t, 2)};
}

/* Rows are contiguous and begin at multiples of 16 bytes. */
static int is_vector(const fdm_tensor *t) {
    return (t->shape[3] == 1 || tensor_stride(t, 3) == 1) && tensor_aligned(t);
}

fdm_status merge_on_device(const fdm_merge_tensors *t, void *stream) {
    const fdm_tensor *out = t->out;
    const fdm_dtype dtype = fdm_dtype_of(out);
    const int64_t *shape = out->shape, row_bytes = shape[3] * fdm_dtype_bytes(dtype);
    if (dtype == FDM_FLOAT64)
        return error_set(FDM_ERROR_UNSUPPORTED, "out1 is float64, which is merged on the CPU only; CUDA devices take "
                                                "float32, float16 and bfloat16");
    const int64_t rows = shape[0] * shape[1] * shape[2]; /* fits: the tensors' own products do */
    if (rows > INT32_MAX || shape[3] > INT32_MAX)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "out has %lld rows of %lld elements; merge on CUDA devices takes fewer than 2^31 of both",
                         (long long)rows, (long long)shape[3]);
    if (rows == 0)
        return FDM_OK;
    const int vector =
        row_bytes > 0 && row_bytes % VECTOR_BYTES == 0 && is_vector(t->out1) && is_vector(t->out2) && is_vector(out);
    const int64_t pieces = vector ? row_bytes / VECTOR_BYTES : shape[3];
    const uint32_t chunks = pieces > 0 ? (uint32_t)pieces : 1,
                   per_block = chunks < MERGE_THREADS ? MERGE_THREADS / chunks : 1;
    const struct merge_params arguments = {.out1 = out_of(t->out1),
                                           .out2 = out_of(t->out2),
                                           .out = out_of(out),
                                           .lse1 = rows_of(t->lse1),
                                           .lse2 = rows_of(t->lse2),
                                           .lse = rows_of(t->lse),
                                           .lse_low1 = rows_of(t->lse_low1),
                                           .lse_low2 = rows_of(t->lse_low2),
                                           .lse_low = rows_of(t->lse_low),
                                           .num_rows = (uint32_t)rows,
                                           .seqlen = (uint32_t)shape[1],
                                           .heads = (uint32_t)shape[2],
                                           .chunks = chunks,
                                           .rows_per_block = per_block,
                                           .pieces = (uint32_t)pieces};
    struct cuda_kernel_request request;
    merge_request(dtype, vector, &request);
    return cuda_run(out->device.index, &request, ((uint32_t)rows + per_block - 1) / per_block, &arguments,
                    sizeof arguments, stream);
}
