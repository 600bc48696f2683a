/* topk_on_device.c: how the keys of a head are cut, the kernels' parameters and their launches. */
#include "masks/topk/topk_on_device.h"

#include "base/error.h"
#include "cuda/request_constants.h"
#include "gpu/features.h"
#include "problem/tensor.h"

/* Below SMALL_KEYS more and smaller blocks are there sooner; above LARGE_KEYS the reads of every chunk's block of all
 * keys before it are more than the spans cost. */
enum { SMALL_KEYS = 2048, SMALL_CHUNK = 128, CHUNK = 1024, LARGE_KEYS = 65536, SPAN = 16384 };

struct topk_cut topk_cut_of(int64_t num_keys) {
    const struct topk_cut small = {SMALL_CHUNK, INT32_MAX}, middle = {CHUNK, INT32_MAX}, large = {CHUNK, SPAN};
    return num_keys <= SMALL_KEYS ? small : num_keys <= LARGE_KEYS ? middle : large;
}

void topk_request(enum topk_kernel kernel, fdm_dtype dtype, int32_t chunk, struct cuda_kernel_request *request) {
    static const char *const files[] = {"masks/topk/topk_threshold.cu", "masks/topk/topk_carry.cu",
                                        "masks/topk/topk_resolve.cu"};
    static const char *const entries[] = {"topk_threshold", "topk_carry", "topk_resolve"};
    *request = (struct cuda_kernel_request){.file = files[kernel], .entry = entries[kernel], .threads = chunk};
    GPU_SET_CONSTANTS(request, TOPK_CONSTANTS, .DTYPE = gpu_dtype(dtype), .CHUNK = chunk);
}

struct topk_tensor topk_tensor_of(const fdm_tensor *tensor) {
    return (struct topk_tensor){(int32_t *)(void *)tensor_data(tensor), tensor_stride(tensor, 0),
                                tensor_stride(tensor, 1), tensor_stride(tensor, 2)};
}

/* ---- workspace ---- */

/* Where its arrays lie, from its beginning; those of spans are empty where there is one. */
struct layout {
    int64_t num_chunks, num_spans;
    size_t span_bounds, carried, carries, bytes;
};

static struct layout layout_of(int64_t rows, int64_t num_keys, struct topk_cut cut) {
    struct layout at = {.num_chunks = gpu_ceil_div(num_keys, cut.chunk), .num_spans = gpu_ceil_div(num_keys, cut.span)};
    const size_t spans = at.num_spans > 1 ? (size_t)(rows * at.num_spans) : 0;
    at.span_bounds = (size_t)(rows * at.num_chunks) * sizeof(struct topk_bound);
    at.carried = at.span_bounds + spans * sizeof(struct topk_bound);
    at.carries = at.carried + spans * (size_t)cut.span * sizeof(uint64_t);
    at.bytes = at.carries + spans * sizeof(struct topk_carried);
    return at;
}

size_t topk_workspace_on_device(int64_t rows, int64_t num_keys, struct topk_cut cut) {
    return rows > 0 && num_keys > 0 ? layout_of(rows, num_keys, cut).bytes : 0;
}

/* ---- launches ---- */

int32_t topk_index_bits(int64_t num_keys) {
    int32_t bits = 1;
    while ((int64_t)1 << bits < num_keys)
        bits++;
    return bits;
}

static struct topk_params params_of(const fdm_tensor *bias, const fdm_tensor *padding, int64_t window, int64_t seqlen_q,
                                    const fdm_tensor *start, const fdm_tensor *end, struct topk_cut cut,
                                    char *workspace) {
    const int64_t rows = start->shape[0] * start->shape[1], num_keys = start->shape[2];
    const struct layout at = layout_of(rows, num_keys, cut);
    const int spans = at.num_spans > 1;
    return (struct topk_params){.bias = tensor_data(bias),
                                .bias_batch = tensor_stride(bias, 0),
                                .bias_head = tensor_stride(bias, 1),
                                .bias_key = tensor_stride(bias, bias->ndim - 1),
                                .padding = padding ? (const uint8_t *)tensor_data(padding) : NULL,
                                .padding_batch = padding ? tensor_stride(padding, 0) : 0,
                                .padding_key = padding ? tensor_stride(padding, 1) : 0,
                                .start = topk_tensor_of(start),
                                .end = topk_tensor_of(end),
                                .chunk_bounds = (struct topk_bound *)(void *)workspace,
                                .span_bounds = spans ? (void *)(workspace + at.span_bounds) : NULL,
                                .carried = spans ? (void *)(workspace + at.carried) : NULL,
                                .carries = spans ? (void *)(workspace + at.carries) : NULL,
                                .row_shift = num_keys - seqlen_q,
                                .num_keys = (int32_t)num_keys,
                                .num_heads = (int32_t)start->shape[1],
                                .num_rows = (int32_t)rows,
                                .index_bits = topk_index_bits(num_keys),
                                .window = window < INT32_MAX ? (int32_t)window : INT32_MAX,
                                .span = spans ? cut.span : (int32_t)(at.num_chunks * cut.chunk),
                                .num_spans = (int32_t)at.num_spans,
                                .num_chunks = (int32_t)at.num_chunks};
}

static fdm_status launch(const struct cuda_kernel *kernel, struct topk_params *params, int of_spans, int32_t chunk,
                         void *stream) {
    const int32_t blocks_of_row = of_spans ? params->num_spans : params->num_chunks;
    params->of_spans = of_spans;
    const struct cuda_launch launch = {.kernel = kernel,
                                       .grid = {(uint32_t)blocks_of_row * (uint32_t)params->num_rows, 1, 1},
                                       .threads = (uint32_t)chunk,
                                       .stream = stream,
                                       .arguments = params,
                                       .arguments_bytes = sizeof *params};
    return cuda_launch(&launch);
}

fdm_status topk_on_device(const fdm_tensor *bias, const fdm_tensor *padding, int64_t window, int64_t seqlen_q,
                          const fdm_tensor *start, const fdm_tensor *end, struct topk_cut cut, void *workspace,
                          void *stream) {
    const int64_t rows = start->shape[0] * start->shape[1], num_keys = start->shape[2];
    if (rows == 0 || num_keys == 0)
        return FDM_OK;
    if (num_keys > TOPK_KEYS_MAX || rows > INT32_MAX / gpu_ceil_div(num_keys, cut.chunk))
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "bias has %lld heads of %lld keys; on CUDA devices top-W takes at most 2^30 keys, and fewer "
                         "than 2^31 chunks of %d of them",
                         (long long)rows, (long long)num_keys, cut.chunk);
    struct cuda_kernel_request requests[TOPK_NUM_KERNELS];
    const struct cuda_kernel *kernels[TOPK_NUM_KERNELS];
    for (int i = 0; i < TOPK_NUM_KERNELS; i++)
        topk_request((enum topk_kernel)i, fdm_dtype_of(bias), cut.chunk, &requests[i]);
    fdm_status status = cuda_kernels_get(bias->device.index, requests, TOPK_NUM_KERNELS, kernels);
    struct topk_params params = params_of(bias, padding, window, seqlen_q, start, end, cut, workspace);
    if (!status && params.num_spans > 1) {
        status = launch(kernels[TOPK_THRESHOLD], &params, 1, cut.chunk, stream);
        if (!status)
            status = launch(kernels[TOPK_CARRY], &params, 1, cut.chunk, stream);
    }
    if (!status)
        status = launch(kernels[TOPK_THRESHOLD], &params, 0, cut.chunk, stream);
    return status ? status : launch(kernels[TOPK_RESOLVE], &params, 0, cut.chunk, stream);
}
