/* tune_problems.c: the problems of `fdm tune`: words of `fdm plan`, or lines of JSON that say the same. */
#include "tune_problems.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_reader.h"
#include "cache_build.h"
#include "cli.h"
#include "companion_run.h"
#include "system/streams.h"

enum { WORDS_MAX = 64 };

static int parse_companion(int count, char **words, struct tune_problem *added) {
    if (count > 0 && strcmp(words[0], "gemm") == 0) {
        added->operation = TUNE_GEMM;
        return tune_words_gemm(count, words, &added->gemm);
    }
    if (count > 0 && strcmp(words[0], "softmax") == 0) {
        added->operation = TUNE_SOFTMAX;
        return tune_words_softmax(count, words, &added->softmax);
    }
    return complain(0, "--op is '%s'; it must be gemm or softmax", count > 0 ? words[0] : "");
}

/* added->window: the number after --topk, 0 = none. */
static int parse_words(char *text, struct tune_problem *added) {
    char *words[WORDS_MAX] = {"fdm tune"}, *rest = NULL;
    int count = 1;
    added->operation = TUNE_ATTENTION;
    added->window = 0;
    for (char *word = strtok_r(text, " \t\r\n", &rest); word; word = strtok_r(NULL, " \t\r\n", &rest)) {
        if (strcmp(word, "--device") == 0)
            return complain(0, "a problem names no device; --device is an option of the command");
        if (count == WORDS_MAX - 1)
            return complain(0, "more than %d words", WORDS_MAX - 2);
        words[count++] = word;
    }
    words[count] = NULL;
    if (count > 1 && strcmp(words[1], "--op") == 0)
        return parse_companion(count - 2, words + 2, added);
    for (int i = 1; i + 1 < count; i++)
        if (strcmp(words[i], "--topk") == 0 && !parse_integer("topk", words[i + 1], 1, INT32_MAX, &added->window))
            return 0;
    fdm_options options;
    return plan_problem(count, words, &added->problem, &options);
}

int tune_add_words(struct tune_problems *problems, const char *text, const char *where) {
    char copy[TUNE_TEXT_BYTES];
    struct tune_problem *list = realloc(problems->list, (size_t)(problems->count + 1) * sizeof *list);
    if (!list)
        return complain(0, "no memory for %d problems", problems->count + 1);
    problems->list = list;
    struct tune_problem *added = &list[problems->count];
    if (strlen(text) >= sizeof copy)
        return complain(0, "%s: more than %d bytes", where, TUNE_TEXT_BYTES - 1);
    snprintf(added->text, sizeof added->text, "%s", text);
    snprintf(copy, sizeof copy, "%s", text);
    if (!parse_words(copy, added))
        return complain(0, "%s: it is no problem: %s", where, text);
    if (added->operation == TUNE_ATTENTION && fdm_problem_validate(&added->problem))
        return complain(0, "%s: %s", where, fdm_last_error());
    problems->count++;
    return 1;
}

/* ---- lines of JSON ---- */

/* The value as a word after `--key`; true as no word, false and null take the key back. */
static int append_value(struct json_reader *reader, char *text, size_t key_at) {
    char value[64];
    const size_t used = strlen(text);
    reader->at += strspn(reader->at, " \t");
    const char *begin = reader->at;
    if (json_null(reader) || strncmp(begin, "false", 5) == 0) {
        text[key_at] = 0;
        return *begin == 'n' || json_skip(reader);
    }
    if (strncmp(begin, "true", 4) == 0)
        return json_skip(reader);
    if (*begin == '"') {
        if (!json_string(reader, value, sizeof value))
            return 0;
    } else {
        double number;
        if (!json_number(reader, &number))
            return 0;
        snprintf(value, sizeof value, "%.*s", (int)(reader->at - begin), begin);
    }
    return snprintf(text + used, TUNE_TEXT_BYTES - used, " %s", value) < (int)(TUNE_TEXT_BYTES - used);
}

static int words_of_json(const char *line, char *text) {
    struct json_reader reader = json_reader_of(line, strlen(line));
    char key[32];
    int first = 1, right = json_object_begin(&reader);
    *text = 0;
    while (right && json_object_next(&reader, &first, key, sizeof key)) {
        const size_t used = strlen(text);
        for (char *at = key; *at; at++)
            *at = *at == '_' ? '-' : *at;
        right = snprintf(text + used, TUNE_TEXT_BYTES - used, "%s--%s", used ? " " : "", key) <
                    (int)(TUNE_TEXT_BYTES - used) &&
                append_value(&reader, text, used);
    }
    return right && !reader.fault && json_end(&reader);
}

static int add_line(struct tune_problems *problems, char *line, const char *path, int number) {
    char where[256], text[TUNE_TEXT_BYTES];
    line[strcspn(line, "\r\n")] = 0;
    line += strspn(line, " \t");
    snprintf(where, sizeof where, "%.200s:%d", path, number);
    if (!*line || *line == '#')
        return 1;
    if (*line != '{')
        return tune_add_words(problems, line, where);
    return words_of_json(line, text) ? tune_add_words(problems, text, where)
                                     : complain(0, "%s: it is no object of options and numbers: %s", where, line);
}

int tune_read_file(struct tune_problems *problems, const char *path) {
    char line[2 * TUNE_TEXT_BYTES];
    int number = 0, right = 1;
    FILE *file = system_open_text(path);
    if (!file)
        return complain(0, "%s cannot be read: %s", path, strerror(errno));
    while (right && fgets(line, sizeof line, file)) {
        number++;
        right = strlen(line) < sizeof line - 1 ? add_line(problems, line, path, number)
                                               : complain(0, "%s:%d: more than %zu bytes", path, number, sizeof line);
    }
    fclose(file);
    return right;
}
