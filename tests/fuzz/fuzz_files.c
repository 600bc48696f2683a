/* fuzz_files.c: bytes as a .safetensors file, as a .npy file and as a plan's JSON; what is accepted lies inside them.
 */
#include <stdlib.h>
#include <string.h>

#include "../../cli/tensor_file.h"

static void check(const struct file_tensor *t, const uint8_t *bytes, size_t size) {
    const uint8_t *data = t->data;
    int64_t elements = file_tensor_elements(t);
    if (t->ndim < 0 || t->ndim > TENSOR_AXES_MAX || elements < 0 ||
        (size_t)elements * (size_t)fdm_dtype_bytes(t->dtype) != t->bytes)
        abort();
    if (t->bytes > 0 && (data < bytes || t->bytes > size || data > bytes + size - t->bytes))
        abort();
}

/* The fuzzer seldom guesses a length that fits: the file's first bytes are made to say where its header ends. */
static void fit_header(uint8_t *bytes, size_t size, int kind) {
    const size_t start = kind == 0 ? 8 : 10, header = size > start ? (size - start) * bytes[0] / 255 : 0;
    if (size <= start)
        return;
    static const uint8_t magic[8] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0};
    memcpy(bytes, magic, sizeof magic);
    if (kind == 0)
        memset(bytes, 0, sizeof magic);
    bytes[start - (kind == 0 ? 8 : 2)] = (uint8_t)header;
    bytes[start - (kind == 0 ? 7 : 1)] = (uint8_t)(header >> 8);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static struct tensor_file file;
    struct file_tensor tensor = {.ndim = 0};
    fdm_plan plan;
    char fault[160];
    if (size == 0)
        return 0;
    const int kind = input[0] % 3, fitted = input[0] >> 7 && kind < 2;
    size--;
    uint8_t *data = malloc(size ? size : 1); /* exactly as long as the file, for the sanitizer */
    if (!data)
        abort();
    memcpy(data, input + 1, size);
    if (fitted)
        fit_header(data, size, kind);
    file.count = 0;
    if (kind == 0 && safetensors_parse(data, size, &file, fault, sizeof fault))
        for (int32_t i = 0; i < file.count; i++)
            check(&file.tensors[i], data, size);
    if (kind == 1 && npy_parse(data, size, &tensor, fault, sizeof fault))
        check(&tensor, data, size);
    if (kind == 2)
        (void)fdm_plan_from_json((const char *)data, size, &plan);
    free(data);
    return 0;
}
