/* settings.c: the table of environment variables, and what each may hold. */
#include "base/settings.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "system/system.h"

static const char prefix[] = "FLASH_DMATTN_";

/* WORD: one of the words of `allowed`. */
enum kind { FLAG, WORD, COUNT, BYTES, PATH, KERNEL_NAME };

static const struct {
    struct setting_facts facts;
    enum kind kind;
} settings[SETTING_COUNT] = {
    [SETTING_PROFILE_BACKWARD] = {{"FLASH_DMATTN_PROFILE_BACKWARD",
                                   "1: print one line to stderr for each backward call", "0 or 1"},
                                  FLAG},
    [SETTING_KERNEL] = {{"FLASH_DMATTN_KERNEL", "force one kernel, by name or choice code",
                         "the name of a kernel (fdm info) or a choice code (fdm plan --variants)"},
                        KERNEL_NAME},
    [SETTING_SCHEDULER] = {{"FLASH_DMATTN_SCHEDULER",
                            "static, longest or dynamic: the order of tiles, in kernels that offer them",
                            "static, longest or dynamic"},
                           WORD},
    [SETTING_CACHE_DIR] = {{"FLASH_DMATTN_CACHE_DIR", "folder of compiled kernels (default: the XDG cache folder)",
                            "a path of at most 511 bytes"},
                           PATH},
    [SETTING_CACHE_SIZE] = {{"FLASH_DMATTN_CACHE_SIZE", "bytes of that folder at most, e.g. 512M (default: 1G)",
                             "a whole number of bytes below 2^63, which may end in K, M or G"},
                            BYTES},
    [SETTING_KERNEL_ARCHIVE] = {{"FLASH_DMATTN_KERNEL_ARCHIVE",
                                 "an archive of compiled kernels (fdm cache pack) that is looked into too",
                                 "a path of at most 511 bytes"},
                                PATH},
    [SETTING_NUM_THREADS] = {{"FLASH_DMATTN_NUM_THREADS", "CPU threads (default: what affinity and cgroup allow)",
                              "a whole number from 1 to 2147483647"},
                             COUNT},
    [SETTING_CPU_ISA] = {{"FLASH_DMATTN_CPU_ISA", "best CPU instruction set to use (default: the best present)",
                          "scalar, neon, avx2, avx512, avx512_bf16 or amx"},
                         WORD},
    [SETTING_LOG] = {{"FLASH_DMATTN_LOG",
                      "1: print each plan and its reason to stderr, and cached kernels that are not trusted", "0 or 1"},
                     FLAG},
    [SETTING_TUNE] = {{"FLASH_DMATTN_TUNE",
                       "1: measure a class of problems at its first call; 0: the rules alone (default: what was kept)",
                       "0 or 1"},
                      FLAG},
    [SETTING_CHECK_PAGES] =
        {{"FLASH_DMATTN_CHECK_PAGES",
          "1: Python's calls on a KV cache of a CUDA device wait, and wrong pages and lengths raise", "0 or 1"},
         FLAG},
};

const struct setting_facts *setting_facts(enum setting setting) { return &settings[setting].facts; }

/* ---- what is allowed ---- */

static int is_one_of(const char *words, const char *value) {
    for (const char *at = words; *at; at += strspn(at, ", ")) {
        const size_t length = strcspn(at, ", ");
        if (strlen(value) == length && strncmp(at, value, length) == 0 && strcmp(value, "or") != 0)
            return 1;
        at += length;
    }
    return 0;
}

/* Digits, and where `units` are allowed one of K, M and G for 2^10, 2^20, 2^30; -1: something else, or too large. */
static int64_t number_of(const char *value, const char *units) {
    char *end;
    if (*value < '0' || *value > '9')
        return -1;
    errno = 0;
    const long long number = strtoll(value, &end, 10);
    const char *unit = *end ? strchr(units, *end) : NULL;
    const int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    return errno || (*end && (!unit || end[1])) || number > INT64_MAX >> shift ? -1 : (int64_t)number << shift;
}

int setting_allows(enum setting setting, const char *value) {
    switch (settings[setting].kind) {
    case FLAG: return strcmp(value, "0") == 0 || strcmp(value, "1") == 0;
    case WORD: return is_one_of(settings[setting].facts.allowed, value);
    case COUNT: return number_of(value, "") >= 1 && number_of(value, "") <= INT_MAX;
    case BYTES: return number_of(value, "KMG") >= 0;
    case PATH: return strlen(value) < SETTING_PATH_BYTES;
    default: return 1;
    }
}

/* ---- reading ---- */

const char *setting_get(enum setting setting) { return setting_get_foreign(settings[setting].facts.name); }

const char *setting_get_foreign(const char *name) {
    const char *value = system_variable(name);
    return value && *value ? value : NULL;
}

fdm_status setting_refuse(enum setting setting, const char *value) {
    const struct setting_facts *facts = setting_facts(setting);
    return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is '%.100s'; it must be %s", facts->name, value, facts->allowed);
}

fdm_status setting_read(enum setting setting, const char **value) {
    *value = setting_get(setting);
    return !*value || setting_allows(setting, *value) ? FDM_OK : setting_refuse(setting, *value);
}

fdm_status setting_check(enum setting setting) {
    const char *value;
    return setting_read(setting, &value);
}

fdm_status setting_read_flag(enum setting setting, int *on) {
    const char *value;
    const fdm_status status = setting_read(setting, &value);
    *on = value && *value == '1';
    return status;
}

fdm_status setting_read_number(enum setting setting, int64_t *number) {
    const char *value;
    const fdm_status status = setting_read(setting, &value);
    *number = value ? number_of(value, "KMG") : -1;
    return status;
}

/* ---- unknown variables ---- */

static int is_setting(const char *variable) {
    const size_t length = strcspn(variable, "=");
    for (int i = 0; i < SETTING_COUNT; i++)
        if (strlen(settings[i].facts.name) == length && strncmp(settings[i].facts.name, variable, length) == 0)
            return 1;
    return 0;
}

const char *setting_unknown(int32_t index) {
    extern char **environ;
    for (char **at = environ; at && *at; at++)
        if (strncmp(*at, prefix, sizeof prefix - 1) == 0 && !is_setting(*at) && index-- == 0)
            return *at;
    return NULL;
}
