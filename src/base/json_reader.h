/* json_reader.h: a strict pull reader for small JSON: the caller says what it expects next. Reads memory only,
 * allocates nothing. */
#ifndef FDM_JSON_READER_H
#define FDM_JSON_READER_H

#include <stddef.h>
#include <stdint.h>

struct json_reader {
    const char *at, *end;
    const char *fault; /* NULL, or what is wrong, for a sentence; nothing is read after a fault */
};

struct json_reader json_reader_of(const char *text, size_t length);

/* Each returns 1, or 0 with fault set. */
int json_object_begin(struct json_reader *reader);
int json_array_begin(struct json_reader *reader);
/* The next key of an object, or the next element of an array: 1, or 0 at its end (which is consumed) or at a fault.
 * `first` is 1 before the first call and is cleared by it. A key longer than the buffer is a fault. */
int json_object_next(struct json_reader *reader, int *first, char *key, size_t size);
int json_array_next(struct json_reader *reader, int *first);
int json_string(struct json_reader *reader, char *text, size_t size);
int json_integer(struct json_reader *reader, int64_t *value); /* no fraction, no exponent */
int json_number(struct json_reader *reader, double *value);
int json_null(struct json_reader *reader);      /* 1 and consumed when the next value is null; never a fault */
int json_at_object(struct json_reader *reader); /* 1 when the next value is an object; consumes nothing */
int json_skip(struct json_reader *reader);      /* any value, nested at most 32 deep */
/* Nothing but blanks is left. */
int json_end(struct json_reader *reader);

#endif
