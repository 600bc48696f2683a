/* json_writer.c: JSON to a stream. */
#include "json_writer.h"

#include <math.h>

static void put_string(FILE *stream, const char *text) {
    fputc('"', stream);
    for (; *text; text++)
        if (*text == '"' || *text == '\\')
            fprintf(stream, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            fprintf(stream, "\\u%04x", *text);
        else
            fputc(*text, stream);
    fputc('"', stream);
}

static void put_key(struct json_writer *w, const char *key) {
    if (w->needs_comma)
        fputs(", ", w->stream);
    w->needs_comma = 1;
    if (!key)
        return;
    put_string(w->stream, key);
    fputs(": ", w->stream);
}

void json_open(struct json_writer *w, const char *key, char bracket) {
    put_key(w, key);
    fputc(bracket, w->stream);
    w->needs_comma = 0;
}

void json_close(struct json_writer *w, char bracket) {
    fputc(bracket, w->stream);
    w->needs_comma = 1;
}

void json_put_text(struct json_writer *w, const char *key, const char *text) {
    put_key(w, key);
    if (text)
        put_string(w->stream, text);
    else
        fputs("null", w->stream);
}

void json_put_integer(struct json_writer *w, const char *key, int64_t value) {
    put_key(w, key);
    fprintf(w->stream, "%lld", (long long)value);
}

void json_put_real(struct json_writer *w, const char *key, double value) {
    put_key(w, key);
    if (isfinite(value))
        fprintf(w->stream, "%.9g", value);
    else
        fputs("null", w->stream);
}

void json_put_raw(struct json_writer *w, const char *key, const char *json) {
    put_key(w, key);
    fputs(json, w->stream);
}
