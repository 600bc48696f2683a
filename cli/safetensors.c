/* safetensors.c: the .safetensors format: u64 header length, JSON header, data. */
#include <stdio.h>
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

static int fault_set(char fault[FAULT_BYTES], const char *text) {
    snprintf(fault, FAULT_BYTES, "%s", text);
    return 0;
}

/* A reader that stops with a fault of its own words, which lie in `fault`. */
struct parser {
    struct json_reader json;
    char *fault;
    uint64_t data_bytes; /* behind the header; INT64_MAX where the file's end is unknown */
};

static void tensor_fault(struct parser *p, const struct file_tensor *tensor, const char *text) {
    snprintf(p->fault, FAULT_BYTES, "tensor '%s' %s", tensor->name, text);
    p->json.fault = p->fault;
}

static void read_dtype(struct parser *p, struct file_tensor *tensor) {
    char name[16] = "", text[96];
    if (!json_string(&p->json, name, sizeof name))
        return;
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (strcmp(name, dtypes[i].name) == 0) {
            tensor->dtype = dtypes[i].dtype;
            return;
        }
    snprintf(text, sizeof text, "has dtype %s; it must be F64, F32, F16, BF16, I32, U8 or BOOL", name);
    tensor_fault(p, tensor, text);
}

static void read_shape(struct parser *p, struct file_tensor *tensor) {
    int first = 1;
    tensor->ndim = 0;
    json_array_begin(&p->json);
    while (!p->json.fault && json_array_next(&p->json, &first)) {
        if (tensor->ndim == TENSOR_AXES_MAX)
            tensor_fault(p, tensor, "has more than 8 axes");
        else if (json_integer(&p->json, &tensor->shape[tensor->ndim]) && tensor->shape[tensor->ndim++] < 0)
            tensor_fault(p, tensor, "has a negative extent");
    }
}

static void read_offsets(struct parser *p, const struct file_tensor *tensor, int64_t offsets[2]) {
    struct json_reader *r = &p->json;
    int first = 1;
    json_array_begin(r);
    for (int i = 0; i < 2; i++)
        if (!r->fault && (!json_array_next(r, &first) || !json_integer(r, &offsets[i])) && !r->fault)
            tensor_fault(p, tensor, "has data_offsets of fewer than two numbers");
    if (!r->fault && json_array_next(r, &first))
        tensor_fault(p, tensor, "has data_offsets of more than two numbers");
}

static const char *extent_fault(const struct parser *p, const struct file_tensor *tensor, const int64_t offsets[2]) {
    const int64_t elements = file_tensor_elements(tensor);
    if (elements < 0)
        return "has more elements than fit";
    if (offsets[0] < 0 || offsets[1] < offsets[0] || (uint64_t)offsets[1] > p->data_bytes)
        return "has data_offsets that leave the file";
    return offsets[1] - offsets[0] != elements * fdm_dtype_bytes(tensor->dtype)
               ? "has data_offsets that do not match its shape"
               : NULL;
}

/* The description of one tensor; its offset is that in the data area. */
static void read_tensor(struct parser *p, struct file_tensor *tensor) {
    char key[24];
    int first = 1, seen = 0;
    int64_t offsets[2] = {0, 0};
    json_object_begin(&p->json);
    while (!p->json.fault && json_object_next(&p->json, &first, key, sizeof key)) {
        int bit = strcmp(key, "dtype") == 0          ? 1
                  : strcmp(key, "shape") == 0        ? 2
                  : strcmp(key, "data_offsets") == 0 ? 4
                                                     : 0;
        if (!bit || seen & bit) {
            tensor_fault(p, tensor, bit ? "repeats a key" : "has an unknown key");
            return;
        }
        seen |= bit;
        if (bit == 1)
            read_dtype(p, tensor);
        else if (bit == 2)
            read_shape(p, tensor);
        else
            read_offsets(p, tensor, offsets);
    }
    if (p->json.fault)
        return;
    const char *wrong = seen == 7 ? extent_fault(p, tensor, offsets) : "lacks dtype, shape or data_offsets";
    if (wrong)
        tensor_fault(p, tensor, wrong);
    tensor->offset = (uint64_t)offsets[0];
    tensor->bytes = (size_t)(offsets[1] - offsets[0]);
}

static int overlaps(const struct file_tensor *a, const struct file_tensor *b) {
    return a->bytes && b->bytes && a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
}

static int check_distinct(const struct tensor_file *file, char fault[FAULT_BYTES]) {
    for (int32_t i = 0; i < file->count; i++)
        for (int32_t j = 0; j < i; j++) {
            const struct file_tensor *a = &file->tensors[j], *b = &file->tensors[i];
            const int same = strcmp(a->name, b->name) == 0;
            if (!same && !overlaps(a, b))
                continue;
            snprintf(fault, FAULT_BYTES, same ? "two tensors have the name '%s'" : "tensors '%s' and '%s' overlap",
                     a->name, b->name);
            return 0;
        }
    return 1;
}

size_t safetensors_needs(const uint8_t *bytes, size_t size) {
    uint64_t length = 0;
    if (size < 8)
        return 8;
    for (int i = 0; i < 8; i++)
        length |= (uint64_t)bytes[i] << 8 * i;
    return length > HEADER_MAX ? 0 : 8 + (size_t)length;
}

int safetensors_parse(const uint8_t *bytes, size_t size, uint64_t file_bytes, struct tensor_file *file,
                      char fault[FAULT_BYTES]) {
    const size_t header = safetensors_needs(bytes, size);
    file->count = 0;
    if (size < 8)
        return fault_set(fault, "it is shorter than its header length");
    if (!header || header > size)
        return fault_set(fault, "its header is longer than the file or 100 MiB");
    struct parser p = {.json = json_reader_of((const char *)bytes + 8, header - 8),
                       .fault = fault,
                       .data_bytes = file_bytes == FILE_BYTES_UNKNOWN ? INT64_MAX : file_bytes - header};
    char name[TENSOR_NAME_MAX];
    int first = 1;
    json_object_begin(&p.json);
    while (!p.json.fault && json_object_next(&p.json, &first, name, sizeof name)) {
        if (strcmp(name, "__metadata__") == 0) {
            json_skip(&p.json);
            continue;
        }
        if (file->count == TENSORS_MAX)
            return fault_set(fault, "it holds more than 64 tensors");
        struct file_tensor *tensor = &file->tensors[file->count++];
        memset(tensor, 0, sizeof *tensor);
        snprintf(tensor->name, sizeof tensor->name, "%s", name);
        read_tensor(&p, tensor);
        tensor->offset += header;
    }
    if (!p.json.fault)
        json_end(&p.json);
    if (p.json.fault)
        return p.json.fault == fault ? 0 : fault_set(fault, p.json.fault);
    return check_distinct(file, fault);
}

static const char *dtype_code(fdm_dtype dtype) {
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].name;
    return "F32";
}

/* The header without its length; returns that. stream NULL: it is only measured. */
static size_t write_header(FILE *stream, const struct tensor_file *file) {
    struct json_writer w = {.stream = stream};
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
    return w.bytes;
}

static int write_all(FILE *stream, const void *tensors) {
    const struct tensor_file *file = tensors;
    const size_t length = write_header(NULL, file);
    const int padding = (int)((64 - (8 + length) % 64) % 64); /* blanks, so that data starts at a multiple of 64 */
    for (int i = 0; i < 8; i++)
        fputc((int)(uint8_t)((length + (size_t)padding) >> 8 * i), stream);
    write_header(stream, file);
    fprintf(stream, "%*s", padding, "");
    int fine = !ferror(stream);
    for (int32_t i = 0; i < file->count && fine; i++)
        fine = fwrite(file->tensors[i].data, 1, file->tensors[i].bytes, stream) == file->tensors[i].bytes;
    return fine;
}

int safetensors_write(const char *path, const struct tensor_file *file) { return output_write(path, write_all, file); }
