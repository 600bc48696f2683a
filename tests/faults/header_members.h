/* header_members.h: the members of a struct of the public header, counted in its text: a table of them in a test is
 * whole, wherever a new one is put. */
#ifndef FDM_HEADER_MEMBERS_H
#define FDM_HEADER_MEMBERS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* What stands between the braces of "typedef struct NAME {", without comments. */
static inline void header_struct(const char *path, const char *name, char *text, size_t size) {
    static char header[1 << 17];
    char opening[80];
    size_t used = 0;
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    header[fread(header, 1, sizeof header - 1, file)] = 0;
    fclose(file);
    snprintf(opening, sizeof opening, "typedef struct %s {", name);
    const char *at = strstr(header, opening);
    assert_non_null(at);
    for (at += strlen(opening); *at != '}' && used + 1 < size; at++) {
        if (strncmp(at, "/*", 2) == 0)
            at = strstr(at, "*/") + 2;
        if (*at != '}')
            text[used++] = *at;
    }
    text[used] = 0;
}

static inline int header_members(const char *path, const char *name) {
    static char text[1 << 13];
    int members = 0;
    header_struct(path, name, text, sizeof text);
    for (const char *at = text; *at; at++)
        members += *at == ';' || *at == ',';
    return members;
}

/* 1: it has a member of this name. */
static inline int header_names(const char *path, const char *name, const char *member) {
    static char text[1 << 13];
    static const char word[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    header_struct(path, name, text, sizeof text);
    for (const char *at = text; (at = strstr(at, member)); at++)
        if (at > text && !strchr(word, at[-1]) && !strchr(word, at[strlen(member)]))
            return 1;
    return 0;
}

#endif
