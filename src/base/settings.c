/* settings.c: the table of environment variables. */
#include "base/settings.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

static const struct {
    const char *name, *description;
} settings[SETTING_COUNT] = {
    [SETTING_PROFILE_BACKWARD] = {"FLASH_DMATTN_PROFILE_BACKWARD",
                                  "1: print one line to stderr for each backward call"},
    [SETTING_KERNEL] = {"FLASH_DMATTN_KERNEL", "force one kernel, by name or choice code"},
    [SETTING_SCHEDULER] = {"FLASH_DMATTN_SCHEDULER",
                           "static, longest or dynamic: who hands out tiles, where a kernel leaves it open"},
    [SETTING_CACHE_DIR] = {"FLASH_DMATTN_CACHE_DIR", "folder of compiled kernels (default: the XDG cache folder)"},
    [SETTING_CACHE_SIZE] = {"FLASH_DMATTN_CACHE_SIZE", "bytes of that folder at most, e.g. 512M (default: 1G)"},
    [SETTING_NUM_THREADS] = {"FLASH_DMATTN_NUM_THREADS", "CPU threads (default: what affinity and cgroup allow)"},
    [SETTING_CPU_ISA] = {"FLASH_DMATTN_CPU_ISA", "best CPU instruction set to use (default: the best present)"},
    [SETTING_AUTOTUNE] = {"FLASH_DMATTN_AUTOTUNE", "measure candidate kernels (no effect in this version)"},
    [SETTING_LOG] = {"FLASH_DMATTN_LOG",
                     "1: print each plan and its reason to stderr, and whose compiled kernels are ignored"},
};

const char *setting_get(enum setting setting) {
    const char *value = getenv(settings[setting].name);
    return value && *value ? value : NULL;
}

const char *setting_get_foreign(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

int setting_get_positive(enum setting setting) {
    const char *value = setting_get(setting);
    if (!value)
        return 0;
    char *end;
    long number = strtol(value, &end, 10);
    return *end || number < 1 || number > INT_MAX ? 0 : (int)number;
}

int64_t setting_get_bytes(enum setting setting) {
    static const char units[] = "KMG";
    const char *value = setting_get(setting);
    char *end;
    if (!value || *value < '0' || *value > '9')
        return -1;
    errno = 0;
    const long long number = strtoll(value, &end, 10);
    const char *unit = *end ? strchr(units, *end) : NULL;
    const int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    return errno || (*end && (!unit || end[1])) || number > INT64_MAX >> shift ? -1 : (int64_t)number << shift;
}

fdm_status fdm_setting_list(int32_t index, fdm_setting_info *info) {
    if (!info || index < 0 || index >= SETTING_COUNT)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "setting index is %d, but there are %d settings", index,
                         (int)SETTING_COUNT);
    *info = (fdm_setting_info){settings[index].name, settings[index].description, setting_get((enum setting)index)};
    return FDM_OK;
}
