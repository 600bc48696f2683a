/* json_writer.c: JSON to a stream. */
#include "json_writer.h"

#include <math.h>
#include <string.h>

static void put(struct json_writer *w, const char *text) {
    w->bytes += strlen(text);
    if (w->stream)
        fputs(text, w->stream);
}

static void put_string(struct json_writer *w, const char *text) {
    put(w, "\"");
    for (; *text; text++) {
        char form[8] = {*text};
        if (*text == '"' || *text == '\\')
            snprintf(form, sizeof form, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            snprintf(form, sizeof form, "\\u%04x", *text);
        put(w, form);
    }
    put(w, "\"");
}

static void put_key(struct json_writer *w, const char *key) {
    if (w->needs_comma)
        put(w, ", ");
    w->needs_comma = 1;
    if (!key)
        return;
    put_string(w, key);
    put(w, ": ");
}

void json_open(struct json_writer *w, const char *key, char bracket) {
    put_key(w, key);
    put(w, (char[2]){bracket});
    w->needs_comma = 0;
}

void json_close(struct json_writer *w, char bracket) {
    put(w, (char[2]){bracket});
    w->needs_comma = 1;
}

void json_put_text(struct json_writer *w, const char *key, const char *text) {
    put_key(w, key);
    if (text)
        put_string(w, text);
    else
        put(w, "null");
}

void json_put_integer(struct json_writer *w, const char *key, int64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    json_put_raw(w, key, text);
}

void json_put_real(struct json_writer *w, const char *key, double value) {
    char text[32];
    snprintf(text, sizeof text, "%.9g", value);
    json_put_raw(w, key, isfinite(value) ? text : "null");
}

void json_put_raw(struct json_writer *w, const char *key, const char *json) {
    put_key(w, key);
    put(w, json);
}
