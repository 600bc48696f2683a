/* npy.c: the header of NumPy's .npy format, versions 1 to 3, C order. */
#include <stdio.h>
#include <string.h>

#include "tensor_file.h"

enum { HEADER_MAX = 1 << 20 };

static int fault_set(char fault[FAULT_BYTES], const char *text) {
    snprintf(fault, FAULT_BYTES, "%s", text);
    return 0;
}

/* '>' in the place of '<' says that the bytes of an element come in the other order. */
static const struct {
    const char *descr;
    fdm_dtype dtype;
} dtypes[] = {{"<f4", FDM_FLOAT32}, {"<f2", FDM_FLOAT16}, {"<f8", FDM_FLOAT64},  {"|b1", FDM_BOOL},
              {"|u1", FDM_BOOL},    {"<i4", FDM_INT32},   {"<V2", FDM_BFLOAT16}, {"|V2", FDM_BFLOAT16}};
static const char dtype_words[] = "it must be f8, f4, f2 or i4 of either byte order, b1, u1, or V2 for bfloat16";

/* The header is a Python dict literal: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), } and blanks. */
struct dict {
    const char *at, *end;
};

static void skip_blanks(struct dict *d) {
    while (d->at < d->end && (*d->at == ' ' || *d->at == '\n' || *d->at == '\t'))
        d->at++;
}

static int take(struct dict *d, char wanted) {
    skip_blanks(d);
    if (d->at == d->end || *d->at != wanted)
        return 0;
    d->at++;
    return 1;
}

static int read_quoted(struct dict *d, char *text, size_t size) {
    skip_blanks(d);
    if (d->at == d->end || (*d->at != '\'' && *d->at != '"'))
        return 0;
    char quote = *d->at++;
    size_t used = 0;
    while (d->at < d->end && *d->at != quote && used + 1 < size)
        text[used++] = *d->at++;
    text[used] = 0;
    return d->at < d->end && *d->at++ == quote;
}

static int read_shape(struct dict *d, struct file_tensor *tensor) {
    if (!take(d, '('))
        return 0;
    tensor->ndim = 0;
    while (!take(d, ')')) {
        int64_t extent = 0;
        skip_blanks(d);
        const char *begin = d->at;
        for (; d->at < d->end && *d->at >= '0' && *d->at <= '9'; d->at++)
            if (__builtin_mul_overflow(extent, 10, &extent) || __builtin_add_overflow(extent, *d->at - '0', &extent))
                return 0;
        if (d->at == begin || tensor->ndim == TENSOR_AXES_MAX)
            return 0;
        tensor->shape[tensor->ndim++] = extent;
        skip_blanks(d);
        if (!take(d, ',') && (d->at == d->end || *d->at != ')'))
            return 0;
    }
    return 1;
}

static int take_word(struct dict *d, const char *word) {
    size_t length = strlen(word);
    skip_blanks(d);
    if ((size_t)(d->end - d->at) < length || memcmp(d->at, word, length) != 0)
        return 0;
    d->at += length;
    return 1;
}

/* 1, or 0 with what is wrong in `fault`. A structured dtype is a list. */
static int read_dtype(struct dict *d, struct file_tensor *tensor, char fault[FAULT_BYTES]) {
    char descr[32];
    skip_blanks(d);
    if (d->at < d->end && *d->at == '[') {
        snprintf(fault, FAULT_BYTES, "its dtype has fields; %s", dtype_words);
        return 0;
    }
    if (!read_quoted(d, descr, sizeof descr))
        return fault_set(fault, "its header is malformed");
    tensor->swapped = descr[0] == '>';
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if ((descr[0] == dtypes[i].descr[0] || (tensor->swapped && dtypes[i].descr[0] == '<')) &&
            strcmp(descr + 1, dtypes[i].descr + 1) == 0) {
            tensor->dtype = dtypes[i].dtype;
            return 1;
        }
    snprintf(fault, FAULT_BYTES, "its dtype is '%s'; %s", descr, dtype_words);
    return 0;
}

static int read_header(struct dict *d, struct file_tensor *tensor, char fault[FAULT_BYTES]) {
    char key[16];
    int seen = 0;
    if (!take(d, '{'))
        return fault_set(fault, "its header is not a dictionary");
    while (!take(d, '}')) {
        if (!read_quoted(d, key, sizeof key) || !take(d, ':'))
            return fault_set(fault, "its header is malformed");
        if (strcmp(key, "descr") == 0 && !(seen & 1)) {
            seen |= 1;
            if (!read_dtype(d, tensor, fault))
                return 0;
        } else if (strcmp(key, "fortran_order") == 0 && !(seen & 2) && take_word(d, "False")) {
            seen |= 2;
        } else if (strcmp(key, "shape") == 0 && !(seen & 4) && read_shape(d, tensor)) {
            seen |= 4;
        } else {
            return fault_set(fault, strcmp(key, "fortran_order") == 0 ? "it is in Fortran order; only C order is read"
                                                                      : "its header is malformed");
        }
        take(d, ',');
    }
    skip_blanks(d);
    if (d->at != d->end)
        return fault_set(fault, "its header is malformed");
    return seen == 7 || fault_set(fault, "its header lacks descr, fortran_order or shape");
}

/* Where the dictionary starts: behind magic, version and its length, two bytes or four; 0: it is no .npy file. */
static size_t start_of(const uint8_t *bytes) {
    static const uint8_t magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};
    if (memcmp(bytes, magic, 6) != 0 || bytes[6] < 1 || bytes[6] > 3)
        return 0;
    return bytes[6] == 1 ? 10 : 12;
}

size_t npy_needs(const uint8_t *bytes, size_t size) {
    const size_t start = size < 8 ? 8 : start_of(bytes);
    if (size < start || !start)
        return start;
    size_t length = bytes[8] | (size_t)bytes[9] << 8;
    if (start == 12)
        length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
    return length > HEADER_MAX ? 0 : start + length;
}

int npy_parse(const uint8_t *bytes, size_t size, uint64_t file_bytes, struct file_tensor *tensor,
              char fault[FAULT_BYTES]) {
    memset(tensor, 0, sizeof *tensor);
    if (size < 8 || !start_of(bytes))
        return fault_set(fault, "it does not start as a .npy file of version 1, 2 or 3");
    const size_t start = start_of(bytes), header = npy_needs(bytes, size);
    if (!header || header > size)
        return fault_set(fault, "its header is longer than the file or 1 MiB");
    struct dict dict = {(const char *)bytes + start, (const char *)bytes + header};
    if (!read_header(&dict, tensor, fault))
        return 0;
    const int64_t elements = file_tensor_elements(tensor);
    if (elements < 0)
        return fault_set(fault, "its shape has more elements than fit");
    tensor->offset = header;
    tensor->bytes = (size_t)elements * (size_t)fdm_dtype_bytes(tensor->dtype);
    return file_bytes == FILE_BYTES_UNKNOWN || tensor->bytes == file_bytes - header ||
           fault_set(fault, "its shape does not match the bytes that follow the header");
}
