/* fuzz_files.c: bytes as a .safetensors file, as a .npy file and as a plan's JSON; what is accepted lies inside the
 * file, behind its header. */
#include <stdlib.h>
#include <string.h>

#include "../../cli/tensor_file.h"

static void check(const struct file_tensor *t, size_t header, size_t size) {
    int64_t elements = file_tensor_elements(t);
    if (t->ndim < 0 || t->ndim > TENSOR_AXES_MAX || elements < 0 ||
        (size_t)elements * (size_t)fdm_dtype_bytes(t->dtype) != t->bytes)
        abort();
    if (t->offset < header || t->bytes > size || t->offset > size - t->bytes)
        abort();
}

/* As a file is read: only what the header's beginning asks for is in memory. Its bytes, exactly as many as are read,
 * for the sanitizer; *size of them. */
static uint8_t *header_of(const uint8_t *data, size_t file_bytes, size_t (*needs)(const uint8_t *, size_t),
                          size_t *size) {
    size_t needed = 8;
    *size = 0;
    while (*size < needed && needed <= file_bytes) {
        *size = needed;
        needed = needs(data, *size);
    }
    uint8_t *header = malloc(*size ? *size : 1);
    if (!header)
        abort();
    memcpy(header, data, *size);
    return header;
}

static void parse_safetensors(const uint8_t *data, size_t size, uint64_t file_bytes) {
    static struct tensor_file file;
    char fault[FAULT_BYTES];
    size_t known;
    uint8_t *header = header_of(data, size, safetensors_needs, &known);
    file.count = 0;
    if (safetensors_parse(header, known, file_bytes, &file, fault) && file_bytes == size)
        for (int32_t i = 0; i < file.count; i++)
            check(&file.tensors[i], known, size);
    free(header);
}

static void parse_npy(const uint8_t *data, size_t size, uint64_t file_bytes) {
    struct file_tensor tensor = {.ndim = 0};
    char fault[FAULT_BYTES];
    size_t known;
    uint8_t *header = header_of(data, size, npy_needs, &known);
    if (npy_parse(header, known, file_bytes, &tensor, fault) && file_bytes == size)
        check(&tensor, known, size);
    free(header);
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
    fdm_plan plan = {.struct_bytes = sizeof plan};
    if (size == 0)
        return 0;
    const int kind = input[0] % 3, fitted = input[0] >> 7 && kind < 2;
    const uint64_t file_bytes = input[0] & 64 ? FILE_BYTES_UNKNOWN : size - 1; /* of a pipe, of a file */
    size--;
    uint8_t *data = malloc(size ? size : 1); /* exactly as long as the file, for the sanitizer */
    if (!data)
        abort();
    memcpy(data, input + 1, size);
    if (fitted)
        fit_header(data, size, kind);
    if (kind == 0)
        parse_safetensors(data, size, file_bytes);
    if (kind == 1)
        parse_npy(data, size, file_bytes);
    if (kind == 2)
        (void)fdm_plan_from_json((const char *)data, size, &plan);
    free(data);
    return 0;
}
