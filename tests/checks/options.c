/* options.c: reads the command line of fdm-checks, and prints what it may say. */
#include "options.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind { FLAG, NUMBER, TEXT, TEXTS, SHARE, WAYS };
static const struct row {
    const char *name, *value, *about;
    enum kind kind;
    size_t offset;
} rows[] = {
#define ROW(name) offsetof(struct options, name)
    {"kernel", "NAME",
     "the kernel of this name; attention, serving, cases: else all whose names hold it or, with *, fit it, or a code",
     TEXT, ROW(kernel)},
    {"group", "TEXT", "cases and faults whose names hold TEXT", TEXT, ROW(group)},
    {"emulate", "NAME", "the emulated device, such as sm_90, in the place of a driver", TEXT, ROW(emulate)},
    {"cuda", NULL, "no kernel of the CPU", FLAG, ROW(cuda)},
    {"seed", "N", "the first problem's seed; of cases their number", NUMBER, ROW(seed)},
    {"repeat", "N", "how many problems", NUMBER, ROW(repeat)},
    {"right", "N", "until each kernel has done N problems", NUMBER, ROW(right)},
    {"seconds", "N", "no other problem is begun after N seconds", NUMBER, ROW(seconds)},
    {"ways", "N[+M]", "of N kinds, from number M on, so that few specialisations run many problems", WAYS, ROW(ways)},
    {"share", "K/N", "of every N problems the K-th, from 0 on", SHARE, ROW(share)},
    {"rotate", NULL, "the seed, kinds and share that FDM_CHECK_SEED names", FLAG, ROW(rotate)},
    {"threads", "N", "of the CPU; without it 1 to 3 by turns", NUMBER, ROW(threads)},
    {"far", NULL, "on a real device too, tensors that lie 2^31 bytes apart", FLAG, ROW(far)},
    {"until-wrong", NULL, "no further than the first wrong result", FLAG, ROW(until_wrong)},
    {"launches", "LIST", "fails unless these were launched: combine_splits,hopper_forward.SPLITS=1", TEXT,
     ROW(launches)},
    {"json", "FILE", "appends a line for each kernel or group to FILE", TEXT, ROW(json)},
    {"keys", "N", "keys at the most", NUMBER, ROW(keys)},
    {"large", NULL, "sizes for a real device", FLAG, ROW(large)},
    {"most", "N", "of each kernel N problems, spread over all of its", NUMBER, ROW(most)},
    {"from", "N", "the first of those", NUMBER, ROW(from)},
    {"full", NULL, "every combination of features", FLAG, ROW(full)},
    {"variants", NULL, "only ways to run that no rule chooses", FLAG, ROW(variants)},
    {"arch", "NAME", "one architecture, such as sm_90", TEXT, ROW(arch)},
    {"entry", "TEXT", "kernel entries whose names hold TEXT", TEXT, ROW(entry)},
    {"with", "NAME[=V]", "only where the constant NAME is V, or is not 0; up to 16 times", TEXTS, ROW(with)},
    {"known", "FILE", "leaves out groups whose key is in FILE", TEXT, ROW(known)},
    {"list", NULL, "prints the groups and compiles nothing", FLAG, ROW(list)},
    {"verbose", NULL, "a line for each specialisation", FLAG, ROW(verbose)},
#undef ROW
};
enum { NUM_ROWS = sizeof rows / sizeof rows[0] };

static char program[256];
const char *checks_program(void) { return program; }

static const char *called_by; /* this program's own name, without its folder */
static const char *called(void) { return called_by; }

/* Whether a list of words holds a word of this length. */
static int holds(const char *list, const char *word, size_t length) {
    for (; *list; list += strspn(list, " ")) {
        const size_t each = strcspn(list, " ");
        if (each == length && strncmp(list, word, length) == 0)
            return 1;
        list += each;
    }
    return 0;
}

static int takes(const struct subject *subject, const char *name) {
    return holds(subject->options, name, strlen(name));
}

static int help(const struct subject *subjects) {
    printf("usage: %s [SUBJECT] [--OPTION [VALUE]]...\n\nSubjects, each with its options; the first is meant where "
           "none is named:\n",
           called());
    for (const struct subject *s = subjects; s->name; s++)
        printf("  %-16s %s\n  %-16s   %s\n", s->name, s->about, "", s->options);
    printf("\nOptions:\n");
    for (int i = 0; i < NUM_ROWS; i++)
        printf("  --%-11s %-9s %s\n", rows[i].name, rows[i].value ? rows[i].value : "", rows[i].about);
    printf("\nExit codes: 0 all is right, 1 something is wrong, 2 the command line, 77 there is no device.\n");
    return 0;
}

/* The number at the beginning of a text, and what follows it; 0 where there is none. */
static int read_number(const char *text, uint64_t *number, const char **end) {
    char *after;
    errno = 0;
    *number = strtoull(text, &after, 10);
    *end = after;
    return *text >= '0' && *text <= '9' && !errno;
}

/* 0: the text is no value of the option. */
static int set(struct options *o, const struct row *row, const char *text) {
    void *const at = (char *)o + row->offset;
    const char *end;
    switch (row->kind) {
    case FLAG: *(int *)at = 1; return 1;
    case NUMBER: return read_number(text, at, &end) && !*end;
    case TEXT: *(const char **)at = text; return 1;
    case TEXTS:
        for (const char **one = at; one < (const char **)at + WITH_MAX; one++)
            if (!*one) {
                *one = text;
                return 1;
            }
        return 0;
    case SHARE: {
        struct share *share = at;
        return read_number(text, &share->part, &end) && *end == '/' && read_number(end + 1, &share->parts, &end) &&
               !*end && share->part < share->parts;
    }
    case WAYS: {
        struct ways *ways = at;
        return read_number(text, &ways->count, &end) &&
               (!*end || (*end == '+' && read_number(end + 1, &ways->first, &end) && !*end));
    }
    }
    return 0;
}

/* Reads the option at argv[*i], and its value, which follows it or a "=". 0 after a sentence. */
static int read_option(struct options *o, int argc, char **argv, int *i) {
    const char *name = argv[*i] + 2;
    const size_t length = strcspn(name, "=");
    const char *value = name[length] ? name + length + 1 : NULL;
    const struct row *row = rows;
    while (row < rows + NUM_ROWS && (strlen(row->name) != length || strncmp(row->name, name, length) != 0))
        row++;
    if (row == rows + NUM_ROWS || !holds(o->subject->options, name, length)) {
        fprintf(stderr, "%s: %s takes no option %s; it takes: %s\n", called(), o->subject->name, argv[*i],
                o->subject->options);
        return 0;
    }
    if (row->kind != FLAG && !value)
        value = *i + 1 < argc ? argv[++*i] : NULL;
    if (row->kind == FLAG ? value == NULL && set(o, row, NULL) : value && set(o, row, value))
        return 1;
    fprintf(stderr, "%s: --%s is %s; allowed is %s: %s\n", called(), row->name, value ? value : "not given",
            row->value ? row->value : "no value", row->about);
    return 0;
}

/* The subject that the words before the options name; NULL: there is no such subject. */
static const struct subject *read_subject(const struct subject *subjects, int argc, char **argv, int *i) {
    char name[64] = "";
    for (*i = 1; *i < argc && strncmp(argv[*i], "--", 2) != 0; ++*i)
        snprintf(name + strlen(name), sizeof name - strlen(name), *name ? " %s" : "%s", argv[*i]);
    for (const struct subject *s = subjects; s->name; s++)
        if (!*name || strcmp(s->name, name) == 0)
            return s;
    fprintf(stderr, "%s: there is no subject \"%s\"; --help lists the subjects\n", called(), name);
    return NULL;
}

/* A number made of FDM_CHECK_SEED, which scripts/draw.sh sets to the hour; 0 where it is not set. So CI tries other
 * problems each hour, and the same ones again where it is given that hour. */
static uint64_t rotation(void) {
    const char *text = getenv("FDM_CHECK_SEED");
    uint64_t number = 0;
    for (; text && *text; text++)
        number = (number ^ (unsigned char)*text) * 0x100000001b3u + 0x9e3779b97f4a7c15u;
    return number ^ number >> 31;
}

/* Streams of seeds begin a million apart: one moves among the first 900,000 of its own. */
static void rotate(struct options *o) {
    printf("the same again, without FDM_CHECK_SEED and --rotate: ");
    if (takes(o->subject, "share")) {
        o->share.part = (o->share.part + rotation()) % o->share.parts;
        printf("--share %llu/%llu\n", (unsigned long long)o->share.part, (unsigned long long)o->share.parts);
        return;
    }
    o->seed = given_or(o->seed, 1) + rotation() % 900 * 1000;
    o->ways.first += o->ways.count * (rotation() % 1000);
    printf("--seed %llu", (unsigned long long)o->seed);
    if (o->ways.count)
        printf(" --ways %llu+%llu", (unsigned long long)o->ways.count, (unsigned long long)o->ways.first);
    printf("\n");
}

static void name_program(const struct options *o) {
    static const char *const settings[] = {"EMULATED_SMS", "EMULATED_STRICT", "EMULATED_SWITCH", "EMULATED_UNORDERED"};
    int used = 0;
    for (size_t i = 0; o->emulate && i < sizeof settings / sizeof settings[0]; i++)
        if (getenv(settings[i]))
            used += snprintf(program + used, 120 - (size_t)used, "%s=%.8s ", settings[i], getenv(settings[i]));
    used += snprintf(program + used, 64, "%.32s %s", called(), o->subject->name);
    if (o->emulate)
        used += snprintf(program + used, 32, " --emulate %.18s", o->emulate);
    if (o->ways.count)
        snprintf(program + used, sizeof program - (size_t)used, " --ways %llu+%llu", (unsigned long long)o->ways.count,
                 (unsigned long long)o->ways.first);
}

int options_read(struct options *o, const struct subject *subjects, int argc, char **argv) {
    const char *slash = strrchr(argv[0], '/');
    int i = 1;
    called_by = slash ? slash + 1 : argv[0];
    *o = (struct options){.share.parts = 1};
    o->seed = o->repeat = o->right = o->seconds = o->threads = o->keys = o->most = o->from = NOT_GIVEN;
    for (int n = 1; n < argc; n++)
        if (strcmp(argv[n], "--help") == 0)
            return help(subjects);
    o->subject = read_subject(subjects, argc, argv, &i);
    if (!o->subject)
        return 2;
    for (; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) != 0) {
            fprintf(stderr, "%s: %s is no option: an option begins with --\n", called(), argv[i]);
            return 2;
        }
        if (!read_option(o, argc, argv, &i))
            return 2;
    }
    if (o->rotate)
        rotate(o);
    name_program(o);
    return -1;
}
