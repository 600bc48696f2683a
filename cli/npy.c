/* npy.c: NumPy's .npy format, versions 1 to 3, C order. */
#include <stdio.h>
#include <string.h>

#include "tensor_file.h"

static int fault_set(char *fault, size_t size, const char *text) {
    snprintf(fault, size, "%s", text);
    return 0;
}

static const struct {
    const char *descr;
    fdm_dtype dtype;
} dtypes[] = {{"<f4", FDM_FLOAT32}, {"<f2", FDM_FLOAT16}, {"<f8", FDM_FLOAT64},  {"|b1", FDM_BOOL},
              {"|u1", FDM_BOOL},    {"<i4", FDM_INT32},   {"<V2", FDM_BFLOAT16}, {"|V2", FDM_BFLOAT16}};

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

/* NULL, or what is wrong. */
static const char *read_header(struct dict *d, struct file_tensor *tensor) {
    char key[16], descr[8];
    int seen = 0;
    if (!take(d, '{'))
        return "its header is not a dictionary";
    while (!take(d, '}')) {
        if (!read_quoted(d, key, sizeof key) || !take(d, ':'))
            return "its header is malformed";
        if (strcmp(key, "descr") == 0 && !(seen & 1) && read_quoted(d, descr, sizeof descr)) {
            seen |= 1;
            tensor->dtype = FDM_NO_DTYPE;
            for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
                if (strcmp(descr, dtypes[i].descr) == 0)
                    tensor->dtype = dtypes[i].dtype;
            if (tensor->dtype == FDM_NO_DTYPE)
                return "its dtype is none of <f4 <f2 <f8 <i4 |b1 |u1 <V2 (bfloat16)";
        } else if (strcmp(key, "fortran_order") == 0 && !(seen & 2) && take_word(d, "False")) {
            seen |= 2;
        } else if (strcmp(key, "shape") == 0 && !(seen & 4) && read_shape(d, tensor)) {
            seen |= 4;
        } else {
            return strcmp(key, "fortran_order") == 0 ? "it is in Fortran order; only C order is read"
                                                     : "its header is malformed";
        }
        take(d, ',');
    }
    skip_blanks(d);
    return d->at != d->end ? "its header is malformed"
           : seen == 7     ? NULL
                           : "its header lacks descr, fortran_order or shape";
}

int npy_parse(const uint8_t *bytes, size_t size, struct file_tensor *tensor, char *fault, size_t fault_size) {
    static const uint8_t magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};
    memset(tensor, 0, sizeof *tensor);
    if (size < 10 || memcmp(bytes, magic, 6) != 0 || bytes[6] < 1 || bytes[6] > 3)
        return fault_set(fault, fault_size, "it does not start as a .npy file of version 1, 2 or 3");
    size_t start = bytes[6] == 1 ? 10 : 12;
    size_t length = bytes[8] | (size_t)bytes[9] << 8;
    if (bytes[6] > 1 && size >= 12)
        length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
    if (size < start || length > size - start)
        return fault_set(fault, fault_size, "its header is longer than the file");
    struct dict dict = {(const char *)bytes + start, (const char *)bytes + start + length};
    const char *wrong = read_header(&dict, tensor);
    if (wrong)
        return fault_set(fault, fault_size, wrong);
    int64_t elements = file_tensor_elements(tensor);
    if (elements < 0 || (uint64_t)elements * (uint64_t)fdm_dtype_bytes(tensor->dtype) != size - start - length)
        return fault_set(fault, fault_size, "its shape does not match the bytes that follow the header");
    tensor->data = (void *)(uintptr_t)(bytes + start + length);
    tensor->bytes = size - start - length;
    return 1;
}
