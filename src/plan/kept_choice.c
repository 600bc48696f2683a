/* kept_choice.c: what a plan makes of a choice that was measured: a wish, which every refusal stands above. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/settings.h"
#include "plan/plan.h"
#include "tuning/store.h"

fdm_status plan_check_older_names(void) {
    return setting_get_foreign("FLASH_DMATTN_AUTOTUNE")
               ? error_set(FDM_ERROR_INVALID_ARGUMENT, "FLASH_DMATTN_AUTOTUNE is set, which was never measured by; "
                                                       "FLASH_DMATTN_TUNE has taken its place")
               : FDM_OK;
}

fdm_status plan_tune_wish(const fdm_problem *problem, const fdm_options *options, int forced, int *wish) {
    const char *value;
    const fdm_status status = setting_read(SETTING_TUNE, &value);
    const int64_t asked = options ? options->tune : FDM_TUNE_DEFAULT;
    *wish = 0;
    if (asked < FDM_TUNE_DEFAULT || asked > FDM_TUNE_RULES)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "tune is %lld; it must be 0 (FLASH_DMATTN_TUNE), 1 (measure) or 2 (the rules)",
                         (long long)asked);
    const int rules = asked == FDM_TUNE_RULES || (asked == FDM_TUNE_DEFAULT && value && *value == '0');
    if (!status && !forced && !rules && !problem->deterministic)
        *wish = asked == FDM_TUNE_MEASURE || (value && *value == '1') ? 2 : 1;
    return status;
}

/* In UTC; gmtime() has one result for all threads. Years are counted from March on, so that leap days come last. */
static void name_day(int64_t date, char *text, size_t size) {
    enum { SECONDS = 86400, DAYS_OF_400_YEARS = 146097, BEFORE_1970 = 719468 };
    const int64_t days = (date > 0 ? date : 0) / SECONDS + BEFORE_1970, era = days / DAYS_OF_400_YEARS;
    const int64_t day = days % DAYS_OF_400_YEARS, year = (day - day / 1460 + day / 36524 - day / 146096) / 365;
    const int64_t of_year = day - (365 * year + year / 4 - year / 100), month = (5 * of_year + 2) / 153;
    snprintf(text, size, "%04lld-%02lld-%02lld", (long long)(era * 400 + year + (month >= 10)),
             (long long)(month < 10 ? month + 3 : month - 9), (long long)(of_year - (153 * month + 2) / 5 + 1));
}

static void append(fdm_plan *plan, const char *first, const char *second) {
    const size_t used = strlen(plan->reason);
    snprintf(plan->reason + used, sizeof plan->reason - used, "%s%s", first, second);
}

void plan_apply_kept(const fdm_device *device, fdm_plan *plan) {
    char key[TUNING_KEY_BYTES], maker[TUNING_MAKER_BYTES], day[32], words[256];
    struct tuning_entry entry;
    fdm_plan tuned;
    if (tuning_key(device, &plan->problem, plan->num_threads, key) || tuning_maker(device, maker) ||
        !tuning_find(key, maker, &entry) || entry.num_best == 0)
        return;
    name_day(entry.date, day, sizeof day);
    const struct tuning_choice *best = &entry.best[entry.chosen < 0 ? 0 : entry.chosen];
    if (entry.chosen < 0) {
        snprintf(words, sizeof words, "; measured %s: no other way is faster than %s", day, entry.rule.choice);
        append(plan, words, "");
    } else if (plan_of_choice(device, &plan->problem, best->kernel, best->choice,
                              best->num_threads < plan->num_threads ? best->num_threads : plan->num_threads, &tuned)) {
        snprintf(words, sizeof words, "; rule: %s, measured %s, is passed over: ", best->choice, day);
        append(plan, words, fdm_last_error());
    } else {
        snprintf(words, sizeof words, "measured %s: %.1f %% less time than %s; ", day,
                 100 * (1 - best->seconds / entry.rule.seconds), entry.rule.choice);
        const fdm_plan rules = *plan;
        *plan = tuned;
        snprintf(plan->reason, sizeof plan->reason, "%s", words);
        append(plan, *tuned.reason ? tuned.reason : rules.reason, "");
    }
}
