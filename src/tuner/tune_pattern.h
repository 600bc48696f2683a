/* tune_pattern.h: random numbers for a tuner's inputs. */
#ifndef FDM_TUNE_PATTERN_H
#define FDM_TUNE_PATTERN_H

#include "flash_dmattn.h"

/* Fills device memory with about normal numbers of a fixed generator, FDM_BOOL with three ones in four. They repeat
 * after a megabyte, which no timing sees. */
fdm_status tune_pattern_fill(fdm_device_id device, void *memory, size_t bytes, fdm_dtype dtype);

#endif
