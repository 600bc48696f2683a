/* store.h: choices that were measured, a file a class in a folder beside the compiled kernels. A file that does not
 * verify is none; nothing here can fail a call. */
#ifndef FDM_TUNING_STORE_H
#define FDM_TUNING_STORE_H

#include <stdio.h>

#include "tuning/class.h"

struct tuning_choice {
    char kernel[48], choice[64];
    double seconds, quartile_low, quartile_high;
    int32_t num_samples, num_threads; /* threads: of the CPU */
};
enum { TUNING_BEST = 3, TUNING_LINE_BYTES = 4096 };
struct tuning_entry {
    char key[TUNING_KEY_BYTES], maker[TUNING_MAKER_BYTES];
    int64_t date; /* seconds since 1970 */
    struct tuning_choice rule, best[TUNING_BEST];
    int32_t num_best; /* fastest first; the rule's is among them where it is one of them */
    int32_t chosen;   /* of `best`; -1: the rule's choice stays */
};

/* 1 and the entry of this key and maker, from memory or from its file. One line of the log says why a file that is
 * there is not used. */
int tuning_find(const char *key, const char *maker, struct tuning_entry *entry);
/* Keeps it in memory and, where that can be written, in its file. 0: it lies in memory alone. */
int tuning_keep(const struct tuning_entry *entry);
/* Keeps it in memory alone. */
void tuning_remember(const struct tuning_entry *entry);
/* Forgets what memory holds, so that files are read again. */
void tuning_forget_memory(void);
/* Another number whenever what tuning_find() answers can have changed. */
uint32_t tuning_generation(void);

/* One line of text, without its end; and back: 0 where it is damaged. */
void tuning_write_line(const struct tuning_entry *entry, char line[TUNING_LINE_BYTES]);
int tuning_read_line(const char *line, size_t length, struct tuning_entry *entry);

/* Calls visit() for each file of the folder: the entry, or NULL with why it is not used; `name` is the file's. Ends
 * where visit() returns other than 0. */
void tuning_visit(int (*visit)(void *argument, const struct tuning_entry *entry, const char *name, const char *why),
                  void *argument);
/* Removes all files; returns how many, -1 where one stays. */
int64_t tuning_forget_files(void);

#endif
