/* tensor_file.c: whole files of tensors, read by extension. */
#include "tensor_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli.h"

int64_t file_tensor_elements(const struct file_tensor *tensor) {
    int64_t elements = 1;
    for (int32_t i = 0; i < tensor->ndim; i++)
        if (__builtin_mul_overflow(elements, tensor->shape[i], &elements) || elements > INT64_MAX / 16)
            return -1;
    return elements;
}

struct file_tensor *tensor_file_find(struct tensor_file *file, const char *name) {
    for (int32_t i = 0; i < file->count; i++)
        if (strcmp(file->tensors[i].name, name) == 0)
            return &file->tensors[i];
    return NULL;
}

static uint8_t *read_bytes(const char *path, size_t *size) {
    FILE *stream = fopen(path, "rb");
    struct stat facts;
    if (!stream || fstat(fileno(stream), &facts) != 0 || !S_ISREG(facts.st_mode)) {
        complain(0, "%s: %s", path, stream ? "it is not a regular file" : strerror(errno));
        if (stream)
            fclose(stream);
        return NULL;
    }
    *size = (size_t)facts.st_size;
    uint8_t *bytes = allocate_or_exit(*size);
    int fine = fread(bytes, 1, *size, stream) == *size;
    fclose(stream);
    if (fine)
        return bytes;
    complain(0, "%s: it cannot be read to its end", path);
    free(bytes);
    return NULL;
}

static int ends_with(const char *path, const char *extension) {
    size_t length = strlen(path), tail = strlen(extension);
    return length >= tail && strcmp(path + length - tail, extension) == 0;
}

static int add_tensor(const char *path, const struct file_tensor *tensor, struct tensor_file *file) {
    if (file->count == TENSORS_MAX || tensor_file_find(file, tensor->name))
        return complain(0, "%s: tensor '%s' is given twice", path, tensor->name);
    struct file_tensor *copy = &file->tensors[file->count++];
    *copy = *tensor;
    copy->data = allocate_or_exit(tensor->bytes);
    memcpy(copy->data, tensor->data, tensor->bytes);
    return 1;
}

int tensor_file_read(const char *path, const char *name, struct tensor_file *file) {
    static struct tensor_file parsed;
    char fault[160];
    size_t size;
    int npy = ends_with(path, ".npy");
    if (!npy && !ends_with(path, ".safetensors"))
        return complain(0, "%s: the extension must be .npy or .safetensors", path);
    uint8_t *bytes = read_bytes(path, &size);
    if (!bytes)
        return 0;
    parsed.count = 1;
    int fine = npy ? npy_parse(bytes, size, &parsed.tensors[0], fault, sizeof fault)
                   : safetensors_parse(bytes, size, &parsed, fault, sizeof fault);
    if (npy)
        snprintf(parsed.tensors[0].name, sizeof parsed.tensors[0].name, "%s", name);
    if (!fine)
        complain(0, "%s: %s", path, fault);
    for (int32_t i = 0; i < parsed.count && fine; i++)
        fine = add_tensor(path, &parsed.tensors[i], file);
    free(bytes);
    return fine;
}
