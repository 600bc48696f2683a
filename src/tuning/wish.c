/* wish.c: the option and the variable that say whether kept choices are taken, and the day of one. */
#include "tuning/wish.h"

#include <stdio.h>

#include "base/error.h"
#include "base/settings.h"

fdm_status tuning_check_older_names(void) {
    return setting_get_foreign("FLASH_DMATTN_AUTOTUNE")
               ? error_set(FDM_ERROR_INVALID_ARGUMENT, "FLASH_DMATTN_AUTOTUNE is set, which was never measured by; "
                                                       "FLASH_DMATTN_TUNE has taken its place")
               : FDM_OK;
}

fdm_status tuning_wish(int64_t asked, int excluded, int *wish) {
    const char *value;
    const fdm_status status = setting_read(SETTING_TUNE, &value);
    *wish = 0;
    if (asked < FDM_TUNE_DEFAULT || asked > FDM_TUNE_PREDICT)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "tune is %lld; it must be 0 (FLASH_DMATTN_TUNE), 1 (measure), 2 (the rules) or 3 (predict)",
                         (long long)asked);
    const int measures = asked == FDM_TUNE_MEASURE || (asked == FDM_TUNE_DEFAULT && value && *value == '1');
    const int rules = asked == FDM_TUNE_RULES || (asked == FDM_TUNE_DEFAULT && value && *value == '0');
    if (!status && !excluded && !rules)
        *wish = measures ? TUNING_MEASURES : asked == FDM_TUNE_PREDICT ? TUNING_PREDICTS : TUNING_TAKES_KEPT;
    return status;
}

/* In UTC; gmtime() has one result for all threads. Years are counted from March on, so that leap days come last. */
void tuning_name_day(int64_t date, char *text, size_t size) {
    enum { SECONDS = 86400, DAYS_OF_400_YEARS = 146097, BEFORE_1970 = 719468 };
    const int64_t days = (date > 0 ? date : 0) / SECONDS + BEFORE_1970, era = days / DAYS_OF_400_YEARS;
    const int64_t day = days % DAYS_OF_400_YEARS, year = (day - day / 1460 + day / 36524 - day / 146096) / 365;
    const int64_t of_year = day - (365 * year + year / 4 - year / 100), month = (5 * of_year + 2) / 153;
    snprintf(text, size, "%04lld-%02lld-%02lld", (long long)(era * 400 + year + (month >= 10)),
             (long long)(month < 10 ? month + 3 : month - 9), (long long)(of_year - (153 * month + 2) / 5 + 1));
}
