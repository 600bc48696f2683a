/* text.c: what of CUDA C++ a macro cannot do: shared memory and a kernel's entry are written into its text, line by
 * line.
 *
 *     extern __shared__ char s[];        char *const s = (char *)emu_dynamic_shared(...);
 *     __shared__ T a[3], b;              auto &a = emu_static_as<T [3]>(...); auto &b = ...;
 *     extern "C" __global__ ...          and before it, how to enter it and how large its parameters are */
#include "text.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct buffer {
    char *text;
    size_t used, size;
};

static void append(struct buffer *b, const char *text, size_t bytes) {
    if (b->used + bytes + 1 > b->size) {
        b->size = 2 * (b->used + bytes) + 256;
        b->text = realloc(b->text, b->size);
    }
    memcpy(b->text + b->used, text, bytes);
    b->used += bytes;
    b->text[b->used] = 0;
}
static void __attribute__((format(printf, 2, 3))) print(struct buffer *b, const char *format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    const int bytes = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    append(b, text, (size_t)bytes < sizeof text ? (size_t)bytes : sizeof text - 1);
}

/* The same text with comments and strings blanked. */
static char *code_of(const char *text) {
    char *code = strdup(text);
    for (char *at = code; *at; at++) {
        if (at[0] == '/' && at[1] == '/') {
            while (*at && *at != '\n')
                *at++ = ' ';
        } else if (at[0] == '/' && at[1] == '*') {
            while (*at && !(at[0] == '*' && at[1] == '/')) {
                if (*at != '\n')
                    *at = ' ';
                at++;
            }
            if (*at)
                at[0] = at[1] = ' ';
        } else if (*at == '"' || (*at == '\'' && !(at > code && isalnum((unsigned char)at[-1])))) {
            const char quote = *at;
            for (at++; *at && *at != quote && *at != '\n'; at++) {
                if (*at == '\\' && at[1] && at[1] != '\n')
                    *at++ = ' ';
                *at = ' ';
            }
        }
        if (!*at)
            break;
    }
    return code;
}

static int is_name(char c) { return isalnum((unsigned char)c) || c == '_'; }
static const char *skip_blank(const char *at) {
    while (isspace((unsigned char)*at))
        at++;
    return at;
}
/* The next place of a whole word. */
static const char *find_word(const char *from, const char *begin, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = from; (at = strstr(at, word)); at++)
        if ((at == begin || !is_name(at[-1])) && !is_name(at[length]))
            return at;
    return NULL;
}
/* After the bracket that closes the one at `at`. */
static const char *close_of(const char *at) {
    int depth = 0;
    for (; *at; at++) {
        depth += *at == '(' || *at == '[' || *at == '{';
        depth -= *at == ')' || *at == ']' || *at == '}';
        if (depth == 0)
            return at + 1;
    }
    return at;
}

struct span {
    const char *from, *to;
};
static struct span trim(struct span s) {
    while (s.from < s.to && isspace((unsigned char)*s.from))
        s.from++;
    while (s.from < s.to && isspace((unsigned char)s.to[-1]))
        s.to--;
    return s;
}
static void newlines(struct buffer *out, struct span s) {
    for (; s.from < s.to; s.from++)
        if (*s.from == '\n')
            append(out, "\n", 1);
}

/* The next declarator or parameter: up to a comma outside of brackets. */
static struct span next_part(const char **at, const char *end) {
    struct span s = {*at, *at};
    int depth = 0, angles = 0;
    for (; *at < end; ++*at) {
        const char c = **at;
        depth += c == '(' || c == '[' || c == '{';
        depth -= c == ')' || c == ']' || c == '}';
        angles += c == '<' && depth == 0;
        angles -= c == '>' && depth == 0 && angles > 0;
        if (c == ',' && depth == 0 && angles == 0)
            break;
    }
    s.to = *at;
    if (*at < end)
        ++*at;
    return trim(s);
}

/* ---- shared memory ---- */

/* Takes __align__(N) or alignas(N) out of the front of a declaration. */
static struct span take_alignment(const char **at) {
    struct span align = {NULL, NULL};
    for (;;) {
        *at = skip_blank(*at);
        const size_t length = strncmp(*at, "__align__", 9) == 0 ? 9 : strncmp(*at, "alignas", 7) == 0 ? 7 : 0;
        if (!length)
            return align;
        const char *open = skip_blank(*at + length);
        *at = close_of(open);
        align = (struct span){open, *at};
    }
}

/* The last name of a declarator before its brackets. */
static struct span name_of(struct span s) {
    struct span n = {s.from, s.from};
    while (n.to < s.to && *n.to != '[' && *n.to != '=')
        n.to++;
    n = trim(n);
    n.from = n.to;
    while (n.from > s.from && is_name(n.from[-1]))
        n.from--;
    return n;
}

static void write_shared(struct buffer *out, const char *at, const char *end, int dynamic) {
    struct span align = take_alignment(&at);
    struct span type = {at, NULL};
    const char *next = at;
    while (next < end) {
        const struct span part = next_part(&next, end);
        const struct span name = name_of(part);
        if (!type.to)
            type = trim((struct span){type.from, name.from});
        const int t = (int)(type.to - type.from), n = (int)(name.to - name.from);
        if (dynamic)
            print(out, "%.*s *const %.*s = (%.*s *)emu_dynamic_shared(%.*s)", t, type.from, n, name.from, t, type.from,
                  align.from ? (int)(align.to - align.from) : 1, align.from ? align.from : "1");
        else
            print(out, "auto &%.*s = emu_static_as<%.*s %.*s>(EMU_KEY, %.*s)", n, name.from, t, type.from,
                  (int)(part.to - name.to), name.to, align.from ? (int)(align.to - align.from) : 1,
                  align.from ? align.from : "1");
        append(out, "; ", next < end ? 2 : 0);
    }
}

/* `extern` right before, or NULL. */
static const char *extern_before(const char *begin, const char *at) {
    const char *end = at;
    while (end > begin && isspace((unsigned char)end[-1]))
        end--;
    return end - begin >= 6 && strncmp(end - 6, "extern", 6) == 0 ? end - 6 : NULL;
}

/* ---- entries ---- */

static void write_entry(struct buffer *out, struct span name, struct span parameters, struct span bounds) {
    const int n = (int)(name.to - name.from);
    struct buffer call = {0}, sizes = {0}, list = {0};
    const char *at = parameters.from;
    for (int i = 0; at < parameters.to; i++) {
        struct span part = next_part(&at, parameters.to);
        const char *grid = strstr(part.from, "__grid_constant__");
        const int constant = grid && grid < part.to;
        const struct span own = name_of(part);
        struct buffer type = {0};
        for (const char *c = part.from; c < own.from; c++) {
            if (c == grid)
                c += strlen("__grid_constant__");
            append(&type, *c == '\n' ? " " : c, 1);
        }
        print(&list, "%s%s%s", i ? ", " : "", type.text, constant ? "&" : "");
        print(&call, "%s*(%s *)emu_p[%d]", i ? ", " : "", type.text, i);
        print(&sizes, "sizeof(%s), ", type.text);
        free(type.text);
    }
    print(out, "extern \"C\" void %.*s(%s); ", n, name.from, list.text ? list.text : "");
    print(out, "extern \"C\" void emu_enter_%.*s(void **emu_p) { %.*s(%s); } ", n, name.from, n, name.from,
          call.text ? call.text : "");
    print(out, "extern \"C\" const unsigned long emu_sizes_%.*s[] = {%s0}; ", n, name.from,
          sizes.text ? sizes.text : "");
    print(out, "extern \"C\" const int emu_bounds_%.*s[] = {%.*s, 0, 0}; ", n, name.from,
          bounds.from ? (int)(bounds.to - bounds.from) : 1, bounds.from ? bounds.from : "0");
    free(call.text);
    free(sizes.text);
    free(list.text);
}

/* From after __global__: name, parameters and launch bounds; 0 where no definition follows. */
static int read_entry(const char *at, struct span *name, struct span *parameters, struct span *bounds) {
    *bounds = (struct span){NULL, NULL};
    for (;;) {
        at = skip_blank(at);
        if (*at == '#') {
            at += strcspn(at, "\n");
            continue;
        }
        struct span word = {at, at};
        while (is_name(*word.to))
            word.to++;
        if (word.to == word.from)
            return 0;
        const char *after = skip_blank(word.to);
        const int is_bounds = strncmp(word.from, "__launch_bounds__", 17) == 0;
        if (*after != '(') {
            at = word.to;
            continue;
        }
        const char *close = close_of(after);
        if (is_bounds || strncmp(word.from, "__cluster_dims__", 16) == 0) {
            if (is_bounds)
                *bounds = (struct span){after + 1, close - 1};
            at = close;
            continue;
        }
        *name = word;
        *parameters = (struct span){after + 1, close - 1};
        return *skip_blank(close) == '{';
    }
}

/* A parameter that is never copied on the device is a reference here. */
static void write_parameters(struct buffer *out, const char *text, const char *code, struct span parameters) {
    const char *at = parameters.from, *copied = parameters.from;
    while (at < parameters.to) {
        const struct span part = next_part(&at, parameters.to);
        const char *grid = strstr(part.from, "__grid_constant__");
        if (!grid || grid >= part.to)
            continue;
        const struct span name = name_of(part);
        append(out, text + (copied - code), (size_t)(name.from - copied));
        append(out, "&", 1);
        copied = name.from;
    }
    append(out, text + (copied - code), (size_t)(parameters.to - copied));
}

char *text_rewrite(const char *text) {
    char *code = code_of(text);
    struct buffer out = {0};
    const char *copied = code, *at = code;
    append(&out, "", 0);
    for (;;) {
        const char *shared = find_word(at, code, "__shared__"), *global = find_word(at, code, "__global__");
        if (!shared && !global)
            break;
        if (shared && (!global || shared < global)) {
            const char *dynamic = extern_before(code, shared), *end = strchr(shared, ';');
            const char *from = dynamic ? dynamic : shared;
            const char *body = shared + strlen("__shared__");
            append(&out, text + (copied - code), (size_t)(from - copied));
            write_shared(&out, body, end, dynamic != NULL);
            newlines(&out, (struct span){from, end});
            at = copied = end;
            continue;
        }
        struct span name, parameters, bounds;
        at = global + strlen("__global__");
        const char *quote = global;
        while (quote > code && isspace((unsigned char)quote[-1]))
            quote--;
        const int external = quote - code >= 3 && quote[-1] == '"';
        const char *from = external ? extern_before(code, quote - 3) : NULL;
        if (!from || !read_entry(at, &name, &parameters, &bounds))
            continue;
        append(&out, text + (copied - code), (size_t)(from - copied));
        write_entry(&out, name, parameters, bounds);
        append(&out, text + (from - code), (size_t)(parameters.from - from));
        write_parameters(&out, text, code, parameters);
        at = copied = parameters.to;
    }
    append(&out, text + (copied - code), strlen(copied));
    free(code);
    return out.text;
}
