/* wish.h: whether a call takes choices that were kept. */
#ifndef FDM_TUNING_WISH_H
#define FDM_TUNING_WISH_H

#include <stddef.h>

#include "flash_dmattn.h"

/* Whether a call whose option `tune` is `asked` may take a choice that was kept (1), may measure one besides (2), or is
 * to take that of the rules (0), as where `excluded`. An error where the option or the variable is not allowed. */
fdm_status tuning_wish(int64_t asked, int excluded, int *wish);
/* An error where a variable of older versions is set. */
fdm_status tuning_check_older_names(void);
/* "2026-11-28" of seconds since 1970, in UTC. */
void tuning_name_day(int64_t date, char *text, size_t size);

#endif
