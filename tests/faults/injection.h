/* injection.h: "the n-th call of this function fails with this number"; shared by the pretended driver and compiler. */
#ifndef FDM_INJECTION_H
#define FDM_INJECTION_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct injection {
    char function[48]; /* "*" = any */
    int result;
    int64_t nth;       /* 1 = the next call; 0 = none any more */
    char injected[48]; /* the function that was made to fail last, "" = none yet */
};

/* "FUNCTION:RESULT:NTH"; anything else is no injection. */
static inline struct injection injection_parse(const char *text) {
    struct injection injection = {.nth = 0};
    long long nth = 0;
    if (text && sscanf(text, "%47[^:]:%d:%lld", injection.function, &injection.result, &nth) == 3)
        injection.nth = nth;
    return injection;
}

/* To be asked once a call; the number to fail with, or 0. */
static inline int injection_due(struct injection *injection, const char *function) {
    if (injection->nth < 1 || (strcmp(injection->function, "*") != 0 && strcmp(injection->function, function) != 0) ||
        --injection->nth > 0)
        return 0;
    snprintf(injection->injected, sizeof injection->injected, "%s", function);
    return injection->result;
}

#endif
