/* settings.c: the table of environment variables. */
#include "base/settings.h"

#include <limits.h>
#include <stdlib.h>

#include "base/error.h"

static const struct {
    const char *name, *description;
} settings[SETTING_COUNT] = {
    [SETTING_PROFILE_BACKWARD] = {"FLASH_DMATTN_PROFILE_BACKWARD",
                                  "1: print one line to stderr for each backward call"},
    [SETTING_KERNEL] = {"FLASH_DMATTN_KERNEL", "force one kernel, by name or choice code"},
    [SETTING_SCHEDULER] = {"FLASH_DMATTN_SCHEDULER", "static or dynamic (Hopper and Blackwell; no effect on the CPU)"},
    [SETTING_CACHE_DIR] = {"FLASH_DMATTN_CACHE_DIR", "folder of compiled kernels (default: the XDG cache folder)"},
    [SETTING_NUM_THREADS] = {"FLASH_DMATTN_NUM_THREADS", "CPU threads (default: what affinity and cgroup allow)"},
    [SETTING_CPU_ISA] = {"FLASH_DMATTN_CPU_ISA", "best CPU instruction set to use (default: the best present)"},
    [SETTING_AUTOTUNE] = {"FLASH_DMATTN_AUTOTUNE", "measure candidate kernels (no effect in this version)"},
    [SETTING_LOG] = {"FLASH_DMATTN_LOG", "1: print each plan and its reason to stderr"},
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

fdm_status fdm_setting_list(int32_t index, fdm_setting_info *info) {
    if (!info || index < 0 || index >= SETTING_COUNT)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "setting index is %d, but there are %d settings", index,
                         (int)SETTING_COUNT);
    *info = (fdm_setting_info){settings[index].name, settings[index].description, setting_get((enum setting)index)};
    return FDM_OK;
}
