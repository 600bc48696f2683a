/* settings.h: the only reader of environment variables. */
#ifndef FDM_SETTINGS_H
#define FDM_SETTINGS_H

#include <stdint.h>

#include "flash_dmattn.h"

enum setting {
    SETTING_PROFILE_BACKWARD, /* a flag: one line on stderr for each backward call */
    SETTING_KERNEL,           /* force a kernel by name or choice code */
    SETTING_SCHEDULER,
    SETTING_CACHE_DIR,
    SETTING_CACHE_SIZE, /* bytes */
    SETTING_KERNEL_ARCHIVE,
    SETTING_NUM_THREADS,
    SETTING_CPU_ISA,     /* best instruction set to use */
    SETTING_LOG,         /* a flag */
    SETTING_TUNE,        /* a flag, of which unset is a third value */
    SETTING_CHECK_PAGES, /* a flag, of the Python package */
    SETTING_COUNT
};
enum { SETTING_PATH_BYTES = 512 }; /* of a path that a variable may hold, with its end */

/* The variable, what it is for, and what it may be, for a sentence that begins with "it must be". */
struct setting_facts {
    const char *name, *description, *allowed;
};
const struct setting_facts *setting_facts(enum setting setting);

/* Whether a value that is not empty is allowed; of SETTING_KERNEL any is: who plans knows the kernels. */
int setting_allows(enum setting setting, const char *value);

/* A call that depends on a setting reads or checks it first, and returns the status: FDM_ERROR_INVALID_ARGUMENT with a
 * sentence where the variable holds what is not allowed. An empty variable counts as unset. */
fdm_status setting_check(enum setting setting);
fdm_status setting_read(enum setting setting, const char **value);    /* NULL when unset */
fdm_status setting_read_flag(enum setting setting, int *on);          /* 0 when unset */
fdm_status setting_read_number(enum setting setting, int64_t *value); /* -1 when unset */
fdm_status setting_refuse(enum setting setting, const char *value);   /* the sentence about a value */

/* The value as it stands, for functions below such a call. NULL when unset or empty. Owned by the environment. */
const char *setting_get(enum setting setting);
/* A variable of the system or of other programs (HOME, VIRTUAL_ENV, ...), NULL when unset or empty. */
const char *setting_get_foreign(const char *name);

/* The index-th variable FLASH_DMATTN_* that is no setting, as "NAME=value"; NULL past the last. */
const char *setting_unknown(int32_t index);

#endif
