/* error.h: the one place where a status and its sentence are made. */
#ifndef FDM_ERROR_H
#define FDM_ERROR_H

#include "flash_dmattn.h"

/* Records one sentence (printf format) for this thread and returns `status`, so that callers write
 * `return error_set(FDM_ERROR_..., "k has head_dim %d, ...", d);`. */
fdm_status error_set(fdm_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
