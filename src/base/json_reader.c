/* json_reader.c: a strict pull reader for small JSON (RFC 8259). */
#include "base/json_reader.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 32 };

struct json_reader json_reader_of(const char *text, size_t length) {
    return (struct json_reader){text, text + length, NULL};
}

static int fail(struct json_reader *r, const char *fault) {
    if (!r->fault)
        r->fault = fault;
    return 0;
}

static void skip_blanks(struct json_reader *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t'))
        r->at++;
}

static int take(struct json_reader *r, char wanted, const char *fault) {
    skip_blanks(r);
    if (r->fault || r->at == r->end || *r->at != wanted)
        return fail(r, fault);
    r->at++;
    return 1;
}

static int next_is(struct json_reader *r, char wanted) {
    skip_blanks(r);
    if (r->fault || r->at == r->end || *r->at != wanted)
        return 0;
    r->at++;
    return 1;
}

int json_object_begin(struct json_reader *r) { return take(r, '{', "an object is expected"); }
int json_array_begin(struct json_reader *r) { return take(r, '[', "an array is expected"); }

static int step(struct json_reader *r, int *first, char closing) {
    if (r->fault)
        return 0;
    if (next_is(r, closing))
        return 0;
    if (!*first && !take(r, ',', "a comma is expected"))
        return 0;
    *first = 0;
    return 1;
}

int json_object_next(struct json_reader *r, int *first, char *key, size_t size) {
    return step(r, first, '}') && json_string(r, key, size) && take(r, ':', "a colon is expected");
}

int json_array_next(struct json_reader *r, int *first) { return step(r, first, ']'); }

/* Four hexadecimal digits after \u; -1 on anything else. */
static int32_t read_hex4(struct json_reader *r) {
    int32_t value = 0;
    if (r->end - r->at < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        char c = *r->at++;
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* The code point after a backslash and u, surrogate pairs joined; -1 when malformed. */
static int32_t read_code_point(struct json_reader *r) {
    int32_t high = read_hex4(r);
    if (high < 0xd800 || high > 0xdfff)
        return high;
    if (high > 0xdbff || r->end - r->at < 6 || r->at[0] != '\\' || r->at[1] != 'u')
        return -1;
    r->at += 2;
    int32_t low = read_hex4(r);
    return low < 0xdc00 || low > 0xdfff ? -1 : 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
}

static size_t encode_utf8(int32_t code, char out[4]) {
    if (code < 0x80)
        return out[0] = (char)code, 1;
    if (code < 0x800)
        return out[0] = (char)(0xc0 | code >> 6), out[1] = (char)(0x80 | (code & 63)), 2;
    if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 63));
        out[2] = (char)(0x80 | (code & 63));
        return 3;
    }
    out[0] = (char)(0xf0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 63));
    out[2] = (char)(0x80 | (code >> 6 & 63));
    out[3] = (char)(0x80 | (code & 63));
    return 4;
}

/* One character of a string as UTF-8; its length, or 0 when malformed. The opening backslash was consumed. */
static size_t read_escape(struct json_reader *r, char out[4]) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (r->at == r->end)
        return 0;
    char c = *r->at++;
    if (c == 'u') {
        int32_t code = read_code_point(r);
        return code <= 0 ? 0 : encode_utf8(code, out);
    }
    const char *found = c ? strchr(from, c) : NULL;
    if (!found)
        return 0;
    out[0] = to[found - from];
    return 1;
}

/* Keeps the string in text unless text is NULL. */
static int read_string(struct json_reader *r, char *text, size_t size) {
    size_t used = 0;
    if (!take(r, '"', "a string is expected"))
        return 0;
    while (r->at < r->end && *r->at != '"') {
        char piece[4] = {*r->at++};
        size_t length = 1;
        if ((unsigned char)piece[0] < 0x20)
            return fail(r, "a string holds a control character");
        if (piece[0] == '\\' && (length = read_escape(r, piece)) == 0)
            return fail(r, "a string holds a malformed escape");
        if (text && used + length >= size)
            return fail(r, "a string is too long");
        if (text)
            memcpy(text + used, piece, length);
        used += length;
    }
    if (text)
        text[used] = 0;
    return take(r, '"', "a string does not end");
}

int json_string(struct json_reader *r, char *text, size_t size) { return read_string(r, text, size); }

static int is_digit(const struct json_reader *r) { return r->at < r->end && *r->at >= '0' && *r->at <= '9'; }

static int read_digits(struct json_reader *r) {
    if (!is_digit(r))
        return fail(r, "a number is malformed");
    while (is_digit(r))
        r->at++;
    return 1;
}

/* The text of a number, copied and terminated; *whole is 1 without fraction and exponent. */
static int read_number(struct json_reader *r, char text[64], int *whole) {
    skip_blanks(r);
    const char *begin = r->at;
    *whole = 1;
    if (r->fault)
        return 0;
    if (r->at < r->end && *r->at == '-')
        r->at++;
    int zero = r->at < r->end && *r->at == '0';
    if (!is_digit(r))
        return fail(r, "a number is expected");
    if (zero)
        r->at++;
    else
        read_digits(r);
    if (zero && is_digit(r))
        return fail(r, "a number starts with 0");
    if (r->at < r->end && *r->at == '.') {
        *whole = 0;
        r->at++;
        if (!read_digits(r))
            return 0;
    }
    if (r->at < r->end && (*r->at == 'e' || *r->at == 'E')) {
        *whole = 0;
        r->at++;
        if (r->at < r->end && (*r->at == '+' || *r->at == '-'))
            r->at++;
        if (!read_digits(r))
            return 0;
    }
    if (r->at - begin >= 64)
        return fail(r, "a number is too long");
    memcpy(text, begin, (size_t)(r->at - begin));
    text[r->at - begin] = 0;
    return 1;
}

int json_integer(struct json_reader *r, int64_t *value) {
    char text[64];
    int whole;
    if (!read_number(r, text, &whole))
        return 0;
    errno = 0;
    long long number = strtoll(text, NULL, 10);
    if (!whole || errno)
        return fail(r, whole ? "an integer is out of range" : "an integer is expected");
    *value = number;
    return 1;
}

int json_number(struct json_reader *r, double *value) {
    char text[64];
    int whole;
    if (!read_number(r, text, &whole))
        return 0;
    *value = strtod(text, NULL);
    return 1;
}

static int take_word(struct json_reader *r, const char *word) {
    size_t length = strlen(word);
    skip_blanks(r);
    if (r->fault || (size_t)(r->end - r->at) < length || memcmp(r->at, word, length) != 0)
        return 0;
    r->at += length;
    return 1;
}

int json_null(struct json_reader *r) { return take_word(r, "null"); }

int json_at_object(struct json_reader *r) {
    skip_blanks(r);
    return !r->fault && r->at < r->end && *r->at == '{';
}

static int skip_value(struct json_reader *r, int depth) {
    char number[64];
    int whole, first = 1;
    if (depth > DEPTH_MAX)
        return fail(r, "values are nested too deeply");
    skip_blanks(r);
    if (r->fault || r->at == r->end)
        return fail(r, "a value is expected");
    if (*r->at == '"')
        return read_string(r, NULL, 0);
    if (take_word(r, "null") || take_word(r, "true") || take_word(r, "false"))
        return 1;
    if (next_is(r, '[')) {
        while (step(r, &first, ']') && skip_value(r, depth + 1))
            ;
        return !r->fault;
    }
    if (next_is(r, '{')) {
        while (step(r, &first, '}') && read_string(r, NULL, 0) && take(r, ':', "a colon is expected") &&
               skip_value(r, depth + 1))
            ;
        return !r->fault;
    }
    return read_number(r, number, &whole);
}

int json_skip(struct json_reader *r) { return skip_value(r, 0); }

int json_end(struct json_reader *r) {
    skip_blanks(r);
    return !r->fault && (r->at == r->end || fail(r, "text follows the value"));
}
