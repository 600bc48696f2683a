/* tensor_file.c: tensors from files and pipes: the header first, then the data that it speaks of. */
#include "tensor_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "system/streams.h"

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

static int ends_with(const char *path, const char *extension) {
    size_t length = strlen(path), tail = strlen(extension);
    return length >= tail && strcmp(path + length - tail, extension) == 0;
}

int safetensors_may_be(const char *path) {
    return !ends_with(path, ".npy") ||
           complain(0, "--out is '%s'; results are written as .safetensors, not as .npy", path);
}

/* ---- bytes ---- */

struct source {
    const char *path;
    struct system_source stream;
    int is_pipe;
    uint64_t bytes; /* of the file; unknown of a pipe */
};

/* 1, or 0 after a complaint. */
static int open_source(const char *path, struct source *source) {
    struct system_source stream;
    if (!system_open_source(path, &stream))
        return complain(0, "%s: %s", path, strerror(errno));
    const int is_pipe = stream.kind == SYSTEM_PIPE;
    *source = (struct source){path, stream, is_pipe, is_pipe ? FILE_BYTES_UNKNOWN : stream.bytes};
    if (stream.kind != SYSTEM_NEITHER)
        return 1;
    system_close_source(&stream);
    return complain(0, "%s: it is neither a regular file nor a pipe", path);
}

/* A FIFO may wait for a writer without end. One that is there, or comes within seconds, is waited for. */
static void wait_for_writer(const struct source *source) {
    enum { PATIENCE_MS = 3000 };
    progress("waiting for a writer of %s", source->path);
    system_await_writer(&source->stream, PATIENCE_MS);
    progress(NULL);
}

/* ---- headers ---- */

struct header {
    uint8_t *bytes;
    size_t size;
    int npy;
};

/* As much as the format asks for and the file has. 1, or 0 after a complaint. */
static int read_header(const struct source *source, struct header *header) {
    size_t needed = 8;
    while (header->size < needed && needed <= source->bytes) {
        uint8_t *bytes = realloc(header->bytes, needed);
        if (!bytes)
            return complain(0, "%s: no memory for its header of %zu bytes", source->path, needed);
        header->bytes = bytes;
        const int64_t come = system_read(&source->stream, bytes + header->size, needed - header->size);
        if (come < 0)
            return complain(0, "%s: %s", source->path, strerror(errno));
        if (come == 0 && header->size == 0 && source->is_pipe)
            return complain(0, "%s: nobody writes to this pipe", source->path);
        header->size += (size_t)come;
        if (header->size < needed)
            break;
        if (source->is_pipe && needed == 8)
            header->npy = memcmp(bytes, "\x93NUMPY", 6) == 0;
        needed = header->npy ? npy_needs(bytes, header->size) : safetensors_needs(bytes, header->size);
    }
    return 1;
}

static int parse(const struct source *source, const struct header *header, const char *name,
                 struct tensor_file *parsed) {
    char fault[FAULT_BYTES];
    int fine;
    if (header->npy) {
        fine = npy_parse(header->bytes, header->size, source->bytes, &parsed->tensors[0], fault);
        parsed->count = 1;
        snprintf(parsed->tensors[0].name, sizeof parsed->tensors[0].name, "%s", name);
    } else {
        fine = safetensors_parse(header->bytes, header->size, source->bytes, parsed, fault);
    }
    return fine || complain(0, "%s: %s", source->path, fault);
}

/* ---- data ---- */

static void swap_bytes(struct file_tensor *tensor) {
    const size_t width = (size_t)fdm_dtype_bytes(tensor->dtype);
    uint8_t *bytes = tensor->data;
    for (size_t at = 0; at < tensor->bytes; at += width)
        for (size_t i = 0; i < width / 2; i++) {
            const uint8_t low = bytes[at + i];
            bytes[at + i] = bytes[at + width - 1 - i];
            bytes[at + width - 1 - i] = low;
        }
}

/* From place `*at` of the file on. */
static int read_data(const struct source *source, uint64_t *at, struct file_tensor *tensor) {
    char unused[4096];
    int64_t come = 1;
    for (; *at < tensor->offset && come > 0; *at += (uint64_t)come) {
        const uint64_t gap = tensor->offset - *at;
        come = system_read(&source->stream, unused, gap < sizeof unused ? (size_t)gap : sizeof unused);
    }
    tensor->data = allocate(tensor->bytes);
    if (!tensor->data)
        return complain(0, "%s: tensor '%s' has %zu bytes, more than there is memory", source->path, tensor->name,
                        tensor->bytes);
    if (come > 0)
        come = system_read(&source->stream, tensor->data, tensor->bytes);
    if (come < 0)
        return complain(0, "%s: %s", source->path, strerror(errno));
    if (*at < tensor->offset || (size_t)come < tensor->bytes)
        return complain(0, "%s: it ends before tensor '%s' does", source->path, tensor->name);
    *at += tensor->bytes;
    if (tensor->swapped)
        swap_bytes(tensor);
    return 1;
}

static int compare_offsets(const void *a, const void *b) {
    const uint64_t x = ((const struct file_tensor *)a)->offset, y = ((const struct file_tensor *)b)->offset;
    return (x > y) - (x < y);
}

/* In the order in which they lie, since a pipe cannot go back. */
static int read_tensors(const struct source *source, const struct header *header, struct tensor_file *parsed,
                        struct tensor_file *file) {
    uint64_t at = header->size;
    char more;
    qsort(parsed->tensors, (size_t)parsed->count, sizeof parsed->tensors[0], compare_offsets);
    for (int32_t i = 0; i < parsed->count; i++) {
        struct file_tensor *tensor = &parsed->tensors[i];
        if (tensor_file_find(file, tensor->name))
            return complain(0, "%s: tensor '%s' is given twice", source->path, tensor->name);
        if (file->count == TENSORS_MAX)
            return complain(0, "%s: with it there are more than %d tensors", source->path, TENSORS_MAX);
        if (!read_data(source, &at, tensor))
            return 0;
        file->tensors[file->count++] = *tensor;
    }
    return !header->npy || system_read(&source->stream, &more, 1) == 0 ||
           complain(0, "%s: its shape does not match the bytes that follow the header", source->path);
}

int tensor_file_read(const char *path, const char *name, struct tensor_file *file) {
    static struct tensor_file parsed;
    struct header header = {.npy = ends_with(path, ".npy")};
    struct source source;
    if (!open_source(path, &source))
        return 0;
    int fine = source.is_pipe || header.npy || ends_with(path, ".safetensors") ||
               complain(0, "%s: the extension must be .npy or .safetensors", path);
    if (fine && source.is_pipe)
        wait_for_writer(&source);
    fine = fine && read_header(&source, &header) && parse(&source, &header, name, &parsed) &&
           read_tensors(&source, &header, &parsed, file);
    system_close_source(&source.stream);
    free(header.bytes);
    return fine;
}
