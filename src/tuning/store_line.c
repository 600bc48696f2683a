/* store_line.c: a measured choice as one line of JSON with a checksum, and back. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_reader.h"
#include "cuda/cache.h"
#include "tuning/store.h"

/* {"checksum": "16 digits", "entry": {...}}; the checksum is that of the inner object's text. */
static const char lead[] = "{\"checksum\": \"", middle[] = "\", \"entry\": ";
enum { DIGITS = 16, ENTRY_AT = sizeof lead - 1 + DIGITS + sizeof middle - 1 };

static size_t put_choice(char *text, size_t size, const struct tuning_choice *c) {
    const int length =
        snprintf(text, size,
                 "{\"kernel\": \"%s\", \"choice\": \"%s\", \"seconds\": %.9g, \"low\": %.9g, \"high\": "
                 "%.9g, \"samples\": %d, \"threads\": %d}",
                 c->kernel, c->choice, c->seconds, c->quartile_low, c->quartile_high, c->num_samples, c->num_threads);
    return length < (int)size ? (size_t)length : size;
}

void tuning_write_line(const struct tuning_entry *e, char line[TUNING_LINE_BYTES]) {
    char *entry = line + ENTRY_AT;
    const size_t size = TUNING_LINE_BYTES - ENTRY_AT - 2;
    size_t used = (size_t)snprintf(
        entry, size, "{\"key\": \"%s\", \"maker\": \"%s\", \"date\": %lld, \"chosen\": %d, \"rule\": ", e->key,
        e->maker, (long long)e->date, e->chosen);
    used += put_choice(entry + used, size - used, &e->rule);
    used += (size_t)snprintf(entry + used, size - used, ", \"best\": [");
    for (int32_t i = 0; i < e->num_best; i++) {
        used += (size_t)snprintf(entry + used, size - used, "%s", i ? ", " : "");
        used += put_choice(entry + used, size - used, &e->best[i]);
    }
    used += (size_t)snprintf(entry + used, size - used, "]}");
    char head[ENTRY_AT + 1];
    snprintf(head, sizeof head, "%s%016llx%s", lead, (unsigned long long)cache_checksum(0, entry, used), middle);
    memcpy(line, head, ENTRY_AT);
    entry[used] = '}';
    entry[used + 1] = 0;
}

static int read_choice(struct json_reader *r, struct tuning_choice *c) {
    char key[16];
    int first = 1;
    int64_t samples = 0, threads = 0;
    *c = (struct tuning_choice){0};
    if (!json_object_begin(r))
        return 0;
    while (json_object_next(r, &first, key, sizeof key)) {
        const int right = strcmp(key, "kernel") == 0    ? json_string(r, c->kernel, sizeof c->kernel)
                          : strcmp(key, "choice") == 0  ? json_string(r, c->choice, sizeof c->choice)
                          : strcmp(key, "seconds") == 0 ? json_number(r, &c->seconds)
                          : strcmp(key, "low") == 0     ? json_number(r, &c->quartile_low)
                          : strcmp(key, "high") == 0    ? json_number(r, &c->quartile_high)
                          : strcmp(key, "threads") == 0 ? json_integer(r, &threads)
                                                        : strcmp(key, "samples") == 0 && json_integer(r, &samples);
        if (!right)
            return 0;
    }
    c->num_samples = (int32_t)samples;
    c->num_threads = (int32_t)threads;
    return !r->fault && *c->kernel && *c->choice && c->seconds > 0 && samples > 0 && samples < 1000 && threads > 0 &&
           threads < INT32_MAX;
}

static int read_best(struct json_reader *r, struct tuning_entry *e) {
    int first = 1;
    if (!json_array_begin(r))
        return 0;
    while (json_array_next(r, &first))
        if (e->num_best == TUNING_BEST || !read_choice(r, &e->best[e->num_best++]))
            return 0;
    return !r->fault;
}

static int read_entry(struct json_reader *r, struct tuning_entry *e) {
    char key[16];
    int first = 1;
    int64_t chosen = -2;
    *e = (struct tuning_entry){0};
    if (!json_object_begin(r))
        return 0;
    while (json_object_next(r, &first, key, sizeof key)) {
        const int right = strcmp(key, "key") == 0      ? json_string(r, e->key, sizeof e->key)
                          : strcmp(key, "maker") == 0  ? json_string(r, e->maker, sizeof e->maker)
                          : strcmp(key, "date") == 0   ? json_integer(r, &e->date)
                          : strcmp(key, "chosen") == 0 ? json_integer(r, &chosen)
                          : strcmp(key, "rule") == 0   ? read_choice(r, &e->rule)
                                                       : strcmp(key, "best") == 0 && read_best(r, e);
        if (!right)
            return 0;
    }
    e->chosen = (int32_t)chosen;
    return !r->fault && *e->key && *e->rule.kernel && chosen >= -1 && chosen < e->num_best;
}

int tuning_read_line(const char *line, size_t length, struct tuning_entry *e) {
    char digits[DIGITS + 1], *end;
    if (length < ENTRY_AT + 3 || length >= TUNING_LINE_BYTES || memcmp(line, lead, sizeof lead - 1) != 0 ||
        memcmp(line + sizeof lead - 1 + DIGITS, middle, sizeof middle - 1) != 0 || line[length - 1] != '}')
        return 0;
    memcpy(digits, line + sizeof lead - 1, DIGITS);
    digits[DIGITS] = 0;
    const char *entry = line + ENTRY_AT;
    const size_t bytes = length - ENTRY_AT - 1;
    if (strtoull(digits, &end, 16) != cache_checksum(0, entry, bytes) || *end)
        return 0;
    struct json_reader reader = json_reader_of(entry, bytes);
    return read_entry(&reader, e) && json_end(&reader);
}
