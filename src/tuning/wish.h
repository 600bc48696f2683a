/* wish.h: whether a call takes choices that were kept. */
#ifndef FDM_TUNING_WISH_H
#define FDM_TUNING_WISH_H

#include <stddef.h>

#include "flash_dmattn.h"

/* A call is to take the rules' choice; may take one that was kept; may measure one besides; may take the model's where
 * none was kept. */
enum { TUNING_RULES, TUNING_TAKES_KEPT, TUNING_MEASURES, TUNING_PREDICTS };
/* *wish, of these, of a call whose option `tune` is `asked`: TUNING_RULES where `excluded`. An error where the option
 * or the variable is not allowed. */
fdm_status tuning_wish(int64_t asked, int excluded, int *wish);
/* An error where a variable of older versions is set. */
fdm_status tuning_check_older_names(void);
/* "2026-11-28" of seconds since 1970, in UTC. */
void tuning_name_day(int64_t date, char *text, size_t size);

#endif
