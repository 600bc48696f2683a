/* json_writer.h: JSON to a stream, commas and quotes included. */
#ifndef FDM_JSON_WRITER_H
#define FDM_JSON_WRITER_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct json_writer {
    FILE *stream; /* NULL: bytes are counted alone */
    int needs_comma;
    size_t bytes; /* so far */
};

/* key NULL: an element of an array, or the outermost value. */
void json_open(struct json_writer *writer, const char *key, char bracket);
void json_close(struct json_writer *writer, char bracket);
void json_put_text(struct json_writer *writer, const char *key, const char *text); /* NULL = null */
void json_put_integer(struct json_writer *writer, const char *key, int64_t value);
void json_put_real(struct json_writer *writer, const char *key, double value); /* not finite = null */
void json_put_raw(struct json_writer *writer, const char *key, const char *json);

#endif
