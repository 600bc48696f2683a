/* error.c: thread-local last error. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[1024];

fdm_status error_set(fdm_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *fdm_last_error(void) { return last_error; }

const char *fdm_status_name(fdm_status status) {
    switch (status) {
    case FDM_OK: return "ok";
    case FDM_ERROR_INVALID_ARGUMENT: return "invalid argument";
    case FDM_ERROR_UNSUPPORTED: return "unsupported";
    case FDM_ERROR_OUT_OF_MEMORY: return "out of memory";
    case FDM_ERROR_WORKSPACE: return "workspace";
    case FDM_ERROR_SYSTEM: return "system";
    case FDM_ERROR_INTERNAL: return "internal error";
    case FDM_ERROR_REMOTE: return "error of another rank";
    }
    return "unknown status";
}

const char *fdm_version(void) { return FDM_VERSION; }
