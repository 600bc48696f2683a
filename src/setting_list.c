/* setting_list.c: the public list of environment variables, with their values. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/settings.h"
#include "base/struct_bytes.h"
#include "plan/plan.h"

/* The sentence is for calls that need the value; a list has the facts. */
static int is_valid(enum setting setting, const char *value) {
    return !value || (setting_allows(setting, value) && (setting != SETTING_KERNEL || plan_knows_kernel(value)));
}

static fdm_setting_info info_of(enum setting setting) {
    const struct setting_facts *facts = setting_facts(setting);
    fdm_setting_info info = {
        .description = facts->description, .allowed = facts->allowed, .value = setting_get(setting)};
    info.valid = is_valid(setting, info.value);
    snprintf(info.name, sizeof info.name, "%s", facts->name);
    return info;
}

static fdm_setting_info info_of_unknown(const char *variable) {
    const size_t length = strcspn(variable, "=");
    fdm_setting_info info = {.value = variable[length] && variable[length + 1] ? variable + length + 1 : NULL};
    snprintf(info.name, sizeof info.name, "%.*s", (int)length, variable);
    return info;
}

fdm_status fdm_setting_list(int32_t index, fdm_setting_info *info) {
    const char *unknown = index < SETTING_COUNT ? NULL : setting_unknown(index - SETTING_COUNT);
    if (index < 0 || (index >= SETTING_COUNT && !unknown))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "setting index is %d; the list has none of this index", index);
    const fdm_setting_info found = unknown ? info_of_unknown(unknown) : info_of((enum setting)index);
    return STRUCT_WRITE(fdm_setting_info, info, &found);
}
