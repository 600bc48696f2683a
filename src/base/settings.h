/* settings.h: the only reader of environment variables. */
#ifndef FDM_SETTINGS_H
#define FDM_SETTINGS_H

#include <stdint.h>

enum setting {
    SETTING_PROFILE_BACKWARD, /* "1": one line on stderr for each backward call */
    SETTING_KERNEL,           /* force a kernel by name or choice code */
    SETTING_SCHEDULER,
    SETTING_CACHE_DIR,
    SETTING_CACHE_SIZE, /* bytes, with K, M or G */
    SETTING_NUM_THREADS,
    SETTING_CPU_ISA, /* best instruction set to use */
    SETTING_AUTOTUNE,
    SETTING_LOG,
    SETTING_COUNT
};

/* The value now, NULL when unset or empty. Owned by the environment. */
const char *setting_get(enum setting setting);
/* A variable of the system or of other programs (HOME, VIRTUAL_ENV, ...), NULL when unset or empty. */
const char *setting_get_foreign(const char *name);
/* A positive integer setting; 0 when unset. A malformed value is 0 too (fdm info shows it). */
int setting_get_positive(enum setting setting);
/* A number of bytes, 0 and up, that may end in K, M or G for 2^10, 2^20, 2^30; -1 when unset or malformed. */
int64_t setting_get_bytes(enum setting setting);

#endif
