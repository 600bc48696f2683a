/* options.h: the command line of fdm-checks, in one form for every subject: fdm-checks [SUBJECT] [--NAME [VALUE]]... */
#ifndef FDM_CHECKS_OPTIONS_H
#define FDM_CHECKS_OPTIONS_H

#include <stdint.h>

struct options;

/* What the program can be asked to check. */
struct subject {
    const char *name, *about;
    const char *options;                       /* the names of those that it takes, with spaces between them */
    int (*run)(const struct options *options); /* returns the exit code of the program */
};

/* Of how many kinds problems are, and the first kind's number, so that few specialisations run many problems; count 0:
 * each seed is of its own kind. */
struct ways {
    uint64_t count, first;
};
/* Of every `parts` problems of a list the one of number `part`. */
struct share {
    uint64_t part, parts;
};

enum { WITH_MAX = 16 };
static const uint64_t NOT_GIVEN = UINT64_MAX;

/* Numbers are NOT_GIVEN, texts NULL, flags 0 and the share 0/1 where the command line does not name them. */
struct options {
    const struct subject *subject;
    const char *kernel, *group, *emulate, *launches, *json, *arch, *entry, *known, *with[WITH_MAX];
    uint64_t seed, repeat, right, seconds, threads, keys, most, from;
    struct ways ways;
    struct share share;
    int cuda, far, rotate, until_wrong, large, full, variants, list, verbose;
};

/* Reads a command line. The first subject is meant where none is named. Returns -1, or the exit code of a program that
 * ends here: 0 after --help, 2 after a sentence. With --rotate, share, seed and ways are those that FDM_CHECK_SEED
 * names, and a line says which. */
int options_read(struct options *options, const struct subject *subjects, int argc, char **argv);

static inline uint64_t given_or(uint64_t number, uint64_t otherwise) {
    return number == NOT_GIVEN ? otherwise : number;
}

/* How a report says what to run again: the program, its subject, and the emulated device with its settings. */
const char *checks_program(void);

#endif
