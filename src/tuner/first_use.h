/* first_use.h: measuring at the first call of a class of problems. */
#ifndef FDM_TUNE_FIRST_USE_H
#define FDM_TUNE_FIRST_USE_H

#include "flash_dmattn.h"

/* For a call that asks for it: where nothing is known of the problem's class, and the stream is not captured, measures
 * and keeps. What fails is not tried again by this process, and is no error of the call. 1: it measured, so that the
 * plan may be another. */
/* The same of any operation, whose class has this key. */
typedef fdm_status (*tune_function)(const fdm_device *device, const void *problem, const fdm_tune_options *options,
                                    fdm_tune_result *result);
int tune_class(const fdm_device *device, tune_function tune, const void *problem, void *stream, const char *key);
int tune_first_use(fdm_device_id device, const fdm_problem *problem, const fdm_options *options);

#endif
