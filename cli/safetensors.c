/* safetensors.c: the .safetensors format: u64 header length, JSON header, data. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_reader.h"
#include "cli.h"
#include "json_writer.h"
#include "output_file.h"
#include "tensor_file.h"

enum { HEADER_MAX = 100 << 20 };

static const struct {
    const char *name;
    fdm_dtype dtype;
} dtypes[] = {{"F32", FDM_FLOAT32}, {"F16", FDM_FLOAT16}, {"BF16", FDM_BFLOAT16}, {"F64", FDM_FLOAT64},
              {"BOOL", FDM_BOOL},   {"U8", FDM_BOOL},     {"I32", FDM_INT32}};

static int fault_set(char *fault, size_t size, const char *text) {
    snprintf(fault, size, "%s", text);
    return 0;
}

static fdm_dtype read_dtype(struct json_reader *r) {
    char name[16] = "";
    json_string(r, name, sizeof name);
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (strcmp(name, dtypes[i].name) == 0)
            return dtypes[i].dtype;
    if (!r->fault)
        r->fault = "a tensor has a dtype other than F64, F32, F16, BF16, I32, U8, BOOL";
    return FDM_NO_DTYPE;
}

static void read_shape(struct json_reader *r, struct file_tensor *tensor) {
    int first = 1;
    tensor->ndim = 0;
    json_array_begin(r);
    while (!r->fault && json_array_next(r, &first)) {
        if (tensor->ndim == TENSOR_AXES_MAX)
            r->fault = "a tensor has more than 8 axes";
        else if (json_integer(r, &tensor->shape[tensor->ndim]) && tensor->shape[tensor->ndim++] < 0)
            r->fault = "a tensor has a negative extent";
    }
}

static void read_offsets(struct json_reader *r, int64_t offsets[2]) {
    int first = 1;
    json_array_begin(r);
    for (int i = 0; i < 2; i++)
        if (!json_array_next(r, &first) || !json_integer(r, &offsets[i]))
            r->fault = r->fault ? r->fault : "data_offsets has fewer than two numbers";
    if (!r->fault && json_array_next(r, &first))
        r->fault = "data_offsets has more than two numbers";
}

/* The description of one tensor; data becomes its offset range within the data area. */
static void read_tensor(struct json_reader *r, const uint8_t *data, size_t data_size, struct file_tensor *tensor) {
    char key[24];
    int first = 1, seen = 0;
    int64_t offsets[2] = {0, 0};
    json_object_begin(r);
    while (!r->fault && json_object_next(r, &first, key, sizeof key)) {
        int bit = strcmp(key, "dtype") == 0          ? 1
                  : strcmp(key, "shape") == 0        ? 2
                  : strcmp(key, "data_offsets") == 0 ? 4
                                                     : 0;
        if (!bit || seen & bit) {
            r->fault = bit ? "a tensor repeats a key" : "a tensor has an unknown key";
            return;
        }
        seen |= bit;
        if (bit == 1)
            tensor->dtype = read_dtype(r);
        else if (bit == 2)
            read_shape(r, tensor);
        else
            read_offsets(r, offsets);
    }
    if (r->fault)
        return;
    int64_t elements = seen == 7 ? file_tensor_elements(tensor) : -1;
    if (seen != 7)
        r->fault = "a tensor lacks dtype, shape or data_offsets";
    else if (elements < 0)
        r->fault = "a tensor has more elements than fit";
    else if (offsets[0] < 0 || offsets[1] < offsets[0] || (uint64_t)offsets[1] > data_size)
        r->fault = "a tensor's data_offsets leave the file";
    else if (offsets[1] - offsets[0] != elements * fdm_dtype_bytes(tensor->dtype))
        r->fault = "a tensor's data_offsets do not match its shape";
    tensor->data = r->fault ? NULL : (void *)(uintptr_t)(data + offsets[0]);
    tensor->bytes = r->fault ? 0 : (size_t)(offsets[1] - offsets[0]);
}

static int overlaps(const struct file_tensor *a, const struct file_tensor *b) {
    const char *a_begin = a->data, *b_begin = b->data;
    return a->bytes && b->bytes && a_begin < b_begin + b->bytes && b_begin < a_begin + a->bytes;
}

static int check_distinct(const struct tensor_file *file, char *fault, size_t fault_size) {
    for (int32_t i = 0; i < file->count; i++)
        for (int32_t j = 0; j < i; j++) {
            if (strcmp(file->tensors[i].name, file->tensors[j].name) == 0)
                return fault_set(fault, fault_size, "two tensors have one name");
            if (overlaps(&file->tensors[i], &file->tensors[j]))
                return fault_set(fault, fault_size, "two tensors overlap");
        }
    return 1;
}

int safetensors_parse(const uint8_t *bytes, size_t size, struct tensor_file *file, char *fault, size_t fault_size) {
    uint64_t length = 0;
    file->count = 0;
    if (size < 8)
        return fault_set(fault, fault_size, "it is shorter than its header length");
    for (int i = 0; i < 8; i++)
        length |= (uint64_t)bytes[i] << 8 * i;
    if (length > HEADER_MAX || length > size - 8)
        return fault_set(fault, fault_size, "its header is longer than the file or 100 MiB");
    struct json_reader r = json_reader_of((const char *)bytes + 8, (size_t)length);
    const uint8_t *data = bytes + 8 + length;
    char name[TENSOR_NAME_MAX];
    int first = 1;
    json_object_begin(&r);
    while (!r.fault && json_object_next(&r, &first, name, sizeof name)) {
        if (strcmp(name, "__metadata__") == 0) {
            json_skip(&r);
            continue;
        }
        if (file->count == TENSORS_MAX)
            return fault_set(fault, fault_size, "it holds more than 64 tensors");
        struct file_tensor *tensor = &file->tensors[file->count++];
        memset(tensor, 0, sizeof *tensor);
        snprintf(tensor->name, sizeof tensor->name, "%s", name);
        read_tensor(&r, data, size - 8 - (size_t)length, tensor);
    }
    if (!r.fault)
        json_end(&r);
    if (r.fault)
        return fault_set(fault, fault_size, r.fault);
    return check_distinct(file, fault, fault_size);
}

static const char *dtype_code(fdm_dtype dtype) {
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].name;
    return "F32";
}

/* The header, padded with blanks so that data starts at a multiple of 64; the caller frees it. */
static char *make_header(const struct tensor_file *file, size_t *length) {
    char *header = NULL;
    FILE *stream = open_memstream(&header, length);
    if (!stream)
        return NULL;
    struct json_writer w = {stream, 0};
    int64_t offset = 0;
    json_open(&w, NULL, '{');
    for (int32_t i = 0; i < file->count; i++) {
        const struct file_tensor *tensor = &file->tensors[i];
        json_open(&w, tensor->name, '{');
        json_put_text(&w, "dtype", dtype_code(tensor->dtype));
        json_open(&w, "shape", '[');
        for (int32_t axis = 0; axis < tensor->ndim; axis++)
            json_put_integer(&w, NULL, tensor->shape[axis]);
        json_close(&w, ']');
        json_open(&w, "data_offsets", '[');
        json_put_integer(&w, NULL, offset);
        json_put_integer(&w, NULL, offset += (int64_t)tensor->bytes);
        json_close(&w, ']');
        json_close(&w, '}');
    }
    json_close(&w, '}');
    fflush(stream);
    for (size_t padding = (64 - (8 + *length) % 64) % 64; padding > 0; padding--)
        fputc(' ', stream);
    if (fclose(stream) == 0)
        return header;
    free(header);
    return NULL;
}

static int write_all(FILE *stream, const void *tensors) {
    const struct tensor_file *file = tensors;
    size_t length = 0;
    uint8_t prefix[8];
    char *header = make_header(file, &length);
    for (int i = 0; i < 8; i++)
        prefix[i] = (uint8_t)(length >> 8 * i);
    int fine = header && fwrite(prefix, 1, 8, stream) == 8 && fwrite(header, 1, length, stream) == length;
    for (int32_t i = 0; i < file->count && fine; i++)
        fine = fwrite(file->tensors[i].data, 1, file->tensors[i].bytes, stream) == file->tensors[i].bytes;
    free(header);
    return fine;
}

int safetensors_write(const char *path, const struct tensor_file *file) { return output_write(path, write_all, file); }
